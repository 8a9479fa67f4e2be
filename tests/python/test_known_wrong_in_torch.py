"""Cases that PyTorch's own path gets silently wrong: merging gathers over a flattened mesh loses rows of uneven shards.

When one of them becomes right in stock, test_stock_is_wrong says so.
"""

from __future__ import annotations

import pytest
import torch

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

Placements = tuple[str, ...]

# Mesh, shape, source, destination. Sharding twice over 2 x 2 leaves 2/1/1/1 of 5 rows, once over 4 leaves 2/2/1/0.
WRONG: list[tuple[tuple[int, ...], tuple[int, ...], Placements, Placements]] = [
    ((2, 2), (5, 3), ("S(0)", "S(0)"), ("R", "R")),
    ((2, 3), (9,), ("S(0)", "S(0)"), ("R", "R")),
    ((3, 2), (9,), ("S(0)", "S(0)"), ("R", "R")),
    ((2, 2, 2), (9, 2), ("S(0)", "S(0)", "S(0)"), ("R", "R", "R")),
]


def _is_right(mesh_shape: tuple[int, ...], shape: tuple[int, ...], src: Placements, dst: Placements) -> bool:
    mesh = get_mesh(mesh_shape, flatten="all")
    tensor = oracle.global_tensor(shape, torch.float32, seed=1)
    result = dtensors.distribute(tensor, mesh, src).redistribute(mesh, dtensors.to_placements(dst))
    return oracle.difference(result.to_local(), dtensors.my_local(tensor, mesh, dst)) is None


def _is_right_with_us(*case: object) -> bool:
    with sw.enabled(strict=True):
        return _is_right(*case)


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_right_with_us(pool: Pool, case: tuple) -> None:
    assert all(pool.run(_is_right_with_us, torch.Size(case[0]).numel(), *case))


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_stock_is_wrong(pool: Pool, case: tuple) -> None:
    assert not all(pool.run(_is_right, torch.Size(case[0]).numel(), *case)), "stock is right now: update the documents"


def _rows() -> list[list[float]]:
    mesh = get_mesh((2, 2), flatten=[("a", "b")])
    source = dtensors.distribute(torch.arange(15.0).view(5, 3), mesh, ["S(0)", "S(0)"])
    with sw.enabled(strict=True):
        return source.full_tensor().tolist()


def test_no_row_is_lost(pool: Pool) -> None:
    assert pool.run(_rows, 4) == [torch.arange(15.0).view(5, 3).tolist()] * 4
