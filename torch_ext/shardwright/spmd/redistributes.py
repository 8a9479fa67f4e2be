"""Redistributes plain tensors between types of spmd_types, over any number of mesh axes in one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import spmd_types
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..runtime import executables, groups
from ..runtime.plain_tensors import redistribute_local


def redistribute(x: torch.Tensor, mesh: DeviceMesh, src: Mapping[str, Any], dst: Mapping[str, Any]) -> torch.Tensor:
    """Moves a local tensor from types `src` to types `dst`, like `spmd_types.redistribute` on each axis that changes.

    The gradient moves from the types of gradients of `dst` to those of `src`: R becomes P (a pending sum), P becomes R,
    I and S stay. If several axes change, or one axis that shards a tensor dim together with others, the axes that
    change must be the innermost of that dim, in mesh order.

    Args:
        x: the local tensor; all ranks of the axes that change have the same shape.
        mesh: a mesh with named dims.
        src, dst: types by name of a mesh dim: R, I, P or S(dim). Dims of size 1 and dims not in `dst` do not change.

    Raises:
        ValueError: a type that changes is V, which does not say how local tensors make up a global one; the mesh has no
            names, or `dst` has a name that is not in both the mesh and `src`.
    """
    mesh_names = mesh.mesh_dim_names or ()
    if unknown := [name for name in dst if name not in mesh_names or name not in src]:
        known = [name for name in mesh_names if name in src]
        raise argument_error("dst", f"types of mesh dims that src has too, {known}", unknown)
    names = tuple(
        name for dim, name in enumerate(mesh_names) if name in dst and src[name] != dst[name] and mesh.size(dim) > 1
    )
    if not names:
        return x
    before, after = [src[name] for name in names], [dst[name] for name in names]
    key = mesh, groups.key_of_mesh(mesh), names, *before, *after, x.shape, x.dtype
    moves = _known.get_or_make(key, lambda: _Moves(mesh[names], before, after, x))
    if x.requires_grad and torch.is_grad_enabled():
        moved: torch.Tensor = _Redistribute.apply(x, moves)
        return moved
    return redistribute_local(x, moves.src, moves.dst, device_mesh=moves.mesh)


class _Moves:
    """The layouts of a redistribute and of its gradient."""

    def __init__(self, mesh: DeviceMesh, src: Sequence[Any], dst: Sequence[Any], x: torch.Tensor) -> None:
        self.mesh = mesh
        shape = list(x.shape)
        for dim, placement in enumerate(_placements(src, x.ndim)):
            if isinstance(placement, Shard):
                shape[placement.dim] *= mesh.size(dim)
        on, backward = Mesh(mesh), ([each.backward_type() for each in types] for types in (src, dst))
        self.src, self.dst, self.src_gradient, self.dst_gradient = (
            Layout(on, shape, _placements(types, x.ndim), x.dtype) for types in (src, dst, *backward)
        )


class _Redistribute(torch.autograd.Function):
    """A redistribute for autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moves: _Moves) -> torch.Tensor:  # type: ignore[override]
        ctx.moves = moves
        moved = redistribute_local(x, moves.src, moves.dst, device_mesh=moves.mesh)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        moves = ctx.moves
        return redistribute_local(gradients[0], moves.dst_gradient, moves.src_gradient, device_mesh=moves.mesh), None


def _placements(types: Sequence[Any], ndim: int) -> list[Placement]:
    """Returns DTensor's placements for types, by mesh dim. Raises ValueError for V."""
    found = [spmd_types.spmd_type_to_dtensor_placement(each) for each in types]
    return [Shard(each.dim % ndim) if isinstance(each, Shard) else each for each in found]


_known: executables.PlanningCache[_Moves] = executables.PlanningCache(is_local=True)
