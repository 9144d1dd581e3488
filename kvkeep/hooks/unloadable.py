"""A model that mlx-lm cannot load, and why."""

from __future__ import annotations

from pathlib import Path

from kvkeep.errors import KvkeepError


class ModelUnusable(KvkeepError):
    """mlx-lm cannot load the model."""

    exit_code = 5
    remedy = "Name a folder that mlx_lm.load accepts, or a hub id that can be downloaded."


def unusable(model: str, error: Exception) -> ModelUnusable:
    """What to tell of ``error``, which mlx-lm raised for ``model``: a folder or a hub id."""
    looks_like_a_folder = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if looks_like_a_folder and not Path(model).exists():
        return ModelUnusable(f"{model} cannot be loaded: there is no such folder")
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelUnusable(f"{model} cannot be loaded: {said}")
