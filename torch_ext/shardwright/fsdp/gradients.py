"""Gradients of a weight: taken from autograd, reduced, and added to the sharded parameter's gradient.

    full gradient    the gradient that a backward computes on this rank (layout `grad` of layouts.py)
    part             this rank's shard of the reduced gradient (layout `store`)
    replicas         the ranks of the mesh dims over which `store` is replicated
A gradient *waits* if it is kept here until a later backward reduces it.
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
from torch.distributed.tensor import DTensor

from .._native import _planner
from ..layouts.layout import Layout
from . import extensions
from .formats import Dtypes, with_dtype
from .gather import Move
from .layouts import Layouts
from .offload import CopyToHost, HostCopies
from .packing import Promise


@dataclasses.dataclass
class PendingReduction:
    """A reduction in progress. It keeps the sent tensor alive until it ends."""

    sent: torch.Tensor | None  # the gradient in the dtype of messages; None if it was copied to a shared message
    received: torch.Tensor  # written until `work` ends
    work: dist.Work | Promise | None  # None: already done
    finish: Callable[[torch.Tensor], torch.Tensor | None]  # returns the part, from `received`; None: the part waits


class _ReductionLayouts(NamedTuple):
    """The layouts of a reduction, for gradients of one layout. Except `src` and `dst`, they have the sum's dtype."""

    partial: _planner.Layout  # the full gradient before the reduction
    between: _planner.Layout  # the sharded gradient, with the sum over replicas still pending
    # If messages have another dtype than the sum, ranks exchange contributions, and each rank adds up its shard.
    # `apart`: mesh dims to add up over; `src`, `dst`: layouts with a leading tensor dim for each dim of `apart`.
    apart: Sequence[int] = ()
    src: _planner.Layout | None = None
    dst: _planner.Layout | None = None


class Gradients:
    """The gradients of one weight that are being reduced or wait for a reduction.

    Two kinds wait for later backwards: full gradients that are not reduced yet and, if weights are also replicated,
    shards that are not reduced over the replicas yet.
    """

    def __init__(self, dtypes: Dtypes, shards: _planner.Layout, move: Move) -> None:
        self.dtypes = dtypes
        self._full: tuple[torch.Tensor, _planner.Layout] | None = None  # full gradient that waits
        self._part: tuple[torch.Tensor, _planner.Layout] | None = None  # shard that waits for a sum over replicas
        self._reduced: torch.Tensor | None = None  # part that was reduced in chunks in this backward
        self._shards, self._move = with_dtype(shards, dtypes.reduce), move
        self._reduction_layouts: dict[tuple[_planner.Layout, bool], _ReductionLayouts] = {}
        self._latest: tuple[Any, bool, Any] = (
            None,
            True,
            None,
        )  # latest entry of `_reduction_layouts`: layout, averages, _ReductionLayouts
        self._rank = dist.get_rank()

    @property
    def bytes_per_element(self) -> int:
        """Bytes per element of a full gradient, including its copy in the dtype of messages."""
        use, sent = self.dtypes.use, self.dtypes.gradients
        return use.itemsize + (sent.itemsize if use != sent else 0)

    @property
    def are_kept(self) -> bool:
        """True if a full gradient waits for a reduction."""
        return self._full is not None

    @property
    def wait(self) -> bool:
        """True if full gradients or shards wait for a later backward."""
        return self._full is not None or self._part is not None

    @property
    def latest_layout(self) -> _planner.Layout | None:
        """The layout of the gradient that was reduced last; None before the first reduction."""
        layout: _planner.Layout | None = self._latest[0]
        return layout

    def keep(self, gradient: torch.Tensor, layout: _planner.Layout) -> None:
        """Adds a full gradient to the gradients that wait for a reduction."""
        if self._full is None:
            self._full = gradient.to(self.dtypes.reduce), layout
        elif self._full[1] != layout:
            raise RuntimeError(
                "gradients of a weight must have the same placements in all backwards without gradient sync, got "
                f"{layout.placements} after {self._full[1].placements}"
            )
        else:
            self._full[0].add_(gradient)

    def add_reduced(self, part: torch.Tensor) -> None:
        """Adds a shard that a matmul of the running backward has reduced in chunks. `take_reduced` returns the sum."""
        self._reduced = part if self._reduced is None else self._reduced.add_(part)

    def take_reduced(self) -> list[PendingReduction]:
        """Takes the sum from `add_reduced`, as a finished reduction. Returns an empty list if there is none."""
        reduced, self._reduced = self._reduced, None
        return [] if reduced is None else [PendingReduction(reduced, reduced, None, lambda part: part)]

    def drop(self) -> None:
        """Discards all gradients that wait."""
        self._full = self._part = self._reduced = None

    def start(
        self,
        gradient: tuple[torch.Tensor, _planner.Layout] | None,
        over_replicas: bool,
        divide_by: float | None,
        move: Move,
    ) -> PendingReduction | None:
        """Starts to reduce the sum of the waiting gradients and this one. Returns None if there are none.

        Args:
            gradient: the full gradient of this backward and its layout, or None.
            over_replicas: False keeps the reduced shard here until a later reduction over replicas.
            divide_by: the divisor of the sum; None: average.
            move: starts the move of the gradient.
        """
        if self._full is not None:
            if gradient is not None:
                self.keep(*gradient)
            gradient, self._full = self._full, None
        if gradient is None:
            return None
        full, layout = gradient
        layouts = self._layouts_for(layout, divide_by is None)
        target = self._shards if over_replicas and self._part is None and layouts.src is None else layouts.between
        sent = full.to(self.dtypes.gradients)
        if layouts.src is not None and layouts.dst is not None:
            sent = sent[(None,) * len(layouts.apart)]
            received = sent.new_empty(layouts.dst.local_shape(self._rank))
            work = move(layouts.src, layouts.dst, sent, received)
        else:
            received = sent.new_empty(target.local_shape(self._rank))
            work = move(layouts.partial, target, sent, received)

        def finish(received: torch.Tensor) -> torch.Tensor | None:
            part = received if layouts.src is None else self._added_up(received, layouts)
            return self._finish(part, target, over_replicas, divide_by)

        return PendingReduction(sent, received, work, finish)

    def _layouts_for(self, layout: _planner.Layout, averages: bool) -> _ReductionLayouts:
        """Returns the layouts of the reduction of a full gradient in `layout`. `averages`: average, not sum."""
        if self._latest[0] is layout and self._latest[1] == averages:
            latest: _ReductionLayouts = self._latest[2]
            return latest
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
                apart = [dim for dim, (p, q) in enumerate(pairs) if p.startswith("P(") and p != q]
                src, dst = (_side_by_side(each, apart, self.dtypes.gradients) for each in (partial, between))
                layouts = _ReductionLayouts(partial, between, apart, src, dst)
            self._reduction_layouts[layout, averages] = layouts
        self._latest = (layout, averages, layouts)
        return layouts

    def _added_up(self, contributions: torch.Tensor, layouts: _ReductionLayouts) -> torch.Tensor:
        """Returns the sum or average of contributions that are stacked along leading dims, in the order of ranks."""
        each = contributions.flatten(0, len(layouts.apart) - 1) if layouts.apart else contributions[None]
        part = each[0].to(self.dtypes.reduce, copy=True)
        for other in each[1:]:
            part += other
        averaged = [dim for dim in layouts.apart if layouts.partial.placements[dim] == "P(avg)"]
        count = math.prod(layouts.partial.mesh.shape[dim] for dim in averaged)
        return part.div_(count) if count > 1 else part

    def _finish(
        self, part: torch.Tensor, layout: _planner.Layout, over_replicas: bool, divide_by: float | None
    ) -> torch.Tensor | None:
        """Completes a reduced shard: adds the shard that waited, and reduces over replicas.

        Returns the part; None if `over_replicas` is False and the shard waits for the sum over replicas.
        """
        if self._part is not None:
            earlier, self._part = self._part, None
            if earlier[1] != layout:
                raise RuntimeError(
                    "gradients of a weight must have the same placements in all backwards without all-reduce, got "
                    f"{layout.placements} after {earlier[1].placements}"
                )
            part += earlier[0]
        if not over_replicas and layout != self._shards:
            self._part = part, layout
            return None
        if layout != self._shards:
            reduced = torch.empty_like(part)
            work = self._move(layout, self._shards, part, reduced)
            if work is not None:
                work.wait()
            part = reduced
        return part if divide_by is None else part.div_(divide_by)


def _side_by_side(layout: _planner.Layout, dims: list[int], dtype: torch.dtype) -> Layout:
    """Returns the layout with a leading tensor dim for each of these mesh dims, for the contributions along it.

    The leading dim is sharded over the mesh dim if the placement there is pending, and replicated otherwise. Example:
    P(sum) over 4 ranks of a tensor [8, 8] becomes S(0) of a tensor [4, 8, 8].
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


# ---- write-back of reduced gradients to sharded parameters


class GradientWriteBack:
    """Adds reduced gradients to the gradient of a sharded parameter, and calls the parameter's hooks.

    If the parameter is on the host, the gradient is copied there first. `finish` waits for the copy and adds it; if
    there are hooks, `add` does so itself.
    """

    def __init__(self, host_copies: HostCopies | None) -> None:
        self._host_copies = host_copies
        self._in_flight: list[CopyToHost] = []  # copies to the host in progress

    def add(self, parameter: nn.Parameter, part: torch.Tensor) -> None:
        """Adds a part to `parameter.grad`, or starts to copy it to the host."""
        part = part.to(parameter.dtype)
        if self._host_copies is None:
            _add(parameter, part)
            return
        self._in_flight.append(self._host_copies.start_copy_to_host(part))
        if _hooks_of(parameter):
            self.finish(parameter)

    def finish(self, parameter: nn.Parameter) -> None:
        """Makes the host wait for the copies in progress, and adds them to the gradient."""
        copies, self._in_flight = self._in_flight, []
        for copy in copies:
            _add(parameter, copy.wait())


def _add(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Adds a part to `parameter.grad`, with the parameter's hooks before and after, as autograd calls them."""
    # `from_local` would check its arguments, which takes most of the time of a step with small weights.
    spec = parameter._spec  # type: ignore[attr-defined]
    gradient = DTensor(part, spec, requires_grad=False)  # type: ignore[call-arg]
    for hook in (parameter._backward_hooks or {}).values():  # hooks of `register_hook`
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if not isinstance(gradient, DTensor) or gradient.placements != spec.placements:
        raise RuntimeError(
            f"a hook of register_hook must return a gradient placed as {spec.placements}, got "
            f"{getattr(gradient, 'placements', type(gradient).__name__)}"
        )
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
    for hook in _hooks_of(parameter):
        hook(parameter)


def _hooks_of(parameter: nn.Parameter) -> list[Any]:
    """Returns the hooks of `register_post_accumulate_grad_hook`."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


@dataclasses.dataclass
class Reduction:
    """The reductions of a unit that are in flight, each with the function that adds its result to the gradient."""

    under_way: list[tuple[Callable[[torch.Tensor], None], PendingReduction]]

    def finish(self) -> None:
        """Waits for the reductions, and adds their results to the gradients of the sharded parameters."""
        for add, arriving in self.under_way:
            if arriving.work is not None:
                arriving.work.wait()
            part = arriving.finish(arriving.received)
            if part is not None:
                add(part)
        self.under_way = []

    def discard(self) -> None:
        """Waits for the reductions, but drops their results."""
        for _, arriving in self.under_way:
            if arriving.work is not None:
                arriving.work.wait()
        self.under_way = []


# ---- the gradient state of one weight


class Trained:
    """The part of `Weight` that handles gradients."""

    sharded: nn.Parameter  # the parameter between uses; gets the reduced gradient
    whole: nn.Parameter  # the parameter in use; autograd writes its gradient
    memory: torch.Tensor  # the local tensor of `whole`
    layouts: Layouts
    gradients: Gradients

    def __init__(self, host_copies: HostCopies | None) -> None:
        self.is_expected = True  # some rank had a gradient in the latest backward that reduced its unit
        self.had_gradient = False  # this rank had a gradient since the last write-back to the sharded parameter
        self._undecided: list[torch.Tensor] = []  # reduced sums to which this rank has contributed zeros
        self._write_back = GradientWriteBack(host_copies)
        self._note_gradient: Callable[[torch.Tensor], None] | None = None
        self._watched: nn.Parameter | None = None  # the full parameter whose hook calls `_note_gradient`

    def watch_gradients(self, note: Callable[[torch.Tensor], None]) -> None:
        """Calls a function whenever autograd has added to the gradient of the gathered weight."""
        self._note_gradient = note
        self._watch()

    def _watch(self) -> None:
        """Registers the hook on `whole`, once for each tensor, if it requires gradients."""
        if self._note_gradient is not None and self.whole.requires_grad and self._watched is not self.whole:
            self.whole.register_post_accumulate_grad_hook(self._note_gradient)
            self._watched = self.whole

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Adds a gradient from a compiled graph. It is copied, because the graph may reuse its memory."""
        if not self.sharded.requires_grad:
            return  # the parameter was frozen since the graph was compiled
        if self.whole.grad is None:
            self.whole.grad = torch.empty_like(self.whole).copy_(gradient)
        else:
            self.whole.grad.add_(gradient)

    @property
    def has_gradient(self) -> bool:
        """True if a gradient of this rank waits for a reduction."""
        return self.whole.grad is not None or self.gradients.are_kept

    def start_reduction(self, over_replicas: bool, divide_by: float | None, move: Move) -> list[PendingReduction]:
        """Starts to reduce the gradient from autograd and the kept gradients, or zeros if there are none.

        Returns this reduction, and the result of those in chunks. `move` starts the moves of gradients.
        """
        in_chunks = self.gradients.take_reduced()
        has_any = self.has_gradient or bool(in_chunks)
        self.had_gradient = self.had_gradient or has_any
        taken = self._taken_gradient()
        if not has_any and self.sharded.requires_grad:
            taken = self._zeros()
        arriving = self.gradients.start(taken, over_replicas, divide_by, move)
        return in_chunks if arriving is None else [*in_chunks, arriving]

    def _zeros(self) -> tuple[torch.Tensor, _planner.Layout]:
        """Returns a gradient of zeros with the layout of the latest gradient."""
        layout = self.gradients.latest_layout or self.layouts.usual_gradient
        shape = layout.local_shape(dist.get_rank())
        return torch.zeros(shape, dtype=self.whole.dtype, device=self.memory.device), layout

    def keep_gradient(self) -> None:
        """Keeps the gradient from autograd until a later reduction."""
        taken = self._taken_gradient()
        if taken is not None:
            self.gradients.keep(*taken)

    def _taken_gradient(self) -> tuple[torch.Tensor, _planner.Layout] | None:
        """Takes the gradient away from `whole`. Returns its local tensor and layout; None without a gradient."""
        gradient, self.whole.grad = self.whole.grad, None
        if gradient is None:
            return None
        gradient, layout = self.layouts.of_gradient(gradient)
        return extensions.as_plain(gradient), layout

    def add_gradient(self, part: torch.Tensor) -> None:
        """Adds a reduced gradient to that of the sharded parameter. On the host, `finish_gradients` completes this.

        If this rank has contributed zeros to the reduced gradient, `decide` adds or drops it.
        """
        if self.had_gradient:
            self._write_back.add(self.sharded, part)
        else:
            self._undecided.append(part)

    def decide(self, is_used: bool) -> None:
        """Ends a backward: adds the undecided sums if some rank had a gradient (`is_used`), otherwise drops them."""
        undecided, self._undecided = self._undecided, []
        for part in undecided if is_used else ():
            self._write_back.add(self.sharded, part)
        if not is_used:
            self.gradients.drop()  # zeros that wait for a reduction over replicas
        self.had_gradient = self.gradients.wait

    def drop_gradient(self) -> None:
        """Discards all gradients that were not added to the sharded parameter's."""
        self.whole.grad = None
        self.gradients.drop()
        self._undecided = []
        self.had_gradient = False

    def finish_gradients(self) -> None:
        """Waits for copies to the host, and adds them to the sharded parameter's gradient."""
        self._write_back.finish(self.sharded)
