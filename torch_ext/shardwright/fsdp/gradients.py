"""Gradients of a weight: taken from autograd, reduced, and added to the sharded parameter's gradient.

full gradient         the gradient that a backward computes on this rank (layout `grad` of layouts.py)
accumulated gradient  the sum of full gradients of backwards that do not reduce; a later backward reduces it
part                  this rank's shard of the reduced gradient (layout `store`)
replicas              the ranks of the mesh dims over which `store` is replicated
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .._native import _planner
from ..layouts.layout import Layout
from . import extensions
from .agreed_layouts import AgreedLayout
from .formats import Dtypes, with_dtype
from .gather import Move
from .layouts import Layouts
from .offload import HostCopies
from .packing import DeferredWork
from .write_back import GradientWriteBack, is_zero


@dataclasses.dataclass
class PendingReduction:
    """A reduction of one weight's gradient in progress. It keeps the sent tensor alive until it ends."""

    sent: torch.Tensor | None  # the gradient in the dtype of messages; None if it was copied to a shared message
    received: torch.Tensor  # written until `work` ends
    work: dist.Work | DeferredWork | None  # None: already done
    # Returns the part, from `received`; None if the part is kept until a later reduction over replicas.
    finish: Callable[[torch.Tensor], torch.Tensor | None]
    is_deferred: bool = False  # this rank has contributed zeros; the end of the backward adds or drops the part


class _ReductionLayouts(NamedTuple):
    """The layouts of a reduction, for gradients of one layout. Except `src` and `dst`, they have the sum's dtype.

    If messages have another dtype than the sum, the reduce-scatter becomes an all-to-all: it moves the contributions
    from layout `src` to layout `dst`, and each rank sums those to its shard. These layouts have a leading tensor dim
    for each mesh dim in `stacked_dims`, along which the contributions are stacked.
    """

    partial: _planner.Layout  # the full gradient before the reduction
    between: _planner.Layout  # the sharded gradient, with the sum over replicas still pending
    stacked_dims: Sequence[int] = ()
    src: _planner.Layout | None = None
    dst: _planner.Layout | None = None


class Gradients:
    """The gradients of one weight that autograd has computed and no reduction has completed.

    As in FSDP2, two kinds are kept for later backwards: the accumulated gradient, and a shard that is not reduced over
    the replicas yet.
    """

    def __init__(self, dtypes: Dtypes, layouts: Layouts, move: Move) -> None:
        self.dtypes = dtypes
        self.agreed = AgreedLayout(layouts, move)  # the layout of all gradients that are reduced
        self._accumulated: tuple[torch.Tensor, _planner.Layout] | None = None  # the accumulated gradient
        # A shard that is not reduced over the replicas yet.
        self._partial_reduced: tuple[torch.Tensor, _planner.Layout] | None = None
        self._reduced_in_chunks: torch.Tensor | None = None  # part that was reduced in chunks in this backward
        self._shards, self._move = with_dtype(layouts.store, dtypes.reduce), move
        # By layout of the full gradient, and whether gradients are averaged.
        self._reduction_layouts: dict[tuple[_planner.Layout, bool], _ReductionLayouts] = {}
        # Key and value of the latest entry of `_reduction_layouts`.
        self._latest: tuple[_planner.Layout | None, bool, Any] = (None, True, None)
        self._rank = dist.get_rank()

    @property
    def bytes_per_element(self) -> int:
        """Bytes per element of a full gradient, including its copy in the dtype of messages."""
        use, sent = self.dtypes.use, self.dtypes.gradients
        return use.itemsize + (sent.itemsize if use != sent else 0)

    @property
    def has_accumulated(self) -> bool:
        """True if there is an accumulated gradient."""
        return self._accumulated is not None

    @property
    def has_partial_reduced(self) -> bool:
        """True if there is a shard that is not reduced over the replicas yet."""
        return self._partial_reduced is not None

    @property
    def are_pending(self) -> bool:
        """True if a gradient or shard is kept for a later backward."""
        return self._accumulated is not None or self._partial_reduced is not None

    def agree(self, code: int) -> None:
        """Sets the layout of later reductions, by its number. A kept shard keeps it until the shard is reduced."""
        if self._partial_reduced is None:
            self.agreed.adopt(code)

    def accumulate(self, gradient: torch.Tensor, layout: _planner.Layout) -> None:
        """Adds a full gradient to the accumulated one."""
        if self._accumulated is None:
            self._accumulated = gradient.to(self.dtypes.reduce), layout
        elif self._accumulated[1] != layout:
            raise RuntimeError(
                "gradients of a weight must have the same placements in all backwards without gradient sync, got "
                f"{layout.placements} after {self._accumulated[1].placements}"
            )
        else:
            self._accumulated[0].add_(gradient)

    def add_reduced_in_chunks(self, part: torch.Tensor) -> None:
        """Adds a shard that a matmul of the running backward has reduced in chunks, to those since the last take."""
        self._reduced_in_chunks = part if self._reduced_in_chunks is None else self._reduced_in_chunks.add_(part)

    def take_reduced_in_chunks(self) -> list[PendingReduction]:
        """Takes the sum of the shards that were reduced in chunks, as a finished reduction. Empty if there are none."""
        reduced, self._reduced_in_chunks = self._reduced_in_chunks, None
        return [] if reduced is None else [PendingReduction(reduced, reduced, None, lambda part: part)]

    def drop(self) -> None:
        """Discards all gradients that are kept."""
        self._accumulated = self._partial_reduced = self._reduced_in_chunks = None

    def start(
        self,
        gradient: tuple[torch.Tensor, _planner.Layout] | None,
        over_replicas: bool,
        divide_by: float | None,
        move: Move,
    ) -> PendingReduction | None:
        """Starts to reduce the sum of the accumulated gradient and this one. Returns None if there is neither.

        Args:
            gradient: the full gradient of this backward and its layout, or None.
            over_replicas: False keeps the reduced shard until a later reduction over replicas.
            divide_by: the divisor of the sum; None: average.
            move: starts the move of the gradient.
        """
        if self._accumulated is not None:
            if gradient is not None:
                self.accumulate(*gradient)
            gradient, self._accumulated = self._accumulated, None
        if gradient is None:
            return None
        full, layout = self.agreed.conform(*gradient, self.dtypes.reduce), self.agreed.layout
        layouts = self._layouts_for(layout, divide_by is None)
        # One move also reduces over replicas, unless a kept shard must be added first or ranks sum contributions.
        is_complete = over_replicas and self._partial_reduced is None and layouts.src is None
        target = self._shards if is_complete else layouts.between
        sent = full.to(self.dtypes.gradients)
        if layouts.src is not None and layouts.dst is not None:
            sent = sent[(None,) * len(layouts.stacked_dims)]
            received = sent.new_empty(layouts.dst.local_shape(self._rank))
            work = move(layouts.src, layouts.dst, sent, received)
        else:
            received = sent.new_empty(target.local_shape(self._rank))
            work = move(layouts.partial, target, sent, received)

        def finish(received: torch.Tensor) -> torch.Tensor | None:
            part = received if layouts.src is None else self._sum_contributions(received, layouts)
            return self._finish(part, target, over_replicas, divide_by)

        return PendingReduction(sent, received, work, finish)

    def start_with_zeros(
        self, zeros: tuple[torch.Tensor, _planner.Layout], over_replicas: bool, divide_by: float | None, move: Move
    ) -> PendingReduction:
        """Takes part in a reduction with zeros, and drops its result. Gradients that are kept stay."""
        accumulated, self._accumulated = self._accumulated, None
        pending = self.start(zeros, over_replicas, divide_by, move)
        self._accumulated = accumulated
        assert pending is not None
        finish = pending.finish

        def finish_and_drop(received: torch.Tensor) -> None:
            kept = self._partial_reduced
            finish(received)
            self._partial_reduced = kept

        return dataclasses.replace(pending, finish=finish_and_drop)

    def _layouts_for(self, layout: _planner.Layout, averages: bool) -> _ReductionLayouts:
        """Returns the layouts of the reduction of a full gradient in `layout`. `averages`: average, not sum."""
        if self._latest[0] is layout and self._latest[1] == averages:
            return self._latest[2]
        layouts = self._reduction_layouts.get((layout, averages))
        if layouts is None:
            operation = "P(avg)" if averages else "P(sum)"
            placements = [operation if text == "P(avg)" else text for text in layout.placements]
            partial = _like(layout, layout.shape, placements, layout.shard_order, self.dtypes.reduce)
            shards = self._shards
            pairs = list(zip(partial.placements, shards.placements))
            placements = [p if r == "R" and p.startswith("P(") else r for p, r in pairs]
            between = _like(shards, shards.shape, placements, shards.shard_order, self.dtypes.reduce)
            layouts = _ReductionLayouts(partial, between)
            if self.dtypes.gradients != self.dtypes.reduce:
                pairs = list(zip(partial.placements, between.placements))
                stacked_dims = [dim for dim, (p, q) in enumerate(pairs) if p.startswith("P(") and p != q]
                src, dst = (_stacked_layout(each, stacked_dims, self.dtypes.gradients) for each in (partial, between))
                layouts = _ReductionLayouts(partial, between, stacked_dims, src, dst)
            self._reduction_layouts[layout, averages] = layouts
        self._latest = (layout, averages, layouts)
        return layouts

    def _sum_contributions(self, contributions: torch.Tensor, layouts: _ReductionLayouts) -> torch.Tensor:
        """Returns the sum or average, in the order of ranks, of contributions that are stacked along leading dims."""
        each = contributions.flatten(0, len(layouts.stacked_dims) - 1) if layouts.stacked_dims else contributions[None]
        part = each[0].to(self.dtypes.reduce, copy=True)
        for other in each[1:]:
            part += other
        averaged = [dim for dim in layouts.stacked_dims if layouts.partial.placements[dim] == "P(avg)"]
        count = math.prod(layouts.partial.mesh.shape[dim] for dim in averaged)
        return part.div_(count) if count > 1 else part

    def _finish(
        self, part: torch.Tensor, layout: _planner.Layout, over_replicas: bool, divide_by: float | None
    ) -> torch.Tensor | None:
        """Completes a shard in `layout`: adds the shard that was kept, and reduces the sum over replicas.

        Returns the part; None if `over_replicas` is False and the sum is kept.
        """
        if self._partial_reduced is not None:
            earlier, self._partial_reduced = self._partial_reduced, None
            if earlier[1] != layout:
                raise RuntimeError(
                    "gradients of a weight must have the same placements in all backwards without all-reduce, got "
                    f"{layout.placements} after {earlier[1].placements}"
                )
            part += earlier[0]
        if not over_replicas and layout != self._shards:
            self._partial_reduced = part, layout
            return None
        if layout != self._shards:
            reduced = torch.empty_like(part)
            work = self._move(layout, self._shards, part, reduced)
            if work is not None:
                work.wait()
            part = reduced
        return part if divide_by is None else part.div_(divide_by)


def _stacked_layout(layout: _planner.Layout, dims: list[int], dtype: torch.dtype) -> Layout:
    """Returns the layout with a leading tensor dim for each mesh dim in `dims`, for the contributions along it.

    A leading dim is sharded over its mesh dim if the placement there is pending, and replicated otherwise. Example, for
    the reduce-scatter of a gradient [8, 8] over 4 ranks with ``dims=[0]``:

        P(sum) of [8, 8], the full gradient   ->  S(0) of [4, 8, 8]: each rank has its own contribution
        S(0) of [8, 8], the reduced gradient  ->  S(1) of [4, 8, 8]: each rank has two rows of all contributions
    """
    placements = [re.sub(r"^(\w+\()(\d+)", lambda m: f"{m[1]}{int(m[2]) + len(dims)}", p) for p in layout.placements]
    order = {dim + len(dims): list(cuts) for dim, cuts in layout.shard_order.items()}
    for front, dim in enumerate(dims):
        if placements[dim].startswith("P("):
            placements[dim] = f"S({front})"
            order[front] = [dim]
    shape = [*(layout.mesh.shape[dim] for dim in dims), *layout.shape]
    return _like(layout, shape, placements, order, dtype)


def _like(
    layout: _planner.Layout,
    shape: Sequence[int],
    placements: Sequence[str],
    order: dict[int, list[int]],
    dtype: torch.dtype,
) -> Layout:
    """Returns a layout on the mesh of `layout` with other properties."""
    return Layout(layout.mesh, shape, placements, dtype, order, "literal", layout.flattened)


@dataclasses.dataclass
class Reduction:
    """The reductions of one unit's gradients in one backward."""

    # Each reduction in progress, after the function that adds or defers its result (`add_reduced_gradient`).
    in_flight: list[tuple[Callable[[torch.Tensor], None], PendingReduction]]

    def finish(self) -> None:
        """Waits for the reductions, and adds their results to the gradients of the sharded parameters."""
        for add, pending in self.in_flight:
            if pending.work is not None:
                pending.work.wait()
            part = pending.finish(pending.received)
            if part is not None:
                add(part)
        self.in_flight = []

    def discard(self) -> None:
        """Waits for the reductions, but drops their results."""
        for _, pending in self.in_flight:
            if pending.work is not None:
                pending.work.wait()
        self.in_flight = []


# ---- the gradient state of one weight


def is_wanted(leaf: torch.Tensor) -> bool:
    """Returns true if the running backward adds to `leaf.grad`. `autograd.grad` and `backward(inputs=)` may not."""
    will_execute = torch._C._will_engine_execute_node  # type: ignore[attr-defined]
    return leaf.requires_grad and will_execute(torch.autograd.graph.get_gradient_edge(leaf).node)


class GradientMixin:
    """Base class of `Weight`: takes gradients from autograd, and adds reduced ones to the sharded parameter's."""

    sharded: nn.Parameter  # the parameter between uses; gets the reduced gradient
    unsharded: nn.Parameter  # the parameter in use; autograd writes its gradient
    memory: torch.Tensor  # the local tensor of `unsharded`
    layouts: Layouts
    gradients: Gradients

    def __init__(self, host_copies: HostCopies | None) -> None:
        self.is_expected = True  # some rank had a gradient in the latest backward that reduced its unit
        self.had_gradient = False  # this rank had a gradient since the last write-back to the sharded parameter
        self._deferred_parts: list[torch.Tensor] = []  # reduced gradients to which this rank has contributed zeros
        self._was_written = False  # the running backward has added a part to the sharded parameter's gradient
        self._write_back = GradientWriteBack(host_copies)
        self._note_gradient: Callable[[torch.Tensor], None] | None = None
        self._watched: nn.Parameter | None = None  # the full parameter whose hook calls `_note_gradient`
        self._requires_grad = False  # `requires_grad` of `unsharded`, unless users have changed it
        self._requires_grad_in_forward: bool | None = None  # the same before the running backward; None outside of it

    def watch_gradients(self, note: Callable[[torch.Tensor], None]) -> None:
        """Makes autograd call `note` each time it has added to the gradient of the unsharded parameter."""
        self._note_gradient = note
        self._watch()

    def _watch(self) -> None:
        """Registers the hook on `unsharded`, once for each tensor, if it requires gradients."""
        self._requires_grad = self.unsharded.requires_grad
        if self._note_gradient is not None and self.unsharded.requires_grad and self._watched is not self.unsharded:
            self.unsharded.register_post_accumulate_grad_hook(self._note_gradient)
            self._watched = self.unsharded

    def adopt_requires_grad(self) -> None:
        """Freezes or unfreezes `sharded` if users have done this to `unsharded`, which modules may have."""
        if self.unsharded.requires_grad != self._requires_grad:
            self._requires_grad = self.unsharded.requires_grad
            self.sharded.requires_grad_(self._requires_grad)

    def match_requires_grad(self, until_end: bool = False) -> None:
        """Freezes or unfreezes both parameters if users have done this to one of them.

        `until_end`: `unsharded` only until the end of this backward, because graphs are compiled for the forward.
        """
        self._requires_grad_in_forward = self._requires_grad if until_end else None
        self.adopt_requires_grad()
        self._set_requires_grad(self.sharded.requires_grad)

    def restore_requires_grad(self) -> None:
        """Undoes the change to `unsharded` of the ending backward."""
        if self._requires_grad_in_forward is not None:
            self._set_requires_grad(self._requires_grad_in_forward)
            self._requires_grad_in_forward = None

    def _set_requires_grad(self, requires_grad: bool) -> None:
        if self.unsharded.requires_grad != requires_grad:
            self.unsharded.requires_grad_(requires_grad)
            self._watch()

    def add_graph_gradient(self, gradient: torch.Tensor) -> None:
        """Adds a gradient from a compiled graph. It is copied, because the graph may reuse its memory."""
        if not self.sharded.requires_grad:
            return  # the parameter was frozen since the graph was compiled
        if self.unsharded.grad is None:
            self.unsharded.grad = torch.empty_like(self.unsharded).copy_(gradient)
        else:
            self.unsharded.grad.add_(gradient)

    @property
    def may_have_gradient(self) -> bool:
        """True if the weight requires gradients, or did when the running step began to use it."""
        return bool(self.sharded.requires_grad or self.unsharded.requires_grad)

    @property
    def has_gradient(self) -> bool:
        """True if this rank has a gradient from autograd, or an accumulated one, that is not reduced yet."""
        return self.unsharded.grad is not None or self.gradients.has_accumulated

    @property
    def layout_code(self) -> int:
        """The number of the layout of this rank's latest gradient (agreed_layouts.py)."""
        agreed, gradient = self.gradients.agreed, self.unsharded.grad
        if agreed.own_dims and gradient is not None:
            agreed.latest = self.layouts.gradient_and_layout(gradient)[1]
        return agreed.code

    def start_reduction(
        self, over_replicas: bool, divide_by: float | None, move: Move, drops_result: bool
    ) -> list[PendingReduction]:
        """Starts to reduce the sum of the gradient from autograd and the accumulated one, or zeros if there is neither.

        Args:
            move: starts the moves of gradients.
            drops_result: contribute zeros and drop the result, so that gradients stay as they are.

        Returns this reduction, and the finished ones of matmuls in chunks.
        """
        if drops_result:
            return [self.gradients.start_with_zeros(self._zeros(), over_replicas, divide_by, move)]
        in_chunks = self.gradients.take_reduced_in_chunks()
        has_any = self.has_gradient or bool(in_chunks)
        self.had_gradient = self.had_gradient or has_any
        taken = self._pop_gradient()
        if not has_any:
            taken = self._zeros()
        pending = self.gradients.start(taken, over_replicas, divide_by, move)
        if pending is not None:
            pending.is_deferred = not has_any
        return in_chunks if pending is None else [*in_chunks, pending]

    def _zeros(self) -> tuple[torch.Tensor, _planner.Layout]:
        """Returns a gradient of zeros in the layout of the other ranks' gradients."""
        layout = self.gradients.agreed.layout
        shape = layout.local_shape(dist.get_rank())
        return torch.zeros(shape, dtype=self.unsharded.dtype, device=self.memory.device), layout

    def accumulate_gradient(self) -> None:
        """Adds the gradient from autograd to the accumulated one, which a later backward reduces."""
        taken = self._pop_gradient()
        if taken is not None:
            self.gradients.accumulate(*taken)

    def _pop_gradient(self) -> tuple[torch.Tensor, _planner.Layout] | None:
        """Clears the gradient of `unsharded`. Returns its local tensor and layout; None if there was none."""
        gradient, self.unsharded.grad = self.unsharded.grad, None
        if gradient is None:
            return None
        gradient, layout = self.layouts.gradient_and_layout(gradient)
        self.gradients.agreed.latest = layout
        return extensions.as_plain(gradient), layout

    def add_reduced_gradient(self, part: torch.Tensor) -> None:
        """Adds a reduced gradient to that of the sharded parameter, with the deferred ones, so that hooks run once.

        With offload, `finish_gradients` completes this.
        """
        parts, self._deferred_parts = self._deferred_parts, []
        for deferred in parts:
            part += deferred
        self._was_written = True
        self._write_back.add(self.sharded, part)

    def receiver_of(self, pending: PendingReduction) -> Callable[[torch.Tensor], None]:
        """Returns the function that adds the result of a reduction, or keeps it until `end_backward`."""
        return self._defer_reduced_gradient if pending.is_deferred else self.add_reduced_gradient

    def _defer_reduced_gradient(self, part: torch.Tensor) -> None:
        self._deferred_parts.append(part)

    def end_backward(self, is_used: bool) -> None:
        """Ends a backward for the reduced gradients to which this rank contributed zeros: adds or drops them.

        `is_used`: add them. Some rank had a gradient, or gradients of unused weights are to be zeros instead of None.
        """
        if self._deferred_parts and is_used:
            part = self._deferred_parts.pop()
            # The deferred parts of a module that is called several times are zeros, for which hooks need not run again.
            may_skip = self._was_written and self._write_back.has_hooks(self.sharded)
            if not may_skip or not is_zero([part, *self._deferred_parts]):
                self.add_reduced_gradient(part)
        self._deferred_parts, self._was_written = [], False
        if not is_used:
            self.gradients.drop()  # zeros that are not reduced over replicas yet
        self.had_gradient = self.gradients.are_pending

    def drop_gradient(self) -> None:
        """Discards all gradients that were not added to the sharded parameter's."""
        self.unsharded.grad = None
        self.gradients.drop()
        self._deferred_parts = []
        self.had_gradient = self._was_written = False

    def finish_gradients(self) -> None:
        """Waits for copies to the host, and adds them to the sharded parameter's gradient."""
        self._write_back.finish(self.sharded)
