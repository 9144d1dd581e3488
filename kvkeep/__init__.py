"""kvkeep keeps the prompt caches of MLX language models, so that a prompt is read only once.

    import kvkeep

    with kvkeep.open("~/.cache/kvkeep", max_bytes="50GB") as store:
        space = store.space(model=model, tokenizer=tokenizer, model_path="…")
        hit = space.resume(tokens)                  # hit.caches, hit.offset, hit.rest
        …                                           # run the model over hit.rest
        space.snapshot(tokens, caches)              # stores what is new

Everything public is listed in ``__all__``; it is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.errors import KvkeepError as KvkeepError
    from kvkeep.hooks.prompt_cache import PromptCache as PromptCache
    from kvkeep.hooks.session import Session as Session
    from kvkeep.hooks.session import session as session
    from kvkeep.prefixstore.pins import Pin as Pin
    from kvkeep.prefixstore.policy import Decision as Decision
    from kvkeep.prefixstore.policy import LayerLimit as LayerLimit
    from kvkeep.prefixstore.policy import Reason as Reason
    from kvkeep.prefixstore.receipt import Receipt as Receipt
    from kvkeep.prefixstore.report import Report as Report
    from kvkeep.prefixstore.space import Hit as Hit
    from kvkeep.prefixstore.space import Space as Space
    from kvkeep.prefixstore.store import Store as Store
    from kvkeep.prefixstore.store import open_store as open
    from kvkeep.prefixstore.tokens import media_tokens as media_tokens

from kvkeep._version import __version__ as __version__

_HOMES = {
    "Decision": ("kvkeep.prefixstore.policy", "Decision"),
    "Hit": ("kvkeep.prefixstore.space", "Hit"),
    "KvkeepError": ("kvkeep.errors", "KvkeepError"),
    "LayerLimit": ("kvkeep.prefixstore.policy", "LayerLimit"),
    "Pin": ("kvkeep.prefixstore.pins", "Pin"),
    "PromptCache": ("kvkeep.hooks.prompt_cache", "PromptCache"),
    "Reason": ("kvkeep.prefixstore.policy", "Reason"),
    "Receipt": ("kvkeep.prefixstore.receipt", "Receipt"),
    "Report": ("kvkeep.prefixstore.report", "Report"),
    "Session": ("kvkeep.hooks.session", "Session"),
    "Space": ("kvkeep.prefixstore.space", "Space"),
    "Store": ("kvkeep.prefixstore.store", "Store"),
    "media_tokens": ("kvkeep.prefixstore.tokens", "media_tokens"),
    "open": ("kvkeep.prefixstore.store", "open_store"),
    "session": ("kvkeep.hooks.session", "session"),
}

__all__ = [
    "Decision",
    "Hit",
    "KvkeepError",
    "LayerLimit",
    "Pin",
    "PromptCache",
    "Reason",
    "Receipt",
    "Report",
    "Session",
    "Space",
    "Store",
    "__version__",
    "media_tokens",
    "open",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
