"""The options of a unit (units.py)."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass
class UnitOptions:
    """Options of a unit that the methods of its modules set (methods.py)."""

    keep_gathered: bool  # keep it gathered from the first use of a step to the last
    keep_between_steps: bool = False  # keep it gathered after a step
    reduces: bool = True  # reduce gradients in backwards
    reduces_over_replicas: bool = True  # reduce them also over mesh dims on which weights are replicated
    reduces_unused: bool = False  # give weights without a gradient on any rank a gradient of zeros
    divides_by: float | None = None  # divisor of summed gradients; None: average
    gradient_hook: Callable[[torch.Tensor], None] | None = None  # called with each reduced gradient
    # Units to gather when a forward or a backward of this unit begins.
    forward_prefetch: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)
    backward_prefetch: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)

    def prefetch(self, kind: str) -> list[Any]:
        """Returns the units to gather when a use of this kind ("forward" or "backward") of this unit begins."""
        found = self.backward_prefetch if kind == "backward" else self.forward_prefetch
        return [unit for unit in (reference() for reference in found) if unit is not None]

    def hooked(self, add: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """Returns a function that calls `gradient_hook`, if there is one, with a reduced gradient, and then `add`."""
        hook = self.gradient_hook
        if hook is None:
            return add

        def add_after_hook(gradient: torch.Tensor) -> None:
            hook(gradient)
            add(gradient)

        return add_after_hook
