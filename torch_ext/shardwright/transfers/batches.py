"""Batches of a transfer's tensors, bound to a process group.

A batch moves boxes of elements from sources to a range of destinations, in rounds of messages (csrc/batch).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._native import _planner, _runtime
from ..rules import explaining
from ..runtime import argument_checks, executables, groups, plain_tensors
from .setup import SetUp


class Run:
    """A running batch. Every method may be called any number of times."""

    def __init__(self, pending: _runtime.BatchHandle | None, num_destinations: int) -> None:
        self._pending = pending
        self._num_destinations = num_destinations

    def in_order(self) -> list[int]:
        """Returns the indices of the destinations, in the order in which this rank completes its part of them."""
        return self._pending.completion_order if self._pending is not None else list(range(self._num_destinations))

    def wait_for_sources(self) -> None:
        if self._pending is not None:
            self._pending.wait_for_sources()

    def wait_for(self, index: int) -> None:
        """Waits until a destination is complete on this rank, and its elements for other ranks were sent."""
        if self._pending is not None:
            self._pending.wait_for_destination_and_sends(index)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def is_done(self) -> bool:
        return self._pending is None or self._pending.is_done()


class BoundBatch:
    """The batch that fills a range of destinations. All ranks of the group make equal batches."""

    def __init__(
        self,
        made: SetUp,
        destinations: range,
        bucket_bytes: int,
        buckets: int,
        group: dist.ProcessGroup | None,
        first_sender: int = 0,
    ) -> None:
        begin, end = (
            bisect.bisect_left(made.items, edge, key=lambda item: item.destination)
            for edge in (destinations.start, destinations.stop)
        )
        items = made.items[begin:end]
        index_of: dict[int, int] = {}
        for item in items:
            index_of.setdefault(item.source, len(index_of))
        self._made = made
        self._sources = list(index_of)  # by index in the batch: index of the source in the transfer
        self._layouts = [made.sources[source] for source in index_of]
        try:
            self.batch = _planner.Batch(
                self._layouts,
                [made.destinations[destination] for destination in destinations],
                [(index_of[item.source], item.destination - destinations.start, item.axes) for item in items],
                bucket_bytes,
                buckets,
                first_sender,
            )
            self._executable = executables.bind_batch(self.batch, made.device.type, group) if items else None
        except ValueError as error:  # a bucket is too small
            raise explaining.with_names(error, [made.names[item.destination] for item in items]) from None
        # Layouts to which sources with pending reductions are reduced before the batch starts, by index.
        self._reduced = self.batch.reductions()
        self._group = groups.weakly(group)

    def start(self, destinations: Sequence[torch.Tensor]) -> Run:
        """Starts the batch, which writes to this rank's tensors of the destinations, in order."""
        if self._executable is None:
            return Run(None, len(destinations))
        sources = list(map(self._source, range(len(self._sources))))
        into = [tensor.detach() for tensor in destinations]
        torch.autograd.graph.increment_version(into)  # the writes bypass autograd
        return Run(self._executable.start(sources, into), len(into))

    def _source(self, index: int) -> torch.Tensor:
        """Returns this rank's part of a source of the batch. Reduces pending values first, which is collective."""
        source = argument_checks.resolved(self._made.source(self._sources[index]).detach())
        if (reduced := self._reduced.get(index)) is None:
            return source
        return plain_tensors.redistribute_local(source, self._layouts[index], reduced, group=self._group.get())
