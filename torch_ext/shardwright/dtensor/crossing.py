"""Redistributes of DTensors from one mesh to another, which PyTorch does not have.

All ranks of both meshes must call. A rank outside a mesh holds an empty part there, as in DTensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
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

from .._native import _planner
from ..graph import plans
from ..layouts.errors import argument_error
from ..layouts.layout import Mesh, layout_text
from ..runtime import argument_checks, counters, dynamo, executables, groups
from ..runtime.agreement import Statement, in_default_store, ranks_text
from ..runtime.plain_tensors import redistribute_part
from . import guards, masks
from .specs import layout_of_spec, with_placements


def is_other_mesh(x: DTensor, mesh: DeviceMesh | None) -> bool:
    """Returns True if the mesh is given and differs from the mesh of `x`."""
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
    """Returns `x` on another mesh. Differentiable any number of times: the gradient moves back.

    In a trace, records operators of shardwright. If `make_groups` is False, missing process groups are an error, also
    in the backward.

    Raises ValueError for a mesh of another device type, for a slice of a mesh that is not the same on all ranks, and
    for placements that are partial or not one per mesh dim. Raises RuntimeError if ranks differ in the layout of `x`,
    and in compiled code if some rank of `mesh` is not on the mesh of `x`.
    """
    target = target_spec(x, mesh, placements, forward_dtype or x.dtype, "on another mesh")
    moved: DTensor = _Crossing.apply(x, x._spec, target, async_op, backward_dtype, make_groups)  # type: ignore[no-untyped-call]
    return moved


def target_spec(
    x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], dtype: torch.dtype, where: str
) -> DTensorSpec:
    """Returns the spec of `x` after a redistribute. Raises ValueError as `redistribute` does.

    `where` ends the error about a partial placement, such as "on another mesh".
    """
    if mesh.device_type != x.device_mesh.device_type:
        raise argument_error("mesh", f"of the device type of x ({x.device_mesh.device_type})", mesh.device_type)
    _check_meshes(x.device_mesh, mesh)
    placements = argument_checks.placements_of(placements, mesh.ndim)
    for i, placement in enumerate(placements):
        if placement.is_partial():
            raise argument_error("placements", f"Shard or Replicate {where}", placement)
        if isinstance(placement, _StridedShard) and placement.dim < 0:
            placements[i] = _StridedShard(placement.dim + x.ndim, split_factor=placement.split_factor)
        elif isinstance(placement, Shard) and placement.dim < 0:
            placements[i] = Shard(placement.dim + x.ndim)
    # Nothing is read from the local tensor, because ranks outside the mesh of x may hold any tensor.
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(x.shape, x.stride(), dtype))


def _check_meshes(source: DeviceMesh, target: DeviceMesh) -> None:
    """Raises ValueError, without communication, if one of the meshes is not the same on all ranks that must call.

    A proper slice of a mesh, such as ``mesh["tp"]``, has other ranks in other processes, unless it contains all ranks
    of both meshes.
    """
    for argument, mesh, other in (("mesh (device_mesh)", target, source), ("the mesh of x", source, target)):
        root = mesh._get_root_mesh()
        if root.size() > mesh.size() and not _covers(mesh, other):
            raise ValueError(
                f"{argument} must be the same mesh on all ranks, got {Mesh(mesh)}, a slice of {Mesh(root)} that has "
                f"different ranks on other processes (here {ranks_text(Mesh(mesh).ranks)}). Moves within one slice are "
                f"allowed. To shard x over some dims of {Mesh(root)}, redistribute it on that mesh, with Replicate() "
                "for the other dims"
            )


def _covers(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Returns True if all ranks of `other` are on `mesh`."""
    return mesh is other or set(Mesh(mesh).ranks) >= set(Mesh(other).ranks)


# Pairs of layouts that ranks have compared, by default process group. Sizes and dtypes are not part of an entry.
# Entries are never dropped, because all ranks must compare in the same calls, even if their planning tables differ.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = weakref.WeakKeyDictionary()
groups.default_group_gone_hooks.append(_compared.clear)

_REMEDY = (
    "On ranks outside the mesh of x, PyTorch may choose other placements for the results of operators than on its "
    "ranks. x.redistribute(placements=...) on the mesh of x gives it the same ones on all ranks"
)


def _compare_layouts(src: _planner.Layout, dst: _planner.Layout) -> None:
    """Raises RuntimeError on all ranks of both meshes if ranks have different layouts. Compares only at the first use.

    A DTensor may have wrong placements on ranks outside its mesh: where an operator can choose among placements,
    PyTorch assumes on these ranks that moves are free, and chooses others.
    """
    if src.mesh == dst.mesh or groups.moves_nothing(None):
        return
    # The counter of rounds is separate from that of `check_ranks`, which may differ among ranks after an error.
    texts = in_default_store("layouts")
    assert dist.group.WORLD is not None
    known = _compared.setdefault(dist.group.WORLD, set())
    key = tuple((spec.mesh, tuple(spec.placements), str(spec.shard_order)) for spec in (src, dst))
    ranks, rank = tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks})), dist.get_rank()
    if key in known or rank not in ranks:
        return
    fields = {"x": layout_text(src), "result": layout_text(dst)}
    texts.compare(Statement("redistribute to another mesh", fields, remedy=_REMEDY), ranks, rank)
    known.add(key)


class _Crossing(torch.autograd.Function):
    """Moves `x` from a source spec to a target spec, whose meshes may be equal. All ranks must pass the same specs."""

    @staticmethod
    @dynamo.skipped
    def forward(  # type: ignore[override]
        ctx: Any,
        x: DTensor,
        source: DTensorSpec,
        target: DTensorSpec,
        async_op: bool,
        backward_dtype: torch.dtype | None,
        make_groups: bool,
    ) -> DTensor:
        assert source.tensor_meta is not None and target.tensor_meta is not None
        ctx.source, ctx.target, ctx.async_op, ctx.make_groups = source, target, async_op, make_groups
        ctx.backward_dtype = backward_dtype or source.tensor_meta.dtype
        ctx.set_materialize_grads(False)
        local = x._local_tensor.to(target.tensor_meta.dtype)
        moved = _local_result(local, source, target, async_op, make_groups)
        return DTensor(moved, target, requires_grad=x.requires_grad)  # type: ignore[call-arg]

    @staticmethod
    @dynamo.skipped
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        options = ctx.async_op, None, ctx.make_groups
        ends = gradient_move(gradient, ctx.source, ctx.target, ctx.backward_dtype, *options)
        moved: DTensor = _Crossing.apply(*ends, *options)  # type: ignore[no-untyped-call]
        return moved.to(ctx.source.tensor_meta.dtype), None, None, None, None, None


def gradient_move(
    gradient: DTensor | None, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype, *options: Any
) -> tuple[DTensor, DTensorSpec, DTensorSpec]:
    """Returns the arguments of the move of a gradient back: the gradient, its spec, and the spec to move it to.

    All ranks return the same specs. If `gradient` is None, returns zeros.

    Args:
        gradient: the gradient of the result, which had moved from `source` to `target`.
        source: the spec before the forward.
        target: the spec after the forward.
        dtype: the dtype in which the gradient moves.
        options: the last three arguments of `_Crossing`.
    """
    target = with_dtype(target, dtype)
    if gradient is None:
        gradient = _zeros(target)
    elif _covers(target.mesh, source.mesh):
        target = with_dtype(gradient._spec, dtype)  # all participating ranks have the gradient's spec
    elif target.mesh.get_coordinate() is not None and not _have_same_placements(gradient._spec, target):
        # Ranks outside the mesh do not know the gradient's placements, so it is first moved to those of the result.
        gradient = _Crossing.apply(gradient, gradient._spec, target, *options)  # type: ignore[no-untyped-call]
    # R in place of P, as in PyTorch's own backward; the shard order stays.
    placements = tuple(Replicate() if p.is_partial() else p for p in source.placements)
    return gradient, target, with_dtype(source, dtype, placements)


def with_dtype(spec: DTensorSpec, dtype: torch.dtype, placements: tuple[Placement, ...] | None = None) -> DTensorSpec:
    """Returns the spec with another dtype and, if given, other placements in the same shard order."""
    assert spec.tensor_meta is not None
    placements = spec.placements if placements is None else placements
    if placements == spec.placements and dtype == spec.tensor_meta.dtype:
        return spec
    return with_placements(spec, placements, dtype)


def _have_same_placements(a: DTensorSpec, b: DTensorSpec) -> bool:
    """Returns True if two specs have the same placements and shard order."""
    kinds = [(s.placements, s.shard_order, s.use_strided_shard_as_shard_order) for s in (a, b)]
    return kinds[0] == kinds[1]


def _zeros(spec: DTensorSpec) -> DTensor:
    """Returns a DTensor of zeros with this spec, for a gradient that this rank does not have."""
    assert spec.tensor_meta is not None
    shape = layout_of_spec(spec, spec.shape, spec.tensor_meta.dtype).local_shape(dist.get_rank())
    local = torch.zeros(shape, dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def _local_result(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool, make_groups: bool
) -> torch.Tensor:
    """Moves a local tensor from `source` to `target`. Returns the local tensor in `target`, a fake one in a trace."""
    if source.mesh.get_coordinate() is None:
        # DTensor's operators may leave a tensor of any device and size on ranks outside the mesh.
        local = torch.empty(0, dtype=local.dtype, device=source.mesh.device_type)
    pending = [p for p in source.placements if masks.is_masked(p)]
    source = masks.without_masks(source) if pending else source
    src = dst = None
    if not _are_we_tracing():
        src, dst = (layout_of_spec(spec, target.shape, local.dtype) for spec in (source, target))
        _compare_layouts(src, dst)
    if source.mesh.get_coordinate() is not None:
        masks.apply_masks(local, pending)
    if src is None or dst is None:
        return _record(local, source, target, make_groups)
    return redistribute_part(local, src, dst, source.mesh, async_op, make_groups)


def _check_compilable(source_mesh: _planner.Mesh, target_mesh: _planner.Mesh) -> None:
    """Raises RuntimeError, on all ranks, if torch.compile might run code for other sizes on some ranks.

    Guards of torch.compile check a DTensor's local tensor, not its global size. A rank outside the mesh always has the
    same local tensor, so it would reuse the code for the first size. Backwards are not checked: the guards of the
    forward apply to them.
    """
    if CompileContext.current_compile_id() is None or torch._C._current_autograd_node() is not None:
        return
    outside = sorted(set(target_mesh.ranks) - set(source_mesh.ranks))
    if outside:
        raise RuntimeError(
            f"mesh must have only ranks of the mesh of x ({source_mesh}) in compiled code, got ranks {outside}. There "
            "torch.compile does not notice that sizes change. Use eager code for this move"
        )


def _record(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, make_groups: bool) -> torch.Tensor:
    """Records the redistribute in a trace, as operators of shardwright. Returns the fake result."""
    from ..graph import operators

    with _disable_current_modes():  # none of this belongs in the trace
        sizes = plans.example_of(target.shape)
        if sizes is None:
            raise RuntimeError("x must have sizes known while tracing, got a size known only when the graph runs")
        src, dst = (layout_of_spec(spec, sizes, local.dtype) for spec in (source, target))
        _check_compilable(src.mesh, dst.mesh)
        rank = dist.get_rank()
        if src.mesh.coordinate(rank) is None and dst.mesh.coordinate(rank) is None:
            return local
        existing = None if make_groups else source.mesh
        plan = executables.make_plan(src, dst, local.device.type, existing_groups_of=existing)
        arguments = operators.arguments_for_sizes(plan, target.shape, source.mesh, make_groups)
    counters.counts.traced += 1
    guards.mark_graph()
    return operators.trace(local, **arguments)
