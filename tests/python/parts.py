"""Parts of a global tensor, cut by the intervals of a layout."""

from __future__ import annotations

import torch
import torch.distributed as dist

import meshes
import shardwright as sw


def part_in_group(full: torch.Tensor, placement: str) -> torch.Tensor:
    """Returns the part of `full` that this rank of the default group holds."""
    mesh = sw.Mesh({"group": dist.get_world_size()})
    return part_of(full, sw.Layout(mesh, full.shape, [placement]), dist.get_rank()).to(meshes.device)


def part_of(tensor: torch.Tensor, layout: sw.Layout, rank: int) -> torch.Tensor:
    """Returns the part of `tensor` that `rank` holds by the cuts of `layout`."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:  # PyTorch cannot concatenate 8-bit floats on CPU
        return part_of(tensor.float(), layout, rank).to(tensor.dtype)
    for dim, intervals in enumerate(layout.region(rank)):
        tensor = torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in intervals or [(0, 0)]], dim)
    return tensor
