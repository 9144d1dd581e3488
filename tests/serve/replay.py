"""Replay a recorded agent session against servers, turn by turn, with a restart in the middle.

    python -m tests.serve.replay --model MODEL --turns 7
    python -m tests.serve.replay --model MODEL --session session.jsonl --turns 8 --exact --step 256

Three servers get the same requests: plain ``mlx_lm.server`` without a cache (cold), plain with
its cache, and ``kvkeep serve``; the last two are stopped and started again half-way. A session
is a JSON list of chat messages, or lines with the whole ``input`` of each turn. The table shows
tokens resumed and seconds to the first token, and whether the greedy text is the cold one.

With ``--exact`` kvkeep runs in its exact mode and all three answer one request at a time: then
the text must be the same, and the exit status says whether it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.serve.harness import Reply, Server, chat, complete, settle

SESSION = Path(__file__).parents[1] / "data" / "agent_session.json"

Turn = Callable[..., Reply]


def turns_of(file: Path) -> list[Turn]:
    """The requests of a session; each takes a client and options."""
    text = file.read_text("utf-8")
    if text.lstrip().startswith("["):
        messages = json.loads(text)
        ends = [i for i, message in enumerate(messages) if message["role"] == "user"]
        return [_chat(messages[: end + 1]) for end in ends]
    return [_complete(json.loads(line)["input"]) for line in text.splitlines()]


def replay(
    folder: Path,
    model: str,
    turns: Sequence[Turn],
    options: Sequence[str] = (),
    ours: Sequence[str] = (),
    **how: Any,
) -> dict[str, list[Reply]]:
    """What each server answered, by the server's name. ``ours`` are options of kvkeep's."""
    words = ("--model", model, *options)
    out: dict[str, list[Reply]] = {}
    for name in ("cold", "plain", "kvkeep"):
        store = folder / "store" if name == "kvkeep" else None
        more = {"cold": ("--prompt-cache-size", "0"), "kvkeep": ours}.get(name, ())
        half = len(turns) if name == "cold" else len(turns) // 2
        replies: list[Reply] = []
        for part in (turns[:half], turns[half:]):
            if part:
                with Server(folder / f"{name}.log", store, *words, *more) as server:
                    for turn in part:
                        replies.append(turn(server.client(), stream=True, **how))
                        if store is not None:
                            settle(server)
                    server.stop()
        out[name] = replies
    return out


def _chat(messages: list[Any]) -> Turn:
    return lambda client, **how: chat(client, messages, **how)


def _complete(prompt: str) -> Turn:
    return lambda client, **how: complete(client, prompt, **how)


def main() -> None:
    """The table, and the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--session", type=Path, default=SESSION)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--step", type=int, default=2048, help="tokens of a prefill step")
    parser.add_argument("--seed", type=int, help="given: the path for one request at a time")
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else 1 if args.exact else None
    how = {"max_tokens": args.max_tokens} | ({"seed": seed} if seed is not None else {})
    step = ("--prefill-step-size", str(args.step))
    ours = ("--exact", "--checkpoint-every", str(args.step)) if args.exact else ()
    with tempfile.TemporaryDirectory() as made:
        started = time.perf_counter()
        turns = turns_of(args.session)[: args.turns]
        found = replay(Path(made), args.model, turns, step, ours, **how)
        seconds = time.perf_counter() - started
    print("turn  tokens      cold            plain                  kvkeep       same text")
    for i, (cold, plain, ours) in enumerate(zip(*found.values(), strict=True)):
        print(
            f"{i:4}  {cold.prompt:6}  {cold.first:6.2f} s  "
            f"{plain.cached:6} {plain.first:6.2f} s  "
            f"{ours.cached:6} {ours.first:6.2f} s  "
            f"{'yes' if ours.text == cold.text else 'no'}"
        )
    half = len(turns) // 2
    for title, part in (("all", found), ("2nd half", {n: g[half:] for n, g in found.items()})):
        cold, plain, ours_ = part.values()
        print(
            f"{title:8}  {sum(r.prompt for r in cold)} tokens; to the first token: cold "
            f"{_seconds(cold)}, plain {_seconds(plain)} with {sum(r.cached for r in plain)} "
            f"resumed, kvkeep {_seconds(ours_)} with {sum(r.cached for r in ours_)} resumed"
        )
    rows = {name: [[r.cached, r.prompt, r.first] for r in got] for name, got in found.items()}
    json.dump({"seconds": seconds, **rows}, sys.stderr)
    same = all(a.text == b.text for a, b in zip(found["cold"], found["kvkeep"], strict=True))
    sys.exit(args.exact and not same)


def _seconds(replies: Sequence[Reply]) -> str:
    return f"{sum(reply.first for reply in replies):.2f} s"


if __name__ == "__main__":
    main()
