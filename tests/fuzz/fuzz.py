"""Fuzz the decoders with coverage as the guide (atheris, which is libFuzzer).

    python -m tests.fuzz.fuzz --seconds 60              every target, one after the other
    python -m tests.fuzz.fuzz frame --seconds 60        one

The corpus starts with what kvkeep itself writes and grows in ``--corpus``, a temporary folder
unless one is named. An input that breaks a decoder is written to ``--found``; put it into
``cases/TARGET`` with the change that mends it, and the test suite keeps trying it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path

NAMES = (
    "frame",
    "sealed_frame",
    "node",
    "recipe",
    "small_records",
    "lookup",
    "prompt_file",
    "prompt_header",
    "marker",
    "pages",
)
LONGEST = 1 << 16


def fuzz(name: str, seconds: int, corpus: Path, found: Path) -> int:
    """Fuzz a target in a process of its own; how many inputs were tried.

    Raises ``AssertionError`` with the fuzzer's output for an input that broke it.
    """
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tests.fuzz.fuzz", "--inside", name, str(corpus)]
    words += [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-rss_limit_mb=3000"]
    words += ["-timeout=20", "-print_final_stats=1", f"-artifact_prefix={found}/"]
    root = Path(__file__).parents[2]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvkeep-fuzz-", dir=memory) as scratch:
        variables = {**os.environ, "KVKEEP_FUZZ_SCRATCH": scratch}
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=root, env=variables, check=False
        )
    tried = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    assert done.returncode == 0, f"{name}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert tried is not None, done.stderr
    return int(tried[1])


def inside(name: str, words: list[str]) -> None:
    """The fuzzing process: does not return."""
    import logging

    import atheris

    from tests.faults import light

    light.install()
    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=["kvkeep"]):
        from tests.fuzz import targets

    corpus = Path(words[0])
    for seed in targets.TARGETS[name].seeds():
        if len(seed) <= LONGEST:
            (corpus / blake2b(seed, digest_size=8).hexdigest()).write_bytes(seed)
    atheris.Setup([sys.argv[0], *words], lambda data: targets.run(name, data))
    atheris.Fuzz()


def main() -> None:
    """The command line."""
    if "--inside" in sys.argv[1:2]:
        inside(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TARGET", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--found", type=Path, default=Path("found"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvkeep-corpus-") as temporary:
        corpus = options.corpus or Path(temporary)
        for name in options.names or NAMES:
            tried = fuzz(name, options.seconds, corpus / name, options.found)
            kept = len(list((corpus / name).iterdir()))
            print(f"{name:16}{tried:>12,} inputs, {kept:>6,} in the corpus", flush=True)


if __name__ == "__main__":
    main()
