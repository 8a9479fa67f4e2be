"""Redistributes of DTensors from one mesh to another, which PyTorch does not have.

All ranks of both meshes call. A rank outside a mesh holds an empty part there, as DTensor has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import CompileContext
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from .. import argument_values, counters, executables
from .._planner import Mesh
from ..graphs import plans
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
    make_groups: bool = True,
) -> DTensor:
    """Returns `x` on another mesh. Differentiable any number of times: the gradient takes the way back.

    While code is traced, our operators are recorded. Without `make_groups`, process groups must exist, also for the
    backward.

    Raises ValueError for a mesh of another device type and for placements that are partial or not one per mesh dim, and
    RuntimeError in compiled code if some rank of `mesh` is not on that of `x`.
    """
    if mesh.device_type != x.device_mesh.device_type:
        raise ValueError(
            f"mesh: its device type is {mesh.device_type}, and that of x is {x.device_mesh.device_type}; allowed is "
            "the same device type"
        )
    placements = argument_values.items(placements, "placements", "a list of one per mesh dim of device_mesh")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"placements: got {len(placements)} for a mesh of {mesh.ndim} dims; allowed is one per mesh dim"
        )
    for i, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"placements: {placement} on another mesh; allowed are Shard and Replicate there")
        if isinstance(placement, _StridedShard) and placement.dim < 0:
            placements[i] = _StridedShard(placement.dim + x.ndim, split_factor=placement.split_factor)
        elif isinstance(placement, Shard) and placement.dim < 0:
            placements[i] = Shard(placement.dim + x.ndim)
    dtype = forward_dtype or x._local_tensor.dtype
    target = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(x.shape, x.stride(), dtype))
    moved: DTensor = _Crossing.apply(x, target, async_op, backward_dtype, make_groups)  # type: ignore[no-untyped-call]
    return moved


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: DTensor, target: DTensorSpec, async_op: bool, backward_dtype: torch.dtype | None, make_groups: bool
    ) -> DTensor:
        ctx.source, ctx.async_op, ctx.make_groups = x._spec, async_op, make_groups
        ctx.dtype = x._local_tensor.dtype
        ctx.backward_dtype = backward_dtype or ctx.dtype
        assert target.tensor_meta is not None
        local = x._local_tensor.to(target.tensor_meta.dtype)
        moved = _moved(local, x._spec, target, async_op, make_groups)
        return DTensor(moved, target, requires_grad=x.requires_grad)  # type: ignore[call-arg]

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        source = ctx.source
        meta = TensorMeta(gradient.shape, gradient.stride(), ctx.backward_dtype)
        # R in place of P, as in PyTorch's own backward. What cuts the source does so in the same order.
        placements = tuple(Replicate() if p.is_partial() else p for p in source.placements)
        is_order = source.use_strided_shard_as_shard_order
        order = None if is_order else source.shard_order
        target = DTensorSpec(source.mesh, placements, meta, order, use_strided_shard_as_shard_order=is_order)
        moved: DTensor = _Crossing.apply(  # type: ignore[no-untyped-call]
            gradient, target, ctx.async_op, None, ctx.make_groups
        )
        return moved if moved.dtype == ctx.dtype else moved.to(ctx.dtype), None, None, None, None


def _moved(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool, make_groups: bool
) -> torch.Tensor:
    """Returns this rank's part in `target`, or in a trace what stands for it."""
    if source.mesh.get_coordinate() is None:
        # DTensor's operators leave tensors of any device and size there.
        local = torch.empty(0, dtype=local.dtype, device=source.mesh.device_type)
    if _are_we_tracing():
        return _traced(local, source, target, make_groups)
    src, dst = (layout_of_spec(spec, target.shape, local.dtype) for spec in (source, target))
    return redistribute_part(local, src, dst, source.mesh, async_op, make_groups)


def _check_compilable(here: Mesh, there: Mesh) -> None:
    """Raises RuntimeError, on all ranks, if torch.compile would run code for other sizes on some.

    Its guards look at a DTensor's local tensor, not at its size. A rank outside of the mesh always has the same one, so
    it would go on with code for the sizes that it has seen first. In a backward, ranks have the guards of the forward.
    """
    if CompileContext.current_compile_id() is None or torch._C._current_autograd_node() is not None:
        return
    outside = sorted(set(there.ranks) - set(here.ranks))
    if outside:
        raise RuntimeError(
            f"mesh: ranks {outside} of it are not on the mesh of x ({here}), and torch.compile does not notice there "
            "that sizes change; allowed in compiled code are meshes whose ranks are all on that of x, in eager code any"
        )


def _traced(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, make_groups: bool) -> torch.Tensor:
    """Records our operators. Missing process groups are made now, by the ranks of both meshes."""
    from .. import operators  # imports compilers

    with _disable_current_modes():  # none of this belongs in the trace
        sizes = plans.example_of(target.shape)
        if sizes is None:
            raise RuntimeError("x: a size is known only when the graph runs; allowed are sizes known while tracing")
        src, dst = (layout_of_spec(spec, sizes, local.dtype) for spec in (source, target))
        _check_compilable(src.mesh, dst.mesh)
        rank = dist.get_rank()
        if src.mesh.coordinate(rank) is None and dst.mesh.coordinate(rank) is None:
            return local
        is_symbolic = plans.is_symbolic(target.shape)
        # A graph for symbolic sizes makes plans when it runs, and then makes no groups.
        existing = source.mesh if is_symbolic or not make_groups else None
        plan = executables.make_plan(src, dst, local.device.type, existing_groups_of=existing)
        arguments = operators.arguments_of(plan, device_mesh=source.mesh, make_groups=make_groups)
    counters.counts.traced += 1
    return operators.trace(local, **arguments, sizes=list(target.shape) if is_symbolic else None)
