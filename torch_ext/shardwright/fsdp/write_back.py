"""Write-back of reduced gradients to sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._native import _runtime
from .offload import CopyToHost, HostCopies


class GradientWriteBack:
    """Adds reduced gradients to the gradient of a sharded parameter, and calls the parameter's hooks.

    If the parameter is on the host, the gradient is first copied to the host. `finish` waits for the copy and adds it.
    If the parameter has hooks, `add` itself waits for the copy.
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

    def has_hooks(self, parameter: nn.Parameter) -> bool:
        """True if a write calls hooks of the parameter."""
        return bool(parameter._backward_hooks or _hooks_of(parameter))

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
    elif parameter.grad.placements == spec.placements:  # type: ignore[attr-defined]
        parameter.grad._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
    else:  # of a loss on the DTensor itself: DTensor replicates gradients of dims of size 1
        parameter.grad = parameter.grad.redistribute(placements=spec.placements) + gradient  # type: ignore[attr-defined]
    for hook in _hooks_of(parameter):
        hook(parameter)


def _hooks_of(parameter: nn.Parameter) -> list[Any]:
    """Returns the hooks of `register_post_accumulate_grad_hook`."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


def is_zero(parts: Sequence[torch.Tensor]) -> bool:
    """Returns true if all elements of the parts are 0. False in a capture, which cannot read them."""
    is_captured = any(part.device.type != "cpu" and _runtime.is_capturing(part.device.type) for part in parts)
    return not is_captured and not any(bool(part.any()) for part in parts)
