"""Converts mapped tensors to the items of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .pieces import Mapped, Piece

# (source dim, destination dim, begin in the source, begin in the destination, length); -1 for no dim.
Axis = tuple[int, int, int, int, int]


class Item(NamedTuple):
    """A box of elements that moves from a source to a destination, both given by index."""

    source: int
    destination: int
    axes: tuple[Axis, ...]


def items_of(tensors: Mapping[str, Mapped], names: Sequence[str]) -> tuple[list[str], list[Item]]:
    """Returns the names of the source tensors, and the items that move them to the tensors `names`.

    `Item.source` and `Item.destination` are indices into the two lists of names.
    """
    index_of: dict[str, int] = {}
    items = []
    for destination, name in enumerate(names):
        for piece in tensors[name].pieces:
            items.append(Item(index_of.setdefault(piece.source, len(index_of)), destination, _axes_of(piece)))
    return list(index_of), items


def _axes_of(piece: Piece) -> tuple[Axis, ...]:
    """Returns the axes of a piece: its runs, then dims of the source and of the tensor with one index."""
    runs = ((run.src_dim, run.dim, run.src_start, run.start, run.length) for run in piece.runs)
    taken = ((dim, -1, index, 0, 1) for dim, index in piece.src_fixed)
    put = ((-1, dim, 0, index, 1) for dim, index in piece.fixed)
    return (*runs, *taken, *put)
