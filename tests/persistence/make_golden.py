"""Write the golden frames, once: ``python -m tests.persistence.make_golden``.

A file that exists is never written again, because later versions must go on reading it. A
change of the format adds files beside these.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.persistence.frame import Draft
from kvkeep.persistence.tensors import HOST_DTYPES, TensorSpec

FOLDER = Path(__file__).parent / "golden"


def contents(spec: TensorSpec, *, smooth: bool) -> Any:
    """Bits that depend on the spec's name and shape alone, not on any random generator."""
    need = max(spec.nbytes, 1)
    blocks = [hashlib.sha256(f"{spec.name} {i}".encode()).digest() for i in range(-(-need // 32))]
    raw = np.frombuffer(b"".join(blocks)[: spec.nbytes], np.uint8)
    if spec.dtype == "bool":
        raw = raw & 1
    if smooth:
        raw = raw.copy()
        # High bytes as a float's: few different ones, so that planes and zstd gain.
        raw[spec.itemsize - 1 :: spec.itemsize] &= 3
        if spec.dtype not in ("bfloat16", "float16", "float32"):
            raw &= 3
    return raw.view(spec.host_dtype).reshape(spec.shape)


Golden = tuple[list[TensorSpec], dict[str, Any], bool]

FIRST: dict[str, Golden] = {
    "empty": ([], {}, False),
    "raw": (
        [TensorSpec(f"t/{dtype}", dtype, (2, 3)) for dtype in HOST_DTYPES]
        + [TensorSpec("scalar", "int64", ()), TensorSpec("nothing", "bfloat16", (1, 8, 64, 0))],
        {
            "space": b"\x00\x01\xff",
            "start": 0,
            "stop": 1 << 40,
            "axes": [2, 2],
            "meta": [{"keep": 4, "none": None, "scale": 0.5, "name": "é", "wrapped": True}],
        },
        False,
    ),
    "compressed": (
        [
            TensorSpec("0/keys", "bfloat16", (1, 2, 64, 32)),
            TensorSpec("0/values", "float16", (1, 2, 64, 32)),
            TensorSpec("1/keys", "float32", (1, 2, 64, 32)),
            TensorSpec("1/packed", "uint32", (1, 2, 64, 32)),
            TensorSpec("1/ids", "int64", (2048,)),
        ],
        {"start": 64, "stop": 128},
        True,
    ),
}
"""What is in the frames of version 1."""

STACKS = [
    TensorSpec(f"{layer}/{name}", dtype, shape)
    for name, dtype, shape in (
        ("keys", "bfloat16", (1, 2, 64, 16)),
        ("packed", "uint32", (1, 2, 64, 4)),
        ("scales", "float16", (1, 2, 64, 1)),
        ("small", "float32", (3,)),
        ("scalar", "uint8", ()),
    )
    for layer in range(5)
]

SECOND: dict[str, Golden] = {
    **{f"{name}-2": golden for name, golden in FIRST.items()},
    "stacks-2": (STACKS, {"start": 0, "axes": [2] * 25}, True),
    "stacks-raw-2": (STACKS, {"start": 0, "axes": [2] * 25}, False),
}
"""What is in those of version 2."""

FRAMES = FIRST | SECOND


def sealed(name: str) -> bytes:
    """The frame ``name`` as this version writes it."""
    specs, extra, smooth = FRAMES[name]
    draft = Draft(specs, extra)
    for spec in specs:
        draft.views[spec.name][...] = contents(spec, smooth=smooth)
    return bytes(draft.seal())


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    written = 0
    for name in FRAMES:
        path = FOLDER / f"{name}.kvkf"
        try:
            with path.open("xb") as file:
                written += file.write(sealed(name))
        except FileExistsError:
            print(f"{path.name} exists and stays as it is", file=sys.stderr)
    return 0 if written else 1


if __name__ == "__main__":
    raise SystemExit(main())
