from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvkeep.persistence.frame import HEAD, Frame
from tests.persistence import make_golden


def test_every_golden_file_has_its_contents() -> None:
    assert {path.stem for path in make_golden.FOLDER.glob("*.kvkf")} == set(make_golden.FRAMES)


@pytest.mark.parametrize("name", list(make_golden.FRAMES))
def test_golden_frames_read_bit_for_bit(name: str) -> None:
    specs, extra, smooth = make_golden.FRAMES[name]
    frame = Frame.open((make_golden.FOLDER / f"{name}.kvkf").read_bytes())
    assert frame.extra == extra
    assert list(frame.specs.values()) == specs
    compared = 0
    for spec in specs:
        want = make_golden.contents(spec, smooth=smooth)
        found = frame.read(spec.name)
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        assert found.tobytes() == want.tobytes()
        compared += found.size
    assert compared == sum(int(np.prod(spec.shape)) for spec in specs)


@pytest.mark.parametrize(("version", "names"), [(1, make_golden.FIRST), (2, make_golden.SECOND)])
def test_golden_files_cover_every_encoding(version: int, names: dict[str, Any]) -> None:
    seen = set()
    for name in names:
        data = (make_golden.FOLDER / f"{name}.kvkf").read_bytes()
        assert HEAD.unpack_from(data)[1] == version
        seen |= {(stack.encoding, len(stack.names) > 1) for stack in Frame.open(data).stacks}
    alone = {(0, False), (1, False), (2, False)}
    assert seen == (alone if version == 1 else alone | {(0, True), (1, True), (2, True)})


def test_the_raw_golden_frames_are_what_is_written_today() -> None:
    # Compressed bytes may change with zstd; these may not.
    for name in ("empty-2", "raw-2", "stacks-raw-2"):
        assert make_golden.sealed(name) == (make_golden.FOLDER / f"{name}.kvkf").read_bytes()


def test_golden_files_are_never_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(make_golden, "FOLDER", tmp_path)
    assert make_golden.main() == 0
    (tmp_path / "raw.kvkf").write_bytes(b"kept")
    assert make_golden.main() == 1
    assert (tmp_path / "raw.kvkf").read_bytes() == b"kept"
