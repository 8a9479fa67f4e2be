"""`sw.debug.check_ranks`: if ranks call different redistributes, all raise, name the difference, and send nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.debug import check_ranks
from shardwright.runtime import agreement, checking

WORLD = 4


@contextlib.contextmanager
def _checking(timeout_seconds: float = 30) -> Iterator[None]:
    check_ranks(timeout_seconds=timeout_seconds)
    try:
        yield
    finally:
        check_ranks(False)


def _layout(placement: str, dtype: str = "float32") -> sw.Layout:
    return sw.Layout(sw.Mesh({"a": WORLD}), (8, 12), [placement], dtype)


def _gather(rank: int) -> None:
    sw.redistribute_local(torch.ones(2, 12), _layout("S(0)"), _layout("R"))


def _equal_calls() -> None:
    x = DTensor.from_local(torch.ones(2, 12), get_mesh((WORLD,)), [Shard(0)], run_check=False).requires_grad_()
    with _checking(), sw.enabled(strict=True):
        for _ in range(4):
            _gather(dist.get_rank())
            x.redistribute(placements=[Replicate()]).sum().backward()
            assert sw.redistribute_local(torch.ones(2, 12), _layout("S(0)"), _layout("R"), async_op=True).sum() == 96


def test_equal_calls_pass(pool: Pool) -> None:
    pool.run(_equal_calls, WORLD)


def _transposed_on_some() -> None:
    """k = 5 is cut into 2, 2, 1 and 0. A part with a single row or none does not show whether it is transposed."""
    rank = dist.get_rank()
    x, weight = torch.arange(15.0).view(3, 5), torch.arange(30.0).view(5, 6)
    own_rows = slice(2 * rank, 2 * rank + 2)
    for is_transposed in (False, True, rank % 2 == 0):
        part = weight[own_rows].clone()
        if is_transposed:
            part = part.t().contiguous().t()
        part.requires_grad_()
        with _checking():
            y = sw.matmul_reduce_scatter(x[:, own_rows].contiguous(), part, size=5)
            y.sum().backward()
        assert torch.equal(y, (x @ weight)[rank : rank + 1])
        assert part.grad is not None
        assert torch.equal(part.grad, x.t()[own_rows] @ torch.ones(3, 6))


def test_weights_transposed_on_some_ranks(pool: Pool) -> None:
    pool.run(_transposed_on_some, WORLD)


def _other_destination(rank: int) -> None:
    sw.redistribute_local(torch.ones(2, 12), _layout("S(0)"), _layout("S(1)" if rank == 2 else "R"))


def _other_shape(rank: int) -> None:
    sw.redistribute_local(torch.ones(3 if rank == 1 else 2, 12), _layout("S(0)"), _layout("R"))


def _other_dtype(rank: int) -> None:
    dtype = "float64" if rank == 3 else "float32"
    local = torch.ones(2, 12, dtype=getattr(torch, dtype))
    sw.redistribute_local(local, _layout("S(0)", dtype), _layout("R", dtype))


def _other_plan(rank: int) -> None:
    src, dst = _layout("S(0)"), _layout("R")
    topology = "8xNVLink" if rank == 0 else "gloo-local"
    plan = sw.plan(src, dst, backend="gloo", topology=topology)
    sw.pin(plan)
    try:
        _gather(rank)
    finally:
        sw.unpin(plan)


def _other_ranks(rank: int) -> None:
    half = sw.Mesh({"a": 2}, [0, 1] if rank < 2 else [2, 3])
    sw.redistribute_local(torch.ones(2, 12), _layout("S(0)"), sw.Layout(half, (8, 12), ["R"]))


def _nothing(rank: int) -> None:
    sw.redistribute_local(None if rank == 1 else torch.ones(2, 12), _layout("S(0)"), _layout("R"))


def _out_with_gaps(rank: int) -> None:
    out = torch.zeros(8, 24)[:, ::2] if rank == 2 else torch.zeros(8, 12)
    try:
        sw.redistribute_local(torch.ones(2, 12), _layout("S(0)"), _layout("R"), out=out)
    finally:
        assert not out.any()


def _wrong_everywhere(rank: int) -> None:
    sw.redistribute_local(torch.ones(5, 5), _layout("S(0)"), _layout("R"))


def _differing(call: Callable[[int], None], is_known: bool) -> str:
    """Returns the error on this rank. Later calls of all ranks work."""
    if is_known:
        _gather(0)
    with _checking(), pytest.raises(RuntimeError, match="shardwright: redistribute: ") as error:
        call(dist.get_rank())
    _gather(0)
    return str(error.value)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_other_destination, ["dst: [R] on ranks [0, 1, 3]; [S(1)] on ranks [2]", "steps:"]),
        (
            _other_shape,
            ["on ranks [1] the arguments", "  input: must be float32[2, 12], got float32[3, 12] on ranks [1]"],
        ),
        (_other_dtype, ["tensor: float32[8, 12] on ranks [0, 1, 2]; float64[8, 12] on ranks [3]"]),
        (_other_plan, ["topology: 8xNVLink on ranks [0]; gloo-local on ranks [1, 2, 3]"]),
        (_other_ranks, ["ranks: [0, 1, 2, 3] -> [0, 1] on ranks [0, 1]; [0, 1, 2, 3] -> [2, 3] on ranks [2, 3]"]),
        (_nothing, ["  input: must be float32[2, 12], got float32[0] on ranks [1]"]),
        (
            _out_with_gaps,
            ["  out: must be a contiguous tensor of shape [8, 12] on rank 2, got shape [8, 12] and strides [24, 2]"],
        ),
        (_wrong_everywhere, ["input: must be float32[2, 12], got float32[5, 5] on ranks [0, 1, 2, 3]"]),
    ],
)
def test_differing_calls_raise(pool: Pool, call: Callable[[int], None], expected: list[str], is_known: bool) -> None:
    for rank, message in enumerate(pool.run(_differing, WORLD, call, is_known)):
        assert f"this is rank {rank}" in message
        for line in expected:
            assert line in message


def _in_two_groups() -> None:
    """Each half of the ranks runs different redistributes, over a mesh of ranks 0 and 1 of its own group."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, place = halves[rank // 2], rank % 2
    full = torch.arange(24.0).view((4, 6) if rank < 2 else (8, 3))
    mesh = sw.Mesh({"a": 2})
    cut, rows, all_of_it = (sw.Layout(mesh, full.shape, [placement]) for placement in ("S(1)", "S(0)", "R"))
    with _checking():
        size = full.shape[1]
        part, weight = full.chunk(2, 1)[place].contiguous(), torch.eye(size).chunk(2)[place].clone()
        product = sw.matmul_reduce_scatter(part, weight, size=size, group=group)
        assert torch.equal(product, full.chunk(2)[place])
        for _ in range(2 if rank < 2 else 5):
            moved = sw.redistribute_local(full.chunk(2)[place].clone(), rows, cut, group=group)
            assert torch.equal(moved, full.chunk(2, 1)[place])
            local = sw.redistribute_local(full, all_of_it, rows, group=group)  # sends nothing
            assert torch.equal(local, full.chunk(2)[place])
        if rank >= 2:
            with pytest.raises(RuntimeError, match=r"dst: \[R\] on ranks \[2\]; \[S\(1\)\] on ranks \[3\]"):
                dst = all_of_it if rank == 2 else cut
                sw.redistribute_local(full.chunk(2)[place].clone(), rows, dst, group=group)


def test_groups_compare_separately(pool: Pool) -> None:
    pool.run(_in_two_groups, WORLD)


def _one_rank_missing() -> None:
    with _checking(timeout_seconds=0.5):
        if dist.get_rank() != 1:
            with pytest.raises(
                RuntimeError, match=r"waited 0.5 s for ranks \[1\] to call redistribute \(\[S\(0\)\] -> "
            ):
                _gather(0)
    agreement.in_default_store("calls").rounds[tuple(range(WORLD))] += dist.get_rank() == 1


def test_timeout_names_missing_rank(pool: Pool) -> None:
    pool.run(_one_rank_missing, WORLD)


def test_invalid_timeout() -> None:
    with pytest.raises(ValueError, match="timeout_seconds must be a number above 0, got 0"):
        check_ranks(timeout_seconds=0)


def test_environment_variable_must_be_0_or_1() -> None:
    assert [checking._is_enabled(said) for said in ("", "0", "1")] == [False, False, True]
    with pytest.raises(ValueError, match="SHARDWRIGHT_CHECK_RANKS must be 0 or 1 in the environment, got 'no'"):
        checking._is_enabled("no")
