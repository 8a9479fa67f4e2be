"""Notices that parameters at rest were written.

A DTensor's operators count versions of the DTensor, those on its local tensor of that one, and operators on lists of
DTensors (`torch._foreach_*`), which optimizers use, count neither. So optimizers are asked to say when they stepped.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_STEPS = "_shardwright_steps"  # of a parameter: how many steps of optimizers it has seen

_is_registered = False


def watch(parameter: nn.Parameter) -> None:
    """Counts steps of optimizers that have this parameter."""
    global _is_registered
    setattr(parameter, _STEPS, 0)
    if not _is_registered:
        _is_registered = True
        register_optimizer_step_post_hook(_note)


def version_of(parameter: Any) -> tuple[int, ...]:
    """Differs after each write to a DTensor parameter, except for those by `torch._foreach_*` outside of optimizers."""
    return parameter._version, parameter._local_tensor._version, parameter.__dict__.get(_STEPS, 0)


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            steps = getattr(parameter, _STEPS, None)
            if steps is not None:
                setattr(parameter, _STEPS, steps + 1)
