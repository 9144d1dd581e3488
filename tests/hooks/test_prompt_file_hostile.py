"""Prompt-cache files that are hostile, broken, or something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvkeep.errors import FileRefused
from kvkeep.hooks.prompt_file import load
from tests.hooks.prompt_file_parts import stored

K = np.ones((1, 2, 4, 8), np.float16)


def number(value: Any, dtype: Any = np.int32) -> Any:
    return np.array(value, dtype)


def text(value: str) -> Any:
    return np.array([ord(c) for c in value], np.int32)


def hostile(
    tmp_path: Path,
    tensors: dict[str, Any],
    names: list[str],
    scalars: dict[str, str],
    user: dict[str, str] | None = None,
    **texts: str,
) -> Path:
    """A file in the form of 0.32 around whatever is given."""
    metadata = {f"0.{key}": value for key, value in (user or {}).items()}
    metadata |= {f"1.{i}": name for i, name in enumerate(names)}
    metadata["2.0"] = ""
    for i, (path, kind) in enumerate(scalars.items()):
        metadata |= {f"2.{i + 1}.0": path, f"2.{i + 1}.1": kind}
    file = tmp_path / "hostile.safetensors"
    save_file(tensors, file, metadata | {k.replace("_", "."): v for k, v in texts.items()})
    return file


def state(*parts: Any, at: str = "0") -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and scalars for a cache whose state has these parts."""
    tensors: dict[str, Any] = {}
    scalars: dict[str, str] = {}
    for i, part in enumerate(parts):
        path = f"{at}.{i}"
        if isinstance(part, np.ndarray):
            tensors[path] = part
        elif isinstance(part, tuple):
            below = state(*part, at=path)
            tensors |= below[0]
            scalars |= below[1]
        else:
            kind = "none" if part is None else "string" if isinstance(part, str) else "scalar"
            scalars[path] = kind
            tensors[path] = (
                np.zeros(0, np.float32) if part is None
                else text(part) if isinstance(part, str) else np.array(part).astype(
                    {bool: np.bool_, int: np.int32, float: np.float32}[type(part)]
                )
            )  # fmt: skip
    return tensors, scalars


PACKED = np.zeros((1, 2, 4, 8), np.uint32)  # 64 numbers of 4 bits

SCALES = np.zeros((1, 2, 4, 2), np.float16)

SIDE = (PACKED, SCALES, SCALES)

GOOD: dict[str, tuple[Any, ...]] = {
    "KVCache": (K, K, 3),
    "ConcatenateKVCache": (K, K),
    "QuantizedKVCache": (SIDE, SIDE, 3, 32, 4),
    "RotatingKVCache": (K, K, 9, 1, 4, 2),
    "ChunkedKVCache": (K, K, 9, 4, 6),
    "ArraysCache": ((K, None), None, None),
    "CacheList": (((K, K, 3), "KVCache"), ((K, K), "ConcatenateKVCache")),
}


@pytest.mark.parametrize("name", GOOD)
def test_states_made_by_hand_are_read(name: str, tmp_path: Path) -> None:
    # The base of the cases below, each of which changes one thing.
    caches, _ = load(hostile(tmp_path, *reordered(name, GOOD[name])))
    assert [type(c).__name__ for c in caches] == [name]


def reordered(name: str, parts: tuple[Any, ...]) -> tuple[Any, list[str], Any]:
    tensors, scalars = state(*parts)
    return tensors, [name], scalars


BAD: dict[str, tuple[str, tuple[Any, ...]]] = {
    "kv: offset negative": ("KVCache", (K, K, -1)),
    "kv: offset beyond": ("KVCache", (K, K, 5)),
    "kv: offset a bool": ("KVCache", (K, K, True)),
    "kv: offset a float": ("KVCache", (K, K, 3.0)),
    "kv: offset an array": ("KVCache", (K, K, np.array([3], np.int32))),
    "kv: offset none": ("KVCache", (K, K, None)),
    "kv: offset text": ("KVCache", (K, K, "3")),
    "kv: empty with an offset": ("KVCache", (None, None, 3)),
    "kv: keys only": ("KVCache", (K, None, 0)),
    "kv: a number for keys": ("KVCache", (3, 3, 0)),
    "kv: other heads": ("KVCache", (K, K[:, :1], 3)),
    "kv: other positions": ("KVCache", (K, K[:, :, :2], 2)),
    "kv: three axes": ("KVCache", (K[0], K[0], 2)),
    "kv: a part missing": ("KVCache", (K, K)),
    "kv: a part more": ("KVCache", (K, K, 3, 3)),
    "kv: planes": ("KVCache", (SIDE, SIDE, 3)),
    "concatenate: a part more": ("ConcatenateKVCache", (K, K, 4)),
    "quantized: 7 bits": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, 7)),
    "quantized: 16 bits": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, 16)),
    "quantized: other bits": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, 8)),
    "quantized: groups of 0": ("QuantizedKVCache", (SIDE, SIDE, 3, 0, 4)),
    "quantized: other groups": ("QuantizedKVCache", (SIDE, SIDE, 3, 64, 4)),
    "quantized: bits an array": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, np.zeros(2, np.int32))),
    "quantized: two planes": ("QuantizedKVCache", (SIDE[:2], SIDE[:2], 3, 32, 4)),
    "quantized: not packed": ("QuantizedKVCache", ((K, SCALES, SCALES), SIDE, 3, 32, 4)),
    "quantized: other scales": ("QuantizedKVCache", ((PACKED, SCALES, K), SIDE, 3, 32, 4)),
    "quantized: offset beyond": ("QuantizedKVCache", (SIDE, SIDE, 5, 32, 4)),
    "quantized: keys only": ("QuantizedKVCache", (SIDE, None, 3, 32, 4)),
    "rotating: index beyond": ("RotatingKVCache", (K, K, 9, 1, 4, 5)),
    "rotating: index negative": ("RotatingKVCache", (K, K, 9, 1, 4, -1)),
    "rotating: max_size 0": ("RotatingKVCache", (K, K, 9, 0, 0, 2)),
    "rotating: keep beyond": ("RotatingKVCache", (K, K, 9, 5, 4, 2)),
    "rotating: empty with an offset": ("RotatingKVCache", (None, None, 9, 1, 4, 0)),
    "chunked: offset before the start": ("ChunkedKVCache", (K, K, 5, 4, 6)),
    "chunked: offset beyond": ("ChunkedKVCache", (K, K, 11, 4, 6)),
    "chunked: chunks of 0": ("ChunkedKVCache", (K, K, 9, 0, 6)),
    "arrays: a number in a slot": ("ArraysCache", ((3, K), None, None)),
    "arrays: slots no list": ("ArraysCache", (K, None, None)),
    "arrays: padding of two axes": ("ArraysCache", ((K,), K[0, 0], None)),
    "arrays: lengths a number": ("ArraysCache", ((K,), None, 3)),
    "list: inner unknown": ("CacheList", (((K, K, 3), "Popen"),)),
    "list: inner a batch": ("CacheList", (((K, K, 3), "BatchKVCache"),)),
    "list: inner a number": ("CacheList", (((K, K, 3), 5),)),
    "list: inner without a name": ("CacheList", ((K, K, 3),)),
    "list: an array": ("CacheList", (K,)),
    "list: inner state wrong": ("CacheList", (((K, K, 7), "KVCache"),)),
    "a batch": ("BatchKVCache", (K, K, np.zeros(1, np.int32), np.zeros(1, np.int32))),
    "a class of mlx-lm that is no cache": ("TokenBuffer", (K,)),
    "a module there": ("copy", (K,)),
    "a function there": ("load_prompt_cache", (K,)),
    "a builtin": ("eval", (K,)),
    "a path": ("os.system", (K,)),
    "an attribute": ("__class__", (K,)),
    "no name": ("", (K,)),
    "a long name": ("K" * 257, (K,)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_states_that_fit_no_cache_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(FileRefused) as caught:
        load(hostile(tmp_path, *reordered(*BAD[case])))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


def test_trees_that_cannot_be_are_refused(tmp_path: Path) -> None:
    tensors, scalars = state(*GOOD["KVCache"])
    one, kv = np.zeros(1, np.float32), ["KVCache"]
    cases: list[tuple[dict[str, Any], list[str], dict[str, str]]] = [
        (tensors | {"0.3.0": one, "0.3": one}, kv, scalars),  # a value and a branch
        (tensors | {"0.4": one}, kv, scalars),  # a gap
        (tensors | {"0.999999999999": one}, kv, scalars),
        (tensors | {"999999999999.0": one}, kv, scalars),
        (tensors | {"0.-1": one}, kv, scalars),
        (tensors | {"0.03": one}, kv, scalars),
        (tensors | {"weights": one}, kv, scalars),
        (tensors | {"0." + "0." * 40 + "0": one}, kv, scalars),
        (tensors | {"1.0": one}, kv, scalars),  # more states than names
        (tensors, ["KVCache", "KVCache"], scalars),
        (tensors, kv, {"0.2": "pickle"}),
        (tensors, kv, {"0.2": "none"}),
        (tensors, kv, {"0.2": "string"}),
        (tensors, kv, {"0.0": "scalar"}),
        (tensors, kv, scalars | {"0.9": "none"}),
        (tensors | {"0.2": text("x" * 1000)}, kv, {"0.2": "string"}),
        (tensors | {"0.2": number([-1, 1 << 30])}, kv, {"0.2": "string"}),
        (tensors | {"0.2": np.zeros(3, np.float32)}, kv, {"0.2": "string"}),
        ({}, [], {}),
    ]
    for case in cases:
        with pytest.raises(FileRefused):
            load(hostile(tmp_path, *case))
    twice = {"2_1_0": "0.2", "2_1_1": "scalar", "2_2_0": "0.2", "2_2_1": "scalar"}
    for texts in ({"2_1": "x"}, {"2_9_0": "0.2"}, {"3_0": "x"}, {"more": "x"}, twice):
        with pytest.raises(FileRefused):
            load(hostile(tmp_path, tensors, kv, scalars, **texts))
    assert len(load(hostile(tmp_path, tensors, kv, scalars))[0]) == 1


def old(tmp_path: Path, tensors: dict[str, Any], info: dict[str, str], names: list[str]) -> Path:
    file = tmp_path / "old.safetensors"
    metadata = {f"0.{k}": v for k, v in info.items()} | {f"2.{i}": n for i, n in enumerate(names)}
    save_file(tensors, file, metadata)
    return file


def test_broken_files_of_the_old_form_are_refused(tmp_path: Path) -> None:
    tensors = {"0.0": K, "0.1": K}
    ring = {"0.0": "1", "0.1": "4", "0.2": "9", "0.3": "2"}
    good = [
        (tensors, {"0": ""}, ["KVCache"]),
        (tensors, ring, ["RotatingKVCache"]),
        (tensors, {"0.0": "8", "0.1": "0"}, ["ChunkedKVCache"]),
    ]
    for case in good:
        assert len(load(old(tmp_path, *case))[0]) == 1
    bad: list[tuple[dict[str, Any], dict[str, str], list[str]]] = [
        (tensors, {"0": ""}, ["eval"]),
        (tensors, {"0": ""}, ["BatchKVCache"]),
        (tensors, {"0": ""}, ["KVCache", "KVCache"]),
        (tensors, {"0": "", "1": ""}, ["KVCache"]),
        (tensors, {"0": "5"}, ["KVCache"]),
        (tensors | {"0.2": K}, {"0": ""}, ["KVCache"]),
        (tensors, {"0": ""}, ["RotatingKVCache"]),
        (tensors, ring | {"0.3": "x"}, ["RotatingKVCache"]),
        (tensors, ring | {"0.3": "9" * 5000}, ["RotatingKVCache"]),
        (tensors, ring | {"0.3": "5"}, ["RotatingKVCache"]),
        (tensors, {"0.0": "8", "0.1": "3"}, ["ChunkedKVCache"]),
        (tensors, {"0": ""}, ["CacheList"]),
        (tensors, {"0.0.0": "KVCache", "0.1.0": ""}, ["CacheList"]),
        (tensors, {"0": ""}, ["ArraysCache", ""]),
    ]
    for case in bad:
        with pytest.raises(FileRefused, match=r"before 0\.32"):
            load(old(tmp_path, *case))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = stored("0.31.3_caches").read_bytes()
    file = tmp_path / "cut.safetensors"
    for length in (*range(64), *range(64, len(whole), 97), len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(FileRefused):
            load(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(FileRefused):
        load(file)
    file.write_bytes(whole)
    load(file)


def raw(header: bytes, payload: bytes = b"", claimed: int | None = None) -> bytes:
    length = len(header) if claimed is None else claimed
    return length.to_bytes(8, "little") + header + payload


def one_tensor(**fields: Any) -> bytes:
    return raw(json.dumps({"__metadata__": {"2.0": ""}, "0": fields}).encode(), bytes(8))


@pytest.mark.parametrize(
    "content",
    [
        raw(b"{}", claimed=1 << 62),
        raw(b"{}", claimed=1 << 30),
        raw(b"[" * 100_000),
        raw(b"{" + b'"a":{' * 50_000),
        one_tensor(dtype="U8", shape=[1 << 40], data_offsets=[0, 1 << 40]),
        one_tensor(dtype="U8", shape=[(1 << 64) - 1, 2], data_offsets=[0, 8]),
        one_tensor(dtype="U8", shape=[8], data_offsets=[8, 0]),
        one_tensor(dtype="U8", shape=[8], data_offsets=[8, 16]),
        one_tensor(dtype="U8", shape=[4], data_offsets=[0, 8]),
        one_tensor(dtype="X8", shape=[8], data_offsets=[0, 8]),
        raw(b'{"__metadata__":{"2.0":5}}'),
        raw(b"null"),
        b"GGUF" + bytes(64),
        b"\x93NUMPY" + bytes(64),
        b"PK\x03\x04" + bytes(64),
        b"tokens and words, but no tensors at all",
    ],
)  # fmt: skip
def test_other_bytes_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    file.write_bytes(content)
    with pytest.raises(FileRefused, match="not a readable safetensors file"):
        load(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match="No such file"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(FileRefused):
        load(tmp_path)
    for metadata in ({}, {"format": "mlx"}, {"2.0": "", "format": "pt"}, {"0.a": "b"}):
        save_file({"model.layers.0.weight": K}, tmp_path / "weights.safetensors", metadata)
        with pytest.raises(FileRefused, match="no prompt cache"):
            load(tmp_path / "weights.safetensors")
    save_file(
        {"0.0": K.astype(np.float64), "0.1": K, "0.2": number(3)}, tmp_path / "f64.safetensors"
    )
    with pytest.raises(FileRefused, match="F64"):
        load(tmp_path / "f64.safetensors")
