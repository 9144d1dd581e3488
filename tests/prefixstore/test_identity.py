"""Spaces never mix: what changed is named and never served, and names alone mean nothing."""

from __future__ import annotations

import json
import os
import shutil

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import kvkeep
from kvkeep import Reason
from kvkeep.errors import IdentityUnknown, KvkeepError
from kvkeep.prefixstore import identity
from tests import architectures, model_folders
from tests.prefixstore.shapes import make, problem

TOKENS = [5, 3, 8, 1] * 6
PROMPT = [*TOKENS, 9]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = model_folders.write("llama", tmp_path_factory.mktemp("models") / "tiny")
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {"lora": mx.arange(64)})
    (adapter / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 10.0}}))
    return folder.parent


@pytest.fixture
def models(original, tmp_path):
    """A folder with the model ``tiny`` and its ``adapter``, to be changed."""
    return shutil.copytree(original, tmp_path / "models")


@pytest.fixture(scope="module")
def model():
    return architectures.build("llama")


@pytest.fixture
def store(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as opened:
        yield opened


@pytest.fixture
def opened(store, model, models):
    """Spaces of the model, by what is different about them."""

    def space(**options):
        return store.space(model=model, **({"model_path": models / "tiny"} | options))

    return space


def fill(space):
    assert space.snapshot(TOKENS, make("plain", TOKENS)).stored
    check_hit(space)


def check_hit(space):
    hit = space.resume(PROMPT)
    assert hit.offset == len(TOKENS)
    assert not problem("plain", TOKENS, hit.caches)


def check_miss(space, field):
    """Nothing is served, and the field that differs is named, but for another tenant's."""
    hit = space.resume(PROMPT)
    assert (hit.caches, hit.offset, hit.rest) == (None, 0, PROMPT)
    assert hit.decision.matched == 0
    if field == "salt":
        assert hit.decision.why == Reason.NO_PREFIX
    else:
        assert hit.decision.why == f"space_changed:{field}"
    assert space.explain(PROMPT) == hit.decision


def flip(file, place=-100):
    """Change one byte; name and size stay."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    status = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


IN_FOLDERS = {
    "weights": lambda m: flip(m / "tiny" / "model.safetensors"),
    "weights: first block": lambda m: flip(m / "tiny" / "model.safetensors", 3000),
    "weights: another shard": lambda m: shutil.copy(
        m / "tiny" / "model.safetensors", m / "tiny" / "model-2.safetensors"
    ),
    "config": lambda m: edit(m / "tiny" / "config.json", rope_theta=500000.0),
    "tokenizer": lambda m: edit(m / "tiny" / "tokenizer.json", version="1.1"),
    "adapter": lambda m: flip(m / "adapter" / "adapters.safetensors", -8),
    "adapter: scale": lambda m: edit(
        m / "adapter" / "adapter_config.json", lora_parameters={"scale": 20.0}
    ),
}


@pytest.mark.parametrize("change", IN_FOLDERS)
def test_new_content_under_an_old_name_is_another_space(opened, models, change):
    options = {"adapter": models / "adapter"} if "adapter" in change else {}
    before = opened(**options)
    fill(before)
    IN_FOLDERS[change](models)
    after = opened(**options)
    check_miss(after, change.partition(":")[0])
    check_hit(before)
    fill(after)
    assert after.id != before.id


OPTIONS = {
    "adapter": lambda m: {"adapter": m / "adapter"},
    "draft_model": lambda m: {"draft_model": m / "tiny"},
    "kv_scheme": lambda m: {"kv_scheme": "affine:4:64@5000"},
    "salt": lambda m: {"salt": "tenant"},
    "plan": lambda m: {"exact": True, "prefill_step": 8},
    "layout": lambda m: {"layout": [KVCache(), RotatingKVCache(8)]},
}


@pytest.mark.parametrize("field", OPTIONS)
def test_every_option_makes_a_space_of_its_own(opened, models, field):
    fill(opened())
    check_miss(opened(**OPTIONS[field](models)), field)
    check_hit(opened())


def test_what_was_built_from_the_config_counts_as_well(store, opened, models):
    fill(opened())
    other = architectures.build("llama")
    other.args.rope_theta = 123.0
    check_miss(store.space(model=other, model_path=models / "tiny"), "config")


def test_all_fields_that_differ_are_named(opened, models):
    fill(opened())
    IN_FOLDERS["weights"](models)
    IN_FOLDERS["config"](models)
    hit = opened(kv_scheme="affine:8:64@0").resume(PROMPT)
    assert hit.decision.reason is Reason.SPACE_CHANGED
    assert set(hit.decision.detail.split(",")) == {"weights", "config", "kv_scheme"}


def test_another_draft_is_another_space(opened, models):
    shutil.copytree(models / "tiny", models / "draft")
    fill(opened(draft_model=models / "draft"))
    flip(models / "draft" / "model.safetensors")
    check_miss(opened(draft_model=models / "draft"), "draft_model")


def test_the_same_content_under_another_name_still_hits(opened, models):
    fill(opened(adapter=models / "adapter"))
    (models / "tiny").rename(models / "renamed")
    (models / "adapter").rename(models / "other")
    check_hit(opened(model_path=models / "renamed", adapter=models / "other"))
    (models / "link").symlink_to(models / "renamed")
    check_hit(opened(model_path=str(models / "link"), adapter=str(models / "other")))


def test_a_model_in_the_hub_cache_is_the_same_model(opened, models, tmp_path, monkeypatch):
    fill(opened())
    cache = tmp_path / "hub" / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "blobs").mkdir()
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for number, file in enumerate((models / "tiny").iterdir()):
        shutil.copy(file, cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(cache / "blobs" / str(number))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    check_hit(opened(model_path="someone/tiny"))
    with pytest.raises(IdentityUnknown, match="someone/else"):
        opened(model_path="someone/else")


def test_tenants_learn_nothing_of_each_other(opened):
    one, two = opened(salt="one"), opened(salt="two")
    fill(one)
    never = [77] * 30
    assert two.explain(PROMPT).why == two.explain(never).why == "no_prefix"
    assert two.explain(PROMPT).matched == two.explain(never).matched == 0
    check_hit(opened(salt="one"))
    fields = [dict(space.identity.fields) for space in (one, two)]
    assert all("one" not in value and "two" not in value for f in fields for value in f.values())


def test_a_prompt_that_no_space_knows_is_simply_unknown(opened, models):
    fill(opened())
    IN_FOLDERS["weights"](models)
    other = opened()
    assert other.explain([77] * 30).reason is Reason.NO_PREFIX
    check_miss(other, "weights")


def remove(*names):
    def change(models):
        for name in names:
            (models / name).unlink()

    return change


def garbage(models):
    (models / "tiny" / "config.json").write_text("{ no")


def dangling(models):
    (models / "tiny" / "model-2.safetensors").symlink_to(models / "nowhere")


UNKNOWN = {
    "no path": (lambda m: None, lambda m: {"model_path": None}),
    "no such folder": (lambda m: None, lambda m: {"model_path": m / "nowhere"}),
    "no weights": (remove("tiny/model.safetensors"), lambda m: {}),
    "weights that lead nowhere": (dangling, lambda m: {}),
    "a config that is none": (garbage, lambda m: {}),
    "no adapter": (
        remove("adapter/adapters.safetensors", "adapter/adapter_config.json"),
        lambda m: {"adapter": m / "adapter"},
    ),
    "no such adapter": (lambda m: None, lambda m: {"adapter": m / "missing"}),
    "no draft": (lambda m: (m / "empty").mkdir(), lambda m: {"draft_model": m / "empty"}),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_told_apart_is_refused(opened, models, what):
    change, options = UNKNOWN[what]
    change(models)
    with pytest.raises(IdentityUnknown, match="Pass model_path"):
        opened(**options(models))


def test_a_space_is_of_a_model_or_of_an_identity(store, model, models):
    with pytest.raises(KvkeepError, match="for a model or for an identity"):
        store.space()
    with pytest.raises(KvkeepError, match="for a model or for an identity"):
        store.space(model=model, model_path=models / "tiny", identity={"model": "x"})


def test_the_fields_of_an_embedder_are_compared_as_well(store):
    layout = make("plain", ())
    fill(store.space(identity={"model": "m", "rev": {"a": [1, 2]}}, layout=layout))
    check_hit(store.space(identity={"rev": {"a": [1, 2]}, "model": "m"}, layout=layout))
    other = store.space(identity={"model": "m", "rev": {"a": [2, 1]}}, layout=layout)
    check_miss(other, "x.rev")
    check_miss(store.space(identity={"model": "m"}, layout=layout), "x.rev")


@pytest.fixture
def sampled(monkeypatch):
    """The files whose content was read for a fingerprint."""
    names, sample = [], identity.sample_file

    def counted(path):
        names.append(path.name)
        return sample(path)

    monkeypatch.setattr(identity, "sample_file", counted)
    return names


def test_fingerprints_are_remembered_until_size_or_time_change(
    opened, store, model, models, sampled
):
    file = models / "tiny" / "model.safetensors"
    first = opened().id
    assert sampled == ["model.safetensors"]
    assert opened().id == first
    store.close()
    with kvkeep.open(store.path) as again:
        assert again.space(model=model, model_path=models / "tiny").id == first
        assert sampled == ["model.safetensors"]
        status = file.stat()
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert again.space(model=model, model_path=models / "tiny").id == first
        assert len(sampled) == 2
        file.write_bytes(file.read_bytes() + b"\0")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert again.space(model=model, model_path=models / "tiny").id != first
        assert len(sampled) == 3
    with kvkeep.open(store.path, read_only=True) as reader:
        (models / "tiny").rename(models / "moved")
        for _ in range(2):
            reader.space(model=model, model_path=models / "moved")
        assert len(sampled) == 5, "a reader remembers nothing"


def test_a_forgotten_fingerprint_is_computed_anew(opened, store, sampled):
    first = opened().id
    with store.env.begin(write=True) as txn:
        for key in list(txn.keys("prints")):
            txn.put("prints", key, b"\xc1garbage")
    assert opened().id == first
    assert len(sampled) == 2


def test_every_byte_of_a_small_file_is_sampled(tmp_path):
    file = tmp_path / "small.bin"
    data = bytearray(os.urandom(identity.SAMPLES * identity.BLOCK))
    file.write_bytes(data)
    first, seen = identity.sample_file(file), set()
    for place in (0, 1, 4095, 4096, 100_000, len(data) // 2, len(data) - 1):
        data[place] ^= 1
        file.write_bytes(data)
        seen.add(identity.sample_file(file))
        data[place] ^= 1
    assert len(seen | {first}) == 8


def test_the_layout_is_that_of_the_models_own_caches(opened, model):
    assert opened().layout == ("kv",) * len(make_prompt_cache(model))
