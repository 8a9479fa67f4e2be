"""Moves of one weight between its layouts, and writes to its parameter that leave no other trace."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._native import _planner, _runtime
from ..runtime import executables, groups
from .layouts import Layouts

# ---- writes to parameters
#
# A DTensor's operators count versions of the DTensor, those on its local tensor of that one, and operators on lists of
# DTensors (`torch._foreach_*`), which optimizers use, count neither. So optimizers are asked to say when they stepped.

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


# ---- moves


class Moves:
    """Starts moves. What carries a weight holds on to this, so that nothing needs to refer to the weight itself."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self._device_type = layouts.mesh.device_type

    def __call__(
        self, src: _planner.Layout, dst: _planner.Layout, given: torch.Tensor, out: torch.Tensor
    ) -> dist.Work | None:
        """Returns while transfers are under way: what to wait for, None if nothing is pending."""
        return executables.start_into(self.executable(src, dst), given, out)

    def executable(self, src: _planner.Layout, dst: _planner.Layout) -> _runtime.Executable:
        device_type = self._device_type
        mesh = self.layouts.mesh  # also for kept copies, which may lie on another mesh of the same ranks

        def build() -> _runtime.Executable:
            return executables.bind(executables.make_plan(src, dst, device_type), device_mesh=mesh)

        executable = executables.lookup(("weight", src, dst, device_type, mesh, groups.key_of_mesh(mesh)), build)
        assert isinstance(executable, _runtime.Executable)
        return executable

    def predicted_ps(self, src: _planner.Layout, dst: _planner.Layout) -> int:
        return round(1e6 * executables.make_plan(src, dst, self._device_type).predicted_us)
