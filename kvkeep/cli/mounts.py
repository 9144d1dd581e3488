"""Which file system a folder lies on. LMDB is not safe on a network one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afpfs", "webdav", "fuse.sshfs", "9p", "afs", "ceph"}
)

# «/dev/disk3s5 on /System/Volumes/Data (apfs, local, …)», as macOS prints it.
_BSD_LINE = re.compile(r".+? on (?P<point>.+) \((?P<kind>[^,)]+)")


def filesystem(folder: Path) -> str | None:
    """The type of the file system that holds ``folder``; ``None`` where it cannot be told."""
    try:
        table = Path("/proc/self/mounts")
        if table.exists():
            mounts = linux_mounts(table.read_text(encoding="utf-8", errors="replace"))
        else:
            listed = subprocess.run(
                ["/sbin/mount"], capture_output=True, text=True, timeout=5, check=True
            )
            mounts = bsd_mounts(listed.stdout)
    except (OSError, subprocess.SubprocessError):
        return None
    return holding(folder.resolve(), mounts)


def linux_mounts(text: str) -> list[tuple[str, str]]:
    r"""Mount points and types of ``/proc/self/mounts``.

    >>> linux_mounts("/dev/vda / ext4 rw 0 0\nhost:/x /a\\040b nfs4 rw 0 0")
    [('/', 'ext4'), ('/a b', 'nfs4')]
    """
    fields = (line.split(" ") for line in text.splitlines())
    return [(f[1].replace("\\040", " "), f[2]) for f in fields if len(f) > 2]


def bsd_mounts(text: str) -> list[tuple[str, str]]:
    """Mount points and types as ``mount`` prints them on macOS.

    >>> bsd_mounts("/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled)")
    [('/System/Volumes/Data', 'apfs')]
    """
    found = (_BSD_LINE.match(line) for line in text.splitlines())
    return [(m["point"], m["kind"]) for m in found if m]


def holding(folder: Path, mounts: Iterable[tuple[str, str]]) -> str | None:
    """The type of the deepest mount above ``folder``; the last of several on one point.

    >>> holding(Path("/a/b"), [("/", "ext4"), ("/a", "nfs4"), ("/ab", "xfs")])
    'nfs4'
    """
    above = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(reversed(above), key=lambda x: x[0], default=(0, None))[1]
