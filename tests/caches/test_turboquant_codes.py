"""The numbers of TurboQuant: golden files, an independent reference, and what each width costs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvkeep.caches import turboquant_codes as codes
from kvkeep.caches.bitpack import pack, unpack
from kvkeep.caches.hadamard import rotate, sign_bits, unrotate
from kvkeep.caches.lloyd_max import boundaries, levels
from kvkeep.caches.turboquant import bytes_per_head
from tests.caches import turboquant_reference as reference
from tests.codecs.shuttle import bits as bits_of

HEAD_SIZES = (64, 128, 256, 512)


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def relative(rows, decoded):
    """Root mean square error by the root mean square of the rows."""
    rows = rows.astype(mx.float32)
    return float(mx.sqrt(mx.mean((decoded - rows) ** 2) / mx.mean(rows**2)))


@pytest.fixture(scope="module", params=HEAD_SIZES)
def golden(request):
    return np.load(reference.GOLDEN / f"turboquant-{request.param}.npz")


def bfloat16(halves):
    return mx.array(halves).view(mx.bfloat16)


def test_keys_are_encoded_and_decoded_as_in_the_golden_files(golden):
    for bits in codes.K_BITS:
        wanted = [golden[f"k{bits}.{name}"] for name in ("words", "s", "z")]
        made = codes.encode_keys(bfloat16(golden[f"k{bits}.x"]), bits)
        assert [str(x.dtype) for x in made] == [
            f"mlx.core.{d}" for d in ("uint32", *2 * ("float16",))
        ]
        for ours, theirs in zip(made, wanted, strict=True):
            assert np.array_equal(np.array(ours), theirs)
        decoded = codes.decode_keys(tuple(map(mx.array, wanted)), bits)
        assert np.array_equal(bits_of(decoded), golden[f"k{bits}.decoded"].view(np.uint32))


def test_values_are_encoded_and_decoded_as_in_the_golden_files(golden):
    for bits in codes.V_BITS:
        wanted = [golden[f"v{bits}.{name}"] for name in ("words", "s")]
        made = codes.encode_values(bfloat16(golden[f"v{bits}.x"]), bits)
        for ours, theirs in zip(made, wanted, strict=True):
            assert np.array_equal(np.array(ours), theirs)
        planes = tuple(map(mx.array, wanted))
        rotated = codes.decode_rotated(planes, bits)
        assert np.array_equal(bits_of(rotated), golden[f"v{bits}.rotated"].view(np.uint32))
        # A Hadamard transform sums in an order of its own.
        error = np.abs(np.array(codes.decode_values(planes, bits)) - golden[f"v{bits}.decoded"])
        assert error.max() < 1e-5 * np.abs(golden[f"v{bits}.decoded"]).max()


def test_the_reference_still_writes_the_golden_files(tmp_path):
    reference.write(tmp_path)
    for width in HEAD_SIZES:
        made = np.load(tmp_path / f"turboquant-{width}.npz")
        kept = np.load(reference.GOLDEN / f"turboquant-{width}.npz")
        assert sorted(made) == sorted(kept)
        packed = [name for name in kept if name.endswith((".x", ".words"))]
        assert len(packed) == 2 * (len(codes.K_BITS) + len(codes.V_BITS))
        for name in packed:
            assert np.array_equal(made[name], kept[name])


@pytest.mark.parametrize("bits", codes.V_BITS)
def test_levels_are_the_means_of_their_cells(bits):
    table = np.array(levels(bits))
    assert np.abs(table - reference.lloyd_max(bits)).max() < 1e-9
    edges = np.array(boundaries(bits))
    assert len(edges) == 2**bits - 1
    assert edges[2 ** (bits - 1) - 1] == 0
    cells = np.concatenate([[0], edges[edges > 0], [np.inf]])
    assert np.abs(reference.means(cells) - table[table > 0]).max() < 1e-8


def test_levels_of_three_bits_are_the_published_ones():
    assert [round(x, 5) for x in levels(3)[4:]] == [0.24509, 0.75601, 1.34391, 2.15195]


@pytest.mark.parametrize("width", HEAD_SIZES)
def test_the_rotation_is_its_own_way_back(width):
    x = normal(7, width)
    y = rotate(x)
    assert np.abs(np.array(unrotate(y) - x)).max() < 1e-5
    assert np.abs(np.array(y) - reference.rotated(np.array(x))).max() < 1e-5
    lengths = np.linalg.norm(np.array(x), axis=-1), np.linalg.norm(np.array(y), axis=-1)
    assert np.allclose(*lengths, rtol=1e-5)
    # It mixes: what one channel held is everywhere.
    assert float(mx.abs(rotate(mx.eye(width))).min()) == pytest.approx(width**-0.5)


def test_the_signs_never_change():
    assert sign_bits(512) == (reference.signs(512) < 0).astype(int).tolist()
    assert sign_bits(64) == sign_bits(512)[:64]
    assert 28 <= sum(sign_bits(64)) <= 36


@pytest.mark.parametrize("bits", sorted({*codes.K_BITS, *codes.V_BITS}))
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 5, 128)])
def test_indices_are_a_flat_little_endian_stream(bits, shape):
    rows = np.random.default_rng(bits).integers(0, 2**bits, shape, dtype=np.uint32)
    words = pack(mx.array(rows), bits)
    assert words.shape == (*shape[:-1], shape[-1] * bits // 32)
    flat = rows.reshape(-1, shape[-1])
    assert np.array_equal(np.array(words).reshape(len(flat), -1), reference.stream(flat, bits))
    assert np.array_equal(np.array(unpack(words, bits)), rows)


K_ERROR = {2: 0.41, 4: 0.081, 5: 0.0395, 8: 0.0048}
V_ERROR = {2: 0.335, 3: 0.181, 4: 0.095, 5: 0.0485, 8: 0.0065}
"""Relative error on normal rows, which docs/caches.md states."""


@pytest.mark.parametrize("width", HEAD_SIZES)
def test_the_error_of_each_width_is_as_documented(width):
    rows = normal(1, 2, 400, width, dtype=mx.bfloat16)
    for bits, limit in K_ERROR.items():
        error = relative(rows, codes.decode_keys(codes.encode_keys(rows, bits), bits))
        assert 0.95 * limit < error < 1.01 * limit
    for bits, limit in V_ERROR.items():
        error = relative(rows, codes.decode_values(codes.encode_values(rows, bits), bits))
        assert 0.95 * limit < error < 1.01 * limit


SIXTEEN_BITS = (mx.bfloat16, mx.float16)


@pytest.mark.parametrize("bits", codes.K_BITS)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_a_constant_group_decodes_to_its_constant(bits, dtype):
    every = mx.arange(1 << 16).astype(mx.uint16).view(dtype)
    sizes = np.abs(np.array(every.astype(mx.float32)))
    exact = (sizes == 0) | ((sizes >= 2.0**-28) & (sizes <= 2.0**30))
    groups = mx.broadcast_to(every[:, None], (1 << 16, 64))
    decoded = codes.decode_keys(codes.encode_keys(groups, bits), bits).astype(dtype)
    same = np.array(decoded == groups).all(axis=-1)
    assert exact.sum() > 14_000
    assert same[exact].all()
    assert np.isfinite(np.array(decoded.astype(mx.float32))[np.isfinite(sizes)]).all()


@pytest.mark.parametrize("bits", codes.K_BITS)
def test_the_plain_formula_would_decode_a_constant_to_nan(bits):
    """The flaw that the constant group's own form is there for."""
    x = np.full((1, 64), 3.0, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(reference.decode_keys(*reference.encode_keys(x, bits), bits)).all()
    assert (np.array(codes.decode_keys(codes.encode_keys(mx.array(x), bits), bits)) == 3).all()


@pytest.mark.parametrize("bits", codes.K_BITS)
def test_a_group_that_hardly_varies_is_as_exact_as_float16_allows(bits):
    numbers = np.random.default_rng(bits)
    tried = 0
    for size in (1e-6, 1e-4, 5e-3, 1.0, 50.0, 1e3, 1e5):
        for spread in (1e-9, 1e-7, 1e-5, 1e-3, 1e-2, 0.1, 1.0, 10.0):
            x = (size + spread * numbers.standard_normal((50, 64))).astype(np.float32)
            decoded = np.array(codes.decode_keys(codes.encode_keys(mx.array(x), bits), bits))
            groups = x.reshape(50, 2, 32)
            error = np.abs(decoded.reshape(50, 2, 32) - groups).max(axis=-1)
            step = (groups.max(axis=-1) - groups.min(axis=-1)) / (254 if bits == 8 else 2**bits - 1)
            largest = np.abs(groups).max(axis=-1)
            assert (error <= step / 2 + largest * 2.0**-10 + 2.0**-24).all()
            tried += error.size
    assert tried == 7 * 8 * 100


def test_nan_stays_nan_and_no_other_row_or_group_sees_it():
    rows = np.ones((3, 64), np.float32) + np.arange(64)
    rows[1, 5] = np.nan
    keys = np.array(codes.decode_keys(codes.encode_keys(mx.array(rows), 8), 8))
    assert np.isnan(keys[1, :32]).all()
    assert np.isfinite(keys[[0, 2]]).all()
    assert np.isfinite(keys[1, 32:]).all()
    values = np.array(codes.decode_values(codes.encode_values(mx.array(rows), 3), 3))
    assert np.isnan(values[1]).all()
    assert np.isfinite(values[[0, 2]]).all()


def test_huge_rows_stay_finite():
    for size in (1e7, 1e12, 3e38):
        rows = normal(4, 64) * size
        for bits in codes.K_BITS:
            decoded = codes.decode_keys(codes.encode_keys(rows, bits), bits)
            assert bool(mx.isfinite(decoded).all())
        small = mx.clip(rows, -1e30, 1e30)
        assert bool(mx.isfinite(codes.decode_values(codes.encode_values(small, 3), 3)).all())


def test_bytes_are_as_published():
    assert bytes_per_head(128, 128, 8, 3) == 200
    for width in HEAD_SIZES:
        for k_bits in codes.K_BITS:
            for v_bits in codes.V_BITS:
                rows = normal(1, 1, 1, width)
                planes = (*codes.encode_keys(rows, k_bits), *codes.encode_values(rows, v_bits))
                counted = sum(plane.nbytes for plane in planes)
                assert counted == bytes_per_head(width, width, k_bits, v_bits)
