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


# If Dynamo gives up on a function, it tries to compile the functions that this one calls. These must not be compiled.
outside = types.SimpleNamespace(
    shape_of=parts.shape_of,
    **{
        function.__name__: torch._dynamo.disable(function)
        for function in (parts.viewed, parts.permuted, parts.viewed_part, parts.permuted_part)
    },
)


class _Layouts:
    """An object whose attributes are the layouts of results. Compiled code can guard and return attributes."""


_layouts = _Layouts()
_attribute_names: dict[_planner.Layout, str] = {}  # names of the attributes of `_layouts`
_attribute_numbers = itertools.count()


def _attribute_of(layout: _planner.Layout) -> str:
    """Returns the name of the attribute of `_layouts` that holds a layout. Adds the attribute if it is missing.

    The least recently used layouts are dropped; graphs that return them are then traced again.
    """
    name = _attribute_names.pop(layout, None) or f"layout_{next(_attribute_numbers)}"
    _attribute_names[layout] = name
    setattr(_layouts, name, layout)
    while len(_attribute_names) > executables.MAX_EXECUTABLES:
        delattr(_layouts, _attribute_names.pop(next(iter(_attribute_names))))
    return name


@torch._dynamo.assume_constant_result
def shape_of(layout: _planner.Layout) -> tuple[int, ...]:
    """Returns the global shape of a layout."""
    return tuple(layout.shape)


def viewed_part(
    part: torch.Tensor,
    shape: Sequence[int],
    layout: _planner.Layout,
    redistribute: bool,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, _planner.Layout]:
    """Does the work of `parts.viewed_part` in compiled code."""
    result = _view(_integers(part.shape), part.device.type, _integers(shape), layout, redistribute, group)
    error, move, local_shape, name = result
    if error is not None:
        raise ValueError(error)
    if move is not None:
        part = torch.ops.shardwright.redistribute(part, *move)
    return part.reshape(local_shape), getattr(_layouts, name)


def permuted_part(
    part: torch.Tensor, dims: Sequence[int], layout: _planner.Layout, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, _planner.Layout]:
    """Does the work of `parts.permuted_part` in compiled code."""
    error, order, name = _permutation(_integers(part.shape), _integers(dims), layout, group)
    if error is not None:
        raise ValueError(error)
    return part.permute(order), getattr(_layouts, name)


def _integers(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes as integers, which specializes the graph to them."""
    return tuple([operator.index(size) for size in sizes])


_MOVE_ARGUMENTS = ("plan", "groups", "rank", "backward_plan", "backward_groups")  # arguments of the redistribute


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
            view_layout, dst = parts.view_of_part(shape, layout, redistribute, device_type, group)
            move = None
            if dst is not None and layout.mesh.coordinate(rank) is not None:
                move_operator: Any = operators.operator(layout, dst, device_type=device_type, group=group)
                arguments = [move_operator.keywords[name] for name in _MOVE_ARGUMENTS]
                move = tuple(tuple(argument) if isinstance(argument, list) else argument for argument in arguments)
        except ValueError as error:
            return str(error), None, (), ""
    return None, move, tuple(view_layout.local_shape(rank)), _attribute_of(view_layout)


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
    return None, order, _attribute_of(permuted_layout)
