"""The implementation of `shardwright.views`, for DTensors and for parts.

A part is this rank's local tensor, which the caller passes together with its layout.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from .._native import _planner, _runtime
from ..dtensor import guards
from ..dtensor.specs import layout_of_spec, spec_of_layout
from ..layouts.layout import Layout
from ..layouts.topology import tables_now
from ..runtime import argument_checks, executables
from ..runtime.plain_tensors import redistribute_local, redistribute_part, waited_with_history
from . import constants as constants
from . import meshes


class _ApplyToLocal(torch.autograd.Function):
    """The autograd function that applies a function to the local tensor of a DTensor.

    Args:
        x: the DTensor.
        target: the spec of the result.
        function: computes the local tensor of the result from that of `x`.
        back: computes the gradient of `x` from that of the result.
        may_share: True if the result may share memory with `x`. It is then registered as a view of `x`, so that
            autograd raises for in-place writes to one of the two that it cannot track in the other.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: DTensor,
        target: DTensorSpec,
        function: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[DTensor], DTensor],
        may_share: bool,
    ) -> DTensor:
        ctx.back = back
        ctx.set_materialize_grads(False)
        result = DTensor(function(x._local_tensor), target, requires_grad=False)  # type: ignore[call-arg]
        return _runtime.as_view(x, result) if may_share else result

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        return None if gradient is None else ctx.back(gradient), None, None, None, None


def _layout_of(x: DTensor) -> _planner.Layout:
    """Returns the layout of a DTensor. Raises ValueError for other types."""
    if not isinstance(x, DTensor):
        raise ValueError(f"x must be a DTensor, or a part together with its layout, got a {type(x).__name__}")
    return layout_of_spec(x._spec, _integers(x.shape), x.dtype)


def _integers(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes as integers. Symbolic sizes are specialized to them."""
    return tuple(map(operator.index, sizes))


def _target(x: DTensor, layout: _planner.Layout, stride: Sequence[int]) -> DTensorSpec:
    """Returns the spec of `layout` on the mesh of `x`. Raises ValueError if DTensor has no such spec."""
    spec = spec_of_layout(layout, x._spec, TensorMeta(torch.Size(layout.shape), tuple(stride), x.dtype))
    if spec is None:
        raise ValueError(f"the view of x must be one that DTensor supports, got {layout}; pass x.to_local() and layout")
    return spec


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    return torch.empty(tuple(shape), device="meta").stride()


def _planning() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which operations on layouts and meshes are not traced."""
    if _runtime.is_plain_eager(True):
        return contextlib.nullcontext()
    guards.mark_graph()
    return _disable_current_modes()


def viewed(x: DTensor, shape: Sequence[int], redistribute: bool) -> DTensor:
    """Returns the view of a DTensor. If elements have to move, redistributes `x` first, or raises ValueError if
    `redistribute` is False.
    """
    with _planning():
        layout = _layout_of(x)
        view_layout = _planner.view_of(layout, shape, True)  # or the reason why there is none, as text
        may_split = isinstance(view_layout, str) and not redistribute and meshes.may_be_split(x.device_mesh)
        on_split_mesh = _planner.view_of(layout, shape) if may_split else ""
    if not isinstance(on_split_mesh, str) and _planner.is_known_to_dtensor(on_split_mesh):
        return _on_split_mesh(x, layout, on_split_mesh)
    if isinstance(view_layout, str):
        with _planning():
            backend = executables.lowering_for_mesh(layout.mesh, x.device.type, None).name
            move = _planner.move_before_view(layout, shape, True, backend, tables_now())
            assert move is not None
        if not redistribute:
            raise ValueError(move[2])
        x, view_layout = _moved(x, layout, move[0].dst), move[1]
    with _planning():
        target = _target(x, view_layout, _contiguous(view_layout.shape))
        local_shape, before = view_layout.local_shape(dist.get_rank()), _integers(x.shape)
    result: DTensor = _ApplyToLocal.apply(  # type: ignore[no-untyped-call]
        x,
        target,
        lambda local: local.reshape(local_shape),
        lambda gradient: viewed(gradient, before, True),
        True,
    )
    return result


def _on_split_mesh(x: DTensor, src: _planner.Layout, dst: _planner.Layout) -> DTensor:
    """Returns `x`, which has layout `src`, with layout `dst`, whose mesh splits dims of the mesh of `x`."""
    if _are_we_tracing():
        raise ValueError(
            f"x must have a view on its own mesh in compiled code, got {dst} on a split mesh. Use the view outside of "
            "compiled code, redistribute=True, or a view of x.to_local() with its layout"
        )
    with _planning():
        mesh = meshes.split(x.device_mesh, dst.mesh)
        placements = [x.placements[mesh_dim] for mesh_dim in meshes.containing_dims(x.device_mesh, dst.mesh)]
    return _on_mesh(x, src, dst, mesh, placements)


def _on_mesh(
    x: DTensor, src: _planner.Layout, dst: _planner.Layout, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Returns `x`, which has layout `src`, with layout `dst` on another mesh of the same ranks.

    `placements` has the pending reductions of the result, by mesh dim.
    """
    with _planning():
        meta = TensorMeta(torch.Size(dst.shape), _contiguous(dst.shape), x.dtype)
        target_layout = Layout(mesh, dst.shape, dst.placements, dst.dtype, dst.shard_order, "literal")
        target = spec_of_layout(target_layout, DTensorSpec(mesh, tuple(placements)), meta)
        assert target is not None
        local_shape, source_mesh = dst.local_shape(dist.get_rank()), x.device_mesh

    def back(gradient: DTensor) -> DTensor:
        with _planning():
            given, expected = _layout_of(gradient), _planner.gradient_layout(target_layout, "x")
            source_layout = _planner.gradient_layout(src, "x")
        if given != expected:
            gradient = _moved(gradient, given, expected)
        return _on_mesh(gradient, expected, source_layout, source_mesh, [Replicate()] * source_mesh.ndim)

    result: DTensor = _ApplyToLocal.apply(x, target, lambda local: local.reshape(local_shape), back, True)  # type: ignore[no-untyped-call]
    return result


def _moved(x: DTensor, src: _planner.Layout, dst: _planner.Layout) -> DTensor:
    """Returns `x`, which has layout `src`, redistributed to `dst` on its mesh. Differentiable any number of times."""
    mesh = x.device_mesh

    def back(gradient: DTensor) -> DTensor:
        with _planning():
            given, expected = _layout_of(gradient), _planner.gradient_layout(src, "x")
        return gradient if given == expected else _moved(gradient, given, expected)

    with _planning():
        target = _target(x, dst, x.stride())
    result: DTensor = _ApplyToLocal.apply(  # type: ignore[no-untyped-call]
        x, target, lambda local: _redistributed(local, src, dst, mesh), back, False
    )
    return result


def _redistributed(local: torch.Tensor, src: _planner.Layout, dst: _planner.Layout, mesh: DeviceMesh) -> torch.Tensor:
    """Returns this rank's part in `dst`, or its fake tensor in a trace."""
    if not _are_we_tracing():
        return redistribute_part(local, src, dst, mesh, False, True)
    from ..graph import operators

    with _planning():
        plan = executables.make_plan(src, dst, local.device.type)
        arguments = operators.arguments_for_sizes(plan, src.shape, mesh, make_groups=True)
    return operators.trace(local, **arguments)


def permuted(x: DTensor, dims: Sequence[int]) -> DTensor:
    """Returns ``x.permute(dims)``. No elements move."""
    with _planning():
        layout = _layout_of(x).permute(dims)
        order = [dim % x.ndim for dim in dims]
        target = _target(x, layout, [x.stride(dim) for dim in order])
        is_here = layout.mesh.coordinate(dist.get_rank()) is not None
    inverse = [order.index(dim) for dim in range(x.ndim)]
    result: DTensor = _ApplyToLocal.apply(  # type: ignore[no-untyped-call]
        x,
        target,
        lambda local: local.permute(order) if is_here else local.view_as(local),
        lambda gradient: permuted(gradient, inverse),
        True,
    )
    return result


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
    """Returns the part of the view on this rank, and the layout of the view. Arguments are those of `view`."""
    part, rank = _checked(part, layout, group)
    view_layout, dst = view_of_part(shape, layout, redistribute, part.device.type, group)
    if dst is not None:
        part = redistribute_local(part, layout, dst, group=group)
    return part.reshape(view_layout.local_shape(rank)), view_layout


def view_of_part(
    shape: Sequence[int],
    layout: _planner.Layout,
    redistribute: bool,
    device_type: str,
    group: dist.ProcessGroup | None,
) -> tuple[_planner.Layout, _planner.Layout | None]:
    """Returns the layout of the view, and the layout to which the part must be moved first, or None."""
    view_layout = _planner.view_of(layout, shape)
    if not isinstance(view_layout, str):
        return view_layout, None
    backend = executables.lowering_for_mesh(layout.mesh, device_type, group).name
    move = _planner.move_before_view(layout, shape, False, backend, tables_now())
    assert move is not None
    if not redistribute:
        raise ValueError(move[2])
    return move[1], move[0].dst


def permuted_part(
    part: torch.Tensor, dims: Sequence[int], layout: _planner.Layout, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, _planner.Layout]:
    """Returns the permuted part, and the layout of the result."""
    part, rank = _checked(part, layout, group)
    order, permuted_layout = permutation_of_part(dims, layout, rank)
    return part.permute(order), permuted_layout


def permutation_of_part(
    dims: Sequence[int], layout: _planner.Layout, rank: int
) -> tuple[tuple[int, ...], _planner.Layout]:
    """Returns the order of dims for ``part.permute``, and the layout of the result."""
    permuted_layout = layout.permute(dims)
    if layout.mesh.coordinate(rank) is None:
        return (0,), permuted_layout
    move = layout.flattened - 1  # local tensors have one dim for the flattened dims, which do not move
    return tuple(dim % len(dims) - move for dim in dims[move:]), permuted_layout


def _checked(part: torch.Tensor, layout: _planner.Layout, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, int]:
    """Waits for the part, if it is in flight, and checks it. Returns the part and this rank."""
    part = waited_with_history(part)
    argument_checks.check_tensor("x", part)
    return part, checked_rank(tuple(part.shape), layout, group)


def checked_rank(shape: Sequence[int], layout: _planner.Layout, group: dist.ProcessGroup | None) -> int:
    """Returns this rank. Raises ValueError if its part of `layout` does not have this shape."""
    argument_checks.check_group(group)
    rank = dist.get_rank(group)
    if tuple(shape) != tuple(layout.local_shape(rank)):
        raise ValueError(
            f"x must have shape {tuple(layout.local_shape(rank))} on rank {rank}, as {layout}, got {tuple(shape)}"
        )
    return rank
