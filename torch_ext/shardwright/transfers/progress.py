"""Reports the progress of a transfer to a function, or as a bar on rank 0."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from .setup import SetUp

_LEAST_SECONDS = 0.2  # minimum time between two updates of the plain bar
_WIDTH = 30  # characters of the plain bar


class Progress:
    """Counts the destinations whose elements this rank has received or sent, in bytes of global tensors.

    The total is therefore equal on all ranks.
    """

    def __init__(self, wanted: bool | Callable[[int, int, str], None], made: SetUp, rank: int) -> None:
        self._made = made
        self._done_bytes = 0
        self._total = 0
        self._report: Callable[[int, int, str], None] | None = None
        self._bar: _Bar | None = None
        if wanted is False or (wanted is True and rank != 0):
            return
        self._total = sum(map(self._bytes_of, range(len(made.names))))
        if wanted is True:
            self._bar = _Bar(self._total)
            self._report = self._bar.show
        else:
            self._report = wanted

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, destination: int) -> None:
        """Records that this rank has done its part of a destination."""
        if self._report is not None:
            self._done_bytes += self._bytes_of(destination)
            self._report(self._done_bytes, self._total, self._made.names[destination])

    def _bytes_of(self, destination: int) -> int:
        """Returns the bytes of the global tensor of a destination."""
        layout = self._made.destinations[destination]
        return math.prod(layout.shape) * int(getattr(torch, layout.dtype).itemsize)


class _Bar:
    """A bar on stderr: tqdm's if it is installed, else a line that is rewritten."""

    def __init__(self, total_bytes: int) -> None:
        self._tqdm: Any = None
        self._done = 0
        self._shown_at = -math.inf
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._tqdm = tqdm(total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc="transfer")

    def show(self, done_bytes: int, total_bytes: int, name: str) -> None:
        if self._tqdm is not None:
            self._tqdm.update(done_bytes - self._done)
            self._tqdm.set_postfix_str(name, refresh=False)
        elif done_bytes == total_bytes or time.monotonic() - self._shown_at > _LEAST_SECONDS:
            filled = _WIDTH * done_bytes // max(total_bytes, 1)
            amount = f"{done_bytes / 2**20:,.1f} of {total_bytes / 2**20:,.1f} MiB"
            sys.stderr.write(f"\rtransfer |{'#' * filled:{_WIDTH}}| {amount}  {name[-40:]:40}")
            sys.stderr.flush()
            self._shown_at = time.monotonic()
        self._done = done_bytes

    def close(self) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
        elif self._done:
            sys.stderr.write("\n")
