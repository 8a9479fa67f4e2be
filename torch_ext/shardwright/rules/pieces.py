"""The sources of a tensor's elements: pieces of source tensors, each a box whose dims match dims of its source.

    fuse("qkv", ["q", "k"]) of two tensors of 4 x 8:
        qkv, 8 x 8:    piece of q: dims (0 -> 0, 4 rows from 0 to 0), (1 -> 1, 8 columns from 0 to 0)
                       piece of k: dims (0 -> 0, 4 rows from 0 to 4), (1 -> 1, 8 columns from 0 to 0)

Rules (rules.py) change pieces; no rule changes elements. A cast is noted with the piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Indices of a source dim, in order, that are indices of a dim of the tensor."""

    src_dim: int
    dim: int
    src_start: int
    start: int
    length: int


class Piece(NamedTuple):
    """A box of the tensor: its source, and where each of its dims comes from.

    ``fixed`` are dims of the tensor in which the box has one index, as (dim, index); ``src_fixed`` are those of the
    source. Every dim of either is in one run or fixed. ``cast`` is the dtype to which its elements are cast.
    """

    source: str
    runs: tuple[Run, ...]
    fixed: tuple[tuple[int, int], ...] = ()
    src_fixed: tuple[tuple[int, int], ...] = ()
    cast: str | None = None

    @property
    def elements(self) -> int:
        count = 1
        for run in self.runs:
            count *= run.length
        return count

    def box(self, ndim: int) -> Box:
        sides = [(0, 0)] * ndim
        for run in self.runs:
            sides[run.dim] = (run.start, run.start + run.length)
        for dim, index in self.fixed:
            sides[dim] = (index, index + 1)
        return tuple(sides)

    def moved(self, dim: int, by: int) -> Piece:
        runs = tuple(run._replace(start=run.start + by) if run.dim == dim else run for run in self.runs)
        return self._replace(runs=runs, fixed=tuple((d, i + by if d == dim else i) for d, i in self.fixed))

    def cut(self, dim: int, begin: int, end: int) -> Piece | None:
        """Returns what lies in [begin, end) of the dim; None if nothing does."""
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
        """Dim d becomes dim ``new_dim[d]``."""
        runs = tuple(run._replace(dim=new_dim[run.dim]) for run in self.runs)
        return self._replace(runs=runs, fixed=tuple((new_dim[d], i) for d, i in self.fixed))

    def with_fixed(self, dim: int, index: int) -> Piece:
        return self._replace(fixed=(*self.fixed, (dim, index)))

    def at(self, dim: int, index: int) -> Piece | None:
        """Returns what has this index in the dim, without the dim, but with later dims still where they were."""
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
    """A tensor, and the pieces of sources that it consists of."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


Tensors = dict[str, Mapped]


def source_tensor(name: str, shape: Sequence[int], dtype: str) -> Mapped:
    """Returns a source as a tensor that consists of itself."""
    piece = Piece(name, tuple(Run(d, d, 0, 0, size) for d, size in enumerate(shape)))
    return Mapped(tuple(shape), dtype, (piece,) if piece.elements else ())


# [begin, end) for each dim.
Box = tuple[tuple[int, int], ...]


class Coverage(NamedTuple):
    """Boxes of a tensor that no piece gives, and boxes that several give, with the numbers of these pieces."""

    missing: list[Box]
    repeated: list[tuple[Box, tuple[int, ...]]]


def coverage(shape: Sequence[int], boxes: Sequence[Box]) -> Coverage:
    """Compares boxes, within the shape, with the whole tensor.

    The first dim is cut wherever a box begins or ends. Between two cuts the same boxes are present, and these are
    compared in the remaining dims. Boxes that follow one another in one dim take time in proportion to their number.
    """
    found = Coverage([], [])
    if 0 not in shape:
        _compare(tuple(shape), boxes, range(len(boxes)), (), found)
    return found


def _compare(shape: tuple[int, ...], boxes: Sequence[Box], present: Iterable[int], at: Box, found: Coverage) -> None:
    present = tuple(present)
    dim = len(at)
    if not present:
        found.missing.append((*at, *((0, size) for size in shape[dim:])))
        return
    if dim == len(shape):
        if len(present) > 1:
            found.repeated.append((at, present))
        return
    changes: dict[int, list[int]] = {0: [], shape[dim]: []}  # where boxes begin (number) and end (~number)
    for number in present:
        begin, end = boxes[number][dim]
        if begin < end:
            changes.setdefault(begin, []).append(number)
            changes.setdefault(end, []).append(~number)
    now: set[int] = set()
    cuts = sorted(changes)
    for begin, end in zip(cuts, cuts[1:]):
        for change in changes[begin]:
            if change < 0:
                now.discard(~change)
            else:
                now.add(change)
        _compare(shape, boxes, sorted(now), (*at, (begin, end)), found)


def box_text(box: Box) -> str:
    """``[0:4, 2:8]``; ``[]`` for a scalar."""
    return f"[{', '.join(f'{begin}:{end}' for begin, end in box)}]"
