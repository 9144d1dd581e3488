"""The version, here and nowhere else; packaging reads this file."""

from __future__ import annotations

__version__ = "0.1.0"
