"""mlx-lm's cache classes without the rest of mlx-lm, for processes that are started to be killed.

``import mlx_lm`` loads tokenizers and takes a second. The classes are the real ones.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType


def install() -> None:
    """Have this process import ``mlx_lm`` as a bare package. Only for processes of one job."""
    if "mlx_lm" in sys.modules:
        return
    found = find_spec("mlx_lm")
    assert found is not None
    assert found.submodule_search_locations
    package = ModuleType("mlx_lm")
    package.__path__ = list(found.submodule_search_locations)
    package.__spec__ = found
    sys.modules["mlx_lm"] = package
