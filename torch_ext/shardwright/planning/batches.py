"""Plans of many tensors that move together: `plan_many`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._native import _planner
from ..layouts import argument_values
from .plans import check_layout

BUCKET_BYTES = 64 << 20  # default size of a buffer
BUCKETS = 3  # default number of buffers

_PAIRS = "a list of pairs of layouts, such as [(src, dst)]"

Pair = tuple[_planner.Layout, _planner.Layout]  # source, destination


def plan_many(pairs: Sequence[Pair], *, bucket_bytes: int = BUCKET_BYTES, buckets: int = BUCKETS) -> _planner.BatchPlan:
    """Plans a `redistribute_many`, and returns the plan with its costs.

    Args:
        pairs: (source, destination) layouts of each tensor, on any meshes, with any placements; destinations must not
            be partial.
        bucket_bytes, buckets: as in `redistribute_many`.

    Returns:
        The plan. ``print`` shows bytes, rounds, messages and memory next to their bounds; they are also attributes, and
        ``to_json()`` has them all.

    Raises:
        ValueError: an argument is invalid.
    """
    return _planner.BatchPlan(batch_of(checked_layouts(pairs, "pairs", _PAIRS, 2), bucket_bytes, buckets))


def batch_of(pairs: Sequence[Pair], bucket_bytes: Any, buckets: Any) -> _planner.Batch:
    """Returns the batch that moves these pairs. Raises ValueError if a pair differs in shape or dtype."""
    for i, (src, dst) in enumerate(pairs):
        if tuple(src.shape) != tuple(dst.shape):
            raise ValueError(f"item {i} must have two layouts of one shape, got {src} and {dst}")
        if src.dtype != dst.dtype:
            raise ValueError(f"item {i} must have two layouts of one dtype, got {src} and {dst}")
    return _planner.Batch(
        [src for src, _ in pairs],
        [dst for _, dst in pairs],
        [(i, i, None) for i in range(len(pairs))],
        bucket_bytes,
        buckets,
    )


def checked_layouts(value: Any, argument: str, allowed: str, length: int) -> list[Any]:
    """Returns the items of `value` as tuples of `length` entries, the last two of which are layouts."""
    checked = []
    for i, item in enumerate(argument_values.items(value, argument, allowed)):
        parts = item if type(item) is tuple else tuple(argument_values.items(item, f"{argument}: item {i}", allowed))
        if len(parts) != length:
            raise ValueError(f"{argument} must be {allowed}, got {len(parts)} entries in item {i}")
        for layout in parts[-2:]:
            check_layout(f"{argument}: item {i}", layout)
        checked.append(parts)
    return checked
