"""The server's own options behind ``kvkeep serve``, and what is refused before it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from kvkeep.cli import main
from kvkeep.hooks import mlx_server
from tests import architectures, model_folders
from tests.serve.harness import Reply, Server, chat, complete, free_port, settle

TEXT = "The ferry sails at eight and at noon from the harbour. " * 4


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose heads are wide enough to be quantized in groups of 64."""
    config = architectures.CONFIGS["llama"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures.CONFIGS, "llama", {**config, "head_dim": 64})
        return str(model_folders.write("llama", tmp_path_factory.mktemp("wide") / "m"))


def adapter(folder: Path, model: str, scale: float) -> str:
    """A LoRA adapter with constant weights."""
    folder.mkdir()
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    facts = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 2, "scale": scale, "dropout": 0.0, "keys": keys},
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    weights = {}
    for layer in range(2):
        for name, count in heads.items():
            at = f"model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_a"] = 0.5 * mx.ones((hidden, 2))
            weights[f"{at}.lora_b"] = 0.5 * mx.ones((2, count * width))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return str(folder)


def restarted(folder: Path, *options: str, client: Callable[[Server], list[Reply]]) -> Any:
    """What ``client`` got from a server, and from another one on the same store."""
    out = []
    for _ in range(2):
        with Server(folder / "log", folder / "store", *options) as server:
            out.append(client(server))
            assert server.report()["server"]["failures"] == {}
            settle(server)
            assert server.stop() == 0
    return out


def ask(server: Server, **how: Any) -> list[Reply]:
    client = server.client()
    return [complete(client, TEXT, stream=stream, **how) for stream in (False, True)]


def test_a_quantized_cache_survives(tmp_path: Path, wide: str) -> None:
    quantized = ("--kv-bits", "4", "--quantized-kv-start", "100", "--prefill-step-size", "64")
    first, second = restarted(tmp_path, "--model", wide, *quantized, client=ask)
    last = first[0].prompt - 1
    assert [reply.cached for reply in first] == [0, last]
    assert [(reply.cached, reply.tier) for reply in second] == [(last, "store"), (last, "memory")]
    assert len({reply.text for reply in first + second}) == 1
    with Server(tmp_path / "log", tmp_path / "store", "--model", wide) as server:
        plain = complete(server.client(), TEXT, seed=1)
    assert (plain.cached, plain.reason) == (0, "space_changed:kv_scheme")


def test_a_draft_model_survives(tmp_path: Path, model: Callable[..., str]) -> None:
    words = ("--model", model("llama"), "--draft-model", model("llama", 1))
    every = ("--prefill-step-size", "32", "--checkpoint-every", "50")
    taken = []

    def client(server: Server) -> list[Reply]:
        replies = ask(server)
        taken.append(server.metric("kvkeep_checkpoints_total"))
        return replies

    with Server(tmp_path / "plain", None, *words, *every[:2]) as server:
        plain = complete(server.client(), TEXT)
    first, second = restarted(tmp_path, *words, *every, client=client)
    last = first[0].prompt - 1
    assert taken == [(last - 1) // 64, 0]
    assert first[0].text == plain.text
    assert [reply.cached for reply in first] == [0, last]
    assert [reply.cached for reply in second] == [last, last]
    assert second[0].tier == "store"
    assert len({reply.text for reply in first + second}) == 1


def test_adapters_and_models_in_turn_do_not_mix(tmp_path: Path, model: Callable[..., str]) -> None:
    small = adapter(tmp_path / "small", model("llama"), 1.0)
    large = adapter(tmp_path / "large", model("llama"), 8.0)

    def client(server: Server) -> list[Reply]:
        asked = []
        for _ in range(2):
            for adapters in (None, small, large):
                more = {"extra_body": {"adapters": adapters}} if adapters else {}
                asked.append(complete(server.client(), TEXT, model=model("llama"), **more))
        return asked

    first, second = restarted(tmp_path, client=client)
    last = first[0].prompt - 1
    assert [reply.cached for reply in first] == [0, 0, 0, last, last, last]
    assert [reply.cached for reply in second] == [last] * 6
    assert [reply.text for reply in first] == [reply.text for reply in second]


def test_exact_mode_answers_what_a_cold_run_answers(
    tmp_path: Path, model: Callable[..., str]
) -> None:
    def client(server: Server) -> list[Reply]:
        said = {"seed": 1, "extra_body": {"logprobs": True}, "max_tokens": 6}
        return [complete(server.client(), text, **said) for text in (TEXT, TEXT + "And then?")]

    words = ("--model", model("falcon_h1"), "--prefill-step-size", "64")
    with Server(tmp_path / "log", None, "--prompt-cache-size", "0", *words) as server:
        cold = client(server)
    exact = ("--exact", "--checkpoint-every", "64")
    first, second = restarted(tmp_path, *exact, *words, client=client)
    assert [reply.cached for reply in first] == [0, 192]
    assert [reply.cached for reply in second] == [192, 192]
    for run in (first, second):
        assert [reply.text for reply in run] == [reply.text for reply in cold]
        assert [reply.logprobs for reply in run] == [reply.logprobs for reply in cold]
    assert len(cold[0].logprobs) == 6


def test_the_pages_show_numbers_and_no_text(tmp_path: Path, model: Callable[..., str]) -> None:
    secret = "Zanzibar"
    with Server(tmp_path / "log", tmp_path / "store", "--model", model("falcon_h1")) as server:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": secret}]
        parted = [messages[0], {"role": "user", "content": f"{secret[:4]} is not it"}]
        first, second = (chat(server.client(), said) for said in (messages, parted))
        settle(server)
        pages = {path: server.get(path) for path in ("/metrics", "/kvkeep/report")}
        report = server.report()
    assert second.cached > 0
    for path, page in pages.items():
        assert secret[:4] not in page, path
        assert "not it" not in page, path
    last = report["recent"][-1]
    assert (last["parted_turn"], last["parted_role"]) == (1, "user")
    assert last["parted_at"] == int(second.header["matched"]) > second.cached - 1
    assert report["server"]["prompt_tokens"] == first.prompt + second.prompt
    assert report["server"]["resumed_tokens"] == second.cached
    assert report["store"]["total"]["prompt_tokens"] == first.prompt + second.prompt

    lines = [line for line in pages["/metrics"].splitlines() if not line.startswith("#")]
    sample = re.compile(r'kvkeep_\w+(\{(\w+="[\w.+]+",?)+\})? [\d.]+')
    assert [x for x in lines if not sample.fullmatch(x)] == []
    assert f"kvkeep_prompt_tokens_total {first.prompt + second.prompt}" in lines
    assert 'kvkeep_lookups_total{reason="no_prefix",tier="none"} 1' in lines
    assert secret not in (tmp_path / "log").read_text()


def refused(*words: str) -> Result:
    return CliRunner().invoke(main, ["serve", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--exact", "--draft-model", "d"), "--exact and --draft-model contradict each other"),
        (("--exact", "--prompt-cache-size", "3"), "--exact and --prompt-cache-size contradict"),
        (("--exact", "--prompt-cache-bytes=3GB"), "--exact and --prompt-cache-bytes contradict"),
        (("--exact", "--generation-checkpoints", "8"), "--exact and --generation-checkpoints"),
        (("--generation-checkpoints", "8", "--draft-model", "d"), "and --draft-model contradict"),
        (("--generation-checkpoints", "-1"), "is not in the range"),
        (("--kv-bits", "7"), "--kv-bits is 2, 3, 4, 5, 6 or 8, not 7"),
        (("--kv-group-size", "32"), "add --kv-bits"),
        (("--checkpoint-every", "-1"), "is not in the range"),
        (("--max-bytes", "much"), "much"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(
    words: tuple[str, ...], said: str
) -> None:
    result = refused(*words)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("version", ["0.31.3", "0.33.0", "1.0", "0.33.0.dev0"])
def test_an_unsupported_mlx_lm_is_refused_by_name_and_range(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mlx_server.mlx_lm, "__version__", version)
    result = refused("--model", "m", "--store", str(tmp_path / "s"))
    assert result.exit_code == 5
    assert f"mlx-lm {version} is installed" in result.output
    assert "supports from 0.32.0 to below 0.33.0" in result.output
    assert not (tmp_path / "s").exists()


def test_supported_versions_are_not_refused() -> None:
    for version in ("0.32.0", "0.32.2", "0.32.10", "0.32.3.dev1"):
        mlx_server.check_version(version)


def test_a_store_of_another_format_is_explained(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "store.json").write_text('{"kvkeep": 99, "map_bytes": 1, "budget": 1}')
    result = refused("--model", "m", "--store", str(store))
    assert result.exit_code == 7
    assert "has store format 99; this kvkeep reads" in result.output
    (store / "store.json").unlink()
    (store / "other").write_text("")
    result = refused("--model", "m", "--store", str(store))
    assert result.exit_code == 6
    assert "holds other files" in result.output


@pytest.mark.parametrize("named", ["no/such/folder", "empty"])
def test_a_model_that_cannot_be_loaded_ends_the_process(named: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folder = str(tmp_path / named)
    server = Server(tmp_path / "log", tmp_path / "store", "--model", folder, wait=False)
    assert server.process.wait(60) == 5
    assert f"error: {folder} cannot be loaded: " in server.said
    assert "Traceback" not in server.said


def test_what_the_server_itself_refuses_ends_the_process(
    tmp_path: Path, model: Callable[..., str]
) -> None:
    unknown = Server(tmp_path / "log", tmp_path / "store", "--no-such-option", wait=False)
    assert unknown.process.wait(60) == 2
    assert "kvkeep serve: error: unrecognized arguments: --no-such-option" in unknown.said
    with Server(tmp_path / "log", tmp_path / "store", "--model", model("llama")) as server:
        port = ("--port", str(server.port), "--model", model("llama"))
        second = Server(tmp_path / "log2", tmp_path / "store2", *port, wait=False)
        assert second.process.wait(60) == 2
        assert f"Cannot listen at 127.0.0.1:{server.port}" in second.said
    assert free_port() != server.port
