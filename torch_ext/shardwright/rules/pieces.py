"""The sources of a tensor's elements: pieces of source tensors, each a box whose dims match dims of its source.

    fuse("qkv", ["q", "k"]) of two tensors of 4 x 8:
        qkv, 8 x 8:    piece of q: dims (0 -> 0, 4 rows from 0 to 0), (1 -> 1, 8 columns from 0 to 0)
                       piece of k: dims (0 -> 0, 4 rows from 0 to 4), (1 -> 1, 8 columns from 0 to 0)

Rules (kinds.py) change pieces, never elements. A cast is recorded in the piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """A range of indices of a source dim, which are a range of indices of a dim of the tensor, in the same order."""

    src_dim: int
    dim: int
    src_start: int  # first index in the source dim
    start: int  # first index in the dim of the tensor
    length: int


class Piece(NamedTuple):
    """A box of the tensor, its source, and the mapping of its dims to dims of the source.

    ``fixed``: (dim, index) for dims of the tensor in which the box has one index; ``src_fixed``: (dim, index) for such
    dims of the source. Every dim of the tensor and of the source is in exactly one run or fixed. ``cast``: the dtype to
    which the elements are cast, or None.
    """

    source: str
    runs: tuple[Run, ...]
    fixed: tuple[tuple[int, int], ...] = ()
    src_fixed: tuple[tuple[int, int], ...] = ()
    cast: str | None = None

    @property
    def elements(self) -> int:
        """Returns the number of elements."""
        count = 1
        for run in self.runs:
            count *= run.length
        return count

    def box(self, ndim: int) -> Box:
        """Returns the box of the tensor, which has `ndim` dims, that the piece fills."""
        sides = [(0, 0)] * ndim
        for run in self.runs:
            sides[run.dim] = (run.start, run.start + run.length)
        for dim, index in self.fixed:
            sides[dim] = (index, index + 1)
        return tuple(sides)

    def moved(self, dim: int, by: int) -> Piece:
        """Returns the piece with indices of a dim increased by `by`."""
        runs = tuple(run._replace(start=run.start + by) if run.dim == dim else run for run in self.runs)
        return self._replace(runs=runs, fixed=tuple((d, i + by if d == dim else i) for d, i in self.fixed))

    def cut(self, dim: int, begin: int, end: int) -> Piece | None:
        """Returns the part with indices [begin, end) of the dim; None if it is empty."""
        for d, index in self.fixed:
            if d == dim:
                return self if begin <= index < end else None
        runs = []
        for run in self.runs:
            if run.dim == dim:
                first, last = max(begin, run.start), min(end, run.start + run.length)
                if first >= last:
                    return None
                run = run._replace(src_start=run.src_start + first - run.start, start=first, length=last - first)
            runs.append(run)
        return self._replace(runs=tuple(runs))

    def with_dims(self, new_dim: Sequence[int]) -> Piece:
        """Returns the piece with dim d renumbered to ``new_dim[d]``."""
        runs = tuple(run._replace(dim=new_dim[run.dim]) for run in self.runs)
        return self._replace(runs=runs, fixed=tuple((new_dim[d], i) for d, i in self.fixed))

    def with_fixed(self, dim: int, index: int) -> Piece:
        """Returns the piece with one index in a further dim of the tensor."""
        return self._replace(fixed=(*self.fixed, (dim, index)))

    def at(self, dim: int, index: int) -> Piece | None:
        """Returns the slice at this index, or None if it is empty. Without the dim; later dims keep their numbers."""
        piece = self.cut(dim, index, index + 1)
        if piece is None:
            return None
        taken = [run for run in piece.runs if run.dim == dim]
        return piece._replace(
            runs=tuple(run for run in piece.runs if run.dim != dim),
            fixed=tuple((d, i) for d, i in piece.fixed if d != dim),
            src_fixed=(*piece.src_fixed, *((run.src_dim, run.src_start) for run in taken)),
        )


class Mapped(NamedTuple):
    """A tensor and the pieces of sources that it consists of."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


# Mapped tensors by name.
Tensors = dict[str, Mapped]


def source_tensor(name: str, shape: Sequence[int], dtype: str) -> Mapped:
    """Returns a source as a tensor that consists of one piece."""
    piece = Piece(name, tuple(Run(d, d, 0, 0, size) for d, size in enumerate(shape)))
    return Mapped(tuple(shape), dtype, (piece,) if piece.elements else ())


# An interval [begin, end) for each dim.
Box = tuple[tuple[int, int], ...]


class Coverage(NamedTuple):
    """Boxes of a tensor without a piece, and boxes with several pieces, together with the indices of these pieces."""

    missing: list[Box]
    repeated: list[tuple[Box, tuple[int, ...]]]


def coverage(shape: Sequence[int], boxes: Sequence[Box]) -> Coverage:
    """Finds the elements of a tensor that are in no box or in several. All boxes must be within the shape.

    The first dim is cut wherever a box begins or ends. Between two cuts the set of boxes is constant, and is compared
    in the remaining dims. Example: boxes [0:3] and [2:4] of shape (5,) give missing [4:5] and repeated [2:3]. Time is
    linear in the number of boxes if they follow one another in one dim.
    """
    result = Coverage([], [])
    if 0 not in shape:
        _compare(tuple(shape), boxes, range(len(boxes)), (), result)
    return result


def _compare(shape: tuple[int, ...], boxes: Sequence[Box], present: Iterable[int], at: Box, result: Coverage) -> None:
    """Compares the boxes `present` within the region `at` of the first dims, and adds gaps and overlaps to `result`."""
    present = tuple(present)
    dim = len(at)
    if not present:
        result.missing.append((*at, *((0, size) for size in shape[dim:])))
        return
    if dim == len(shape):
        if len(present) > 1:
            result.repeated.append((at, present))
        return
    changes: dict[int, list[int]] = {0: [], shape[dim]: []}  # where boxes begin (index) and end (~index)
    for index in present:
        begin, end = boxes[index][dim]
        if begin < end:
            changes.setdefault(begin, []).append(index)
            changes.setdefault(end, []).append(~index)
    now: set[int] = set()
    cuts = sorted(changes)
    for begin, end in zip(cuts, cuts[1:]):
        for change in changes[begin]:
            if change < 0:
                now.discard(~change)
            else:
                now.add(change)
        _compare(shape, boxes, sorted(now), (*at, (begin, end)), result)


def box_text(box: Box) -> str:
    """Returns ``[0:4, 2:8]``; ``[]`` for a scalar."""
    return f"[{', '.join(f'{begin}:{end}' for begin, end in box)}]"
