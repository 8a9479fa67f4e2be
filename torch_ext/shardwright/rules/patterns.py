"""Patterns of names: ``*`` is text without dots, ``**`` is any text, ``{}`` is a number without leading zeros.

names("layers.*.q", all_names)      {("0",): "layers.0.q", ("1",): "layers.1.q"}
put("layers.*.qkv", ("1",))         "layers.1.qkv"
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

Captured = tuple[str, ...]  # the texts that stand for the wildcards, in order

_WILDCARD = re.compile(r"\*\*|\*|\{\}")
_MEANING = {"**": "(.*)", "*": "([^.]+)", "{}": "(0|[1-9][0-9]*)"}


def wildcards(pattern: str) -> list[str]:
    """Returns the wildcards of a pattern, in order."""
    return _WILDCARD.findall(pattern)


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern, with one group per wildcard."""
    literals = map(re.escape, _WILDCARD.split(pattern))
    meanings = [_MEANING[wildcard] for wildcard in wildcards(pattern)]
    return re.compile("".join(text for pair in zip(literals, [*meanings, ""]) for text in pair))


def match(pattern: str, name: str) -> Captured | None:
    """Returns the texts of the wildcards in a name; None if the name does not match."""
    matched = _compiled(pattern).fullmatch(name)
    return None if matched is None else matched.groups()


def names(pattern: str, tensor_names: Iterable[str]) -> dict[Captured, str]:
    """Returns the names that match, by the texts of the wildcards. A pattern without wildcards matches only itself."""
    if not wildcards(pattern):
        return {(): pattern} if pattern in tensor_names else {}
    matched = _compiled(pattern).fullmatch
    return {found.groups(): name for name in tensor_names if (found := matched(name)) is not None}


def put(pattern: str, captured: Sequence[str]) -> str:
    """Replaces the wildcards, in order, by the texts `captured`. Their numbers must be equal."""
    literals = _WILDCARD.split(pattern)
    return "".join(text for pair in zip(literals, [*captured, ""]) for text in pair)


def is_listed(name: str, listed: Iterable[str]) -> bool:
    """True if one of these patterns matches."""
    return any(match(pattern, name) is not None for pattern in listed)
