"""Real server processes, started and killed by tests, and the official client against them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """One server process. ``store=None`` runs plain ``mlx_lm.server``; ``env`` is added."""

    def __init__(
        self,
        log: Path,
        store: Path | None,
        *options: str,
        wait: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.log = log
        if store is None:
            words = ["-m", "mlx_lm", "server"]
        else:
            words = ["-m", "kvkeep.cli", "serve", "--store", str(store)]
            if "--max-bytes" not in options:
                words += ["--max-bytes", "1GB"]
        words += ["--port", str(self.port), *options]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                stdout=out,
                stderr=out,
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended at once:\n{self.said}")
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise AssertionError(f"the server does not answer:\n{self.said}")

    @property
    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> str:
        """The body of a page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as page:
            return str(page.read().decode())

    def report(self) -> Any:
        """``/kvkeep/report``."""
        return json.loads(self.get("/kvkeep/report"))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def client(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=600
        )

    def stop(self, number: int = signal.SIGTERM, within: float = 30.0) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(within)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def settle(server: Server) -> None:
    """Wait until all that was accepted is written: a request's end comes before its insertion."""
    deadline = time.monotonic() + 30
    calm = 0
    while calm < 3 and time.monotonic() < deadline:
        calm = calm + 1 if server.metric("kvkeep_queue_snapshots") == 0 else 0
        time.sleep(0.05)


class Reply:
    """What a request gave: text, tokens resumed and in all, and the header's fields.

    ``answer`` is the number of tokens that were answered, ``first`` the seconds to the first piece
    of a streamed answer.
    """

    def __init__(self, text: str, usage: Any, header: str, logprobs: Any = None) -> None:
        self.text = text
        self.logprobs = [part["logprob"] for part in logprobs or []]
        self.first = 0.0
        self.prompt, self.answer = usage.prompt_tokens, usage.completion_tokens
        self.cached = usage.prompt_tokens_details.cached_tokens
        fields = dict(part.split("=") for part in header.split("; ")) if header else {}
        self.tier, self.reason = fields.get("tier", ""), fields.get("reason", "")
        self.header = fields

    def __repr__(self) -> str:
        return f"Reply({self.text!r}, {self.cached}/{self.prompt}, {self.tier}, {self.reason})"


def chat(
    client: openai.OpenAI, messages: Sequence[Any], stream: bool = False, **more: Any
) -> Reply:
    """A chat completion."""
    return _reply(client.chat.completions, stream, messages=list(messages), **more)


def complete(client: openai.OpenAI, prompt: str, stream: bool = False, **more: Any) -> Reply:
    """A text completion."""
    return _reply(client.completions, stream, prompt=prompt, **more)


def _reply(resource: Any, stream: bool, **options: Any) -> Reply:
    options = {"model": "default_model", "max_tokens": 8, **options}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    raw = resource.with_raw_response.create(**options)
    answer, header = raw.parse(), raw.headers.get("X-Kvkeep", "")
    if not stream:
        found = answer.choices[0].logprobs
        scored = found.content if found is not None else None
        return Reply(_said(answer.choices[0]), answer.usage, header, scored)
    parts, usage, first = [], None, 0.0
    for piece in answer:
        first = first or time.perf_counter() - started
        usage = piece.usage or usage
        parts += [_said(choice) for choice in piece.choices]
    reply = Reply("".join(parts), usage, header)
    reply.first = first
    return reply


def _said(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text or ""
    part = choice.delta if hasattr(choice, "delta") else choice.message
    return part.content or ""
