"""Views of DTensors and of plain parts: what `shardwright.view` and the functions next to it do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .. import _planner, argument_checks, executables
from ..dtensor.specs import layout_of_spec, spec_of_layout
from ..plain_tensors import redistribute_local, redistribute_part
from ..topology import tables_now


class _Local(torch.autograd.Function):
    """Something done to the local tensor of a DTensor, which then has another spec."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: DTensor,
        target: DTensorSpec,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[DTensor], DTensor],
    ) -> DTensor:
        ctx.back = back
        return DTensor(there(x._local_tensor), target, requires_grad=x.requires_grad)  # type: ignore[call-arg]

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        return ctx.back(gradient), None, None, None


def _layout_of(x: DTensor) -> _planner.Layout:
    if not isinstance(x, DTensor):
        raise ValueError(f"x: got a {type(x).__name__}; allowed is a DTensor, or a part together with its layout")
    return layout_of_spec(x._spec, x.shape, x.dtype)


def _target(x: DTensor, layout: _planner.Layout, stride: Sequence[int]) -> DTensorSpec:
    spec = spec_of_layout(layout, x._spec, TensorMeta(torch.Size(layout.shape), tuple(stride), x.dtype))
    if spec is None:
        raise ValueError(f"x: its view {layout} is not one that DTensor has; allowed are parts and layouts")
    return spec


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def viewed(x: DTensor, shape: Sequence[int], redistribute: bool) -> DTensor:
    layout = _layout_of(x)
    seen = _planner.view_of(layout, shape, True)
    if isinstance(seen, str):
        backend = executables.lowering_on(layout.mesh, x.device.type, None)
        first = _planner.move_before_view(layout, shape, True, backend, tables_now())
        assert first is not None
        if not redistribute:
            raise ValueError(first[2])
        x, seen = _moved(x, layout, first[0].dst), first[1]
    local_shape = seen.local_shape(dist.get_rank())
    before = tuple(x.shape)
    result: DTensor = _Local.apply(  # type: ignore[no-untyped-call]
        x,
        _target(x, seen, _contiguous(seen.shape)),
        lambda local: local.reshape(local_shape),
        lambda gradient: viewed(gradient, before, True),
    )
    return result


def _moved(x: DTensor, src: _planner.Layout, dst: _planner.Layout) -> DTensor:
    mesh = x.device_mesh

    def back(gradient: DTensor) -> DTensor:
        here, there = _layout_of(gradient), _planner.gradient_layout(src, "x")
        return gradient if here == there else _moved(gradient, here, there)

    result: DTensor = _Local.apply(  # type: ignore[no-untyped-call]
        x, _target(x, dst, x.stride()), lambda local: redistribute_part(local, src, dst, mesh, False, True), back
    )
    return result


def permuted(x: DTensor, dims: Sequence[int]) -> DTensor:
    layout = _layout_of(x).permute(dims)
    order = [dim % x.ndim for dim in dims]
    inverse = [order.index(dim) for dim in range(x.ndim)]
    is_here = layout.mesh.coordinate(dist.get_rank()) is not None
    result: DTensor = _Local.apply(  # type: ignore[no-untyped-call]
        x,
        _target(x, layout, [x.stride(dim) for dim in order]),
        lambda local: local.permute(order) if is_here else local.view_as(local),
        lambda gradient: permuted(gradient, inverse),
    )
    return result


def viewed_part(
    part: torch.Tensor,
    shape: Sequence[int],
    layout: _planner.Layout,
    redistribute: bool,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, _planner.Layout]:
    part, rank = _checked(part, layout, group)
    seen = _planner.view_of(layout, shape)
    if isinstance(seen, str):
        backend = executables.lowering_on(layout.mesh, part.device.type, group)
        first = _planner.move_before_view(layout, shape, False, backend, tables_now())
        assert first is not None
        if not redistribute:
            raise ValueError(first[2])
        part, seen = redistribute_local(part, layout, first[0].dst, group=group), first[1]
    return part.reshape(seen.local_shape(rank)), seen


def permuted_part(
    part: torch.Tensor, dims: Sequence[int], layout: _planner.Layout, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, _planner.Layout]:
    part, rank = _checked(part, layout, group)
    turned = layout.permute(dims)
    if layout.mesh.coordinate(rank) is None:
        return part, turned
    first = layout.flattened - 1  # local tensors have one dim for the first dims, which do not move
    return part.permute([dim % len(dims) - first for dim in dims[first:]]), turned


def _checked(part: torch.Tensor, layout: _planner.Layout, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, int]:
    if isinstance(part, AsyncCollectiveTensor):
        part = part.wait()
    argument_checks.check_tensor("x", part)
    argument_checks.check_group(group)
    rank = dist.get_rank(group)
    if tuple(part.shape) != tuple(layout.local_shape(rank)):
        raise ValueError(
            f"x: has shape {tuple(part.shape)} on rank {rank}, where {layout} has {tuple(layout.local_shape(rank))}"
        )
    return part, rank
