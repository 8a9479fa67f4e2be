"""A progress bar on stderr, for work that takes seconds or minutes."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

_MIN_SECONDS = 0.2  # minimum time between two updates of the plain bar
_WIDTH = 30  # characters of the plain bar


class Bar:
    """A bar of tqdm if it is installed, else a line that is rewritten. Shows nothing if stderr is no terminal.

    Args:
        what: the work, in front of the bar.
        total: the amount of work.
        unit: ``"B"`` for bytes, or the name of a step.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._shown_at = -math.inf
        self._tqdm: Any = None
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        if not self._is_shown:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        in_bytes = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
        self._tqdm = tqdm(total=total, unit=unit, desc=what, file=sys.stderr, **in_bytes)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, done: int, note: str = "") -> None:
        """Sets the amount that is done. `note` describes its last part."""
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(note, refresh=False)
            self._tqdm.update(done - self._done)
        elif self._is_shown and (done == self._total or time.monotonic() - self._shown_at > _MIN_SECONDS):
            filled = _WIDTH * done // max(self._total, 1)
            sys.stderr.write(f"\r{self._what} |{'#' * filled:{_WIDTH}}| {self._amount(done)}  {note[-40:]:40}")
            sys.stderr.flush()
            self._shown_at = time.monotonic()
        self._done = done

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Adds to the amount that is done."""
        self.show(self._done + amount, note)

    def close(self) -> None:
        """Ends the line of the bar."""
        if self._tqdm is not None:
            self._tqdm.close()
        elif self._is_shown and self._done:
            sys.stderr.write("\n")

    def _amount(self, done: int) -> str:
        """Returns an amount as text, in the unit of the bar."""
        if self._unit == "B":
            return f"{done / 2**20:,.1f} of {self._total / 2**20:,.1f} MiB"
        return f"{done} of {self._total} {self._unit}s"
