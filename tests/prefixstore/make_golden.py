"""Write the golden store of this version, once: ``python -m tests.prefixstore.make_golden``.

A file that exists is never written again, because later versions must go on reading it. Each is
named after the version of the frames that are in it.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import kvkeep
from kvkeep.persistence.frame import VERSION
from kvkeep.prefixstore import recipe
from tests.prefixstore.shapes import BOUNDARIES, SHAPES, make

FOLDER = Path(__file__).parent / "golden"
FILES = ("store.json", "data.mdb")
TOKENS = [(7 * i * i + 3) % 101 for i in range(120)]
TURNS = (48, 96)
DATE = (2026, 1, 1, 0, 0, 0)


def space_of(store: kvkeep.Store, shape: str) -> kvkeep.Space:
    """The space of ``shape``, which a golden store has for each."""
    return store.space(identity={"shape": shape}, layout=make(shape, ()))


def boundary_of(shape: str) -> int | None:
    """Where the delayed caches of ``shape`` were quantized."""
    return BOUNDARIES[0] if shape == "delayed" else None


def write(folder: Path) -> None:
    """A store that has two turns of every shape."""
    recipe.CHUNK_BYTES = 1  # chunks of few tokens
    with kvkeep.open(folder, max_bytes="4MB", disk_reserve=1) as store:
        for shape in SHAPES:
            for stop in TURNS:
                caches = make(shape, TOKENS[:stop], boundary=boundary_of(shape))
                assert space_of(store, shape).snapshot(TOKENS[:stop], caches).wait()


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"store-{VERSION}.zip"
    if path.exists():
        print(f"{path.name} exists and stays as it is", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary) / "store")
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name in FILES:
                data = (Path(temporary) / "store" / name).read_bytes()
                archive.writestr(zipfile.ZipInfo(name, DATE), data, zipfile.ZIP_DEFLATED, 9)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
