"""Reduced gradients on their way to the parameters at rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .gradients import Arriving
from .hosting import Host, Leaving


class Landing:
    """Adds to the gradient of a parameter at rest, and calls its hooks after that.

    To a parameter on the host a gradient is copied first; it is added when `finish` has waited for that, or at once if
    there are hooks.
    """

    def __init__(self, host: Host | None) -> None:
        self._host = host
        self._leaving: list[Leaving] = []

    def add(self, parameter: nn.Parameter, part: torch.Tensor) -> None:
        part = part.to(parameter.dtype)
        if self._host is None:
            _add(parameter, part)
            return
        self._leaving.append(self._host.send(part))
        if _hooks_of(parameter):
            self.finish(parameter)

    def finish(self, parameter: nn.Parameter) -> None:
        """Makes the host wait for the gradients that are on their way."""
        leaving, self._leaving = self._leaving, []
        for each in leaving:
            _add(parameter, each.wait())


def _add(parameter: nn.Parameter, part: torch.Tensor) -> None:
    # Not by `from_local`, whose checks are most of what a step of small weights takes.
    spec = parameter._spec  # type: ignore[attr-defined]
    gradient = DTensor(part, spec, requires_grad=False)  # type: ignore[call-arg]
    for hook in (parameter._backward_hooks or {}).values():  # of `register_hook`
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if not isinstance(gradient, DTensor) or gradient.placements != spec.placements:
        raise RuntimeError(
            f"register_hook: a hook of a parameter must return a gradient placed as {spec.placements}, got "
            f"{getattr(gradient, 'placements', type(gradient).__name__)}"
        )
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
    for hook in _hooks_of(parameter):
        hook(parameter)


def _hooks_of(parameter: nn.Parameter) -> list[Any]:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


@dataclasses.dataclass
class Reduction:
    """Gradients of a unit that are being reduced, and where they go. The whole ones stay until that is done."""

    under_way: list[tuple[Callable[[torch.Tensor], None], Arriving]]

    def finish(self) -> None:
        for add, arriving in self.under_way:
            if arriving.work is not None:
                arriving.work.wait()
            part = arriving.finish(arriving.received)
            if part is not None:
                add(part)
        self.under_way = []

    def discard(self) -> None:
        """Waits, but adds nothing."""
        for _, arriving in self.under_way:
            if arriving.work is not None:
                arriving.work.wait()
        self.under_way = []
