"""The generic hook: begin, checkpoint and end around plain ``mlx_lm.stream_generate``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import kvkeep
from kvkeep.prefixstore import writer
from tests import model_folders

ROOT = Path(__file__).parents[2]
TEXT = "The ferry sails at eight and at noon. " * 6


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "falcon_h1"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = model_folders.write(request.param, tmp_path_factory.mktemp("m") / request.param)
    model, tokenizer = load(str(path))
    return SimpleNamespace(path=path, model=model, tokenizer=tokenizer, name=request.param)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvkeep.Store]:
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        yield store


def space_of(store: kvkeep.Store, m: Any) -> kvkeep.Space:
    return store.space(model=m.model, tokenizer=m.tokenizer, model_path=m.path)


def answer(m: Any, prompt: list[int], caches: Any, count: int = 8, **how: Any) -> list[int]:
    responses = stream_generate(
        m.model, m.tokenizer, prompt, max_tokens=count, prompt_cache=caches, **how
    )
    return [r.token for r in responses]


def talk(space: kvkeep.Space, m: Any, prompt: list[int], **how: Any) -> tuple[Any, list[int]]:
    with kvkeep.session(space, prompt, m.model, interval=50) as s:
        tokens = []
        for r in stream_generate(
            m.model,
            m.tokenizer,
            s.rest,
            max_tokens=8,
            prompt_cache=s.caches,
            prefill_step_size=64,
            prompt_progress_callback=s.progress,
            **how,
        ):
            s.emitted(r.token)
            tokens.append(r.token)
    return s, tokens


def test_a_miss_is_stored_and_the_next_request_resumes_with_the_same_answer(
    store: kvkeep.Store, loaded: Any
) -> None:
    space, prompt = space_of(store, loaded), loaded.tokenizer.encode(TEXT)
    first, tokens = talk(space, loaded, prompt)
    assert (first.resumed, first.rest) == (0, prompt)
    assert first.receipt.stored
    cold = answer(loaded, prompt, make_prompt_cache(loaded.model), prefill_step_size=64)
    assert tokens == cold

    again, same = talk(space, loaded, prompt)
    assert (again.resumed, again.rest) == (len(prompt) - 1, prompt[-1:])
    assert same == cold

    later = [*prompt, *tokens, *loaded.tokenizer.encode("And on Sundays?")]
    then, _ = talk(space, loaded, later)
    assert then.resumed == len(prompt) + len(tokens)
    assert then.decision.prompt_tokens == len(later)


def test_a_prompt_that_parts_resumes_at_a_checkpoint(store: kvkeep.Store, loaded: Any) -> None:
    space, prompt = space_of(store, loaded), loaded.tokenizer.encode(TEXT)
    talk(space, loaded, prompt)
    parted = prompt[:150] + loaded.tokenizer.encode("Something else entirely")
    s, _ = talk(space, loaded, parted)
    assert s.resumed == (128 if loaded.name == "falcon_h1" else 150)


def test_an_interrupted_request_keeps_its_checkpoints(store: kvkeep.Store, loaded: Any) -> None:
    space, prompt = space_of(store, loaded), loaded.tokenizer.encode(TEXT)
    s = kvkeep.session(space, prompt, loaded.model)

    def progress(done: int, total: int) -> None:
        if done:
            s.checkpoint(done)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), s:
        answer(loaded, s.rest, s.caches, prefill_step_size=64, prompt_progress_callback=progress)
    assert s.receipt is None
    assert space.explain(prompt).offset == 64


def test_begin_checkpoint_end_for_servers_of_other_make(store: kvkeep.Store, loaded: Any) -> None:
    space, prompt = space_of(store, loaded), loaded.tokenizer.encode(TEXT)
    hook = kvkeep.Session(space, loaded.model)
    for resumed in (0, len(prompt) - 1):
        caches, rest = hook.begin(prompt)
        assert (hook.resumed, len(caches)) == (resumed, len(make_prompt_cache(loaded.model)))
        if len(rest) > 1:
            mx.eval(loaded.model(mx.array(rest[:-1])[None], cache=caches))
            hook.checkpoint(len(rest) - 1)
        emitted = answer(loaded, rest[-1:], caches)
        receipt = hook.end(emitted)
        assert receipt is not None
        assert receipt.stored


def test_a_draft_model_is_brought_along(store: kvkeep.Store, loaded: Any, tmp_path: Path) -> None:
    if loaded.name != "llama":
        pytest.skip("speculative decoding needs caches that can be trimmed")
    draft = load(str(model_folders.write("llama", tmp_path / "draft", seed=1)))[0]
    space = store.space(
        model=loaded.model,
        model_path=loaded.path,
        draft_model=tmp_path / "draft",
        draft_layout=make_prompt_cache(draft),
    )
    prompt, offsets, answers = loaded.tokenizer.encode(TEXT), [], []
    for _ in range(2):
        with kvkeep.session(space, prompt, loaded.model, draft) as s:
            offsets.append({c.offset for c in s.caches})
            how = {"draft_model": draft, "num_draft_tokens": 2}
            answers.append(answer(loaded, s.rest, s.caches, **how))
            for token in answers[-1]:
                s.emitted(token)
    assert offsets == [{0}, {len(prompt) - 1}]
    assert answers[0] == answers[1]


def test_a_full_disk_is_a_receipt_and_no_error(
    tmp_path: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.Writer, "_check_disk", _full)
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space, prompt = space_of(store, loaded), loaded.tokenizer.encode(TEXT)
        s, tokens = talk(space, loaded, prompt)
        assert len(tokens) == 8
        assert (s.receipt.stored, s.receipt.reason) == (False, "the disk is full")


def _full(*_: Any) -> None:
    raise kvkeep.errors.StoreFull("the disk is full")


def test_the_example_resumes_in_another_process(tmp_path: Path, loaded: Any) -> None:
    words = ["--model", str(loaded.path), "--store", str(tmp_path / "s"), "--max-tokens", "8"]
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "examples/stream_generate.py", *words, "--prompt", TEXT],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append((done.stdout, done.stderr.splitlines()[-1]))
    assert said[0][0] == said[1][0]
    total = int(said[0][1].split(" of ")[1].split(":")[0])
    assert said[0][1] == f"resumed 0 of {total}: no_prefix"
    assert said[1][1] == f"resumed {total - 1} of {total}: last_token"


def sampled(space: kvkeep.Space, m: Any, prompt: list[int], stop: int = 0) -> tuple[Any, list[int]]:
    """A long answer with a seed; it is cut off by an error behind ``stop`` tokens, if any."""
    asked = "temp 0.8, seed 5"
    with kvkeep.session(space, prompt, m.model, interval=50, answers=8, asked=asked) as s:
        tokens = list(s.answered)
        mx.random.seed(5)
        for r in stream_generate(
            m.model,
            m.tokenizer,
            s.rest,
            max_tokens=60 - len(tokens),
            prompt_cache=s.caches,
            sampler=s.sampler(make_sampler(0.8, top_p=0.9)),
            logits_processors=make_logits_processors({m.tokenizer.eos_token_id: -100.0}),
        ):
            s.emitted(r.token)
            tokens.append(r.token)
            if len(tokens) == stop:
                raise InterruptedError
    return s, tokens


def test_an_answer_that_was_cut_off_goes_on(store: kvkeep.Store, loaded: Any) -> None:
    space, prompt = space_of(store, loaded), loaded.tokenizer.encode(TEXT)
    other = store.space(identity={"other": 1}, layout=make_prompt_cache(loaded.model))
    _, whole = sampled(other, loaded, prompt)
    assert len(set(whole)) > 10
    with pytest.raises(InterruptedError):
        sampled(space, loaded, prompt, stop=29)
    assert space.resume([*prompt, *whole[:29], 1]).offset <= len(prompt)
    s, tokens = sampled(space, loaded, prompt)
    assert (tokens, len(s.answered)) == (whole, 25 if loaded.name != "llama" else 24)
    assert s.resumed == len(prompt) - 1
    again, tokens = sampled(space, loaded, prompt)
    assert (tokens, again.answered) == (whole, [])


def test_answers_have_no_checkpoints_where_they_could_not_go_on(
    store: kvkeep.Store, loaded: Any
) -> None:
    with pytest.raises(ValueError, match="draft model"):
        kvkeep.Session(space_of(store, loaded), loaded.model, loaded.model, answers=8)
    exact = store.space(identity={}, layout=make_prompt_cache(loaded.model), exact=True)
    with pytest.raises(ValueError, match="chunk-aligned"):
        kvkeep.Session(exact, loaded.model, answers=8)


def test_a_prompt_that_parts_is_read_to_there_first(store: kvkeep.Store, loaded: Any) -> None:
    space = space_of(store, loaded)
    first, second, third = (
        loaded.tokenizer.encode(f"{TEXT} And {said} it does not.") for said in "ABC"
    )
    parted = len(loaded.tokenizer.encode(f"{TEXT} And "))
    talk(space, loaded, first)
    talk(space, loaded, second)
    s, tokens = talk(space, loaded, third)
    assert s.resumed == parted
    assert tokens == answer(loaded, third, make_prompt_cache(loaded.model))
    origins = {p.offset: p.origin for p in store.inspect(space, third).points}
    assert origins.get(parted) == ("junction" if loaded.name == "falcon_h1" else None)
