"""Large exchanges over Gloo are sent as messages on all ranks, with right results."""

from __future__ import annotations

import pytest
import torch

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pairs import ONE_DIM
from pool import Pool

MOVES = [ONE_DIM[name] for name in ("S->R", "S->S", "P->S", "P->R")]
LARGE, SMALL = (2050, 600), (66, 60)  # rows are uneven; parts of the large tensor exceed 1 MiB


def _programs(src: list[str], dst: list[str], shape: tuple[int, int], num_ranks: int, backend: str) -> list[str]:
    mesh = sw.Mesh({"x": num_ranks})
    plan = sw.plan(sw.Layout(mesh, shape, src), sw.Layout(mesh, shape, dst), backend=backend)
    return [plan.program(rank) for rank in range(num_ranks)]


@pytest.mark.parametrize(("src", "dst"), MOVES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_only_large_exchanges_over_gloo_use_messages(src: list[str], dst: list[str], num_ranks: int) -> None:
    for program in _programs(src, dst, LARGE, num_ranks, "gloo"):
        exchanges = program.count("all_to_all ") - program.count("all_to_all by messages ")
        assert exchanges == 0, program
        assert "all_to_all by messages " in program or "send_receive " in program, program
    for program in _programs(src, dst, SMALL, num_ranks, "gloo") + _programs(src, dst, LARGE, num_ranks, "nccl"):
        assert "by messages" not in program, program


def _results(src: list[str], dst: list[str], async_op: bool) -> None:
    mesh = get_mesh((4,))
    full = oracle.global_tensor(LARGE, torch.float32, seed=1, reducible=True)
    part = oracle.contribution(full, mesh.shape, src, mesh.get_coordinate()) if "P(sum)" in src else None
    local = dtensors.my_local(full, mesh, src) if part is None else part
    source = dtensors.wrap(local, mesh, LARGE, src)
    with sw.enabled(strict=True):
        for _ in range(2):
            moved = source.redistribute(mesh, dtensors.to_placements(dst), async_op=async_op)
            dtensors.check(moved, full, dst)


@pytest.mark.parametrize(("src", "dst"), MOVES, ids=str)
def test_large_redistributes_are_right(pool: Pool, src: list[str], dst: list[str]) -> None:
    for async_op in (False, True):
        pool.run(_results, 4, src, dst, async_op)


def _product(method: str) -> None:
    mesh = get_mesh((2,))
    x = oracle.global_tensor((2050, 300), torch.float32, seed=2, reducible=True)
    weight = oracle.global_tensor((500, 300), torch.float32, seed=3, reducible=True)
    for before, after in ((["S(0)"], ["S(1)"]), (["S(1)"], ["S(0)"])):
        y = sw.linear(
            dtensors.distribute(x, mesh, before),
            dtensors.distribute(weight, mesh, [before[0]]),
            placements=dtensors.to_placements(after),
            method=method,
            chunks=2 if method == "collective" else None,
        )
        dtensors.check(y, x @ weight.t(), after)


@pytest.mark.parametrize("method", ["serial", "collective"])
def test_large_products_are_right(pool: Pool, method: str) -> None:
    pool.run(_product, 2, method)
