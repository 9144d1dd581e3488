"""Prompt-cache files: what mlx-lm writes comes in, what goes out mlx-lm reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from kvkeep.errors import FileRefused, OffsetMismatch
from kvkeep.hooks.prefill import prefill
from tests.cli.conftest import Ask, Run
from tests.cli.test_store_commands import CONTEXT, FIRST
from tests.hooks.test_prefill import arrays, bits

NAMES = ("llama", "gemma3_text", "falcon_h1", "qwen3_next")


def cached(folder: str, file: Path, text: str = CONTEXT, **how: Any) -> list[Any]:
    """What ``mlx_lm.cache_prompt`` does: the caches that it writes to ``file``."""
    model, tokenizer = load(folder)[:2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    caches: list[Any] = make_prompt_cache(model)
    for _ in generate_step(mx.array(prompt), model, max_tokens=0, prompt_cache=caches, **how):
        pass
    save_prompt_cache(str(file), caches, {"model": folder, "tokenizer_config": "{}"})
    return caches


def assert_same(ours: list[Any], theirs: list[Any], stop: int) -> None:
    compared = 0
    for a, b in zip(arrays(ours, stop), arrays(theirs, stop), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
        compared += a.nbytes
    assert compared > 1000


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_mlx_lm_is_stored_and_comes_back_bit_for_bit(
    models: Callable[..., str], ask: Ask, tmp_path: Path, name: str
) -> None:
    file, back = tmp_path / "in.safetensors", tmp_path / "back.safetensors"
    made = cached(models(name), file)
    n = len("^user: " + CONTEXT)
    told = ask("import", str(file), "--model", models(name), "--prompt", CONTEXT)
    assert (told["offset"], told["new_tokens"], told["reason"]) == (n, n, "stored")
    resumed = ask("restore", "--model", models(name), "--prompt", FIRST)
    assert resumed["resumed_tokens"] == n

    (conversation,) = ask("ls")["conversations"]
    out = ask("export", conversation["id"], str(back))
    assert (out["tokens"], out["offset"]) == (n, n)
    assert back.stat().st_mode & 0o777 == 0o600
    read, metadata = load_prompt_cache(str(back), return_metadata=True)
    assert metadata["model"] == models(name)
    assert_same(read, made, n)
    model = load(models(name))[0]
    a, b = (model(mx.array([[5, 6, 7]]), cache=caches) for caches in (read, made))
    np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("name", NAMES)
def test_restore_writes_a_file_that_mlx_lm_goes_on_from(
    models: Callable[..., str], ask: Ask, run: Run, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "resumed.safetensors"
    asked = ("--model", models(name), "--prompt", FIRST)
    ask("snapshot", *asked)
    told = ask("restore", *asked, "-o", str(file))
    assert told["resumed_tokens"] == told["prompt_tokens"] - 1
    assert told["bytes_written"] == file.stat().st_size
    read = load_prompt_cache(str(file))
    model, tokenizer = load(models(name))[:2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": FIRST}], add_generation_prompt=True
    )
    fresh: list[Any] = make_prompt_cache(model)
    prefill(model, prompt[:-1], fresh)
    a, b = (model(mx.array([prompt[-1:]]), cache=caches) for caches in (read, fresh))
    np.testing.assert_array_equal(bits(a), bits(b))
    assert "exists; --force" in run("restore", *asked, "-o", str(file), code=2).stderr
    assert ask("restore", *asked, "-o", str(file), "--force")["bytes_written"] > 0
    assert "--cold" in run("restore", *asked, "--cold", "--generate", "1", "-o", "x", code=2).stderr


def test_an_export_needs_no_prompt_to_be_imported(
    models: Callable[..., str], ask: Ask, store: Path, tmp_path: Path
) -> None:
    made = ask("snapshot", "--model", models("llama"), "--prompt", FIRST)
    (conversation,) = ask("ls")["conversations"]
    file = tmp_path / "out.safetensors"
    out = ask("export", conversation["id"], str(file), "--at", "40")
    assert out["offset"] == 40
    store.rename(tmp_path / "old")
    told = ask("import", str(file), "--model", models("llama"))
    assert (told["offset"], told["space"]) == (40, made["space"])
    assert ask("restore", "--model", models("llama"), "--prompt", FIRST)["resumed_tokens"] == 40


def test_a_converted_cache_of_unknown_history_resumes_only_at_its_end(
    models: Callable[..., str], ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import architectures

    wide = {**architectures.CONFIGS["llama"], "head_dim": 64}
    monkeypatch.setitem(architectures.CONFIGS, "llama", wide)
    folder, file = models("llama", seed=64), tmp_path / "q.safetensors"
    cached(folder, file, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    scheme = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    asked = ("--model", folder, *scheme)
    ask("import", str(file), *asked, "--prompt", CONTEXT)
    n = len("^user: " + CONTEXT)
    assert ask("restore", *asked, "--prompt", FIRST)["resumed_tokens"] == n
    shorter = ask("restore", *asked, "--prompt", CONTEXT[:40], code=3)
    assert shorter["reason"] == "below_floor"


def test_what_is_not_that_cache_is_refused(
    models: Callable[..., str], run: Run, ask: Ask, tmp_path: Path
) -> None:
    file = tmp_path / "in.safetensors"
    cached(models("llama"), file)
    asked = ("import", str(file), "--model")
    with pytest.raises(FileRefused, match="does not say which tokens"):
        run(*asked, models("llama"))
    with pytest.raises(OffsetMismatch, match="the prompt has"):
        run(*asked, models("llama"), "--prompt", FIRST)
    with pytest.raises(FileRefused, match="was not made by"):
        run(*asked, models("llama", seed=1), "--prompt", CONTEXT)
    with pytest.raises(FileRefused, match="was not made by"):
        run(*asked, models("llama"), "--prompt", CONTEXT[::-1])
    (tmp_path / "bad.safetensors").write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FileRefused):
        run("import", str(tmp_path / "bad.safetensors"), "--model", "m", "--prompt", CONTEXT)
    assert ask("ls")["conversations"] == []


def test_an_export_never_replaces_a_file_by_accident(
    models: Callable[..., str], run: Run, ask: Ask, tmp_path: Path
) -> None:
    ask("snapshot", "--model", models("falcon_h1"), "--prompt", FIRST)
    (conversation,) = ask("ls")["conversations"]
    file = tmp_path / "out.safetensors"
    file.write_bytes(b"mine")
    run("export", conversation["id"], str(file), code=2)
    assert file.read_bytes() == b"mine"
    assert "must end with" in run("export", conversation["id"], str(tmp_path / "o"), code=2).stderr
    missed = run("export", conversation["id"], str(file), "--at", "9", "--force", code=3)
    assert missed.stdout.startswith("Nothing to resume there\n")
    assert file.read_bytes() == b"mine"
    run("export", conversation["id"], str(file), "--force")
    assert len(load_prompt_cache(str(file))) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.safetensors", "store"]
