"""``python -m kvkeep.cli``, for where the script is not on the path."""

from __future__ import annotations

from kvkeep.cli import main

main(prog_name="kvkeep")
