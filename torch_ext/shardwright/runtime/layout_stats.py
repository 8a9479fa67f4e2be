"""Calls, bytes and times of redistributes by their layouts: ``sw.stats(by="layout")``."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .._native import _runtime

T = TypeVar("T")

on = False  # True while `record_layouts` is on


class _Row:
    """The counts of one pair of layouts: calls, received bytes, total and longest time of a call in seconds."""

    __slots__ = ("bytes", "calls", "seconds", "slowest")

    def __init__(self) -> None:
        self.calls = self.bytes = 0
        self.seconds = self.slowest = 0.0


_rows: dict[str, _Row] = {}
# The key in `_rows` of each executable that has run. Several executables may have the same key.
_keys: weakref.WeakKeyDictionary[_runtime.Executable, str] = weakref.WeakKeyDictionary()


def record_layouts(on: bool = True) -> None:
    """Records calls, bytes and times of redistributes by their layouts, for ``sw.stats(by="layout")``.

    A call then takes about two microseconds more. What was recorded is kept when recording ends; `sw.reset_stats` drops
    it. Redistributes in compiled code, products and `redistribute_many` are not recorded.

    Args:
        on: True to record.
    """
    globals()["on"] = bool(on)


def measure(executable: _runtime.Executable, call: Callable[[], T]) -> T:
    """Returns the result of `call`, which runs the executable, and adds it to the executable's row."""
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    key = _keys.get(executable)
    if key is None:
        fields = executable.signature
        key = _keys[executable] = f"{fields['tensor']} on {fields['mesh']}: {fields['src']} -> {fields['dst']}"
    row = _rows.get(key) or _rows.setdefault(key, _Row())
    row.calls += 1
    row.bytes += executable.received_bytes
    row.seconds += seconds
    row.slowest = max(row.slowest, seconds)
    return result


def by_layout() -> dict[str, dict[str, Any]]:
    """Returns the rows as dicts, the longest total time first. Raises RuntimeError if nothing was recorded."""
    if not on and not _rows:
        raise RuntimeError('stats(by="layout"): nothing is recorded; call sw.debug.record_layouts() first')
    rows = sorted(_rows.items(), key=lambda item: -item[1].seconds)
    return {key: {name: getattr(row, name) for name in ("calls", "bytes", "seconds", "slowest")} for key, row in rows}


def reset() -> None:
    """Drops all rows."""
    _rows.clear()
