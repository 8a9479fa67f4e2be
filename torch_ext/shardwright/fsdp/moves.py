"""Moves of one weight between its layouts (layouts.py), and detection of writes to its parameter."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._native import _planner, _runtime
from ..runtime import executables, groups
from .layouts import Layouts

# ---- writes to parameters
#
# A write to a DTensor increments the DTensor's version, and a write to its local tensor the local tensor's version.
# `torch._foreach_*` on lists of DTensors, which optimizers use, increments neither. `torch._fused_*`, the kernels of
# optimizers with fused=True, increment no version. So a hook notes optimizer steps.

_WRITTEN = "_shardwright_written"  # attribute of a sharded parameter: the number of its latest optimizer step
_FULL = "_shardwright_full"  # attribute of an unsharded parameter, and of one that was sharded: its name

_numbers = itertools.count(1)  # numbers of optimizer steps; shared by all parameters, so they are unique
_is_registered = False  # the hooks of optimizers are registered


Version: TypeAlias = tuple[nn.Parameter, tuple[int, ...]]  # a sharded parameter and its version


def watch(parameter: nn.Parameter) -> None:
    """Starts to detect optimizer steps that write this parameter. The call itself counts as a write."""
    global _is_registered
    setattr(parameter, _WRITTEN, next(_numbers))
    if not _is_registered:
        _is_registered = True
        register_optimizer_step_pre_hook(_check_parameters)
        register_optimizer_step_post_hook(_note_step)


def is_watched(parameter: nn.Parameter) -> bool:
    """Returns true if optimizer steps that write this parameter are detected."""
    return _WRITTEN in parameter.__dict__


def mark_full(parameter: nn.Parameter, name: str) -> None:
    """Makes optimizers refuse a parameter that never gets the reduced gradient."""
    setattr(parameter, _FULL, name)


def _check_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Hook before each optimizer step. Raises RuntimeError if the optimizer has a parameter in full."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := getattr(parameter, _FULL, None)) is not None:
                raise RuntimeError(
                    f"an optimizer must have the sharded parameters of sw.fully_shard, got {name} in full. Make the "
                    "optimizer after sw.fully_shard, while modules have their sharded parameters: before a forward, or "
                    "after reshard() or a backward"
                )


def version_of(parameter: Any) -> tuple[int, ...]:
    """Returns a version of a DTensor parameter. Each write changes it, except `torch._foreach_*` outside optimizers."""
    return parameter._version, parameter._local_tensor._version, parameter.__dict__.get(_WRITTEN, 0)


def version_of_plain(parameter: nn.Parameter) -> tuple[int, ...]:
    """Returns a version of a plain parameter. Each write changes it, except `torch._fused_*` outside optimizers."""
    if _WRITTEN not in parameter.__dict__:
        watch(parameter)
    return parameter._version, parameter.__dict__[_WRITTEN]


def versions_differ(before: list[Version], now: list[Version]) -> bool:
    """Returns true if parameters were replaced or written between two lists of their versions."""
    return len(before) != len(now) or any(a is not b or i != j for (a, i), (b, j) in zip(before, now))


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Hook after each optimizer step: gives the optimizer's watched parameters new numbers."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, _WRITTEN):
                setattr(parameter, _WRITTEN, next(_numbers))


# ---- moves


class Moves:
    """Starts the moves of one weight. Gathers and reductions have this object, so they need not refer to the weight."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.device_type = layouts.mesh.device_type
        self.key: Hashable = layouts.mesh, groups.key_of_mesh(layouts.mesh)  # the DeviceMesh and its process groups

    def __call__(
        self, src: _planner.Layout, dst: _planner.Layout, tensor: torch.Tensor, out: torch.Tensor
    ) -> dist.Work | None:
        """Starts to move `tensor`, this rank's part, into `out`. Returns a Work to wait for, or None if done."""
        return executables.start_into(self.executable(src, dst), tensor, out)

    def executable(self, src: _planner.Layout, dst: _planner.Layout) -> _runtime.Executable:
        """Returns the compiled move between two layouts, from the cache if possible."""
        mesh = self.layouts.mesh  # also for kept copies, whose layouts may have another mesh of the same ranks

        def build() -> _runtime.Executable:
            return executables.bind(executables.make_plan(src, dst, mesh.device_type), device_mesh=mesh)

        executable = executables.lookup(("weight", src, dst, mesh.device_type, mesh, groups.key_of_mesh(mesh)), build)
        assert isinstance(executable, _runtime.Executable)
        return executable

    def predicted_ps(self, src: _planner.Layout, dst: _planner.Layout) -> int:
        """Returns the predicted time of a move in picoseconds."""
        move = src, dst, self.layouts.mesh.device_type
        return _predicted.get_or_make(move, lambda: round(1e6 * executables.make_plan(*move).predicted_us))


# Predicted times in picoseconds by (source, target, device type), for schedules that are made again.
_predicted: executables.PlanningCache[int] = executables.PlanningCache()
