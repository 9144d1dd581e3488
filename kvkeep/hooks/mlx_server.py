"""The real ``mlx_lm.server`` with kvkeep behind its prompt cache. See docs/servers.md.

What is touched, all of it here and in ``batch_points`` and ``single_points``:

* the server's function ``run`` is replaced by ours, which passes a ``PromptCache`` where it
  passes an ``LRUPromptCache``, and subclasses of its generator and of its HTTP handler;
* the server's names ``BatchGenerator`` and ``stream_generate`` stand for versions that store
  resume points while a prompt is read.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import warnings
from _thread import interrupt_main
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import mlx_lm

from kvkeep.errors import KvkeepError
from kvkeep.hooks.agreement import any_rank, between_ranks, rank_name
from kvkeep.hooks.answers import Watched, request_key
from kvkeep.hooks.batch_points import KeepingBatchGenerator
from kvkeep.hooks.keeper import Keeper, Stopping
from kvkeep.hooks.prompt_cache import PromptCache, Served
from kvkeep.hooks.single_points import keeping
from kvkeep.hooks.unloadable import ModelUnusable, unusable
from kvkeep.prefixstore.store import Store

log = logging.getLogger("kvkeep")

server: Any = import_module("mlx_lm.server")

SUPPORTED = ((0, 32, 0), (0, 33, 0))
"""From this version of mlx-lm on, and below that one."""

HEADER = "X-Kvkeep"
HEADER_SECONDS = 5.0
"""The longest that a response's header waits for its lookup."""


class UnsupportedServer(KvkeepError):
    """The hooks are made for some versions of mlx-lm's server."""

    exit_code = 5

    def __init__(self, version: str) -> None:
        least, below = (".".join(map(str, bound)) for bound in SUPPORTED)
        super().__init__(
            f"mlx-lm {version} is installed; `kvkeep serve` supports from {least} to below {below}",
            remedy=f"Install one of them: pip install 'mlx-lm>={least},<{below}'.",
        )


class PortInUse(KvkeepError):
    """The server cannot listen where it was told to."""

    exit_code = 2
    remedy = "Name another with --port or --host."


@dataclass(frozen=True)
class Settings:
    """What ``kvkeep serve`` adds to the server's own options.

    ``interval`` tokens lie at least between two resume points inside a prompt, and ``every``
    tokens between the checkpoints of an answer; 0 for none.
    ``flush_seconds`` bounds the flush when the server stops.
    """

    interval: int = 2048
    every: int = 0
    exact: bool = False
    salt: str | None = None
    flush_seconds: float = 10.0


def check_version(version: str | None = None) -> None:
    """Raise ``UnsupportedServer`` where the installed mlx-lm is not one that is supported."""
    version = mlx_lm.__version__ if version is None else version
    digits = (part for part in version.split(".")[:3])
    found = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise UnsupportedServer(version)


def serve(store: Store, settings: Settings, arguments: Sequence[str]) -> bool:
    """Run the server with its own command line ``arguments`` until it is told to stop.

    Answers whether all that was accepted is durable by then. Run it within ``stoppable``. Raises
    ``UnsupportedServer``, ``PortInUse``, ``ModelUnusable``, and ``SystemExit`` for arguments that
    the server refuses.
    """
    import sys

    check_version()
    flushed: list[bool] = []
    failed: list[ModelUnusable] = []

    def run(host: str, port: int, provider: Any) -> None:
        cache = _prompt_cache(store, settings, provider)
        step = provider.cli_args.prefill_step_size if settings.exact else 1
        keeper = Keeper(cache, settings.interval, step=step, every=settings.every)
        with _installed(keeper):
            generator = Generator(provider, cache, keeper, settings)
            try:
                _listen(host, port, generator)
            finally:
                generator.stop_and_join()
                flushed.append(generator.flushed)
                failed.extend(generator.unusable)

    given, server_run = sys.argv, server.run
    sys.argv, server.run = ["kvkeep serve", *arguments], run
    try:
        server.main()
    except KeyboardInterrupt:
        if not failed:
            log.warning("kvkeep: stopped before the server was up")
    finally:
        sys.argv, server.run = given, server_run
    if failed:
        raise failed[0]
    return all(flushed)


class Generator(server.ResponseGenerator):  # type: ignore[misc]
    """The server's generation thread, which knows the turns of prompts and flushes at its end."""

    def __init__(
        self, provider: Any, cache: PromptCache, keeper: Keeper, settings: Settings
    ) -> None:
        self.keeper = keeper
        self.settings = settings
        self.flushed = True
        self.unusable: list[ModelUnusable] = []
        self.answering = threading.local()
        self.leaving = threading.Event()
        super().__init__(provider, cache)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        prompt, segments, types, *more = super()._tokenize(tokenizer, request, args)
        keeper = self.keeper
        keeper.tokenized(tokenizer, prompt, request.request_type == "chat")
        keeper.asks(None)
        if len(more) < 2 or more[1] is None:  # no images
            kinds = keeper.cache.kinds(None)
            segments, types = list(segments), list(types)
            keeper.guard("turns", lambda: keeper.split(segments, types, kinds), None)
            keeper.asks(self._key(args))
        return (prompt, segments, types, *more)

    def _is_batchable(self, args: Any) -> bool:
        # Rows of a batch depend on its other rows, in their low bits.
        return not self.settings.exact and bool(super()._is_batchable(args))

    def _key(self, args: Any) -> bytes | None:
        """By what a request is known whose answer may go on after a crash."""
        if self._is_distributed or self.model_provider.draft_model is not None:
            return None
        batched = self._is_batchable(args)
        return self.keeper.guard("turns", lambda: request_key(args, batched=batched), None)

    def _serve_single(self, request: Any, *args: Any) -> None:
        """As before; the checkpoints of an answer go when it is complete."""
        responses = Watched(request[0])
        super()._serve_single((responses, *request[1:]), *args)
        answer = self.keeper.single
        if answer is not None and responses.complete:
            self.keeper.guard("checkpoint", answer.finished, None)

    def _generate(self) -> None:
        cache = self.keeper.cache
        try:
            if self._loaded():
                super()._generate()
        finally:
            self.keeper.keep_batch()
            self.flushed = cache.close(self.settings.flush_seconds)
            if self._is_distributed and self._rank == 0 and not self.leaving.is_set():
                interrupt_main()  # another rank was told to stop; this one still listens

    def _loaded(self) -> bool:
        """Load the model of the command line; without it nobody can be answered."""
        try:
            self.model_provider.load_default()
        except Exception as error:
            self.unusable.append(unusable(self.model_provider.cli_args.model, error))
            interrupt_main()
            return False
        return True

    def generate(self, *args: Any, **options: Any) -> Any:
        """As before; notes the answer of the lookup for the headers of this HTTP thread."""
        self.answering.served = None
        context, answers = super().generate(*args, **options)
        self.answering.served = self.keeper.served(context.prompt, HEADER_SECONDS)
        return context, answers

    def _next_request(self, timeout: float | None = None) -> Any:
        """As before; ranks of a distributed run stop together, or collectives deadlock."""
        if self._is_distributed and any_rank(self.leaving.is_set()):
            self._stop = True
            return None
        return super()._next_request(timeout)

    def stop_and_join(self) -> None:
        """Stop after the forward in hand, keep what was done, and flush.

        In a distributed run all ranks stop when one is told to, between two requests of the
        single path or two steps of a batch.
        """
        if self._is_distributed:
            self.leaving.set()
            self.join()
            return
        self.keeper.stopping.set()
        super().stop_and_join()


class Handler(server.APIHandler):  # type: ignore[misc]
    """The server's HTTP handler with one more header and two more pages."""

    def do_GET(self) -> None:  # noqa: N802
        """``/metrics``, ``/kvkeep/report``, or what the server knows."""
        keeper: Keeper = self.response_generator.keeper
        if self.path == "/metrics":
            text = keeper.cache.metrics.prometheus(keeper.cache.gauges())
            self._send(text, "text/plain; version=0.0.4; charset=utf-8")
        elif self.path == "/kvkeep/report":
            self._send(json.dumps(report(keeper)), "application/json")
        else:
            super().do_GET()

    def handle_completion(self, *args: Any) -> None:
        """As before; a request that the server's stop cut short ends without a traceback."""
        try:
            super().handle_completion(*args)
        except Stopping:
            log.info("kvkeep: a request was cut short: the server stops")

    def _set_completion_headers(self, status_code: int = 200) -> None:
        super()._set_completion_headers(status_code)
        self._say(status_code)

    def _set_stream_headers(self, status_code: int = 200) -> None:
        super()._set_stream_headers(status_code)
        self._say(status_code)

    def _say(self, status_code: int) -> None:
        answering = self.response_generator.answering
        served: Served | None = getattr(answering, "served", None)
        answering.served = None
        if served is not None and status_code == 200:
            decision = served.decision
            self.send_header(
                HEADER,
                f"resumed={decision.offset}; prompt={decision.prompt_tokens}; "
                f"matched={decision.matched}; tier={served.tier}; reason={decision.why}; "
                f"saved={served.saved:.2f}"
                + (f"; answered={served.answered}" if served.answered else ""),
            )

    def _send(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-type", kind)
        self.send_header("Content-Length", str(len(body)))
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def report(keeper: Keeper) -> dict[str, Any]:
    """What ``GET /kvkeep/report`` answers: this process, its last lookups, and the store."""
    cache = keeper.cache
    gauges = {name.removeprefix("kvkeep_"): value for name, value in cache.gauges().items()}
    out: dict[str, Any] = {
        "server": {**cache.metrics.data(), "prefill_tokens_per_second": cache.rate, **gauges},
        "recent": list(keeper.recent),
        "store": None,
    }
    if cache.store is not None:
        out["store"] = cache.guarded("report", lambda: _totals(cache.store), None)
    return out


def _totals(store: Any) -> dict[str, Any]:
    found = store.report()
    return {
        "path": str(store.path),
        "used_bytes": found.used_bytes,
        "max_bytes": found.max_bytes,
        "quarantined": found.quarantined,
        "total": {name: _plain(value) for name, value in vars(found.total).items()},
    }


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Counter) else value


def _prompt_cache(store: Store, settings: Settings, provider: Any) -> PromptCache:
    options = provider.cli_args
    parts = (settings.salt, rank_name())
    return PromptCache(
        options.prompt_cache_size,
        options.prompt_cache_bytes,
        store=store,
        provider=provider,
        salt="|".join(part for part in parts if part) or None,
        exact=settings.exact,
        agree=between_ranks(),
    )


def _listen(host: str, port: int, generator: Generator) -> None:
    if generator._rank != 0:
        generator.join()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is no server for production
        try:
            server._run_http_server(host, port, generator, handler_class=Handler)
        except OSError as error:
            raise PortInUse(f"Cannot listen at {host}:{port}: {error.strerror}") from error


@contextmanager
def _installed(keeper: Keeper) -> Iterator[None]:
    """The server's names that stand for other things while it runs."""
    before = server.BatchGenerator, server.stream_generate
    server.BatchGenerator = partial(KeepingBatchGenerator, keeper=keeper)
    server.stream_generate = keeping(keeper, before[1])
    try:
        yield
    finally:
        server.BatchGenerator, server.stream_generate = before


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT stop the server in order; a second one ends the process at once.

    Its exit status then is 128 and the signal's number, as of a process that a signal ended.
    """
    stopping = False

    def stop(number: int, _: Any) -> None:
        nonlocal stopping
        if stopping:
            os.write(2, b"kvkeep: stopped at once; what was not yet on disk is lost\n")
            os._exit(128 + number)
        stopping = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
