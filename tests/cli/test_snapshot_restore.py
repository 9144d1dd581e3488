"""``snapshot`` and ``restore``: what the one stores the other resumes."""

from __future__ import annotations

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli.models import NotQuantizable, UnknownToken
from kvkeep.cli.snapshot import NotStored
from kvkeep.errors import EmptyCache
from tests.cli.conftest import Ask, Run

CONTEXT = "The harbour opens at five, and the first boats leave before seven in the morning. " * 3
FIRST, SECOND = CONTEXT + "Who opens it?", CONTEXT + "When do they leave?"


def told(text: str) -> str:
    """The prompt as the tiny models' template writes it, one token a character."""
    return f"<s>user: {text}</s><s>assistant: "


def length(text: str) -> int:
    """Its tokens: the three special ones count once each."""
    return len(told(text).replace("<s>", "^").replace("</s>", "^"))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1", "qwen3_next"])
def test_an_exact_replay_resumes_all_but_the_last_token(models, ask: Ask, name: str) -> None:
    asked = ("--model", models(name), "--prompt", FIRST)
    made = ask("snapshot", *asked)
    n = length(FIRST)
    assert made["prompt_tokens"] == n
    assert (made["offset"], made["read_tokens"], made["new_tokens"]) == (n - 1, n - 1, n - 1)
    assert made["resume_points"] == [n - 1]
    assert made["bytes_written"] > 0

    cold = ask("restore", *asked, "--generate", "12", "--cold")
    assert (cold["resumed_tokens"], cold["cold"]) == (0, True)
    resumed = ask("restore", *asked, "--generate", "12")
    assert (resumed["resumed_tokens"], resumed["reason"]) == (n - 1, "full")
    assert resumed["text"] == cold["text"]
    assert resumed["generated_tokens"] == cold["generated_tokens"] > 0
    assert resumed["first_token_seconds"] > resumed["restore_seconds"] > 0


def test_another_prompt_resumes_where_the_two_part(models, ask: Ask) -> None:
    model = models("llama")
    ask("snapshot", "--model", model, "--prompt", FIRST)
    resumed = ask("restore", "--model", model, "--prompt", SECOND, "--generate", "12")
    shared = len("^user: " + CONTEXT + "Wh")
    assert (resumed["matched_tokens"], resumed["resumed_tokens"]) == (shared, shared)
    cold = ask("restore", "--model", model, "--prompt", SECOND, "--generate", "12", "--cold")
    assert resumed["text"] == cold["text"]


def test_a_second_snapshot_reads_and_writes_only_what_is_new(models, ask: Ask) -> None:
    model = models("llama")
    ask("snapshot", "--model", model, "--prompt", FIRST)
    again = ask("snapshot", "--model", model, "--prompt", FIRST)
    assert (again["read_tokens"], again["new_tokens"], again["bytes_written"]) == (0, 0, 0)
    assert again["reason"] == "already_stored"
    other = ask("snapshot", "--model", model, "--prompt", SECOND)
    shared = len("^user: " + CONTEXT + "Wh")
    assert other["resumed_tokens"] == shared
    assert other["new_tokens"] == other["read_tokens"] == length(SECOND) - 1 - shared


@pytest.mark.parametrize("name", ["falcon_h1", "gemma3_text"])
def test_layers_that_need_them_get_resume_points_between_the_chunks(
    models, ask: Ask, run: Run, name: str
) -> None:
    model, step = models(name), ("--prefill-step", "64")
    made = ask("snapshot", "--model", model, "--prompt", FIRST, *step)
    n = length(FIRST) - 1
    assert made["resume_points"] == [*range(64, n, 64), n]
    asked = ("restore", "--model", model, "--prompt", SECOND, *step)
    resumed = ask(*asked, "--generate", "12")
    shared = len("^user: " + CONTEXT + "Wh")
    if name == "falcon_h1":
        assert resumed["resumed_tokens"] == shared // 64 * 64
        assert resumed["reason"] == "no_state_at_offset"
        assert "the last one before it is at 192" in run(*asked).stdout
    else:
        assert resumed["resumed_tokens"] == shared
    cold = ask(*asked, "--generate", "12", "--cold")
    assert resumed["text"] == cold["text"]


def test_a_repeated_prompt_is_not_said_to_part_from_itself(models, run: Run) -> None:
    asked = ("--model", models("llama"), "--prompt", FIRST)
    run("snapshot", *asked)
    for command in ("restore", "why"):
        said = run(command, *asked).stdout
        assert "the model has to read at least one token" in said
        assert "part at token" not in said


def test_a_store_that_may_only_be_read_is_resumed(models, store: Path, ask: Ask) -> None:
    asked = ("--model", models("llama"), "--prompt", FIRST)
    offset = ask("snapshot", *asked)["offset"]
    paths = [*store.iterdir(), store]
    modes = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(path.stat().st_mode & 0o555)
    try:
        if os.access(store, os.W_OK):
            pytest.skip("root may write everything")
        assert ask("restore", *asked, "--generate", "2")["resumed_tokens"] == offset
    finally:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)
    assert ask("report")["lookups"] == 1


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_what_was_read_before_ctrl_c_is_kept(
    models, ask: Ask, run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--model", models(name), "--prompt", FIRST, "--prefill-step", "64")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    forward, before = module.Model.__call__, signal.getsignal(signal.SIGINT)
    calls: list[int] = []

    def pressed(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module.Model, "__call__", pressed)
        result = run("snapshot", *asked, code=130)
    assert len(calls) == 3
    assert "\ninterrupted; stored up to token 192, where" in result.stderr
    again = ask("snapshot", *asked)
    assert (again["resumed_tokens"], again["read_tokens"]) == (192, length(FIRST) - 1 - 192)
    assert signal.getsignal(signal.SIGINT) is before


def test_plain_caches_need_no_points_between(models, ask: Ask) -> None:
    asked = ("--model", models("llama"), "--prompt", FIRST, "--prefill-step", "64")
    assert ask("snapshot", *asked)["resume_points"] == [length(FIRST) - 1]


def test_a_quantized_cache_resumes_from_its_conversion_on(
    models, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import architectures

    wide = {**architectures.CONFIGS["llama"], "head_dim": 64}
    monkeypatch.setitem(architectures.CONFIGS, "llama", wide)
    scheme = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "100")
    asked = ("--model", models("llama", seed=64), *scheme, "--prefill-step", "64")
    ask("snapshot", *asked, "--prompt", FIRST)
    resumed = ask("restore", *asked, "--prompt", SECOND, "--generate", "8")
    assert resumed["resumed_tokens"] == len("^user: " + CONTEXT + "Wh")
    below = ask("restore", *asked, "--prompt", CONTEXT[:50], code=3)
    assert (below["matched_tokens"], below["resumed_tokens"]) == (57, 0)
    assert (below["reason"], below["limits"][0]["kind"]) == ("below_floor", "kv-quant")
    plain = ask("restore", "--model", asked[1], "--prompt", FIRST, code=3)
    assert plain["reason"] == "space_changed:kv_scheme"
    said = run("restore", "--model", asked[1], "--prompt", FIRST, code=3).stdout
    assert "kv_scheme affine:8:32@100\n" in said
    assert "kv_scheme none\n" in said


def test_a_miss_is_told_and_has_its_exit_code(models, ask: Ask, run: Run) -> None:
    model = models("llama")
    empty = run("restore", "--model", model, "--prompt", FIRST, code=3).stdout
    assert empty.startswith("Nothing to resume\nNot more, because: the store holds no prompt")
    ask("snapshot", "--model", model, "--prompt", FIRST)
    other = run("restore", "--model", models("llama", seed=1), "--prompt", FIRST, code=3).stdout
    assert "for a model that differs in weights\n" in other
    assert "\n  stored  llama-0  weights " in other
    assert "\n  asked   llama-1  weights " in other
    answered = run(
        "restore", "--model", models("llama", seed=1), "--prompt", FIRST, "--generate", "4", code=3
    )
    assert len(answered.stdout) > 1
    assert answered.stderr.startswith("Nothing to resume")


def test_tenants_do_not_meet(models, ask: Ask, run: Run) -> None:
    asked = ("--model", models("llama"), "--prompt", FIRST)
    ask("snapshot", *asked, "--salt", "one")
    missed = run("restore", *asked, "--salt", "two", code=3).stdout
    assert "stored  " not in missed
    assert ask("restore", *asked, "--salt", "one")["resumed_tokens"] == length(FIRST) - 1


def test_with_generate_stdout_is_the_answer_alone(models, ask: Ask, run: Run) -> None:
    asked = ("restore", "--model", models("llama"), "--prompt", FIRST, "--generate", "6")
    ask("snapshot", *asked[1:-2])
    text = ask(*asked)["text"]
    result = run(*asked)
    assert result.stdout == text + "\n"
    assert result.stderr.splitlines()[0].startswith(f"Resumed {length(FIRST) - 1} of")


def test_prompts_too_short_and_stores_too_small_are_refused(
    models, run: Run, tmp_path: Path
) -> None:
    ids = tmp_path / "one"
    ids.write_text("[5]")
    with pytest.raises(EmptyCache):
        run("snapshot", "--model", models("llama"), "--tokens-file", str(ids))
    with pytest.raises(NotStored, match="budget"):
        run("snapshot", "--model", models("llama"), "--prompt", FIRST, "--max-bytes", "4KiB")
    assert run("restore", "--model", "m", "--prompt", "x", "--cold", code=2)


def test_a_report_adds_up(models, ask: Ask, run: Run) -> None:
    model = models("llama")
    ask("snapshot", "--model", model, "--prompt", FIRST)
    ask("restore", "--model", model, "--prompt", SECOND)
    ask("restore", "--model", model, "--prompt", FIRST, "--generate", "2", "--cold")
    report = ask("report")
    shared = len("^user: " + CONTEXT + "Wh")
    assert report["lookups"] == 2
    assert report["prompt_tokens"] == length(FIRST) + length(SECOND)
    assert report["resumed_tokens"] == shared
    assert report["lost_tokens"] == {
        "no_prefix": length(FIRST),
        "full": length(SECOND) - shared,
    }
    assert report["stored_tokens"] == length(FIRST) - 1
    assert report["spaces"][0]["label"] == model
    assert report["spaces"][0]["resumed_tokens"] == shared
    shown = run("report", "--since", "1h").stdout
    assert shown.startswith("Lookups 2    Prompt tokens ")
    assert "no_prefix" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "gemma3_text"])
def test_exact_mode_resumes_whole_steps_and_answers_as_a_cold_run(
    models, ask: Ask, name: str
) -> None:
    asked = ("--model", models(name), "--exact", "--prefill-step", "64")
    made = ask("snapshot", *asked, "--prompt", FIRST)
    assert made["offset"] == made["resume_points"][-1] == (length(FIRST) - 1) // 64 * 64
    assert made["new_tokens"] == made["offset"]
    resumed = ask("restore", *asked, "--prompt", SECOND, "--generate", "12")
    assert (resumed["resumed_tokens"], resumed["reason"]) == (192, "chunk_aligned")
    cold = ask("restore", *asked, "--prompt", SECOND, "--generate", "12", "--cold")
    assert resumed["text"] == cold["text"]
    other = ask("restore", *asked[:3], "--prompt", SECOND, code=3)
    assert other["reason"] == "space_changed:plan"


def test_exact_mode_reads_nothing_of_a_prompt_below_one_step(models, run: Run) -> None:
    with pytest.raises(EmptyCache, match=r"whole prefill steps of 2,048 .*\n.*--prefill-step"):
        run("snapshot", "--model", models("llama"), "--exact", "--prompt", FIRST)


def test_ids_that_the_model_does_not_have_are_not_read(
    models, tmp_path: Path, ask: Ask, run: Run
) -> None:
    ids = tmp_path / "ids"
    size = json.loads(Path(models("llama"), "config.json").read_text())["vocab_size"]
    asked = ("--model", models("llama"), "--tokens-file", str(ids))
    for bad in (size, -1):
        ids.write_text(f"1 2 {bad}")
        for command in (["snapshot"], ["restore", "--generate", "1"]):
            with pytest.raises(UnknownToken, match=f"token {bad}; the model has 0 to {size - 1}"):
                run(*command, *asked)
    ids.write_text(f"1 2 {size - 1}")
    assert ask("snapshot", *asked)["offset"] == 2


def test_groups_that_do_not_fit_a_head_are_refused_in_words(models, run: Run) -> None:
    scheme = ("--kv-bits", "4", "--kv-group-size", "128", "--quantized-kv-start", "0")
    with pytest.raises(NotQuantizable, match="in groups of 128\n"):
        run("snapshot", "--model", models("llama"), *scheme, "--prompt", FIRST)
    with pytest.raises(NotQuantizable):
        run("restore", "--model", models("llama"), *scheme, "--prompt", FIRST, "--generate", "1")
