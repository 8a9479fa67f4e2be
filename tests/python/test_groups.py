"""Process groups made on demand, by their members alone, agree on their names whatever each rank made before."""

from __future__ import annotations

import torch
import torch.distributed as dist

import shardwright as sw
from pool import Pool

WORLD = 4


def _gather_over(ranks: list[int]) -> None:
    """Members gather over a mesh of just these ranks; the others do nothing."""
    rank = dist.get_rank()
    mesh = sw.Mesh({"m": len(ranks)}, ranks)
    src, dst = sw.Layout(mesh, (len(ranks),), ["S(0)"]), sw.Layout(mesh, (len(ranks),), ["R"])
    if rank in ranks:
        result = sw.redistribute_local(torch.tensor([float(rank)]), src, dst)
        assert result.tolist() == [float(r) for r in ranks]


def _uneven_histories() -> float:
    _gather_over([1, 2])
    _gather_over([1, 3])  # rank 3 makes its first group here, rank 1 its second
    _gather_over([0, 1, 2])
    together = dist.new_group([0, 1, 2, 3])
    total = torch.ones(1)
    dist.all_reduce(total, group=together)
    return total.item()


def test_members_with_uneven_histories_meet(pool: Pool) -> None:
    assert pool.run(_uneven_histories, WORLD, timeout_seconds=40) == [WORLD] * WORLD
