"""From a pair of layouts to an executable bound to process groups, kept for the next call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from . import _planner, _runtime, _stats, groups, planning

_executables: dict[Hashable, _runtime.Executable] = {}
_world: object | None = None


def backend_for(device_type: str) -> str:
    """The lowering for tensors on this kind of device."""
    return "nccl" if device_type == "cuda" else "gloo"


def lookup(key: Hashable, build: Callable[[], _runtime.Executable]) -> _runtime.Executable:
    """The executable kept under `key`, else a new one. A new default process group voids all that are kept."""
    global _world
    if dist.group.WORLD is not _world:
        _executables.clear()
        _world = dist.group.WORLD
    executable = _executables.get(key)
    if executable is not None:
        _stats.count("cache_hits")
        return executable
    executable = build()
    _executables[key] = executable
    return executable


def build(
    src: _planner.Layout,
    dst: _planner.Layout,
    *,
    device_type: str,
    device_mesh: Any | None = None,
    group: dist.ProcessGroup | None = None,
) -> _runtime.Executable:
    """Plans, compiles for this rank, and binds. Collective among the ranks of any group that must be made.

    Ranks of the layouts' mesh are global ranks, or ranks of `group` if one is given.
    """
    groups.check_initialised()
    world_size = dist.get_world_size(group)
    last_rank = max(src.mesh.ranks)
    if last_rank >= world_size:
        raise ValueError(
            f"mesh: {src.mesh} holds rank {last_rank}, but the process group has {world_size} ranks, 0 to {world_size - 1}"
        )
    plan = planning.plan(src, dst, backend=backend_for(device_type))
    _stats.count("plans")
    executable = _runtime.Executable(plan.to_bytes(), dist.get_rank(group))
    names = []
    for mesh_dims, ranks in executable.groups:
        if group is not None:
            ranks = [dist.get_global_rank(group, rank) for rank in ranks]
        if group is not None and dist.get_process_group_ranks(group) == ranks:
            names.append(group.group_name)
        else:
            names.append(groups.find_or_make(ranks, mesh_dims, device_mesh).group_name)
    executable.bind(names)
    return executable


def run(executable: _runtime.Executable, local: torch.Tensor, async_op: bool) -> torch.Tensor:
    """Runs; with async_op, a result that is still under way is an AsyncCollectiveTensor."""
    _stats.count("calls")
    if not async_op:
        return executable.run(local)
    output, pending = executable.start(local)
    if not pending:
        return output
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(output)
