"""Reports the progress of a transfer to a function, or as a bar on rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

import torch

from ..progress_bar import Bar
from .setup import SetUp


class Progress:
    """Counts the destinations whose elements this rank has received or sent, in bytes of global tensors.

    The total is therefore equal on all ranks.
    """

    def __init__(self, wanted: bool | Callable[[int, int, str], None], made: SetUp, rank: int) -> None:
        self._made = made
        self._done_bytes = 0
        self._total = 0
        self._report: Callable[[int, int, str], None] | None = None
        self._bar: Bar | None = None
        if wanted is False or (wanted is True and rank != 0):
            return
        self._total = sum(map(self._bytes_of, range(len(made.names))))
        if wanted is True:
            self._bar = bar = Bar("transfer", self._total, "B")
            self._report = lambda done, total, name: bar.show(done, name)
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
