"""`reduce="ordered"` gives the same bits on different meshes and by different plans: the sum in rank order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from pool import Pool

WORLD = 4
SHAPE = (37, 11)


def _contribution(rank: int) -> torch.Tensor:
    """Values whose sum depends on the order."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(SHAPE, generator=generator) * 10.0 ** torch.randint(-6, 6, SHAPE, generator=generator)


def _sums() -> list[torch.Tensor]:
    """The sum of all ranks' contributions, replicated: on two meshes, and on one of them by a longer plan."""
    results = []
    for sizes, middle in (({"a": 4}, None), ({"a": 2, "b": 2}, None), ({"a": 2, "b": 2}, ["S(1)", "S(0)"])):
        mesh = sw.Mesh(sizes)
        src, dst = (sw.Layout(mesh, SHAPE, [p] * mesh.ndim) for p in ("P", "R"))
        through = None if middle is None else [sw.Layout(mesh, SHAPE, middle)]
        plan = sw.plan(src, dst, reduce="ordered", backend="gloo", through=through)
        assert all(step.ordered == (step.op in ("all_reduce", "reduce_scatter")) for step in plan.steps)
        sw.pin(plan)
        try:
            results.append(sw.redistribute_local(_contribution(dist.get_rank()), src, dst))
        finally:
            sw.unpin(plan)
    return results


def test_same_bits_everywhere(pool: Pool) -> None:
    in_order = _contribution(0)
    for rank in range(1, WORLD):
        in_order = in_order + _contribution(rank)
    other = _contribution(3) + _contribution(2) + _contribution(1) + _contribution(0)
    assert not torch.equal(in_order, other), "these values would not tell one order from another"
    for results in pool.run(_sums, WORLD):
        assert all(torch.equal(result, in_order) for result in results)


def test_unknown_way_to_reduce() -> None:
    layout = sw.Layout(sw.Mesh({"a": 2}), (4,), ["P"])
    with pytest.raises(ValueError, match="reduce: 'slow' is not known; allowed are fast, ordered"):
        sw.plan(layout, layout, reduce="slow")
