"""What must be equal before a cached byte may be reused: the identity of a space (I4).

Every field is a short digest or a plain string, so that two identities can be compared field
by field and a miss can name the one that changed. Names alone never identify anything:
weights are known by their files' sizes, headers and sampled blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import msgpack

from kvkeep.errors import CorruptFrame, IdentityUnknown
from kvkeep.persistence.packing import unpack_plain
from kvkeep.prefixstore.layout import FORMAT

FIELDS = (
    "format",
    "weights",
    "config",
    "tokenizer",
    "adapter",
    "draft_model",
    "layout",
    "kv_scheme",
    "plan",
    "salt",
)
"""The fields that kvkeep fills; an explicit identity may bring others."""

SAMPLES = 64
BLOCK = 4096

Remember = Callable[[Path, Callable[[], str]], str]


@dataclass(frozen=True)
class Identity:
    """The fields of a space and a label for people. Equal fields make the same space."""

    fields: tuple[tuple[str, str], ...]
    label: str = ""

    @property
    def id(self) -> bytes:
        """16 bytes that stand for all fields."""
        packed = msgpack.packb(self.fields)
        return hashlib.blake2b(packed, digest_size=16).digest()

    @property
    def salt(self) -> str:
        """The digest of the tenant's salt, empty without one."""
        return dict(self.fields).get("salt", "")

    def part(self, name: str, layout: Iterable[str], kv_scheme: str | None = None) -> Identity:
        """The identity of a companion that is stored beside this one, such as a draft model.

        Without a scheme of its own it has that of this one.
        """
        fields = dict(self.fields) | {"part": name, "layout": ",".join(layout)}
        fields |= {"kv_scheme": kv_scheme} if kv_scheme else {}
        return Identity(tuple(sorted(fields.items())), f"{self.label} ({name})")

    @staticmethod
    def unpack(data: Any) -> tuple[Identity, float]:
        """The identity in a record of ``spaces``, and when that was made (0 where unknown).

        Raises ``CorruptFrame``.
        """
        match unpack_plain(data):
            case {"fields": tuple(fields), "label": str(label), **rest}:
                created = rest.get("created", 0.0)
                pairs = all(type(f) is tuple and [type(x) for x in f] == [str, str] for f in fields)
                if pairs and isinstance(created, int | float) and 0 <= created < math.inf:
                    return Identity(fields, label), float(created)
        raise CorruptFrame("The record of a space has another form")

    def differences(self, other: Identity) -> tuple[str, ...]:
        """The names of the fields that are not equal."""
        mine, theirs = dict(self.fields), dict(other.fields)
        return tuple(f for f in {**mine, **theirs} if mine.get(f) != theirs.get(f))


def explicit(
    identity: Mapping[str, Any],
    layout: Iterable[str],
    kv_scheme: str | None,
    salt: str | None,
    plan: str = "",
) -> Identity:
    """The identity of an embedder that names its own fields."""
    fields = {f"x.{k}": _digest(_canonical(v)) for k, v in identity.items()}
    label = str(identity.get("name", identity.get("model", "")))
    return _identity(fields, layout, kv_scheme, salt, plan, label)


def of_model(
    model: Any,
    *,
    model_path: str | PathLike[str] | None,
    tokenizer: Any,
    adapter: str | PathLike[str] | None,
    draft_model: str | PathLike[str] | None,
    layout: Iterable[str],
    kv_scheme: str | None,
    salt: str | None,
    plan: str = "",
    remember: Remember,
) -> Identity:
    """The identity of an mlx-lm model.

    ``model_path``, ``adapter`` and ``draft_model`` are folders, or hub ids that lie in the
    local hub cache. Raises ``IdentityUnknown`` where weights cannot be read.
    """
    if model_path is None:
        raise IdentityUnknown("The weights of this model are unknown: no model_path was given")
    folder = resolve(model_path)
    fields = {
        "weights": weights_digest(folder, remember),
        "config": _config_digest(folder, model),
        "tokenizer": _tokenizer_digest(folder, tokenizer),
    }
    if adapter is not None:
        fields["adapter"] = _folder_digest(resolve(adapter), ("*.safetensors", "*.json"), remember)
    if draft_model is not None:
        fields["draft_model"] = weights_digest(resolve(draft_model), remember)
    return _identity(fields, layout, kv_scheme, salt, plan, str(model_path))


def resolve(path: str | PathLike[str]) -> Path:
    """The local folder of a path or of a hub id in the local hub cache."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder.resolve()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(path), local_files_only=True)).resolve()
    except Exception as error:
        raise IdentityUnknown(
            f"{path} is neither a folder nor a model in the local cache"
        ) from error


def salt_digest(salt: str) -> str:
    """What a space keeps of a tenant's salt; empty for none."""
    return _digest(b"kvkeep salt\0" + salt.encode()) if salt else ""


def weights_digest(folder: Path, remember: Remember) -> str:
    """A fingerprint of every ``.safetensors`` shard in ``folder``."""
    return _folder_digest(folder, ("*.safetensors",), remember)


def sample_file(path: Path) -> str:
    """Digest of a file's size, its head, and blocks spread evenly over it.

    The head holds a safetensors header, so names, shapes and dtypes are covered whole.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little") if path.suffix == ".safetensors" else 0
        digest.update(head + file.read(min(length, 64 << 20)))
        for index in range(SAMPLES):
            file.seek(max(0, size - BLOCK) * index // (SAMPLES - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _identity(
    fields: dict[str, str],
    layout: Iterable[str],
    kv_scheme: str | None,
    salt: str | None,
    plan: str,
    label: str,
) -> Identity:
    fields |= {"format": str(FORMAT), "layout": ",".join(layout), "kv_scheme": kv_scheme or ""}
    if plan:
        fields["plan"] = plan
    if salt:
        fields["salt"] = salt_digest(salt)
    return Identity(tuple(sorted(fields.items())), label)


def _folder_digest(folder: Path, patterns: tuple[str, ...], remember: Remember) -> str:
    files = sorted({f for p in patterns for f in folder.glob(p)}) if folder.is_dir() else [folder]
    if not files:
        raise IdentityUnknown(f"{folder} holds no {' or '.join(patterns)} file")
    try:
        parts = [remember(file, lambda f=file: sample_file(f)) for file in files]  # type: ignore[misc]
    except OSError as error:
        raise IdentityUnknown(f"{error.filename} cannot be read: {error.strerror}") from error
    return _digest("\n".join(parts).encode())


def _config_digest(folder: Path, model: Any) -> str:
    args = getattr(model, "args", None)
    built = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    file = folder / "config.json"
    try:
        stored = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise IdentityUnknown(f"{file} cannot be read: {error}") from error
    return _digest(_canonical([stored, built]))


def _tokenizer_digest(folder: Path, tokenizer: Any) -> str:
    files = [f for f in sorted(folder.glob("*token*")) if f.is_file()] + sorted(
        folder.glob("vocab*")
    )
    if files:
        return _digest(b"".join(f.name.encode() + b"\0" + f.read_bytes() for f in files))
    if tokenizer is None:
        return ""
    return _digest(_canonical(sorted(tokenizer.get_vocab().items())))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
