"""From measured points to the figures of a `Topology`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# A mesh dim goes by the link of its node, or between nodes, unless that is off by so much more than one of its own.
_OWN_LINK_GAIN = 0.25

# Passes of the fit, each with weights 1 / (what the point was off by in the one before); less than this is not off.
_PASSES = 20
_SLACK = 0.02

PS = 1e12

INSIDE, BETWEEN, ALONG = "inside", "between", "mesh dim "


class Point(NamedTuple):
    """An all-to-all among `peers` + 1 ranks that each send `sent_bytes` in all, and what it took."""

    peers: int
    sent_bytes: int
    seconds: float


class Fit(NamedTuple):
    """Seconds for a step, for a message and for a byte, with the mean relative error over the points."""

    step: float
    message: float
    byte: float
    error: float


def fit(points: Sequence[Point], step: float | None = None) -> Fit:
    """The figures that explain the points best, none of them negative; with the fixed cost given, if it is.

    A byte costs what the largest messages take longer than the next smaller ones, because buffers on the way take in
    some of every message at once, which small ones are made of. The others are fitted to what is left, where bytes are
    less than half of the time. Where all points have as many peers, what a message costs cannot be told from what a
    step costs, and is 0.
    """
    seconds = torch.tensor([point.seconds for point in points], dtype=torch.float64)
    peers = torch.tensor([point.peers for point in points], dtype=torch.float64)
    sent_bytes = torch.tensor([point.sent_bytes for point in points], dtype=torch.float64)
    columns = torch.stack([torch.ones_like(peers), peers, sent_bytes], dim=1) / seconds[:, None]
    target = torch.ones_like(seconds) - (step or 0.0) * columns[:, 0]
    byte = _byte_of(points)
    are_short = byte * sent_bytes < seconds / 2
    target -= byte * columns[:, 2]
    free = [0] * (step is None) + [1] * (step is not None or len(set(peers.tolist())) > 1) + [2] * (byte == 0)
    if byte > 0 and bool(are_short.any()):
        columns, target = columns[are_short], target[are_short]
    weights = torch.ones_like(target)
    for _ in range(_PASSES):
        figures = _least_squares(columns, target, weights, free)
        off = (columns @ figures - target).abs()
        weights = 1 / off.clamp(min=_SLACK)
    found = figures.tolist()
    made = Fit(found[0] if step is None else step, found[1], byte or found[2], 0.0)
    return made._replace(error=_error(points, made))


def _byte_of(points: Sequence[Point]) -> float:
    """From the two largest sizes, in the median over numbers of peers; 0 where that cannot be told."""
    slopes: list[float] = []
    for peers in {point.peers for point in points}:
        *_, smaller, larger = [None, None, *sorted((p.sent_bytes, p.seconds) for p in points if p.peers == peers)]
        if smaller is not None and larger is not None and larger[0] > smaller[0]:
            slopes.append((larger[1] - smaller[1]) / (larger[0] - smaller[0]))
    return max(statistics.median(slopes), 0.0) if slopes else 0.0


def figures_of(points: dict[str, list[Point]], crossing: set[str]) -> dict[str, Fit]:
    """By the name of the series, and for `inside` and `between` in any case. `crossing`: of mesh dims between nodes."""
    first = INSIDE if INSIDE in points else BETWEEN
    inside = fit(points[first])
    between = fit(points[BETWEEN], inside.step) if first == INSIDE and BETWEEN in points else inside
    fits = {INSIDE: inside, BETWEEN: between}
    for where in points:
        if where.startswith(ALONG):
            common = between if where in crossing else inside
            common = common._replace(error=_error(points[where], common))
            own = fit(points[where], inside.step)
            fits[where] = own if own.error + _OWN_LINK_GAIN < common.error else common
    return fits


def _error(points: Sequence[Point], figures: Fit) -> float:
    """Mean over the points of how far off they are, relative to what was measured."""
    off = [figures.step + p.peers * figures.message + p.sent_bytes * figures.byte - p.seconds for p in points]
    return sum(abs(one) / p.seconds for one, p in zip(off, points)) / len(points)


def _least_squares(columns: Any, target: Any, weights: Any, free: list[int]) -> Any:
    """Figures of 0 or more; those that are not free are 0. Tries every set of them, there are seven at most."""
    best, least = torch.zeros(columns.shape[1], dtype=torch.float64), float("inf")
    scale = weights.sqrt()
    for count in range(1, len(free) + 1):
        for chosen in itertools.combinations(free, count):
            some = columns[:, list(chosen)]
            figures = torch.linalg.lstsq(some * scale[:, None], (target * scale)[:, None]).solution[:, 0]
            off = float((weights * (some @ figures - target) ** 2).sum())
            if off < least and bool((figures >= 0).all()):
                least = off
                best = torch.zeros_like(best)
                best[list(chosen)] = figures
    return best


def link_of(found: Fit) -> dict[str, int]:
    return {"message_ps": round(found.message * PS), "ps_per_kib": max(1, round(found.byte * 1024 * PS))}
