"""Views of sharded tensors without communication: `view`, `flatten`, `unflatten`, `squeeze`, `unsqueeze`, `permute`,
`transpose`.

Each takes a DTensor, or this rank's part of a tensor and its `Layout`. See docs/views.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._native import _planner
from ..layouts import argument_values
from ..planning import check_layout

if "torch" in sys.modules:
    from . import constants as constants

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_ShapeFunction = Callable[[tuple[int, ...]], Sequence[int]]  # maps the global shape of x to that of the result


def view(
    x: torch.Tensor,
    shape: Sequence[int],
    layout: _planner.Layout | None = None,
    *,
    redistribute: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Returns ``x.reshape(shape)``. Every rank keeps its elements, in their order.

    Differentiable any number of times. The gradient is viewed with the shape of `x`; if its layout allows no such view,
    it is redistributed first. The result may share memory with `x`, as with ``reshape``. For DTensors, autograd cannot
    track in-place writes to one of the two in the other: it raises where a gradient would be wrong.

    Args:
        x: a DTensor; or with `layout` this rank's part, of shape ``layout.local_shape(rank)``.
        shape: the global shape of the result; one size may be -1.
        layout: the layout of the tensor if `x` is a part; equal on all ranks.
        redistribute: if elements have to move, run the redistribute that is predicted to be cheapest instead of
            raising; a DTensor then stays on its mesh. All ranks of the mesh must call.
        group: the process group of the layout's mesh, as in `redistribute_local`; only with `layout`.

    Returns:
        A DTensor, or with `layout` this rank's part of the result and its layout. Some results need a mesh with a split
        dim: 64 elements over 8 ranks as (4, 16) need 4 x 2 ranks. The DTensor is then on a mesh of the same ranks: on
        the dims that its mesh was flattened from, or else on a new mesh, for which all ranks must call.

    Raises:
        ValueError: elements have to move (the message has the reason, and the cheapest redistribute with its cost), the
            sizes do not match, or `x` does not match `layout`.
    """
    return _viewed(x, lambda _: shape, layout, redistribute, group)


def flatten(
    x: torch.Tensor,
    start_dim: int = 0,
    end_dim: int = -1,
    layout: _planner.Layout | None = None,
    *,
    redistribute: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``x.flatten(start_dim, end_dim)``; see `view`."""

    def shape_of(shape: tuple[int, ...]) -> Sequence[int]:
        first = argument_values.dim(start_dim, "start_dim", len(shape))
        last = argument_values.dim(end_dim, "end_dim", len(shape))
        if first > last:
            raise ValueError(f"end_dim must not be before start_dim={start_dim}, got {end_dim}")
        size = 1
        for dim_size in shape[first : last + 1]:
            size *= dim_size
        return (*shape[:first], size, *shape[last + 1 :])

    return _viewed(x, shape_of, layout, redistribute, group)


def unflatten(
    x: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    layout: _planner.Layout | None = None,
    *,
    redistribute: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``x.unflatten(dim, sizes)``; see `view`. One size may be -1."""

    inner = argument_values.items(sizes, "sizes", "a list of sizes")

    def shape_of(shape: tuple[int, ...]) -> Sequence[int]:
        at = argument_values.dim(dim, "dim", len(shape))
        return (*shape[:at], *inner, *shape[at + 1 :])

    return _viewed(x, shape_of, layout, redistribute, group)


def squeeze(
    x: torch.Tensor,
    dim: int,
    layout: _planner.Layout | None = None,
    *,
    redistribute: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``x.squeeze(dim)`` of a dim of one element; see `view`."""

    def shape_of(shape: tuple[int, ...]) -> Sequence[int]:
        at = argument_values.dim(dim, "dim", len(shape))
        if shape[at] != 1:
            raise ValueError(f"dim must be a dim of one element, got dim {dim} of {shape[at]} elements")
        return (*shape[:at], *shape[at + 1 :])

    return _viewed(x, shape_of, layout, redistribute, group)


def unsqueeze(
    x: torch.Tensor,
    dim: int,
    layout: _planner.Layout | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``x.unsqueeze(dim)``; see `view`. Never needs communication."""

    def shape_of(shape: tuple[int, ...]) -> Sequence[int]:
        at = argument_values.dim(dim, "dim", len(shape) + 1)
        return (*shape[:at], 1, *shape[at:])

    return _viewed(x, shape_of, layout, False, group)


def permute(
    x: torch.Tensor,
    dims: Sequence[int],
    layout: _planner.Layout | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``x.permute(dims)``: every rank permutes its part. Never needs communication; see `view` for the arguments.

    Raises:
        ValueError: `dims` is no permutation, or moves dims that `layout` flattens.
    """
    dims = [argument_values.integer(dim, "dims") for dim in argument_values.items(dims, "dims", "a list of dims")]
    if layout is None:
        _check_no_group(group)
        return _implementation().permuted(x, dims)
    check_layout("layout", layout)
    return _implementation().permuted_part(x, dims, layout, group)


def transpose(
    x: torch.Tensor,
    dim0: int,
    dim1: int,
    layout: _planner.Layout | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``x.transpose(dim0, dim1)`` of a sharded tensor, as `permute`."""
    ndim = x.ndim if layout is None else len(_implementation().shape_of(layout))
    a, b = argument_values.dim(dim0, "dim0", ndim), argument_values.dim(dim1, "dim1", ndim)
    dims = list(range(ndim))
    dims[a], dims[b] = b, a
    return permute(x, dims, layout, group=group)


def _check_no_group(group: dist.ProcessGroup | None) -> None:
    """Raises ValueError if a group was passed with a DTensor."""
    if group is not None:
        raise ValueError("group must be None without a layout, because a DTensor has a mesh, got a group")


def _viewed(
    x: torch.Tensor,
    shape_of: _ShapeFunction,
    layout: _planner.Layout | None,
    redistribute: bool,
    group: dist.ProcessGroup | None,
) -> Any:
    """Returns the view of `x`. `shape_of` computes its global shape from that of `x`."""
    implementation = _implementation()
    if layout is None:
        _check_no_group(group)
        return implementation.viewed(x, shape_of(tuple(x.shape)), redistribute)
    check_layout("layout", layout)
    return implementation.viewed_part(x, shape_of(implementation.shape_of(layout)), layout, redistribute, group)


def _implementation() -> Any:
    """Returns the module that has the functions: `graphs` in compiled code, `graphs.outside` in eager code that a
    compiler has left out of its graphs, else `parts`. They are imported here, because they import torch.
    """
    import torch

    if torch.compiler.is_dynamo_compiling():
        from . import graphs

        return graphs
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        from . import graphs

        return graphs.outside
    from . import parts

    return parts
