"""The gradients of one weight, from autograd to its parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from .._native import _planner
from . import extensions, hosting
from .gradients import Arriving, Gradients
from .landing import Landing
from .layouts import Layouts


class Trained:
    """The part of `Weight` that handles gradients."""

    sharded: nn.Parameter
    whole: nn.Parameter
    memory: torch.Tensor
    layouts: Layouts
    gradients: Gradients

    def __init__(self, host: hosting.Host | None) -> None:
        self.is_expected = True  # some rank had a gradient in the latest backward that reduced its unit
        self.has_arrived = False  # a gradient of this rank, since gradients were last added to the parameter's
        self._undecided: list[torch.Tensor] = []  # reductions to which this rank has contributed zeros
        self._landing = Landing(host)
        self._note_gradient: Callable[[torch.Tensor], None] | None = None
        self._watched: nn.Parameter | None = None  # calls `_note_gradient`

    def watch_gradients(self, note: Callable[[torch.Tensor], None]) -> None:
        """Calls a function whenever autograd has added to the gradient of the gathered weight."""
        self._note_gradient = note
        self._watch()

    def _watch(self) -> None:
        if self._note_gradient is not None and self.whole.requires_grad and self._watched is not self.whole:
            self.whole.register_post_accumulate_grad_hook(self._note_gradient)
            self._watched = self.whole

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Adds a gradient that a graph has made. The graph may use its memory again, so it is copied."""
        if not self.sharded.requires_grad:
            return  # frozen since the graph was made
        if self.whole.grad is None:
            self.whole.grad = torch.empty_like(self.whole).copy_(gradient)
        else:
            self.whole.grad.add_(gradient)

    @property
    def has_gradient(self) -> bool:
        """True if a gradient of this rank waits for a reduction."""
        return self.whole.grad is not None or self.gradients.are_kept

    def start_reduction(self, over_replicas: bool, divide_by: float | None) -> list[Arriving]:
        """Starts to reduce the gradient that autograd has left, and those that were kept, or zeros if there are none.

        With it comes what products have reduced already.
        """
        there = self.gradients.take_reduced()
        has_any = self.has_gradient or bool(there)
        self.has_arrived = self.has_arrived or has_any
        taken = self._taken_gradient()
        if not has_any and self.sharded.requires_grad:
            taken = self._zeros()
        arriving = self.gradients.start(taken, over_replicas, divide_by)
        return there if arriving is None else [*there, arriving]

    def _zeros(self) -> tuple[torch.Tensor, _planner.Layout]:
        """A gradient of zeros, placed as the latest one was."""
        layout = self.gradients.latest_layout or self.layouts.usual_gradient
        shape = layout.local_shape(dist.get_rank())
        return torch.zeros(shape, dtype=self.whole.dtype, device=self.memory.device), layout

    def keep_gradient(self) -> None:
        """Keeps the gradient that autograd has left until a reduction."""
        taken = self._taken_gradient()
        if taken is not None:
            self.gradients.keep(*taken)

    def _taken_gradient(self) -> tuple[torch.Tensor, _planner.Layout] | None:
        gradient, self.whole.grad = self.whole.grad, None
        if gradient is None:
            return None
        gradient, layout = self.layouts.of_gradient(gradient)
        return extensions.as_plain(gradient), layout

    def add_gradient(self, part: torch.Tensor) -> None:
        """Adds to the gradient of the sharded parameter: on the host, by `finish_gradients`.

        A sum to which this rank has contributed zeros waits for `decide`.
        """
        if self.has_arrived:
            self._landing.add(self.sharded, part)
        else:
            self._undecided.append(part)

    def decide(self, is_used: bool) -> None:
        """Ends a backward: adds the sums that were waiting if any rank had a gradient, else drops them."""
        undecided, self._undecided = self._undecided, []
        for part in undecided if is_used else ():
            self._landing.add(self.sharded, part)
        if not is_used:
            self.gradients.drop()  # zeros that wait for a reduction over replicas
        self.has_arrived = self.gradients.wait

    def drop_gradient(self) -> None:
        self.whole.grad = None
        self.gradients.drop()
        self._undecided = []
        self.has_arrived = False

    def finish_gradients(self) -> None:
        self._landing.finish(self.sharded)
