from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

import kvkeep
from kvkeep import Reason
from kvkeep.caches import make
from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
from kvkeep.caches.delayed import DelayedKVCache
from kvkeep.caches.paged import PagedKVCache
from kvkeep.caches.quantized import DenseQuantizedKVCache
from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.caches.scheme import parse
from kvkeep.caches.turboquant import TurboQuantKVCache
from kvkeep.errors import BadScheme
from tests import model_folders
from tests.architectures import build
from tests.caches.runs import PROMPT, forward, generated
from tests.conformance import wide

WINDOWED = {
    "gemma3_text": (RotatingQuantizedKVCache, QuantizedKVCache),
    "gpt_oss": (RotatingQuantizedKVCache, DenseQuantizedKVCache),
    "llama4": (ChunkedQuantizedKVCache, QuantizedKVCache),
}
"""Window of 12 positions, beside layers of all positions."""


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return mlx_lm.load(str(model_folders.write("llama", tmp_path_factory.mktemp("m") / "m")))[1]


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request):
    return request.param, wide.build(request.param)


@pytest.mark.parametrize(
    "text", ["bf16", "affine:4:64", "affine:8:64@5000", "affine:3:32@0", "turbo:8:3", "paged:256"]
)
def test_schemes_are_spelled_as_they_are_read(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is no scheme; valid are bf16, affine:BITS:GROUP"),
        ("affine", "'affine' is no scheme"),
        ("affine:4", "'affine:4' is no scheme"),
        ("affine:4:64@", "is no scheme"),
        ("turbo:8:3@100", "is no scheme"),
        ("affine:4:64 ", "is no scheme"),
        ("affine:7:64", "no width 7; valid are 2, 3, 4, 5, 6, 8"),
        ("affine:4:48", "no group size 48; valid are 32, 64, 128"),
        ("affine:-4:64", "no width -4"),
        ("affine:4:64@-1", "start of -1 is no offset; valid are 0 and above"),
        ("paged:0", "blocks of 0 positions; valid are 1 and above"),
        ("paged:-16", "blocks of -16 positions"),
    ],
)
def test_other_schemes_are_refused(llama, text, problem):
    with pytest.raises(BadScheme, match=problem):
        make(llama, text)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("llama", "affine:4:64", r"^Layer 0 \(kv\): Keys of head size 32 .* 64; valid are 32\n"),
        (
            "gemma3_text",
            "affine:4:32",
            r"^Layer 0 \(kv-rotating\): Keys of head size 16 .* no valid group size divides it\n",
        ),
        (
            "falcon_h1",
            "affine:4:32",
            r"^Layer 0\.1 \(kv\): Keys of head size 16 are no whole groups of 32",
        ),
        ("llama", "turbo:8:3", r"^Layer 0 \(kv\): .*head size 32.* 64, 128, 256, 512"),
        ("llama", "turbo:7:3", r"^Layer 0 \(kv\): .*7 bits.*valid are 2, 4, 5, 8"),
        ("llama", "turbo:8:7", r"^Layer 0 \(kv\): .*7 bits.*valid are 2, 3, 4, 5, 8"),
        ("mamba2", "affine:4:32", "changes no layer of this model, whose caches are arrays"),
    ],
)
def test_layers_that_do_not_fit_are_named(name, text, problem):
    model = build(name)
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with pytest.raises(BadScheme, match=problem) as caught:
        make(model, text)
    assert isinstance(caught.value, ValueError)
    assert mx.get_peak_memory() - before < 4096, "nothing is allocated first"


def test_a_kind_that_no_scheme_knows_is_named():
    with pytest.raises(BadScheme, match=r"^Layer 0 \(LayerCache\): paged:16 is not known"):
        make(wide.build("deepseek_v41"), "paged:16")


@pytest.mark.parametrize("text", ["bf16", "affine:4:32", "affine:4:32@9", "paged:8"])
def test_nothing_is_allocated_and_the_history_is_known(llama, text):
    caches = make(llama, text)
    arrays = [x for cache in caches for _, x in tree_flatten(vars(cache))]
    assert not any(isinstance(x, mx.array) for x in arrays)
    assert [cache.offset for cache in caches] == [0, 0]
    held = [getattr(cache, "caches", [cache])[0] for cache in caches]
    assert [cache.minimum_resumable_offset for cache in held] == [0, 0]


def test_what_each_layer_gets(windowed):
    name, model = windowed
    window, full = WINDOWED[name]
    plain = [type(cache) for cache in make(model, "bf16")]
    assert {*plain} == {KVCache, plain[0]} != {KVCache}

    def kinds(text):
        return [type(cache) for cache in make(model, text)]

    assert kinds("affine:4:32") == [full if x is KVCache else window for x in plain]
    assert set(kinds("affine:4:32@9")) == {DelayedKVCache}
    assert kinds("paged:8") == [PagedKVCache if x is KVCache else x for x in plain]


def test_turbo_leaves_windows_and_recurrent_layers():
    model = build_with_heads_of_64("gemma3_text")
    found = [type(cache) for cache in make(model, "turbo:8:3")]
    assert set(found) == {RotatingKVCache, TurboQuantKVCache}
    hybrid = build_with_heads_of_64("qwen3_next")
    found = [type(cache) for cache in make(hybrid, "turbo:8:3")]
    assert set(found) == {ArraysCache, TurboQuantKVCache}


def build_with_heads_of_64(name):
    from tests.conformance import models

    return models.build(name, head_dim=64)


@pytest.mark.parametrize("text", ["affine:8:32", "affine:4:32@20", "paged:8"])
def test_mlx_lm_generates_with_them_unchanged(windowed, tokenizer, text):
    """Text, chunk by chunk; the answer is that of forwards over the same caches."""
    _, model = windowed
    options = {"max_tokens": 6, "prefill_step_size": 16}
    prompt = PROMPT.tolist()
    first = mlx_lm.generate(model, tokenizer, prompt, prompt_cache=make(model, text), **options)
    caches = make(model, text)
    for start, stop in ((0, 16), (16, 32), (32, 39)):
        forward(model, caches, PROMPT[start:stop])
    token, answer = int(PROMPT[39]), []
    for _ in range(6):
        logits = model(mx.array([[token]]), cache=caches)
        token = int(mx.argmax(logits[0, -1]).item())
        answer.append(token)
    assert first == tokenizer.decode(answer)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_mlx_lm_itself_refuses_windows(name):
    """What the schemes are for; should it accept them one day, they can be compared."""
    model = wide.build(name)
    with pytest.raises(NotImplementedError, match="RotatingKVCache Quantization"):
        generated(model, make(model, "bf16"), kv_bits=8, kv_group_size=32, quantized_kv_start=0)


@pytest.mark.parametrize("text", ["affine:8:32", "affine:8:32@20"])
def test_quantized_answers_stay_near_those_of_full_precision(windowed, text):
    """The rows that are read are those that were appended, to the width's precision."""
    _, model = windowed
    plain = forward_values(model, make(model, "bf16"))
    quantized = forward_values(model, make(model, text))
    difference = np.abs(plain - quantized).max()
    unrelated = np.abs(plain - plain[::-1]).max()
    assert 0 < difference < 0.2 * unrelated


def forward_values(model, caches):
    out = []
    for start, stop in ((0, 16), (16, 30), (30, 31), (31, 40)):
        logits = model(mx.array(PROMPT[start:stop])[None], cache=caches)
        out.append(np.array(logits[0].astype(mx.float32)))
    return np.concatenate(out)


@pytest.mark.parametrize(
    "text",
    ["affine:8:32", "affine:4:32@20", "affine:4:32@0", "affine:3:32@20", "affine:6:32", "paged:8"],
)
def test_resumes_bit_for_bit_through_a_store(windowed, text, tmp_path):
    name, model = windowed
    caches, edges = make(model, text), (8, 16, 24, 25, 26, 33, 40)
    answers, start = {}, 0
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={"model": name}, layout=caches, kv_scheme=text)
        for stop in edges:
            answers[start] = forward(model, caches, PROMPT[start:stop])
            assert space.snapshot(PROMPT[:stop], caches).stored
            start = stop
    compared = 0
    with kvkeep.open(tmp_path) as store:
        layout = make(model, text)
        space = store.space(identity={"model": name}, layout=layout, kv_scheme=text)
        for p in edges[:-1]:
            hit = space.resume(PROMPT[: p + 1])
            assert hit.offset == p
            assert [type(c) for c in hit.caches] == [type(c) for c in layout]
            for begin, stop in pairwise(edges):
                if begin >= p:
                    found = forward(model, hit.caches, PROMPT[begin:stop])
                    assert np.array_equal(found, answers[begin]), (p, begin)
                    compared += 1
    assert compared == 21


def test_a_store_from_before_the_conversion_converts_at_the_right_place(llama, tmp_path):
    text, answers = "affine:4:32@20", {}
    live = make(llama, text)
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=live, kv_scheme=text)
        forward(llama, live, PROMPT[:16])
        assert space.snapshot(PROMPT[:16], live).stored
    for start, stop in ((16, 19), (19, 27), (27, 40)):
        answers[start] = forward(llama, live, PROMPT[start:stop])
    with kvkeep.open(tmp_path) as store:
        hit = store.space(identity={}, layout=make(llama, text), kv_scheme=text).resume(PROMPT)
    assert hit.offset == 16
    for start, stop in ((16, 19), (19, 27), (27, 40)):
        assert [cache.converted for cache in hit.caches] == [start >= 27] * 2
        assert np.array_equal(forward(llama, hit.caches, PROMPT[start:stop]), answers[start])
    assert [cache.minimum_resumable_offset for cache in hit.caches] == [27, 27]
    assert [cache.minimum_resumable_offset for cache in live] == [27, 27]


def test_below_the_floor_is_refused_and_from_it_on_resumed(llama, tmp_path):
    text = "affine:4:32@20"
    caches = make(llama, text)
    for start, stop in ((0, 16), (16, 27), (27, 40)):
        forward(llama, caches, PROMPT[start:stop])
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=caches, kv_scheme=text)
        assert space.snapshot(PROMPT, caches).stored
        for p in (1, 16, 20, 26):
            decision = space.explain([*PROMPT[:p].tolist(), 1000])
            assert (decision.offset, decision.reason) == (0, Reason.BELOW_FLOOR)
            assert {limit.kind for limit in decision.limits} == {"kv-quant"}
        for p in (27, 30, 39):
            assert space.resume([*PROMPT[:p].tolist(), 1000]).offset == p


def test_rows_of_two_boundaries_never_mix(llama, tmp_path):
    """Two runs over one prompt converted elsewhere: each resumes its own rows."""
    text, runs = "affine:4:32@10", {}
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=make(llama, text), kv_scheme=text)
        for edges in ((12, 30), (16, 32)):
            caches, start = make(llama, text), 0
            for stop in edges:
                forward(llama, caches, PROMPT[start:stop])
                start = stop
            assert space.snapshot(PROMPT[:start], caches).stored
            runs[start] = caches
        hit = space.resume(PROMPT[:33])
        assert hit.offset == 32
        assert {cache.minimum_resumable_offset for cache in hit.caches} == {16}
        again, live = [forward(llama, c, PROMPT[32:]) for c in (hit.caches, runs[32])]
        assert np.array_equal(again, live)
        assert space.explain([*PROMPT[:14].tolist(), 1000]).offset == 14


def test_schemes_do_not_share_a_space(llama, tmp_path):
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        spaces = set()
        for text in ("bf16", "affine:4:32", "affine:8:32", "affine:4:32@9", "affine:4:32@10"):
            caches = make(llama, text)
            space = store.space(identity={}, layout=caches)
            forward(llama, caches, PROMPT[:12])
            assert space.resume(PROMPT).caches is None
            assert space.snapshot(PROMPT[:12], caches).stored
            spaces.add(space.id)
        assert len(spaces) == 5


def test_a_draft_s_scheme_is_its_own(llama, tmp_path):
    draft = build("llama", seed=1)
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        ids = set()
        for text in ("affine:4:32", "affine:8:32"):
            space = store.space(
                identity={}, layout=make(llama, "affine:4:32"), draft_layout=make(draft, text)
            )
            ids |= {space.id, space.draft.id}
    assert len(ids) == 3


def test_a_server_could_take_the_single_path(llama):
    """No batch layout is offered, so mlx_lm.server reads such requests one by one."""
    for text in ("affine:4:32", "affine:4:32@9", "affine:3:32"):
        assert not any(hasattr(cache, "merge") for cache in make(llama, text))
    tokens, _ = generated(llama, make(llama, "affine:4:32"))
    assert len(tokens) == 12


def test_importing_the_room_imports_nothing_heavy():
    code = (
        "import sys, kvkeep.caches\n"
        "from kvkeep.caches import contract, reads, scheme\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'transformers'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    root = Path(kvkeep.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_draft_model_verifies_across_the_start(llama):
    """mlx-lm's speculative decoding trims what it rejects; conversions stay."""
    draft = build("llama", seed=1)
    caches = [*make(llama, "affine:4:32@42"), *make(draft, "affine:4:32@42")]
    steps = speculative_generate_step(
        mx.array(PROMPT), llama, draft, num_draft_tokens=3, max_tokens=10, prompt_cache=caches
    )
    tokens = [int(token) for token, *_ in steps]
    assert len(tokens) == 10
    assert all(cache.converted for cache in caches)
    for cache in caches:
        assert 42 <= cache.minimum_resumable_offset <= 46
        assert 48 <= cache.offset <= 50
