"""What one of several NCCL ranks on one GPU does: redistributes against the global tensor. Started by test_nccl.py.

NCCL refuses two ranks on one GPU, unless their NCCL_HOSTID differ (2.28: they then talk over sockets), or
NCCL_MULTI_RANK_GPU_ENABLE=1 (2.30).
"""

from __future__ import annotations

import itertools
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import shardwright as sw

SHAPE = (9, 10)
PLACEMENTS = ("R", "S(0)", "S(1)", "P")


def part(whole: torch.Tensor, layout: sw.Layout, rank: int) -> torch.Tensor:
    """Cut from the global tensor; every contribution to a pending sum is the whole."""
    for dim, intervals in enumerate(layout.region(rank)):
        whole = torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in intervals], dim)
    return whole


def check(mesh: sw.Mesh, src: tuple[str, ...], dst: tuple[str, ...], rank: int) -> None:
    """Synchronous, asynchronous, and captured: the replay sees new input."""
    before, after = (sw.Layout(mesh, SHAPE, list(p)) for p in (src, dst))
    sums = 1
    for placement, size in zip(src, mesh.shape, strict=True):
        sums *= size if placement == "P" else 1
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32, device="cuda").view(SHAPE)
    local, expected = part(whole, before, rank).contiguous(), part(whole * sums, after, rank)
    name = f"{src} -> {dst} on {mesh}"
    assert torch.equal(sw.redistribute_local(local, before, after), expected), name
    assert torch.equal(sw.redistribute_local(local, before, after, async_op=True) + 0, expected), name
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sw.redistribute_local(local, before, after)
    for turn in range(1, 4):
        local.copy_(part(whole * turn, before, rank))
        graph.replay()
        assert torch.equal(result, expected * turn), f"{name}, replay {turn}"


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=torch.device("cuda", 0))
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    if sys.argv[1] == "reach":
        dist.destroy_process_group()
        return
    shapes = {1: [(1,)], 2: [(2,)], 4: [(2, 2), (4,)]}[world]
    for sizes in shapes:
        mesh = sw.Mesh({f"m{d}": size for d, size in enumerate(sizes)})
        sw.prepare(mesh)
        for src in itertools.product(PLACEMENTS, repeat=len(sizes)):
            for dst in itertools.product(PLACEMENTS[:-1], repeat=len(sizes)):
                if src != dst:
                    check(mesh, src, dst, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
