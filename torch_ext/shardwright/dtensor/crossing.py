"""Redistributes of DTensors from one mesh to another, which PyTorch does not have.

All ranks of both meshes call. A rank outside a mesh holds an empty part there, as DTensor has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..plain_tensors import redistribute_part
from .specs import layout_of_spec


def leads_to_another_mesh(x: DTensor, mesh: DeviceMesh | None) -> bool:
    return mesh is not None and mesh is not x.device_mesh and mesh != x.device_mesh


def redistribute(
    x: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Returns `x` on another mesh. Differentiable any number of times: the gradient takes the way back.

    Raises ValueError for a mesh of another device type and for placements that are partial or not one per mesh dim, and
    RuntimeError while code is traced.
    """
    if _are_we_tracing():
        raise RuntimeError("mesh: compiled code cannot move a DTensor to another mesh; allowed is eager code")
    if mesh.device_type != x.device_mesh.device_type:
        raise ValueError(
            f"mesh: its device type is {mesh.device_type}, and that of x is {x.device_mesh.device_type}; allowed is "
            "the same device type"
        )
    placements = list(placements)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"placements: got {len(placements)} for a mesh of {mesh.ndim} dims; allowed is one per mesh dim"
        )
    for i, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"placements: {placement} on another mesh; allowed are Shard and Replicate there")
        if type(placement) is Shard and placement.dim < 0:
            placements[i] = Shard(placement.dim + x.ndim)
    dtype = forward_dtype or x._local_tensor.dtype
    moved: DTensor = _Crossing.apply(x, mesh, tuple(placements), async_op, dtype, backward_dtype)  # type: ignore[no-untyped-call]
    return moved


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: DTensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        async_op: bool,
        dtype: torch.dtype,
        backward_dtype: torch.dtype | None,
    ) -> DTensor:
        ctx.source, ctx.async_op = x._spec, async_op
        ctx.dtype = x._local_tensor.dtype
        ctx.backward_dtype = backward_dtype or ctx.dtype
        local = x._local_tensor.to(dtype)
        if x.device_mesh.get_coordinate() is None:
            # DTensor's operators leave tensors of any device and size there.
            local = torch.empty(0, dtype=dtype, device=x.device_mesh.device_type)
        target = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(x.shape, x.stride(), dtype))
        src, dst = (layout_of_spec(spec, x.shape, dtype) for spec in (x._spec, target))
        moved = redistribute_part(local, src, dst, x.device_mesh, async_op)
        return DTensor(moved, target, requires_grad=x.requires_grad)  # type: ignore[call-arg]

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        # R in place of P, as in PyTorch's own backward.
        placements = tuple(Replicate() if p.is_partial() else p for p in ctx.source.placements)
        moved: DTensor = _Crossing.apply(  # type: ignore[no-untyped-call]
            gradient, ctx.source.mesh, placements, ctx.async_op, ctx.backward_dtype, None
        )
        return moved if moved.dtype == ctx.dtype else moved.to(ctx.dtype), None, None, None, None, None
