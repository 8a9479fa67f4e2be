"""`Layout.nearest`: the layout on given ranks to which least has to move."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from .._native import _planner

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
    assert best is not None, "a tensor without dims cannot be cut"
    return best[1], best[2]


def _length(intervals: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in intervals)


def _share_out(size: int, held: list[Intervals], worth: list[int]) -> tuple[list[Intervals], int]:
    """Returns the rows of each rank, and what ranks keep in all, counted by worth."""
    count = len(held)
    most = -(-size // count)
    ends = sorted({0, size, *(end for one in held for interval in one for end in interval)})
    runs = list(zip(ends, ends[1:], strict=False))
    begins = [{x for b, e in one for x in ends[bisect_left(ends, b) : bisect_left(ends, e)]} for one in held]
    # Runs that the same ranks hold are of one kind, whose rows are worth the same.
    holders = [tuple(rank for rank, own in enumerate(begins) if begin in own) for begin, _ in runs]
    numbers = {ranks: number for number, ranks in enumerate(dict.fromkeys(holders))}
    kinds = [numbers[ranks] for ranks in holders]
    left = [0] * len(numbers)  # rows of a kind that nobody keeps yet
    for kind, (begin, end) in zip(kinds, runs, strict=True):
        left[kind] += end - begin
    has = [[kind for ranks, kind in numbers.items() if rank in ranks] for rank in range(count)]
    kept: list[dict[int, int]] = [{} for _ in held]  # by rank: rows of each kind
    for rank in sorted(range(count), key=lambda r: (-worth[r], r)):
        room = most if worth[rank] else 0
        while room and (path := _path(rank, has, left, kept)):
            room -= _push(path, room, left, kept)
    total = sum(worth[r] * sum(kept[r].values()) for r in range(count))
    return _intervals(runs, kinds, kept, most), total


def _path(rank: int, has: list[list[int]], left: list[int], kept: list[dict[int, int]]) -> list[int]:
    """Ranks and kinds in turn, from a rank to a kind with rows left: each rank takes from the kind after it what the
    next rank had of it, which takes from the next kind instead."""
    came: dict[int, tuple[int, int]] = {}  # rank: the rank and the kind before it
    queue = deque([rank])
    while queue:
        at = queue.popleft()
        for kind in has[at]:
            if left[kind]:
                path = [at, kind]
                while at != rank:
                    at, through = came[at]
                    path = [at, through, *path]
                return path
            for other, of_other in enumerate(kept):
                if other != rank and other not in came and of_other.get(kind):
                    came[other] = (at, kind)
                    queue.append(other)
    return []


def _push(path: list[int], room: int, left: list[int], kept: list[dict[int, int]]) -> int:
    ranks, kinds = path[::2], path[1::2]
    losers = list(zip(ranks[1:], kinds, strict=False))
    rows = min(room, left[kinds[-1]], *(kept[rank][kind] for rank, kind in losers))
    for rank, kind in zip(ranks, kinds, strict=True):
        kept[rank][kind] = kept[rank].get(kind, 0) + rows
    for rank, kind in losers:
        kept[rank][kind] -= rows
    left[kinds[-1]] -= rows
    return rows


def _intervals(runs: Intervals, kinds: list[int], kept: list[dict[int, int]], most: int) -> list[Intervals]:
    """Cuts the runs among those that keep some of their kind; what nobody keeps goes to the first ranks with room."""
    lists: list[Intervals] = [[] for _ in kept]
    room = [most - sum(one.values()) for one in kept]
    keepers = {kind: [rank for rank, one in enumerate(kept) if one.get(kind)] for kind in set(kinds)}
    for kind, (at, end) in zip(kinds, runs, strict=True):
        keeping: Iterator[tuple[int, Any, int]] = ((rank, kept[rank], kind) for rank in keepers[kind])
        for rank, left, number in itertools.chain(keeping, ((rank, room, rank) for rank in range(len(kept)))):
            if at == end:
                break
            rows = min(end - at, left[number])
            left[number] -= rows
            own = lists[rank]
            if rows and own and own[-1][1] == at:
                own[-1] = (own[-1][0], at + rows)
            elif rows:
                own.append((at, at + rows))
            at += rows
    return lists
