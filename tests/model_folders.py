"""Folders that ``mlx_lm.load`` accepts: a tiny random model with a tokenizer of characters."""

from __future__ import annotations

import json
import string
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from tests import architectures

SPECIAL = ("<s>", "</s>")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

THINKING = ("<think>", "</think>")
THINKING_TEMPLATE = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set last.user = loop.index %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% set said = m['content'] %}"
    "{% if loop.index < last.user %}{% set said = said.split('</think>') | last %}{% endif %}"
    "<s>{{ m['role'] }}: {{ said }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
"""Keeps the thoughts behind the user's last message, and strips earlier ones."""


def write(name: str, folder: Path, seed: int = 0, *, thinking: bool = False) -> Path:
    """Write the tiny model ``name``; one token is one character, others are left out.

    With ``thinking`` two characters make room for the tokens that thoughts stand between.
    """
    folder.mkdir(parents=True)
    characters = CHARACTERS.replace("`", "").replace("~", "") if thinking else CHARACTERS
    weights = dict(tree_flatten(architectures.build(name, seed).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {
        "model_type": name,
        "eos_token_id": len(characters) + 1,
        **architectures.CONFIGS[name],
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, characters, THINKING if thinking else ())
    if thinking:
        (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return folder


def _write_tokenizer(folder: Path, characters: str, more: tuple[str, ...]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = {letter: i for i, letter in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(x, special=True) for x in (*SPECIAL, *more)])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
