"""`Layout.nearest`: the layout on given ranks to which least has to move."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from . import _planner

Intervals = list[tuple[int, int]]


def nearest_lists(src: _planner.Layout, ranks: Sequence[int]) -> tuple[int, list[Intervals]]:
    """Returns the tensor dim to cut, and the intervals that each rank gets.

    Minimises over the layouts that cut one tensor dim, each of its rows going to one rank and no rank getting more than
    ``ceil(n / len(ranks))`` of n. A rank that gets a row keeps what it holds of it, so the rows that ranks keep are a
    matching between rows and places, where a place of rank r is worth what r holds of each of its rows. Sets of places
    that can be matched are a matroid, so it is exact to give places in the order of worth, each rank as many as still
    can be matched.
    """
    regions = {rank: src.region(rank) for rank in ranks if rank in set(src.mesh.ranks)}
    sizes = src.flattened_shape
    best: tuple[int, int, list[Intervals]] | None = None
    for dim, size in enumerate(sizes):
        held = [regions[rank][dim] if rank in regions else [] for rank in ranks]
        worth = [
            math.prod(_length(one) for d, one in enumerate(regions[rank]) if d != dim) if rank in regions else 0
            for rank in ranks
        ]
        lists, kept = _share_out(size, held, worth)
        if best is None or kept > best[0]:
            best = (kept, dim, lists)
    if best is None:
        raise ValueError("src: a tensor without dims cannot be cut; allowed is one dim or more")
    return best[1], best[2]


def _length(intervals: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in intervals)


def _share_out(size: int, held: list[Intervals], worth: list[int]) -> tuple[list[Intervals], int]:
    """Returns the rows of each rank, and what ranks keep in all, counted by worth."""
    count = len(held)
    most = -(-size // count)
    ends = sorted({0, size, *(end for one in held for interval in one for end in interval)})
    atoms = list(zip(ends, ends[1:], strict=False))
    has = [[a for a, atom in enumerate(atoms) if any(b <= atom[0] and atom[1] <= e for b, e in one)] for one in held]
    left = [end - begin for begin, end in atoms]  # rows of an atom that nobody keeps yet
    kept: list[dict[int, int]] = [{} for _ in held]  # by rank: rows of each atom
    for rank in sorted(range(count), key=lambda r: (-worth[r], r)):
        room = most if worth[rank] else 0
        while room and (path := _path(rank, has, left, kept)):
            room -= _push(path, room, left, kept)
    return _intervals(atoms, kept, most), sum(worth[r] * sum(kept[r].values()) for r in range(count))


def _path(rank: int, has: list[list[int]], left: list[int], kept: list[dict[int, int]]) -> list[int]:
    """Ranks and atoms in turn, from a rank to an atom with rows left: each rank takes from the atom after it what the
    next rank had of it, which takes from the next atom instead."""
    came: dict[int, tuple[int, int]] = {}  # rank: the rank and the atom before it
    queue = deque([rank])
    while queue:
        at = queue.popleft()
        for atom in has[at]:
            if left[atom]:
                path = [at, atom]
                while at != rank:
                    at, through = came[at]
                    path = [at, through, *path]
                return path
            for other, of_other in enumerate(kept):
                if other != rank and other not in came and of_other.get(atom):
                    came[other] = (at, atom)
                    queue.append(other)
    return []


def _push(path: list[int], room: int, left: list[int], kept: list[dict[int, int]]) -> int:
    ranks, atoms = path[::2], path[1::2]
    losers = list(zip(ranks[1:], atoms, strict=False))
    rows = min(room, left[atoms[-1]], *(kept[rank][atom] for rank, atom in losers))
    for rank, atom in zip(ranks, atoms, strict=True):
        kept[rank][atom] = kept[rank].get(atom, 0) + rows
    for rank, atom in losers:
        kept[rank][atom] -= rows
    left[atoms[-1]] -= rows
    return rows


def _intervals(atoms: Intervals, kept: list[dict[int, int]], most: int) -> list[Intervals]:
    """Cuts the atoms among those that keep them; what nobody keeps goes to the first ranks with room."""
    lists: list[Intervals] = [[] for _ in kept]
    room = [most - sum(one.values()) for one in kept]
    for atom, (begin, end) in enumerate(atoms):
        at = begin
        wanted = [(rank, one[atom]) for rank, one in enumerate(kept) if one.get(atom)]
        rest = end - begin - sum(rows for _, rows in wanted)
        for rank in range(len(kept)):
            rows = min(rest, room[rank])
            if rows:
                wanted.append((rank, rows))
                room[rank] -= rows
                rest -= rows
        for rank, rows in wanted:
            own = lists[rank]
            if own and own[-1][1] == at:
                own[-1] = (own[-1][0], at + rows)
            else:
                own.append((at, at + rows))
            at += rows
    return lists
