"""Views in compiled code.

A view of a DTensor is one node of Dynamo's graph, and AOTAutograd traces its operations on local tensors. For plain
parts, everything that depends on layouts is computed during tracing. The graph gets a reshape of the part, after
`torch.ops.shardwright.redistribute` if elements have to move. Functions with the names of those in parts.py do the same
in compiled code.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .._native import _planner
from ..dtensor import guards
from ..runtime import executables
from . import parts

# Views of DTensors.
viewed = torch._dynamo.allow_in_graph(parts.viewed)
permuted = torch._dynamo.allow_in_graph(parts.permuted)


# After Dynamo gave up on a caller, it tries to compile the functions that it calls. These must not be compiled.
outside = types.SimpleNamespace(
    shape_of=parts.shape_of,
    **{
        function.__name__: torch._dynamo.disable(function)
        for function in (parts.viewed, parts.permuted, parts.viewed_part, parts.permuted_part)
    },
)


class _Layouts:
    """Holds the layouts of results as attributes: compiled code can guard and return attributes."""


_layouts = _Layouts()
_names: dict[_planner.Layout, str] = {}  # names of the attributes of `_layouts`
_numbers = itertools.count()


def _name_of(layout: _planner.Layout) -> str:
    """Returns the name of a layout's attribute.

    The least recently used layouts are dropped; graphs that return them are then traced again.
    """
    name = _names.pop(layout, None) or f"layout_{next(_numbers)}"
    _names[layout] = name
    setattr(_layouts, name, layout)
    while len(_names) > executables.MAX_EXECUTABLES:
        delattr(_layouts, _names.pop(next(iter(_names))))
    return name


@torch._dynamo.assume_constant_result
def shape_of(layout: _planner.Layout) -> tuple[int, ...]:
    return tuple(layout.shape)


def viewed_part(
    part: torch.Tensor,
    shape: Sequence[int],
    layout: _planner.Layout,
    redistribute: bool,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, _planner.Layout]:
    result = _view(_integers(part.shape), part.device.type, _integers(shape), layout, redistribute, group)
    wrong, move, local_shape, name = result
    if wrong is not None:
        raise ValueError(wrong)
    if move is not None:
        part = torch.ops.shardwright.redistribute(part, *move)
    return part.reshape(local_shape), getattr(_layouts, name)


def permuted_part(
    part: torch.Tensor, dims: Sequence[int], layout: _planner.Layout, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, _planner.Layout]:
    wrong, order, name = _permutation(_integers(part.shape), _integers(dims), layout, group)
    if wrong is not None:
        raise ValueError(wrong)
    return part.permute(order), getattr(_layouts, name)


def _integers(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes as integers, which specializes the graph to them."""
    return tuple([operator.index(size) for size in sizes])


_MOVE = ("plan", "groups", "rank", "backward_plan", "backward_groups")  # arguments of the redistribute


@torch._dynamo.assume_constant_result
def _view(
    local_shape: tuple[int, ...],
    device_type: str,
    shape: tuple[int, ...],
    layout: _planner.Layout,
    redistribute: bool,
    group: dist.ProcessGroup | None,
) -> tuple[str | None, tuple[Any, ...] | None, tuple[int, ...], str]:
    """Returns (error or None, arguments of the redistribute or None, shape of the part, attribute of its layout)."""
    from ..graph import operators

    guards.mark_graph()
    with unset_fake_temporarily():
        try:
            rank = parts.checked_rank(local_shape, layout, group)
            seen, dst = parts.view_of_part(shape, layout, redistribute, device_type, group)
            move = None
            if dst is not None and layout.mesh.coordinate(rank) is not None:
                move_operator: Any = operators.operator(layout, dst, device_type=device_type, group=group)
                arguments = [move_operator.keywords[name] for name in _MOVE]
                move = tuple(tuple(argument) if isinstance(argument, list) else argument for argument in arguments)
        except ValueError as error:
            return str(error), None, (), ""
    return None, move, tuple(seen.local_shape(rank)), _name_of(seen)


@torch._dynamo.assume_constant_result
def _permutation(
    local_shape: tuple[int, ...],
    dims: tuple[int, ...],
    layout: _planner.Layout,
    group: dist.ProcessGroup | None,
) -> tuple[str | None, tuple[int, ...], str]:
    """Returns (error or None, order of dims for ``part.permute``, attribute of the result's layout)."""
    try:
        rank = parts.checked_rank(local_shape, layout, group)
        order, permuted_layout = parts.permutation_of_part(dims, layout, rank)
    except ValueError as error:
        return str(error), (), ""
    return None, order, _name_of(permuted_layout)
