"""Plans as arguments of operators, also in graphs with symbolic sizes.

For symbolic sizes, an operator gets the symbols and a plan for the sizes at the time of tracing, as an example that
holds the layouts. When the graph runs, the operator asks for a plan for the actual sizes, once for each set of sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import _planner, _runtime, counters, executables, groups, layout, planning

Size = Any  # int or SymInt


@functools.lru_cache(maxsize=4096)
def plan_of(text: str) -> _planner.Plan:
    """Returns the plan in an operator's argument."""
    return _planner.parse_plan(text)


def is_symbolic(sizes: Sequence[Size]) -> bool:
    return not all(isinstance(size, int) for size in sizes)


def example_of(sizes: Sequence[Size]) -> list[int] | None:
    """Returns the sizes at the time of tracing; None if one is not known."""
    known = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return None if any(size is None for size in known) else [int(size) for size in known]


def group_names(plan: _planner.Plan, device_mesh: DeviceMesh) -> list[str]:
    """Returns the names of all existing groups, to which later plans are limited."""
    mesh, rank, owner = plan.src.mesh, dist.get_rank(), groups.owner_of(device_mesh)
    found = (groups.find(mesh.group_ranks(rank, dims), owner) for dims in groups.sets_of_large_dims(mesh))
    return [group.group_name for group in found if group is not None]


def local_shape(placed: _planner.Layout, sizes: Sequence[Size], rank: int) -> list[Size]:
    """Returns this rank's sizes when these are cut as by `torch.chunk`. Guards on divisibility."""
    coordinate = placed.mesh.coordinate(rank)
    if coordinate is None:  # the rank is on the other mesh alone
        return [0]
    shape = list(sizes)
    for dim, mesh_dims in placed.shard_order.items():
        for mesh_dim in mesh_dims:
            shape[dim] = _chunk(shape[dim], placed.mesh.shape[mesh_dim], coordinate[mesh_dim])
    return shape


def _chunk(size: Size, count: int, index: int) -> Size:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if guard_or_false(size % count == 0):
        return size // count
    length = (size + count - 1) // count
    return torch.sym_max(0, torch.sym_min(size, length * (index + 1)) - length * index)


def _with_sizes(example: _planner.Layout, sizes: Sequence[int]) -> layout.Layout:
    order, flattened = example.shard_order, example.flattened
    return layout.Layout(example.mesh, sizes, example.placements, example.dtype, order, "literal", flattened)


def _plan_for_sizes(plan: str, group_names: Sequence[str], rank: int, sizes: Sequence[int]) -> list[str]:
    """Returns the plan for these sizes, then the names of its groups."""
    example = plan_of(plan)
    mesh = example.src.mesh
    src, dst = _with_sizes(example.src, sizes), _with_sizes(example.dst, sizes)
    there = {tuple(dist.get_process_group_ranks(_resolve_process_group(name))): name for name in group_names}
    made = planning.pinned(src, dst, example.backend)
    if made is None and not src.mesh.has_same_ranks(dst.mesh):
        made = executables.plan_over_own_dims(src, dst, example.backend)
        counters.counts.plans += 1
    if made is None:
        allowed = [dims for dims in groups.sets_of_large_dims(mesh) if tuple(mesh.group_ranks(rank, dims)) in there]
        made = planning.plan(src, dst, backend=example.backend, groups=allowed)
        counters.counts.plans += 1
    names = []
    owner = groups.owner_of_names(group_names, mesh, rank)
    for _, ranks in _runtime.CompiledProgram(made.to_bytes(), rank).groups:
        name = there.get(tuple(ranks))
        names.append(name if name is not None else groups.find_or_make(ranks, owner).group_name)
    return [_planner.plan_text(made), *names]


torch.library.impl("shardwright::plan_for_sizes", "CompositeExplicitAutograd")(_plan_for_sizes)
