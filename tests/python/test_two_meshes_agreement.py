"""Ranks must agree on layouts before a DTensor moves to another mesh. Differences raise on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import oracle
import shardwright as sw
from pool import Pool
from shardwright.runtime.agreement import StoreTexts
from two_meshes import Grid, device_mesh, dtensor, part

HERE: Grid = ((2,), (0, 1))
THERE: Grid = ((2,), (2, 3))
SHAPE = (4, 6)


def _whole(seed: int = 1) -> torch.Tensor:
    return oracle.global_tensor(SHAPE, torch.float32, seed, reducible=True)


def _different_layouts() -> str:
    rank = dist.get_rank()
    here, there = device_mesh(HERE), device_mesh(THERE)
    x = dtensor(_whole(), here, HERE, ("P(sum)",) if rank < 2 else ("R",))
    with pytest.raises(RuntimeError) as raised:
        sw.redistribute(x, [Shard(0)], there)
    y = sw.redistribute(x.redistribute(placements=[Shard(1)]), [Shard(0)], there)
    assert oracle.difference(y.to_local(), part(_whole(), THERE, ("S(0)",), rank)) is None
    return str(raised.value)


def test_ranks_must_agree_on_layout_of_x(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(_different_layouts, 4)):
        assert f"this is rank {rank}" in text
        assert "[P(sum)]), ranks [0, 1] on ranks [0, 1]; " in text and "[R]), ranks [0, 1] on ranks [2, 3]" in text
        assert "x.redistribute(placements=...) on the mesh of x" in text


def _result_of_operators() -> None:
    """On ranks outside the mesh PyTorch assumes that moves cost nothing, so these results may be R there."""
    rank = dist.get_rank()
    here, there = device_mesh(HERE), device_mesh(THERE)
    square = oracle.global_tensor((6, 6), torch.float32, 2, reducible=True)
    expected = _whole() @ square + _whole()
    cut, rows = dtensor(_whole(), here, HERE, ("S(1)",)), dtensor(square, here, HERE, ("S(0)",))
    x = cut @ rows + dtensor(_whole(), here, HERE, ("R",))
    y = sw.redistribute(x.redistribute(placements=[Shard(1)]), [Shard(0)], there)
    assert oracle.difference(y.to_local(), part(expected, THERE, ("S(0)",), rank)) is None
    # Without an explicit redistribute on its mesh, x is moved correctly or an error is raised.
    try:
        y = sw.redistribute(x, [Shard(0)], there)
    except RuntimeError as error:
        assert "x.redistribute(placements=...) on the mesh of x" in str(error)
        return
    assert oracle.difference(y.to_local(), part(expected, THERE, ("S(0)",), rank)) is None


def test_results_of_operators_move_or_raise(pool: Pool) -> None:
    pool.run(_result_of_operators, 4)


def _compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compare = StoreTexts.compare
    monkeypatch.setattr(StoreTexts, "compare", lambda *a, **k: (calls.append(a[1]), compare(*a, **k)))
    here, there = device_mesh(HERE), device_mesh(((2,), (3, 1)))
    for rows in (4, 7, 9):
        full = oracle.global_tensor((rows, 5), torch.float32, rows)
        x = dtensor(full, here, HERE, ("S(1)",)).requires_grad_()
        y = sw.redistribute(x, [Shard(0)], there)
        (y * y).sum().backward()
        assert isinstance(x.grad, DTensor)
        assert oracle.difference(x.grad.to_local(), part(2 * full, HERE, ("S(1)",), dist.get_rank())) is None
    assert len(calls) == (0 if dist.get_rank() == 2 else 2)  # there and back; rank 2 is on neither mesh


def _compare_once() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _compared_once(monkeypatch)


def test_ranks_compare_layouts_at_first_use(pool: Pool) -> None:
    pool.run(_compare_once, 4)


def _slices() -> None:
    """mesh["tp"] is (0, 1) on some ranks and (2, 3) on others."""
    full = _whole()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    all_ranks = device_mesh(((4,), (0, 1, 2, 3)))
    on_mesh = distribute_tensor(full, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    on_slice = DTensor.from_local(full.chunk(2)[tp.get_local_rank()], tp, [Shard(0)], run_check=False)
    on_all = distribute_tensor(full, all_ranks, [Shard(0)], src_data_rank=None)
    for x, there, argument, name in (
        (on_mesh, tp, r"mesh \(device_mesh\)", "tp"),
        (on_all, dp, r"mesh \(device_mesh\)", "dp"),
        (on_slice, dp, r"mesh \(device_mesh\)", "dp"),
        (on_slice, mesh, "the mesh of x", "tp"),
        (on_slice, all_ranks, "the mesh of x", "tp"),
    ):
        text = rf"{argument} must be .*, got Mesh\({name}=2\), a slice of .* has different ranks on other processes"
        with pytest.raises(ValueError, match=text):
            sw.redistribute(x, [Replicate()] * there.ndim, there)
        with sw.enabled(), pytest.raises(ValueError, match=text):
            x.redistribute(there, [Replicate()] * there.ndim)


def test_slices_that_differ_between_ranks_raise(pool: Pool) -> None:
    pool.run(_slices, 4)


def _slices_with_known_ranks() -> None:
    """Moves between slices that are the only one, slices with the same ranks, and meshes of the ranks of one slice."""
    rank, full = dist.get_rank(), _whole()
    tall = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    column = tall["dp"]
    x = distribute_tensor(full, column, [Shard(0)], src_data_rank=None)
    backwards: Grid = ((2, 2), (3, 2, 1, 0))
    y = sw.redistribute(x, [Shard(1), Shard(0)], device_mesh(backwards))
    assert oracle.difference(y.to_local(), part(full, backwards, ("S(1)", "S(0)"), rank)) is None
    again = sw.redistribute(y, [Shard(1)], column)
    assert oracle.difference(again.to_local(), part(full, ((4,), (0, 1, 2, 3)), ("S(1)",), rank)) is None
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    rows = cube["b", "c"]
    flat = rows._flatten("bc")
    own: Grid = ((2, 1), (0, 1) if rank < 2 else (2, 3))
    local = part(full * (1 + rank // 2), own, ("S(0)", "R"), rank)
    x = DTensor.from_local(local, rows, [Shard(0), Replicate()], run_check=False)
    y = sw.redistribute(x, [Shard(1)], flat)
    assert oracle.difference(y.to_local(), part(full * (1 + rank // 2), ((2,), own[1]), ("S(1)",), rank)) is None
    stages = [DeviceMesh("cpu", [1, 0]), DeviceMesh("cpu", [3, 2])]  # made by all ranks
    y = sw.redistribute(x, [Shard(1)], stages[rank // 2])
    turned: Grid = ((2,), (1, 0) if rank < 2 else (3, 2))
    assert oracle.difference(y.to_local(), part(full * (1 + rank // 2), turned, ("S(1)",), rank)) is None


def test_slices_with_known_ranks_move(pool: Pool) -> None:
    pool.run(_slices_with_known_ranks, 4)


def _masks() -> None:
    """Looks up rows of a sharded table of 10 rows. The result is pending with a mask."""
    rank = dist.get_rank()
    here, there = device_mesh(HERE), device_mesh(((2,), (1, 0)))
    table = oracle.global_tensor((10, 6), torch.float32, 3, reducible=True)
    ids = torch.tensor([1, 9, 4, 0])
    weight = dtensor(table, here, HERE, ("S(0)",)).requires_grad_()
    x = torch.nn.functional.embedding(distribute_tensor(ids, here, [Replicate()], src_data_rank=None), weight)
    assert rank > 1 or hasattr(x.placements[0], "mask_buffer")
    if rank < 2:
        y = sw.redistribute(x, [Shard(1)], there)
        assert oracle.difference(y.to_local().detach(), part(table[ids], ((2,), (1, 0)), ("S(1)",), rank)) is None
        (y * y).sum().backward()
        plain = table.clone().requires_grad_()
        torch.nn.functional.embedding(ids, plain).pow(2).sum().backward()
        assert isinstance(weight.grad, DTensor) and plain.grad is not None
        assert oracle.difference(weight.grad.full_tensor(), plain.grad) is None
    with pytest.raises(ValueError, match=r"placements must be Shard or Replicate on another mesh, got P\(sum\)"):
        sw.redistribute(x, [Partial()], there)


def test_masks_are_applied_before_change_of_mesh(pool: Pool) -> None:
    pool.run(_masks, 4)
