"""The tokens of a prompt: from text, a chat or a file of ids."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError


class PromptUnreadable(KvkeepError):
    """A prompt's file does not hold what its option says."""

    exit_code = 2


@dataclass(frozen=True)
class Source:
    """One of four ways to name a prompt; the others are ``None``."""

    prompt: str | None = None
    prompt_file: Path | None = None
    chat: Path | None = None
    tokens_file: Path | None = None
    raw: bool = False

    def tokens(self, tokenizer: Any, *, continued: bool = False) -> list[int]:
        """The token ids, as ``tokenizer`` writes them.

        Text becomes one user message where the tokenizer has a chat template, unless
        ``raw``. The model's turn follows; with ``continued`` the last message stays open
        instead, as ``mlx_lm.cache_prompt`` leaves it. Raises
        ``PromptUnreadable``.
        """
        if self.tokens_file is not None:
            return parse_ids(_read(self.tokens_file), str(self.tokens_file))
        if self.chat is not None:
            messages = parse_chat(_read(self.chat), str(self.chat))
            return _templated(tokenizer, messages, continued)
        text = _argument(self.prompt) if self.prompt is not None else _read(self.prompt_file)
        if not self.raw and tokenizer.has_chat_template:
            return _templated(tokenizer, [{"role": "user", "content": text}], continued)
        return _filled(list(tokenizer.encode(text)))


def parse_ids(text: str, name: str) -> list[int]:
    """Token ids of a JSON list, or of integers apart by white space.

    >>> parse_ids("[1, 2]", "f"), parse_ids("1 2", "f")
    ([1, 2], [1, 2])
    """
    remedy = "Write [1, 2, 3], or the numbers with spaces or line ends between them."
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
        ids = [int(x) for x in found if not isinstance(x, bool | float)]
    except (ValueError, TypeError) as error:
        problem = f"{name} is neither a JSON list nor integers: {error}"
        raise PromptUnreadable(problem, remedy=remedy) from error
    if any(not -(1 << 63) <= x < 1 << 63 for x in ids):
        raise PromptUnreadable(f"{name} holds integers that do not fit 64 bits", remedy=remedy)
    if len(ids) != len(found):
        raise PromptUnreadable(f"{name} holds values that are not integers", remedy=remedy)
    return _filled(ids)


def parse_chat(text: str, name: str) -> list[dict[str, Any]]:
    """The messages of a JSON list of objects, each with a role."""
    remedy = 'Write [{"role": "user", "content": "…"}, …].'
    try:
        messages = json.loads(text)
    except ValueError as error:
        raise PromptUnreadable(f"{name} is not JSON: {error}", remedy=remedy) from error
    if not isinstance(messages, list) or not messages:
        raise PromptUnreadable(f"{name} is not a list of messages", remedy=remedy)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptUnreadable(f"{name} holds a message without a role", remedy=remedy)
    return messages


def _templated(tokenizer: Any, messages: list[dict[str, Any]], continued: bool) -> list[int]:
    ending = {"add_generation_prompt": not continued}
    if continued:
        ending["continue_final_message"] = True
    try:
        ids = tokenizer.apply_chat_template(messages, **ending)
    except Exception as error:  # a template is a program, and says in its own way what it lacks
        raise PromptUnreadable(
            f"The chat template of the model cannot write this prompt: {error}",
            remedy="Look at the messages' roles and contents; --raw leaves the template out.",
        ) from error
    return _filled(list(ids))


def _filled(ids: list[int]) -> list[int]:
    if not ids:
        raise PromptUnreadable("The prompt is empty", remedy="Give it at least one token.")
    return ids


def _read(path: Path | None) -> str:
    try:
        if path is None or str(path) == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        name = "stdin" if path is None or str(path) == "-" else path
        raise PromptUnreadable(f"{name} is not text in UTF-8", remedy="Convert it.") from error


def _argument(text: str) -> str:
    """An argument as UTF-8, whatever the locale took it for."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise PromptUnreadable("--prompt is not text in UTF-8", remedy="Convert it.") from error
