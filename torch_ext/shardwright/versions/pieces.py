"""Boxes of elements that each rank sends to each other rank, from the layouts of a transfer.

A piece is the part of an item (rules/items.py) that one rank of its source sends to one rank of its destination. Both
ranks compute equal lists of pieces, so messages need no description of their contents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from .._native import _planner
from ..rules.items import Axis, Item

Intervals = tuple[tuple[int, int], ...]  # [begin, end) of global indices along one dim, in local order
Region = tuple[Intervals, ...]  # the part of a rank: intervals of each dim
Index: TypeAlias = "slice | torch.Tensor"  # local indices along one dim

_ONE: Intervals = ((0, 1),)  # of a dim that a tensor does not have


class Side(NamedTuple):
    """The elements of a piece in one local tensor: indices along each dim, and where each dim of the piece is."""

    indices: tuple[Index, ...]
    dims: tuple[int, ...]  # for each dim of the piece, the dim of the local tensor; -1 for none

    def read(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the elements, with the dims of the piece: a view if the indices are contiguous."""
        for dim, index in enumerate(self.indices):
            if isinstance(index, slice):
                local = local.narrow(dim, index.start, index.stop - index.start)
            else:
                local = local.index_select(dim, index.to(local.device))
        kept = [dim for dim in self.dims if dim >= 0]
        others = [dim for dim in range(local.ndim) if dim not in kept]  # each has one index
        local = local.permute([*kept, *others])
        for _ in others:
            local = local.squeeze(-1)
        for place, dim in enumerate(self.dims):
            if dim < 0:
                local = local.unsqueeze(place)
        return local

    def is_view(self) -> bool:
        """Returns True if `read` returns a view."""
        return all(isinstance(index, slice) for index in self.indices)

    def write(self, local: torch.Tensor, values: torch.Tensor) -> None:
        """Copies values, of the shape that `read` returns, into the local tensor.

        Each dim of the piece must be the same dim of `local`.
        """
        if self.is_view():
            self.read(local).copy_(values)
            return
        grid = []
        for dim, index in enumerate(self.indices):
            ones = [1] * len(self.indices)
            ones[dim] = -1
            flat = torch.arange(index.start, index.stop) if isinstance(index, slice) else index
            grid.append(flat.to(local.device).view(ones))
        local.index_put_(tuple(grid), values.to(local.dtype))


class Piece(NamedTuple):
    """Elements that one rank sends to another. `numel` is their number."""

    item: int
    source: int
    destination: int
    taken: Side  # in the sender's part of the source
    put: Side  # in the receiver's part of the destination; its dims are those of the piece
    numel: int


class Ends(NamedTuple):
    """The source and destination tensors of a transfer. Their layouts have ranks of the transfer's group."""

    sources: Sequence[_planner.Layout]
    destinations: Sequence[_planner.Layout]
    items: Sequence[Item]
    rank: int  # of this process

    def dtypes_of_items(self) -> list[torch.dtype]:
        """Returns the dtype in which the elements of each item are sent: the smaller of its two ends."""
        found = []
        for item in self.items:
            ends = self.sources[item.source].dtype, self.destinations[item.destination].dtype
            before, after = (getattr(torch, dtype) for dtype in ends)
            found.append(after if after.itemsize <= before.itemsize else before)
        return found

    def sent(self) -> dict[int, list[Piece]]:
        """Returns the pieces that this rank sends to each rank, in the order of the items."""
        found: dict[int, list[Piece]] = {}
        for number, item in enumerate(self.items):
            source, destination = self.sources[item.source], self.destinations[item.destination]
            holders = _holders(source)
            region = _regions(source).get(self.rank)
            if region is None:
                continue
            for rank, wanted in _regions(destination).items():
                if _sender(holders[region], rank, number) == self.rank:
                    _add(found.setdefault(rank, []), number, item, region, wanted)
        return {rank: pieces for rank, pieces in found.items() if pieces}

    def received(self) -> dict[int, list[Piece]]:
        """Returns the pieces that this rank receives from each rank, in the order of the items."""
        found: dict[int, list[Piece]] = {}
        for number, item in enumerate(self.items):
            wanted = _regions(self.destinations[item.destination]).get(self.rank)
            if wanted is None:
                continue
            for region, holders in _holders(self.sources[item.source]).items():
                sender = _sender(holders, self.rank, number)
                _add(found.setdefault(sender, []), number, item, region, wanted)
        return {rank: pieces for rank, pieces in found.items() if pieces}


def _sender(holders: Sequence[int], receiver: int, item: int) -> int:
    """Returns the holder that sends to a receiver: itself if it is one, else the holders take turns."""
    return receiver if receiver in holders else holders[(receiver + item) % len(holders)]


@functools.lru_cache(maxsize=4096)
def _regions(layout: _planner.Layout) -> dict[int, Region]:
    """Returns the region of each rank of a layout."""
    return {rank: tuple(map(tuple, layout.region(rank))) for rank in layout.mesh.ranks}


@functools.lru_cache(maxsize=4096)
def _holders(layout: _planner.Layout) -> dict[Region, list[int]]:
    """Returns the ranks that hold each region of a layout."""
    found: dict[Region, list[int]] = {}
    for rank, region in _regions(layout).items():
        found.setdefault(region, []).append(rank)
    return found


def _add(pieces: list[Piece], number: int, item: Item, held: Region, wanted: Region) -> None:
    """Adds the piece of an item between two regions, if they have common elements."""
    taken: list[Index] = [slice(0, 1)] * len(held)
    put: list[Index] = [slice(0, 1)] * len(wanted)
    dims = [-1] * len(wanted)
    numel = 1
    for axis in item.axes:
        src_dim, dst_dim = axis[:2]
        inside = held[src_dim] if src_dim >= 0 else _ONE, wanted[dst_dim] if dst_dim >= 0 else _ONE
        found = _common(*inside, axis)
        if found is None:
            return
        if src_dim >= 0:
            taken[src_dim] = found[0]
        if dst_dim >= 0:
            put[dst_dim], dims[dst_dim] = found[1], src_dim
        numel *= found[2]
    ends = Side(tuple(taken), tuple(dims)), Side(tuple(put), tuple(range(len(wanted))))
    pieces.append(Piece(number, item.source, item.destination, *ends, numel))


@functools.lru_cache(maxsize=1 << 16)
def _common(held: Intervals, wanted: Intervals, axis: Axis) -> tuple[Index, Index, int] | None:
    """Returns the local indices of an axis's common elements in both tensors, and their number; None without any.

    held [4, 8), wanted [0, 6), axis (dim 0, dim 0, begins at 0 in both, length 6): [0, 2), [4, 6), 2
    """
    _, _, src_begin, dst_begin, length = axis
    place = torch.full((length,), -1)  # by index on the axis: the local index in the source
    _for_overlaps(held, src_begin, length, lambda axis_slice, local: place[axis_slice].copy_(local))
    sources, destinations = [], []

    def collect(axis_slice: slice, local: torch.Tensor) -> None:
        here = place[axis_slice]
        sources.append(here[here >= 0])
        destinations.append(local[here >= 0])

    _for_overlaps(wanted, dst_begin, length, collect)
    taken = torch.cat(sources) if sources else place[:0]
    if not len(taken):
        return None
    return _index(taken), _index(torch.cat(destinations)), len(taken)


def _for_overlaps(intervals: Intervals, begin: int, length: int, use: Callable[[slice, torch.Tensor], object]) -> None:
    """Calls `use` for each interval that overlaps an axis: with the range of the axis, and the local indices."""
    local = 0
    for first, last in intervals:
        low, high = max(first, begin), min(last, begin + length)
        if low < high:
            use(slice(low - begin, high - begin), torch.arange(local + low - first, local + high - first))
        local += last - first


def _index(indices: torch.Tensor) -> Index:
    """Returns a slice for ascending contiguous indices, else the indices."""
    first = int(indices[0])
    is_contiguous = bool((indices == torch.arange(first, first + len(indices))).all())
    return slice(first, first + len(indices)) if is_contiguous else indices
