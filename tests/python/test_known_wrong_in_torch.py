"""Cases that PyTorch's own path gets silently wrong.

Merging gathers over a flattened mesh loses rows of uneven shards. On meshes whose ranks do not ascend, shards are
ordered by rank instead of by mesh position. Over Gloo, minima and maxima drop NaN, and scattered products of complex
numbers multiply real and imaginary parts separately. Views of inner shards get a wrong sharding. When stock PyTorch
fixes one of these, test_stock_is_wrong and similar tests fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

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


def _is_right_with_shardwright(*case: object) -> bool:
    with sw.enabled(strict=True):
        return _is_right(*case)


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_right_with_shardwright(pool: Pool, case: tuple) -> None:
    assert all(pool.run(_is_right_with_shardwright, torch.Size(case[0]).numel(), *case))


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_stock_is_wrong(pool: Pool, case: tuple) -> None:
    assert not all(pool.run(_is_right, torch.Size(case[0]).numel(), *case)), "stock is right now: update the documents"


def _rows() -> list[list[float]]:
    mesh = get_mesh((2, 2), flatten=[("a", "b")])
    source = dtensors.distribute(torch.arange(15.0).view(5, 3), mesh, ["S(0)", "S(0)"])
    with sw.enabled(strict=True):
        return source.full_tensor().tolist()


def test_full_tensor_loses_no_row(pool: Pool) -> None:
    assert pool.run(_rows, 4) == [torch.arange(15.0).view(5, 3).tolist()] * 4


# Pairs on the mesh [[3, 1], [0, 2]] for which some or all ranks get wrong data.
NOT_ASCENDING: list[tuple[Placements, Placements]] = [
    (("S(0)", "R"), ("R", "R")),
    (("R", "S(0)"), ("R", "R")),
    (("R", "S(1)"), ("R", "S(0)")),
    (("S(0)", "S(0)"), ("R", "R")),
    (("S(0)", "S(1)"), ("S(1)", "S(0)")),
    (("S(1)", "S(1)"), ("S(0)", "S(0)")),
]


def _is_right_not_ascending(src: Placements, dst: Placements) -> bool:
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("a", "b"))
    tensor = torch.arange(48.0).view(8, 6)
    result = dtensors.distribute(tensor, mesh, src).redistribute(mesh, dtensors.to_placements(dst))
    return oracle.difference(result.to_local(), dtensors.my_local(tensor, mesh, dst)) is None


def _min_of_nan(op: str) -> bool:
    """Returns true if NaN on any one rank is in the result, as in `torch.amin` over all ranks."""
    mesh, rank = get_mesh((4,)), torch.distributed.get_rank()
    found = []
    for bad in range(4):
        local = torch.tensor([float("nan") if rank == bad else float(rank)])
        pending = DTensor.from_local(local, mesh, [Partial(op)], run_check=False)
        found.append(pending.redistribute(mesh, [Replicate()]).to_local().isnan().item())
    return all(found)


def _complex_product() -> bool:
    """Returns true if a scattered product is right: 1+i, 2+i, 3+i and 4+i give -10+40i."""
    mesh, rank = get_mesh((4,)), torch.distributed.get_rank()
    local = torch.full((4,), complex(rank + 1, 1))
    pending = DTensor.from_local(local, mesh, [Partial("product")], run_check=False)
    return pending.redistribute(mesh, [Shard(0)]).to_local().tolist() == [complex(-10, 40)]


OTHERS: list[tuple[Callable[..., bool], tuple[object, ...]]] = [
    *((_is_right_not_ascending, case) for case in NOT_ASCENDING),
    (_min_of_nan, ("min",)),
    (_min_of_nan, ("max",)),
    (_complex_product, ()),
]


def _with_shardwright(call: Callable[..., bool], *case: object) -> bool:
    with sw.enabled(strict=True):
        return call(*case)


@pytest.mark.parametrize(("call", "case"), OTHERS, ids=str)
def test_other_cases_are_right_with_shardwright(pool: Pool, call: Callable[..., bool], case: tuple) -> None:
    assert all(pool.run(_with_shardwright, 4, call, *case))


@pytest.mark.cpu_only("Gloo's minimum of NaN")
@pytest.mark.parametrize(("call", "case"), OTHERS, ids=str)
def test_stock_is_wrong_in_other_cases(pool: Pool, call: Callable[..., bool], case: tuple) -> None:
    assert not all(pool.run(call, 4, *case)), "stock is right now: update the documents"


# Reductions for which stock raises over Gloo: dtype, op and the result of four ranks.
REFUSED_BY_STOCK = [
    (torch.complex64, "product", 24),
    (torch.int16, "band", 0),
    (torch.int16, "bor", 7),
    (torch.int16, "max", 4),
]


def _reduce(dtype: torch.dtype, op: str) -> complex:
    mesh, rank = get_mesh((4,)), torch.distributed.get_rank()
    pending = DTensor.from_local(torch.tensor([rank + 1]).to(dtype), mesh, [Partial(op)], run_check=False)
    return pending.redistribute(mesh, [Replicate()]).to_local().item()


def _stock_raises(dtype: torch.dtype, op: str) -> bool:
    try:
        _reduce(dtype, op)
    except RuntimeError:
        return True
    return False


@pytest.mark.cpu_only("strict groups refuse more")
@pytest.mark.parametrize("case", REFUSED_BY_STOCK, ids=str)
def test_reductions_that_stock_refuses(pool: Pool, case: tuple) -> None:
    dtype, op, expected = case
    assert all(pool.run(_stock_raises, 4, dtype, op)), "stock takes it now: update the documents"
    assert pool.run(_with_shardwright, 4, _reduce, dtype, op) == [expected] * 4


def _views_are_right(views: bool) -> bool:
    """Returns true if two views of an inner shard, which need no transfer, are right."""
    tensor = torch.arange(16.0).view(4, 4)
    with sw.enabled(views=True) if views else contextlib.nullcontext():
        try:
            twice = distribute_tensor(tensor, get_mesh((2,)), [Shard(1)]).view(16).view(2, 8)
        except RuntimeError:  # torch 2.11 refuses the first view
            return False
        return torch.equal(twice.full_tensor(), tensor.view(2, 8))


@pytest.mark.cpu_only("stock communicates by itself")
def test_views_of_inner_shards(pool: Pool) -> None:
    assert all(pool.run(_views_are_right, 2, True))
    assert not any(pool.run(_views_are_right, 2, False)), "stock is right now: update the documents"
