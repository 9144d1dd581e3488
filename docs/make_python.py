"""Write docs/python.md from the docstrings of what ``kvkeep`` exports.

python docs/make_python.py docs/python.md
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import kvkeep

HEAD = """# The Python interface

This page is written by `python docs/make_python.py docs/python.md` from the docstrings of what
`kvkeep` exports. That is the public interface, with what [caches.md](caches.md) tells of
`kvkeep.caches`. The [README](../README.md#five-minutes) and
[examples/stream_generate.py](../examples/stream_generate.py) show how it is used.
"""


def page() -> str:
    """The page, as Markdown."""
    names = [name for name in kvkeep.__all__ if not name.startswith("_")]
    return "\n".join([HEAD, *(_entry(name, getattr(kvkeep, name)) for name in names)])


def _entry(name: str, thing: Any) -> str:
    if not inspect.isclass(thing):
        return _function(f"kvkeep.{name}", thing, "##")
    lines = [f"## `kvkeep.{name}`\n", f"{_doc(thing)}\n"]
    if issubclass(thing, enum.Enum):
        lines.append(", ".join(f"`{member.value}`" for member in thing) + "\n")
    elif dataclasses.is_dataclass(thing):
        fields = "\n".join(f"{f.name}: {f.type}" for f in dataclasses.fields(thing))
        lines.append(f"```python\n{fields}\n```\n")
    for member, value in vars(thing).items():
        if member.startswith("_") or isinstance(value, staticmethod) or not _is_ours(value):
            continue
        lines.append(_function(f"{name}.{member}", value, "###"))
    return "\n".join(lines)


def _is_ours(value: Any) -> bool:
    return isinstance(value, property) or inspect.isfunction(value)


def _function(name: str, value: Any, level: str) -> str:
    if isinstance(value, property):
        return f"{level} `{name}`\n\n{_doc(value)}\n"
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))
    signature = signature.replace("(self, ", "(").replace("(self)", "()")
    return f"{level} `{name}`\n\n```python\n{name}{signature}\n```\n\n{_doc(value)}\n"


def _doc(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").replace("``", "`")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(page(), "utf-8")
