"""Plans with a memory limit run in rounds on real ranks, with right results. Replicas share the sending."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from parts import part_of
from pool import Pool

WORLD = 4
SHAPE = (12, 10, 8)


def _whole() -> torch.Tensor:
    return torch.arange(12 * 10 * 8, dtype=torch.float32).reshape(SHAPE)


def _run(sizes: dict[str, int], before: list[str], after: list[str], options: dict) -> tuple[bool, bool]:
    mesh = sw.Mesh(sizes)
    src, dst = (sw.Layout(mesh, SHAPE, placements) for placements in (before, after))
    plan = sw.plan(src, dst, backend="gloo", **options)
    rank = dist.get_rank()
    local = part_of(_whole(), src, rank)
    if "P" in before:
        local = local * (rank + 1)
    sw.pin(plan)
    try:
        result = sw.redistribute_local(local, src, dst)
    finally:
        sw.unpin(plan)
    expected = part_of(_whole(), dst, rank)
    if "P" in before:
        expected = expected * sum(range(1, WORLD + 1))
    return torch.equal(result, expected), any(step.rounds > 1 for step in plan.steps)


@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        ({"a": 4}, ["S(1)"], ["S(2)"]),
        ({"a": 4}, ["S(2)"], ["S(1)"]),  # parts of 3, 3, 3 and 1 rows
        ({"a": 2, "b": 2}, ["S(1)", "S(1)"], ["S(2)", "S(0)"]),
        ({"a": 2, "b": 2}, ["S(1)", "S(2)"], ["S(0)", "R"]),
        ({"a": 4}, ["P"], ["S(1)"]),
        ({"a": 4}, ["P"], ["R"]),
        ({"a": 2, "b": 2}, ["P", "P"], ["R", "R"]),
    ],
)
def test_rounds_on_real_ranks(pool: Pool, sizes: dict[str, int], before: list[str], after: list[str]) -> None:
    mesh = sw.Mesh(sizes)
    src, dst = (sw.Layout(mesh, SHAPE, placements) for placements in (before, after))
    free = sw.plan(src, dst, backend="gloo")
    result = free.certificate["peak_bytes"][1]
    limit = result + (free.peak_bytes - result) * 2 // 3
    limited = sw.plan(src, dst, backend="gloo", memory_limit=limit)
    assert limited.peak_bytes <= limit < free.peak_bytes
    outcomes = pool.run(_run, WORLD, sizes, before, after, {"memory_limit": limit})
    assert all(is_right for is_right, _ in outcomes)
    assert all(in_rounds for _, in_rounds in outcomes)


@pytest.mark.parametrize("objective", ["time", "bytes"])
def test_shared_sending_on_real_ranks(pool: Pool, objective: str) -> None:
    ends = (["S(0)", "R"], ["R", "S(0)"])
    outcomes = pool.run(_run, WORLD, {"a": 2, "b": 2}, *ends, {"objective": objective})
    assert all(is_right for is_right, _ in outcomes)


def test_error_of_a_small_limit_names_the_least_limit() -> None:
    mesh = sw.Mesh({"a": 4})
    src, dst = (sw.Layout(mesh, SHAPE, [placement]) for placement in ("S(1)", "S(2)"))
    with pytest.raises(ValueError, match="memory_limit must be at least .*, got 100") as error:
        sw.plan(src, dst, memory_limit=100)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert sw.plan(src, dst, memory_limit=least).peak_bytes <= least
    with pytest.raises(ValueError, match="memory_limit must be at least 0 bytes, got -1"):
        sw.plan(src, dst, memory_limit=-1)
    with pytest.raises(ValueError, match="memory_limit must be left out if through is given, got"):
        sw.plan(src, dst, through=[], memory_limit=1000)
