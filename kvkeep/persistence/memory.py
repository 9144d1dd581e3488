"""MLX arrays and the host: views on live arrays, and MLX-owned memory filled in place.

Filling memory that MLX owns and nobody has touched saves one copy and half of the page faults
of ``mx.array(numpy_array)``. MLX offers no such call, but its loader of safetensors allocates
each tensor and asks a file-like object to read into it; one whose ``readinto`` leaves the
payload alone hands out exactly that. Whether a write is really seen is tried once per process;
where it is not, a slab fills numpy memory and MLX copies it in ``take``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from kvkeep.errors import StoreClosed
from kvkeep.persistence.libc import linux_call
from kvkeep.persistence.tensors import SAFETENSORS_DTYPES, TensorSpec

if TYPE_CHECKING:
    Host = np.ndarray[Any, np.dtype[Any]]

HUGE_PAGE = 1 << 21

_mlx = {"used": False, "lost": False}
"""Whether MLX's threads run in this process, and whether they ran in the one it was forked from."""


def need_mlx() -> None:
    """Raise ``StoreClosed`` in a child of a process that used MLX: there it waits for ever."""
    if _mlx["lost"]:
        raise StoreClosed(
            "MLX was in use when this process was forked, and does not work in it",
            remedy="Start workers with the spawn method, or fork before MLX is used.",
        )
    _mlx["used"] = True


os.register_at_fork(after_in_child=lambda: _mlx.update(lost=_mlx["used"]))


def host(array: mx.array) -> Host:
    """A read-only numpy view of an evaluated ``array``, without a copy; bfloat16 as uint16.

    Drop it at once: while it is held, MLX copies the whole buffer at the next in-place update.
    An array that is not evaluated is, so call this on the thread that owns its stream. Raises
    ``StoreClosed`` where MLX cannot work, see ``need_mlx``.
    """
    return hosts({"": array})[""]


def hosts(arrays: Mapping[str, mx.array]) -> dict[str, Host]:
    """As ``host`` for each of ``arrays``, evaluated together."""
    need_mlx()
    views = _views(arrays)
    for view in views.values():
        view.flags.writeable = False
    return views


class Slab:
    """Memory for several tensors: fill ``views`` in place, then ``take`` the arrays.

    ``views`` maps names to writable numpy arrays in the host dtype and the tensor's shape,
    with undefined contents. Any thread may fill them. Make the slab and call ``take`` on the
    thread that will use the arrays. Raises ``MemoryError``, or ``StoreClosed`` as ``host``.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        need_mlx()
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("Two tensors of a slab have the same name")
        loadable = [spec for spec in specs if spec.dtype in SAFETENSORS_DTYPES and spec.nbytes]
        try:
            self._arrays = _untouched(loadable) if loadable and fills_in_place() else {}
        except RuntimeError as error:  # all that MLX can say of memory that it did not get
            raise MemoryError(f"MLX got no memory for the caches ({error})") from error
        self.views: dict[str, Host] = _views(self._arrays)
        for view in self.views.values():
            _ask_for_huge_pages(view)
        for spec in specs:
            if spec.name not in self.views:
                self.views[spec.name] = np.empty(spec.shape, spec.host_dtype)

    def take(self) -> dict[str, mx.array]:
        """The filled arrays by name, evaluated. The slab is empty afterwards, and so is ``views``.

        Views that the caller still holds make the first in-place update of an array copy it.
        """
        arrays = dict(self._arrays)
        for name, spec in self._specs.items():
            if name not in arrays:
                arrays[name] = _converted(spec, self.views[name])
        self.views.clear()
        self._arrays = {}
        self._specs = {}
        return arrays


@cache
def fills_in_place() -> bool:
    """Whether MLX sees what is written through a view of memory from its loader."""
    spec = TensorSpec("probe", "bfloat16", (3, 5))
    pattern = np.arange(15, dtype=np.uint16).reshape(3, 5) * 1000
    try:
        array = _untouched([spec])["probe"]
        view = _views({"": array})[""]
        view[...] = pattern
        del view
        seen = mx.array_equal(array.view(mx.uint16), mx.array(pattern))
        return array.shape == spec.shape and bool(seen.item())
    except (ValueError, RuntimeError, TypeError, BufferError, KeyError):
        return False


class _Hollow:
    """A safetensors file with a header and a payload that is never written anywhere."""

    closed = False

    def __init__(self, header: bytes, payload: int) -> None:
        self._header = header
        self._size = len(header) + payload
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        given = self._header[self._at : self._at + len(view)]
        view[: len(given)] = given
        self._at += len(view)
        return len(view)

    def read(self, size: int = -1) -> bytes:
        given = bytearray(self._size - self._at if size < 0 else size)
        self.readinto(given)
        return bytes(given)


def _untouched(specs: Sequence[TensorSpec]) -> dict[str, mx.array]:
    table: dict[str, Any] = {}
    at = 0
    for i, spec in enumerate(specs):
        table[str(i)] = {
            "dtype": SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    file: Any = _Hollow(struct.pack("<Q", len(header)) + header, at)
    arrays: Any = mx.load(file, format="safetensors")
    found = {spec.name: arrays[str(i)] for i, spec in enumerate(specs)}
    mx.eval(list(found.values()))
    return found


def _views(arrays: Mapping[str, mx.array]) -> dict[str, Host]:
    """Numpy views; one evaluation for all of them, as each costs as much as a small copy."""
    bits = {
        name: array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        for name, array in arrays.items()
    }
    mx.eval(list(bits.values()))
    return {name: _numpy(array) for name, array in bits.items()}


def _numpy(array: Any) -> Host:
    return np.asarray(memoryview(array))


def _converted(spec: TensorSpec, filled: Host) -> mx.array:
    array = mx.array(filled, mx.float64) if spec.dtype == "float64" else mx.array(filled)
    if spec.dtype == "bfloat16":
        array = array.view(mx.bfloat16)
    mx.eval(array)
    return array


def _ask_for_huge_pages(view: Host) -> None:
    """Have the kernel back the whole pages of ``view`` by huge ones; a hint, never an error."""
    advise = linux_call("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if advise is None or not hasattr(mmap, "MADV_HUGEPAGE") or view.nbytes < HUGE_PAGE:
        return
    start = -(-view.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (view.ctypes.data + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(start, stop - start, mmap.MADV_HUGEPAGE)
