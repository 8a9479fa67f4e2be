"""Gradients of a weight on their way from autograd to the part at rest."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist

from .. import _planner
from ..layout import Layout
from .formats import with_dtype
from .policy import Dtypes

# Starts a move from one layout to another into a tensor.
Move: TypeAlias = Callable[[_planner.Layout, _planner.Layout, torch.Tensor, torch.Tensor], "dist.Work | None"]


@dataclasses.dataclass
class Arriving:
    """A gradient that is being reduced. What is sent stays until that is done."""

    sent: torch.Tensor
    received: torch.Tensor
    work: dist.Work | None
    finish: Callable[[torch.Tensor], torch.Tensor | None]


class Gradients:
    """Those of one weight.

    Two kinds wait for later backwards: whole ones that are not reduced yet, and, where weights are also replicated,
    parts that are not reduced over the replicas yet.
    """

    def __init__(self, dtypes: Dtypes, rest: _planner.Layout, move: Move) -> None:
        self.dtypes = dtypes
        self._whole: tuple[torch.Tensor, _planner.Layout] | None = None
        self._part: torch.Tensor | None = None
        self._rest, self._move = rest, move
        self._rank = dist.get_rank()

    @property
    def bytes_per_element(self) -> int:
        """Of a whole gradient, together with what is sent in its place."""
        use, sent = self.dtypes.use, self.dtypes.gradients
        return use.itemsize + (sent.itemsize if use != sent else 0)

    @property
    def are_kept(self) -> bool:
        return self._whole is not None

    def keep(self, gradient: torch.Tensor, layout: _planner.Layout) -> None:
        """Adds a whole gradient to those that wait for a reduction."""
        if self._whole is None:
            # A copy, because autograd may hand out a view of something larger.
            self._whole = gradient.to(self.dtypes.reduce, copy=True), layout
        elif self._whole[1] != layout:
            raise RuntimeError(
                f"a gradient is placed as {layout.placements} where the one that it is added to is placed as "
                f"{self._whole[1].placements}; allowed without gradient sync are gradients that are placed alike"
            )
        else:
            self._whole[0].add_(gradient)

    def drop(self) -> None:
        self._whole = self._part = None

    def start(
        self, gradient: tuple[torch.Tensor, _planner.Layout] | None, over_replicas: bool, divide_by: float | None
    ) -> Arriving | None:
        """Starts to reduce what waits, and this; None if there is neither.

        Args:
            gradient: whole, of this backward, and how it is placed.
            over_replicas: False keeps the part until a later reduction.
            divide_by: of sums; None: averages.
        """
        if self._whole is not None:
            if gradient is not None:
                self.keep(*gradient)
            gradient, self._whole = self._whole, None
        if gradient is None:
            return None
        whole, layout = gradient
        partial, rest = _reducing_by("P(avg)" if divide_by is None else "P(sum)", layout), self._rest
        between: _planner.Layout = _pending_over_replicas(partial, rest)
        if over_replicas and self._part is None and self.dtypes.gradients == self.dtypes.reduce:
            between = rest

        def finish(part: torch.Tensor) -> torch.Tensor | None:
            return self._finish(part, between, over_replicas, divide_by)

        if self.dtypes.gradients != self.dtypes.reduce:
            return self._exchange(whole, partial, between, finish)
        given = whole.to(self.dtypes.reduce)
        part = given.new_empty(rest.local_shape(self._rank))
        work = self._start(partial, between, given, part)
        return Arriving(given, part, work, finish)

    def _start(
        self, src: _planner.Layout, dst: _planner.Layout, given: torch.Tensor, out: torch.Tensor
    ) -> dist.Work | None:
        return self._move(with_dtype(src, given.dtype), with_dtype(dst, given.dtype), given, out)

    def _exchange(
        self,
        gradient: torch.Tensor,
        partial: _planner.Layout,
        between: _planner.Layout,
        finish: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> Arriving:
        """Sends gradients in a dtype that is not the one in which they are summed: contributions side by side."""
        pairs = list(zip(partial.placements, between.placements))
        dims = [i for i, (p, q) in enumerate(pairs) if p.startswith("P(") and p != q]
        src, dst = (_side_by_side(layout, dims, self.dtypes.gradients) for layout in (partial, between))
        sent = gradient.to(self.dtypes.gradients)[(None,) * len(dims)]
        received = sent.new_empty(dst.local_shape(self._rank))
        divisor = math.prod(partial.mesh.shape[i] for i in dims if partial.placements[i] == "P(avg)")

        def add_up(contributions: torch.Tensor) -> torch.Tensor | None:
            each = contributions.flatten(0, len(dims) - 1) if dims else contributions[None]
            part = each[0].to(self.dtypes.reduce, copy=True)
            for other in each[1:]:  # in the order of ranks
                part += other
            return finish(part.div_(divisor) if divisor > 1 else part)

        return Arriving(sent, received, self._move(src, dst, sent, received), add_up)

    def _finish(
        self, part: torch.Tensor, layout: _planner.Layout, over_replicas: bool, divide_by: float | None
    ) -> torch.Tensor | None:
        """Takes a part in this layout; returns the gradient of the part at rest, if it is complete."""
        if self._part is not None:
            part += self._part
            self._part = None
        if not over_replicas and layout != self._rest:
            self._part = part
            return None
        if layout != self._rest:
            reduced = torch.empty_like(part)
            work = self._start(layout, self._rest, part, reduced)
            if work is not None:
                work.wait()
            part = reduced
        return part if divide_by is None else part.div_(divide_by)


def _reducing_by(operation: str, layout: _planner.Layout) -> Layout:
    placements = [operation if text == "P(avg)" else text for text in layout.placements]
    return _like(layout, layout.shape, placements, layout.shard_order)


def _pending_over_replicas(partial: _planner.Layout, rest: _planner.Layout) -> Layout:
    pairs = zip(partial.placements, rest.placements)
    return _like(rest, rest.shape, [p if r == "R" else r for p, r in pairs], rest.shard_order)


def _side_by_side(layout: _planner.Layout, dims: list[int], dtype: torch.dtype) -> Layout:
    """With a tensor dim in front for each of these mesh dims, which cuts it where contributions are still apart."""
    placements = [re.sub(r"^(\w+\()(\d+)", lambda m: f"{m[1]}{int(m[2]) + len(dims)}", p) for p in layout.placements]
    order = {dim + len(dims): list(cuts) for dim, cuts in layout.shard_order.items()}
    for front, dim in enumerate(dims):
        if placements[dim].startswith("P("):
            placements[dim] = f"S({front})"
            order[front] = [dim]
    shape = [*(layout.mesh.shape[dim] for dim in dims), *layout.shape]
    return with_dtype(_like(layout, shape, placements, order), dtype)


def _like(layout: _planner.Layout, shape: object, placements: list[str], order: dict[int, list[int]]) -> Layout:
    return Layout(layout.mesh, shape, placements, layout.dtype, order, "literal", layout.flattened)  # type: ignore[arg-type]
