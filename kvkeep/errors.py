"""The errors of kvkeep, each with a remedy and an exit code.

::

    KvkeepError                      1   anything unexpected
    ├── Refused                      5   what was handed in cannot be stored; nothing was written
    │   ├── UnknownCache                 no codec claims the class
    │   ├── BatchCache                   a batch layout: take the rows out first
    │   ├── EmptyCache                   nothing to store yet
    │   ├── MalformedCache               fields that contradict each other
    │   ├── OffsetMismatch               tokens and caches disagree
    │   ├── UncommittedRound             a speculative round is open: tokens may be rejected
    │   └── BadTokens                    not a flat sequence of integers
    ├── StoreUnusable                6   the store cannot be opened or written
    │   ├── NotAStore                    the folder holds something else
    │   ├── StoreTooNew                  written by a newer kvkeep
    │   ├── StoreReadOnly                no permission to write
    │   ├── StoreClosed                  used after close, or after a fork
    │   ├── StoreInUse                   another process has it open
    │   ├── StoreExposed                 others may change what it holds
    │   └── StoreFull                    disk, reserve or budget has no room
    ├── Damaged                      4   stored bytes that are not what was written
    │   └── CorruptFrame                 checksum, length, shape or dtype is wrong
    ├── NewerFormat                  7   a record of a newer format version: kept, not read
    ├── BadRound                     5   a speculative round out of order; a ValueError as well
    ├── FileRefused                  5   a prompt-cache file that cannot be read
    ├── BadScheme                    5   no cache can be made so; a ValueError as well
    └── IdentityUnknown              5   a space cannot be told apart from others

Exit code 2 is click's own (usage), 3 is a miss.
"""

from __future__ import annotations

EXIT_MISS = 3


class KvkeepError(Exception):
    """Root of the tree. ``remedy`` says what to do; it ends the message."""

    exit_code = 1
    remedy = ""

    def __init__(self, problem: str, *, remedy: str | None = None) -> None:
        self.problem = problem
        if remedy is not None:
            self.remedy = remedy
        super().__init__(f"{problem}\n  {self.remedy}" if self.remedy else problem)


class Refused(KvkeepError):
    """What was handed in cannot be stored exactly; nothing was written."""

    exit_code = 5


class UnknownCache(Refused):
    """No codec claims the class of a cache."""

    remedy = "Add a codec for it (docs/add-a-kind.md), or leave this model out of the store."


class BatchCache(Refused):
    """A batch layout holds rows of several requests."""

    remedy = "Take each row out with `cache.extract(i)` and store it with its own tokens."


class EmptyCache(Refused):
    """A cache that covers no token has nothing to resume."""

    remedy = "Run the model over at least one token before the snapshot."


class MalformedCache(Refused):
    """The fields of a cache contradict each other."""

    remedy = "The cache was changed by hand or by a newer mlx-lm; rebuild it from the prompt."


class OffsetMismatch(Refused):
    """The tokens and the caches do not cover the same positions."""

    remedy = "Hand in exactly the tokens whose keys and values the caches hold."


class UncommittedRound(Refused):
    """A cache in the middle of a speculative round may hold tokens that are rejected."""

    remedy = "Commit or roll back the round before the snapshot."


class BadTokens(Refused):
    """Tokens must be one flat sequence of integers that fit 64 bits."""

    remedy = "Pass a list, a numpy array or an mx.array of token ids."


class StoreUnusable(KvkeepError):
    """The store cannot be opened or written."""

    exit_code = 6


class NotAStore(StoreUnusable):
    """The folder is not a kvkeep store."""

    remedy = "Name an empty or a new folder with --store or KVKEEP_STORE."


class StoreTooNew(StoreUnusable):
    """The store was written by a newer kvkeep."""

    exit_code = 7
    remedy = "Upgrade kvkeep, or use another folder; nothing was changed."


class StoreReadOnly(StoreUnusable):
    """The store may not be written by this user."""

    remedy = "Give this user write permission, or name another folder with --store."


class StoreClosed(StoreUnusable):
    """The store was closed, or opened in a parent process before a fork."""

    remedy = "Open the store again in this process with kvkeep.open(path)."


class StoreInUse(StoreUnusable):
    """What is asked for needs the store to be open nowhere else."""

    remedy = "Stop the processes that use this store, and try again."


class StoreExposed(StoreUnusable):
    """Others than this user may change what the store holds."""

    remedy = (
        "chmod go-w the folder; or, if everyone who can write there may read and change all "
        "prompts, pass allow_shared=True or set KVKEEP_ALLOW_SHARED=1."
    )


class StoreFull(StoreUnusable):
    """There is no room: disk, reserve or budget."""

    remedy = "Free disk space, raise max_bytes, or run `kvkeep evict --to SIZE`."


class Damaged(KvkeepError):
    """Stored bytes are not what was written."""

    exit_code = 4
    remedy = "Run `kvkeep verify` to see what is affected; reads stop before the damage."


class CorruptFrame(Damaged):
    """A frame whose checksum, length, shape or dtype is wrong."""


class NewerFormat(KvkeepError):
    """A record of a newer format version; it is kept and not read."""

    exit_code = 7
    remedy = "Upgrade kvkeep to read it."


class BadRound(KvkeepError, ValueError):
    """A speculative round was used out of order, or over caches that cannot be set back."""

    exit_code = 5


class FileRefused(KvkeepError):
    """A prompt-cache file that cannot be read."""

    exit_code = 5


class BadScheme(KvkeepError, ValueError):
    """A cache cannot be made so: the layer, the value and the valid ones are named."""

    exit_code = 5
    remedy = "docs/caches.md lists the schemes, and what each kind of layer takes."


class IdentityUnknown(KvkeepError):
    """What identifies the weights, the tokenizer or an adapter cannot be read."""

    exit_code = 5
    remedy = (
        "Pass model_path=… (a folder, or a hub id in the local cache), "
        "or identity={…} and layout=…."
    )
