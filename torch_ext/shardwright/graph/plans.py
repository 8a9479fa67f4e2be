"""Plans as arguments of operators.

An operator in a graph of the drop-in gets the global sizes, as numbers or symbols, and the plan for the sizes at the
time of tracing, which serves as an example that holds the layouts. When the graph runs, a plan for the actual sizes is
made, once for each set of sizes and for each state of the tables. It equals the plan of eager code. Ranks compile the
same code at different times, with sizes as numbers or as symbols; the plans that they run must not depend on that.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner
from ..layouts import layout
from ..layouts.topology import tables_now
from ..runtime import executables, groups

Size = Any  # int or SymInt

# The results of `_plan_for_sizes`.
_made: executables.PlanningCache[list[str]] = executables.PlanningCache(is_local=True)


@functools.lru_cache(maxsize=4096)
def plan_of(text: str) -> _planner.Plan:
    """Returns the plan in an operator's argument."""
    return _planner.parse_plan(text)


def is_symbolic(sizes: Sequence[Size]) -> bool:
    """Returns True if some size is a symbol."""
    return not all(isinstance(size, int) for size in sizes)


def example_of(sizes: Sequence[Size]) -> list[int] | None:
    """Returns the sizes at the time of tracing; None if one is not known."""
    known = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return None if any(size is None for size in known) else [int(size) for size in known]


def fixed(sizes: Sequence[Size]) -> list[int]:
    """Returns sizes as numbers. Symbols become the sizes at the time of tracing; the graph is valid for these alone."""
    return [operator.index(size) for size in sizes]


def group_names(device_mesh: DeviceMesh) -> list[str]:
    """Returns the names of the mesh's groups, for `groups.owner_of_names`. Makes no group."""
    owner = groups.owner_of(device_mesh)
    return [*owner.names, *owner.flattened]


def local_shape(placed: _planner.Layout, sizes: Sequence[Size], rank: int) -> list[Size]:
    """Returns this rank's local sizes, cut as `torch.chunk` cuts. Guards symbols on divisibility."""
    if not is_symbolic(sizes):
        placed = _with_sizes(placed, sizes)
        return list(placed.local_shape(rank)) if placed.mesh.coordinate(rank) is not None else [0]
    coordinate = placed.mesh.coordinate(rank)
    if coordinate is None:  # the rank is on the other mesh alone
        return [0]
    shape = list(sizes)
    for dim, mesh_dims in placed.shard_order.items():
        for mesh_dim in mesh_dims:
            shape[dim] = _chunk(shape[dim], placed.mesh.shape[mesh_dim], coordinate[mesh_dim])
    return shape


def _chunk(size: Size, count: int, index: int) -> Size:
    """Returns the size of part `index` of a dim that `torch.chunk` cuts into `count` parts. Guards on divisibility."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if guard_or_false(size % count == 0):
        return size // count
    length = (size + count - 1) // count
    return torch.sym_max(0, torch.sym_min(size, length * (index + 1)) - length * index)


def _with_sizes(example: _planner.Layout, sizes: Sequence[int]) -> _planner.Layout:
    """Returns the layout `example` for other global sizes."""
    if list(example.shape) == list(sizes):
        return example
    order, flattened = example.shard_order, example.flattened
    return layout.Layout(example.mesh, sizes, example.placements, example.dtype, order, "literal", flattened)


def _plan_for_sizes(
    plan: str, group_names: Sequence[str], rank: int, sizes: Sequence[int], make_groups: bool
) -> list[str]:
    """Returns the plan for these sizes, then the names of its groups."""
    key = (plan, *group_names), rank, tuple(sizes), make_groups or groups.state()
    return _made.get_or_make(key, lambda: _make_plan(plan, group_names, rank, sizes, make_groups))


def _make_plan(plan: str, group_names: Sequence[str], rank: int, sizes: Sequence[int], make_groups: bool) -> list[str]:
    """Returns the result of `_plan_for_sizes` without the cache. Makes missing groups if `make_groups`."""
    tables_now()
    example = plan_of(plan)
    mesh = example.src.mesh
    owner = groups.owner_of_names(group_names, mesh)
    src, dst = (_with_sizes(end, sizes) for end in (example.src, example.dst))
    allowed = None if make_groups else executables.usable_mesh_dims(src, dst, owner)
    text = _planner.plan_text(executables.plan_for_backend(src, dst, example.backend, allowed))
    return [text, *executables.operator_group_names(text, rank, device_mesh=owner, make_groups=make_groups)]


torch.library.impl("shardwright::plan_for_sizes", "CompositeExplicitAutograd")(_plan_for_sizes)
