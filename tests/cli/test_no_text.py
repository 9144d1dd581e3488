"""Stored ids that are no text, of images and of unfinished answers, are shown as such."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.cli import main
from kvkeep.cli.parting import NO_TEXT
from kvkeep.hooks.prefill import prefill
from tests import model_folders


def test_tree_and_why_show_what_they_can(tmp_path: Path) -> None:
    folder, place = model_folders.write("llama", tmp_path / "model"), tmp_path / "store"
    model, tokenizer, *_ = load(str(folder))
    prompt = tokenizer.encode("The ferry sails at eight.")
    with kvkeep.open(place, max_bytes="1GB", disk_reserve=1) as store:
        space = store.space(
            model=model, tokenizer=tokenizer, model_path=folder, layout=make_prompt_cache(model)
        )
        caches = make_prompt_cache(model)
        prefill(model, [*prompt, 5, 6, 7], caches)
        assert space.unfinished(prompt, b"key").checkpoint([5, 6, 7], caches).stored
        assert space.snapshot([*prompt, -9, -9, 7], caches).stored
    words = ("--model", str(folder), "--store", str(place), "--debug")
    for command in (["tree"], ["why", "--raw", "--prompt", "The ferry sails at eight. And?"]):
        result = CliRunner().invoke(main, [*command, *words], catch_exceptions=False)
        assert result.exit_code == 0
        assert NO_TEXT in result.stdout
    shown = CliRunner().invoke(main, ["tree", *words, "--json"], catch_exceptions=False)
    texts = [node["text"] for node in json.loads(shown.stdout)["spaces"][0]["nodes"]]
    assert sorted(texts)[1:] == [NO_TEXT, NO_TEXT + tokenizer.decode([7])]
    assert sorted(texts)[0].startswith("The ferry")
