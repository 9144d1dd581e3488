"""``kvkeep doctor``: whether this machine can run kvkeep, and with what."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from kvkeep._version import __version__
from kvkeep.cli import options
from kvkeep.cli.mounts import NETWORK, filesystem
from kvkeep.cli.output import emit
from kvkeep.cli.tables import columns
from kvkeep.errors import Damaged, StoreUnusable
from kvkeep.prefixstore.sizes import format_size

PACKAGES = (
    "mlx",
    "mlx-lm",
    "lmdb",
    "msgpack",
    "zstandard",
    "xxhash",
    "safetensors",
    "numpy",
    "click",
)


@dataclass(frozen=True)
class Problem:
    """Something that keeps kvkeep from working well, and what to do about it."""

    what: str
    remedy: str
    fatal: bool = False


@click.command("doctor")
@options.common
@click.pass_context
def command(ctx: click.Context, store: Path, as_json: bool) -> None:
    """Check this machine and the folder of the store.

    Shows versions, the device and the disk, and opens the store that is there; `kvkeep verify`
    reads all of it. Creates nothing. Exits with 6 when the store could not be used here.

    \b
    Example:
      kvkeep doctor
      kvkeep doctor --store /Volumes/Fast/kv --json
    """
    device, problems = _device()
    folder, more = _folder(store)
    problems += more
    packages = {name: _version(name) for name in PACKAGES}
    problems += [
        Problem(f"{name} is not installed", f"pip install {name}", fatal=True)
        for name, version in packages.items()
        if version is None
    ]
    if not any(p.fatal for p in problems):
        problems += _opened(store)
    data: dict[str, Any] = {
        "kvkeep": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "packages": packages,
        "store": folder,
        "problems": [{"what": p.what, "remedy": p.remedy, "fatal": p.fatal} for p in problems],
    }
    emit(as_json, data, _text(data, problems))
    if any(p.fatal for p in problems):
        ctx.exit(StoreUnusable.exit_code)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device() -> tuple[str, list[Problem]]:
    try:
        import mlx.core as mx

        facts = mx.device_info()
    except Exception as error:
        remedy = "Reinstall it: pip install --force-reinstall mlx"
        return "none", [Problem(f"MLX does not load: {error}", remedy, fatal=True)]
    kind = mx.default_device().type.name
    return f"{kind}: {facts.get('device_name', platform.machine())}", []


def _folder(store: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The facts of the store's folder, or of the nearest folder above it that exists."""
    exists = store.is_dir()
    base = next(p for p in (store.absolute(), *store.absolute().parents) if p.exists())
    free = shutil.disk_usage(base).free
    kind = filesystem(base)
    writable = os.access(base, os.R_OK | os.W_OK | os.X_OK)
    mode = stat.S_IMODE(store.stat().st_mode) if exists else None
    problems = []
    if not writable:
        remedy = "Give yourself write permission, or name another folder with --store."
        problems.append(Problem(f"{base} cannot be written", remedy, fatal=True))
    if kind in NETWORK:
        remedy = "LMDB needs a local disk; name one with --store."
        problems.append(Problem(f"{base} lies on a network file system ({kind})", remedy, True))
    if mode is not None and mode & 0o077:
        remedy = f"chmod 700 {store}"
        problems.append(Problem(f"others may read {store} (mode {mode:04o})", remedy))
    facts = {
        "path": str(store),
        "exists": exists,
        "writable": writable,
        "mode": None if mode is None else f"{mode:04o}",
        "filesystem": kind,
        "free_bytes": free,
    }
    return facts, problems


def _opened(store: Path) -> list[Problem]:
    """What keeps the store, where one is, from being read."""
    from kvkeep.prefixstore.store import open_store

    if not store.is_dir() or not any(store.iterdir()):
        return []  # a place for a new one
    try:
        open_store(store, read_only=True).close()
    except (StoreUnusable, Damaged) as error:
        return [Problem(error.problem, error.remedy, fatal=True)]
    return []


def _text(data: dict[str, Any], problems: list[Problem]) -> str:
    folder = data["store"]
    state = f"mode {folder['mode']}" if folder["exists"] else "not there yet"
    free = format_size(folder["free_bytes"])
    lines = [
        ("kvkeep", data["kvkeep"]),
        ("python", f"{data['python']} on {data['platform']}"),
        ("device", data["device"]),
        *((name, version or "missing") for name, version in data["packages"].items()),
        ("store", f"{folder['path']} ({state})"),
        ("disk", f"{free} free, {folder['filesystem'] or 'unknown file system'}"),
    ]
    found = [f"problem: {p.what}\n  {p.remedy}" for p in problems]
    return "\n".join([columns(lines), "", *(found or ["No problem found."])])
