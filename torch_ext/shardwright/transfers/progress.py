"""Reports the progress of a transfer to a function, or as a bar on rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

import torch

from ..progress_bar import Bar
from .setup import Setup


class Progress:
    """Counts the bytes of the destinations that are complete on this rank, and reports them.

    A destination counts with the bytes of its global tensor, so that the total is equal on all ranks.

    Args:
        wanted: the argument `progress` of `transfer`.
        setup: the transfer.
        rank: this rank.
    """

    def __init__(self, wanted: bool | Callable[[int, int, str], None], setup: Setup, rank: int) -> None:
        self._setup = setup
        self._done_bytes = 0
        self._total = 0
        self._report: Callable[[int, int, str], None] | None = None
        self._bar: Bar | None = None
        if wanted is False or (wanted is True and rank != 0):
            return
        self._total = sum(map(self._bytes_of, range(len(setup.names))))
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
        """Records that a destination, given by its index, is complete on this rank."""
        if self._report is not None:
            self._done_bytes += self._bytes_of(destination)
            self._report(self._done_bytes, self._total, self._setup.names[destination])

    def _bytes_of(self, destination: int) -> int:
        """Returns the bytes of the global tensor of a destination."""
        layout = self._setup.destinations[destination]
        return math.prod(layout.shape) * int(getattr(torch, layout.dtype).itemsize)
