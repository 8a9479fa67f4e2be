"""What users ask of a unit through the methods of its modules."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass
class Wishes:
    """Of one unit."""

    stays: bool  # gathered from the first use of a step to the last
    stays_between_steps: bool = False
    reduces: bool = True  # gradients, after a backward
    reduces_over_replicas: bool = True
    reduces_unused: bool = False  # weights of which no rank has a gradient, too: theirs is zero then
    divides_by: float | None = None  # sums of gradients; None: by the number of contributions
    gradient_hook: Callable[[torch.Tensor], None] | None = None  # called with each reduced gradient
    # Units to gather when a forward or a backward of this one begins.
    forward_prefetch: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)
    backward_prefetch: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)

    def prefetch(self, kind: str) -> list[Any]:
        found = self.backward_prefetch if kind == "backward" else self.forward_prefetch
        return [unit for unit in (reference() for reference in found) if unit is not None]

    def hooked(self, add: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """Returns a function that calls the hook for gradients, if there is one, before `add`."""
        hook = self.gradient_hook
        if hook is None:
            return add

        def add_after_hook(gradient: torch.Tensor) -> None:
            hook(gradient)
            add(gradient)

        return add_after_hook
