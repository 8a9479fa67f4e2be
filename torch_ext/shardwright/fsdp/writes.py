"""Notices that parameters at rest were written.

A DTensor's operators count versions of the DTensor, those on its local tensor of that one, and operators on lists of
DTensors (`torch._foreach_*`), which optimizers use, count neither. So optimizers are asked to say when they stepped.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_WRITTEN = "_shardwright_written"  # of a parameter: a number for its latest write that leaves no trace

_numbers = itertools.count(1)  # for all parameters, so none comes back
_is_registered = False


def watch(parameter: nn.Parameter) -> None:
    """From now on, notices steps of optimizers that have this parameter. What was before counts as a write."""
    global _is_registered
    setattr(parameter, _WRITTEN, next(_numbers))
    if not _is_registered:
        _is_registered = True
        register_optimizer_step_post_hook(_note)


def version_of(parameter: Any) -> tuple[int, ...]:
    """Differs after each write to a DTensor parameter, except for those by `torch._foreach_*` outside of optimizers."""
    return parameter._version, parameter._local_tensor._version, parameter.__dict__.get(_WRITTEN, 0)


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, _WRITTEN):
                setattr(parameter, _WRITTEN, next(_numbers))
