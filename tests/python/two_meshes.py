"""Two meshes over some of the ranks, for tests that run inside a worker."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import oracle
import shardwright as sw
from dtensors import to_placements
from meshes import NAMES

# A mesh: its shape, and its ranks in row-major order.
Grid = tuple[tuple[int, ...], tuple[int, ...]]


def mesh(grid: Grid) -> sw.Mesh:
    shape, ranks = grid
    return sw.Mesh(dict(zip(NAMES, shape, strict=False)), ranks)


def part(tensor: torch.Tensor, grid: Grid, placements: tuple[str, ...], rank: int) -> torch.Tensor:
    """Returns a rank's part, which is empty outside the mesh."""
    shape, ranks = grid
    if rank not in ranks:
        return tensor.new_empty(0)
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(ranks.index(rank)), shape))
    return oracle.local(tensor, shape, placements, where)


def device_mesh(grid: Grid) -> DeviceMesh:
    shape, ranks = grid
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=NAMES[: len(shape)])


def dtensor(tensor: torch.Tensor, mesh: DeviceMesh, grid: Grid, placements: tuple[str, ...]) -> DTensor:
    """Makes a DTensor without distribute_tensor, which misplaces parts on meshes whose ranks do not ascend."""
    local = part(tensor, grid, placements, dist.get_rank())
    ends = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, mesh, to_placements(placements), run_check=False, **ends)
