"""The schemes of ``kvkeep.caches`` on one model: memory, speed and what the model then says.

Every scheme's caches hold the same rows and take the same tokens in this one process. A round
takes all of them once, in an order that rotates; a speed is compared round by round with that of
mlx-lm's ``KVCache`` (``bf16``) and ``QuantizedKVCache`` (``affine:4:64``), and the median is given.
Of several tries in a round the fastest counts, which other programs disturb least. A first round
is left out.

* **Bytes per token**: of all layers, as the caches state them.
* **Token**: one decoded token of the whole model behind a context of random rows.
* **Layer**: appending one position to one layer and attending to all, without the model.
* **KL, agreement**: over a text that is read in chunks, each position's distribution against
  that of ``bf16``: mean Kullback–Leibler divergence in nats, and how often the likeliest
  next token is the same.

Examples:
  python -m benchmarks.caches --model mlx-community/SmolLM2-135M-Instruct-4bit
  python -m benchmarks.caches --model FOLDER --text README.md --tokens 2000 --schemes turbo:8:3
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks import machine
from benchmarks.harness import HOME, say
from kvkeep.caches import make
from kvkeep.caches.adapters import adapt
from kvkeep.caches.paged import PagedKVCache
from kvkeep.caches.turboquant import TurboQuantKVCache

PLAIN, QUANTIZED = "bf16", "affine:4:64"
SCHEMES = (
    PLAIN,
    "affine:8:64",
    QUANTIZED,
    "turbo:8:8",
    "turbo:8:4",
    "turbo:8:3",
    "turbo:4:4",
    "turbo:4:3",
    "paged:256",
)
OTHER_READS: dict[str, Callable[[], Any]] = {
    "turbo:8:3, rotation deferred": lambda: TurboQuantKVCache(8, 3, deferred_rotation=True),
    "paged:256, direct": lambda: PagedKVCache(256, read="direct"),
}
CHUNK = 64


@dataclass
class Found:
    """What one scheme costs and changes; ``None`` where it was not measured."""

    scheme: str
    bytes_per_token: int | None = None
    token: list[float] | None = None
    layer: list[float] | None = None
    divergence: float | None = None
    agreement: float | None = None


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write every value."""
    options = _parser().parse_args(words)
    from mlx_lm import load

    before = machine.describe(Path.cwd())
    model, tokenizer = load(options.model)[:2]
    schemes = list(dict.fromkeys([PLAIN, QUANTIZED, *options.schemes]))
    found = {name: Found(name) for name in [*schemes, *OTHER_READS]}
    shapes = _shapes(model)
    _layers(found, schemes, shapes[0], model, options)
    _tokens(found, schemes, shapes, model, options)
    tokens = tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    _quality(found, schemes, model, tokens)
    print(_tables(found, options, len(tokens), len(shapes)))
    if options.json:
        record = {
            "machine": before,
            "options": vars(options),
            "found": list(map(asdict, found.values())),
        }
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


def _shapes(model: Any) -> list[tuple[Any, Any]]:
    """Keys and values of one token, per layer."""
    caches = make(model, PLAIN)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))
    if any(getattr(cache, "kind", adapt(cache).kind) != "kv" for cache in caches):
        raise SystemExit("This compares models whose layers all have full attention")
    return [tuple(x[:, :, :1] for x in cache.keys_and_values()) for cache in caches]


def _rows(one: tuple[Any, Any], count: int, seed: int) -> tuple[Any, Any]:
    """Random rows in the shape of ``one`` layer's."""
    mx.random.seed(seed)
    k, v = (mx.random.normal((1, x.shape[1], count, x.shape[3])).astype(x.dtype) for x in one)
    return k, v


def _layers(
    found: dict[str, Found], schemes: list[str], one: tuple[Any, Any], model: Any, options: Any
) -> None:
    """One layer: append a position and attend."""
    heads = model.layers[0].self_attn.n_heads if hasattr(model.layers[0], "self_attn") else 0
    heads = heads or one[0].shape[1]
    caches = {name: adapt(make(model, name)[0]) for name in schemes}
    caches |= {name: make_one() for name, make_one in OTHER_READS.items()}
    rows, new = _rows(one, options.context, 0), _rows(one, 1, 1)
    queries = mx.random.normal((1, heads, 1, one[0].shape[3])).astype(one[0].dtype)
    for cache in caches.values():
        mx.eval(cache.append_window(*rows).attend(queries, 0.1))

    def once(name: str) -> None:
        mx.eval(caches[name].append_decode(*new).attend(queries, 0.1))

    for name, seconds in _rounds(list(caches), once, options.rounds, each=10).items():
        found[name].layer = seconds


def _tokens(
    found: dict[str, Found], schemes: list[str], shapes: list[Any], model: Any, options: Any
) -> None:
    """One decoded token of the model."""
    held = {}
    for name in schemes:
        held[name] = make(model, name)
        for number, (cache, one) in enumerate(zip(held[name], shapes, strict=True)):
            cache.update_and_fetch(*_rows(one, options.context, number))
            mx.eval(cache.state)
        found[name].bytes_per_token = sum(adapt(cache).bytes_per_token() for cache in held[name])

    def once(name: str) -> None:
        mx.eval(model(mx.array([[1]]), cache=held[name]))

    for name, seconds in _rounds(schemes, once, options.rounds).items():
        found[name].token = seconds


def _rounds(
    names: list[str], once: Callable[[str], None], rounds: int, each: int = 3
) -> dict[str, list[float]]:
    """Seconds of every name in every round but the first: the fastest of ``each``."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        say(f"  round {number} of {rounds}")
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = []
            for _ in range(each):
                start = time.perf_counter()
                once(name)
                seconds.append(time.perf_counter() - start)
            if number:
                taken[name].append(min(seconds))
    return taken


def _quality(found: dict[str, Found], schemes: list[str], model: Any, tokens: list[int]) -> None:
    """Read the text chunk by chunk with every scheme side by side."""
    caches = {name: make(model, name) for name in schemes}
    sums = {name: [0.0, 0.0] for name in schemes}
    for start in range(0, len(tokens), CHUNK):
        say(f"  text: {start} of {len(tokens)} tokens")
        chunk = mx.array(tokens[start : start + CHUNK])[None]
        wanted = None
        for name in schemes:
            logits = model(chunk, cache=caches[name])[0].astype(mx.float32)
            said = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(said, [cache.state for cache in caches[name]])
            wanted = said if wanted is None else wanted
            sums[name][0] += (mx.exp(wanted) * (wanted - said)).sum().item()
            sums[name][1] += (wanted.argmax(-1) == said.argmax(-1)).sum().item()
    for name, (divergence, same) in sums.items():
        found[name].divergence = divergence / len(tokens)
        found[name].agreement = same / len(tokens)


def _tables(found: dict[str, Found], options: Any, tokens: int, layers: int) -> str:
    """Two Markdown tables."""
    plain, quantized = found[PLAIN], found[QUANTIZED]
    out = [
        f"{layers} layers; context {options.context:,}, {options.rounds} rounds; text: "
        f"{options.text.name}, {tokens:,} tokens",
        "",
        "| scheme | bytes per token | of `bf16` | token ÷ `KVCache` | token ÷ `QuantizedKVCache` "
        "| KL | agreement |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found.values():
        if one.token is None or one.bytes_per_token is None or plain.bytes_per_token is None:
            continue
        share = one.bytes_per_token / plain.bytes_per_token
        out.append(
            f"| `{one.scheme}` | {one.bytes_per_token:,} | {share:.2f} "
            f"| {_ratio(one.token, plain.token):.2f} | {_ratio(one.token, quantized.token):.2f} "
            f"| {one.divergence:.5f} | {one.agreement:.1%} |"
        )
    out += ["", "| one layer's append and read | ms | ÷ `KVCache` | ÷ `QuantizedKVCache` |"]
    out.append("|---|---:|---:|---:|")
    for one in found.values():
        if one.layer is not None:
            out.append(
                f"| {one.scheme} | {1e3 * statistics.median(one.layer):.2f} "
                f"| {_ratio(one.layer, plain.layer):.2f} "
                f"| {_ratio(one.layer, quantized.layer):.2f} |"
            )
    return "\n".join(out)


def _ratio(ours: list[float], theirs: list[float] | None) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs or [], strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.caches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder or hub id of an mlx-lm model")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help="(%(default)s)")
    parser.add_argument(
        "--text", type=Path, default=HOME / "docs" / "policy.md", help="what is read (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=512, help="read of the text (%(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="before a token (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="for the speeds (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where every value is written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
