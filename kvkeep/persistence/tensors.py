"""The tensors that a frame or a slab holds: name, dtype and shape, and their host dtypes.

>>> spec = TensorSpec("0/keys", "bfloat16", (1, 8, 64, 128))
>>> spec.nbytes, spec.host_dtype.name
(131072, 'uint16')
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Host = np.ndarray[Any, np.dtype[Any]]

HOST_DTYPES = {
    "bool": "|b1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
}
"""The numpy type of each MLX dtype name. numpy has no bfloat16: its bits travel as uint16."""

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "complex64": "C64",
}
"""What safetensors calls them. Without float64, which MLX does not load as such."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its name, MLX dtype name and shape. Raises ``ValueError`` on any other."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in HOST_DTYPES:
            raise ValueError(f"{self.dtype!r} is not an MLX dtype; known: {', '.join(HOST_DTYPES)}")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"{self.shape} has a negative extent")

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(HOST_DTYPES[self.dtype][2:])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, uncompressed."""
        return prod(self.shape) * self.itemsize

    @cached_property
    def host_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the tensor's bits."""
        import numpy as np

        return np.dtype(HOST_DTYPES[self.dtype])
