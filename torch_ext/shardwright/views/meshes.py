"""DeviceMeshes in which a dim of another mesh is split.

A view may need one: 64 elements over 8 ranks as (4, 16) are [Shard(0), Shard(1)] on 4 x 2 of the same ranks.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner
from ..runtime import executables, groups


def may_be_split(mesh: DeviceMesh) -> bool:
    """Returns True if `split` keeps the order of this mesh's ranks.

    The groups that `split` makes have ascending ranks. PyTorch keeps other orders only in groups that it makes itself.
    """
    ranks = mesh.mesh.flatten().tolist()
    return not getattr(mesh, "_preserve_rank_order", False) or ranks == sorted(ranks)


def split(mesh: DeviceMesh, fine: _planner.Mesh) -> DeviceMesh:
    """Returns the DeviceMesh of `fine`, whose ranks are those of `mesh` in the same order.

    If `mesh` was flattened from a mesh with such dims, returns these dims. Otherwise makes a mesh with the names of
    `fine`, from process groups that exist or that their members make here. All ranks of `mesh` must call.
    """
    return _split(mesh, groups.key_of_mesh(mesh), mesh._get_root_mesh(), fine)


@executables.cached
def _split(mesh: DeviceMesh, _: Hashable, root: DeviceMesh, fine: _planner.Mesh) -> DeviceMesh:
    """Does the work of `split`. `_` is the key of the mesh's process groups, by which results are cached."""
    found = None if root is mesh else _find_submesh(root, fine)
    if found is not None:
        return found
    ranks = torch.tensor(fine.ranks, dtype=torch.int, device="cpu").view(fine.shape)
    rank = dist.get_rank()
    if fine.coordinate(rank) is None:
        return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=tuple(fine.dim_names), _init_backend=False)
    groups.check_initialized()
    owner = groups.owner_of(mesh)
    dim_groups = [groups.find_or_make(fine.group_ranks(rank, (dim,)), owner) for dim in range(fine.ndim)]
    return DeviceMesh.from_group(dim_groups, mesh.device_type, ranks, mesh_dim_names=tuple(fine.dim_names))


def containing_dims(mesh: DeviceMesh, fine: _planner.Mesh) -> list[int]:
    """Returns for each dim of `fine` the index of the dim of `mesh` that contains it.

    Example: a mesh of 2 x 8 ranks and a fine mesh of 2 x 4 x 2 give [0, 1, 1].
    """
    found: list[int] = []
    for mesh_dim, size in enumerate(mesh.shape):
        covered = fine.shape[len(found)]
        found.append(mesh_dim)
        while covered < size:
            covered *= fine.shape[len(found)]
            found.append(mesh_dim)
    return found


def _find_submesh(root: DeviceMesh, fine: _planner.Mesh) -> DeviceMesh | None:
    """Returns the submesh of consecutive dims of `root` with the sizes and ranks of `fine`, or None."""
    names, sizes = root.mesh_dim_names, list(fine.shape)
    if names is None:
        return None
    for begin in range(root.ndim - len(sizes) + 1):
        end = begin + len(sizes)
        if list(root.shape[begin:end]) == sizes:
            found = root if len(sizes) == root.ndim else root[names[begin:end]]
            if found.mesh.flatten().tolist() == list(fine.ranks):
                return found
    return None
