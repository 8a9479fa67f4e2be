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
    """Returns a rank's values. Their sum over ranks depends on the order."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(SHAPE, generator=generator) * 10.0 ** torch.randint(-6, 6, SHAPE, generator=generator)


def _sums() -> list[torch.Tensor]:
    """Returns the replicated sum of all contributions on two meshes, and by a longer plan on one of them."""
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


def test_ordered_sums_have_same_bits_on_all_meshes(pool: Pool) -> None:
    in_order = _contribution(0)
    for rank in range(1, WORLD):
        in_order = in_order + _contribution(rank)
    other = _contribution(3) + _contribution(2) + _contribution(1) + _contribution(0)
    assert not torch.equal(in_order, other), "these values would not tell one order from another"
    for results in pool.run(_sums, WORLD):
        assert all(torch.equal(result, in_order) for result in results)


def _narrow_sums(before: list[str], after: list[str]) -> torch.Tensor:
    mesh = sw.Mesh({"a": 2, "b": 2})
    src, dst = (sw.Layout(mesh, SHAPE, p, "bfloat16") for p in (before, after))
    plan = sw.plan(src, dst, reduce="float32", backend="gloo")
    assert [step.op for step in plan.steps if step.ordered] == ["all_reduce"]
    sw.pin(plan)
    try:
        return sw.redistribute_local(_contribution(dist.get_rank()).bfloat16(), src, dst)
    finally:
        sw.unpin(plan)


@pytest.mark.parametrize(("pending", "divisor"), [("P", 1), ("P(avg)", 4)])
def test_narrow_sums_are_rounded_once(pool: Pool, pending: str, divisor: int) -> None:
    parts = [_contribution(rank).bfloat16() for rank in range(WORLD)]
    wide = parts[0].float()
    narrow = parts[0]
    for part in parts[1:]:
        wide = wide + part.float()
        narrow = narrow + part
    expected = (wide / divisor).bfloat16()
    assert not torch.equal(narrow / divisor, expected), "these values would not tell one rounding from several"
    for result in pool.run(_narrow_sums, WORLD, [pending] * 2, ["R", "R"]):
        assert torch.equal(result, expected)


def test_reduce_float32_applies_to_narrow_sums_only() -> None:
    mesh = sw.Mesh({"a": 8})
    for dtype, pending, is_ordered in (("bfloat16", "P", True), ("float16", "P(avg)", True), ("float32", "P", False),
                                       ("bfloat16", "P(max)", False)):  # fmt: skip
        src, dst = (sw.Layout(mesh, (64, 64), [p], dtype) for p in (pending, "R"))
        plan = sw.plan(src, dst, reduce="float32")
        assert any(step.ordered for step in plan.steps) == is_ordered
        assert plan.wire_bytes_max == sw.plan(src, dst).wire_bytes_max


def test_unknown_reduce_raises() -> None:
    layout = sw.Layout(sw.Mesh({"a": 2}), (4,), ["P"])
    with pytest.raises(ValueError, match="reduce must be one of fast, float32, ordered, got 'slow'"):
        sw.plan(layout, layout, reduce="slow")
