"""Calls of the C library that Python does not offer; all of them hints that may be left out."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def linux_call(name: str, *arguments: Any) -> Callable[..., int] | None:
    """The function ``name`` of C, which takes these ctypes and answers an int.

    ``None`` where it is not to be had: on other systems, and where addresses have 32 bits.
    """
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found
