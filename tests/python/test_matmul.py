"""Products that overlap with redistributes on real ranks, compared with the global product and autograd's gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import meshes
import shardwright as sw
from meshes import get_mesh
from parts import part_in_group as _part
from pool import Pool

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"method": "serial", "chunks": 1},
    {"method": "ring", "chunks": 2},
    {"method": "ring", "chunks": 4, "depth": 1},
    {"method": "ring", "chunks": 8, "depth": 3},
    {"method": "collective", "chunks": 3, "depth": 2},
    {"method": "collective", "chunks": 1},
    {"depth": 4},
]
PLACEMENTS = {"S(0)": Shard(0), "S(1)": Shard(1), "S(2)": Shard(2), "R": Replicate(), "P": Partial()}


def _integers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns integers that are small enough for exact sums of products, in bfloat16 too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _gathers(shape: tuple[int, ...], columns: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = _integers(shape, 1, dtype)
    weights = [_integers((shape[-1], n), 2 + j, dtype) for j, n in enumerate(columns)]
    offset = _integers((columns[0],), 9, dtype)
    biases = [_part(offset, "S(0)").requires_grad_(), *[None] * (len(columns) - 1)]
    products = [x.float() @ w.float() for w in weights]
    products[0] += offset.float()
    expected = [_part(product, f"S({len(shape) - 1})").to(dtype) for product in products]
    for schedule, save, transposed in itertools.product(SCHEDULES, ("shard", "gathered"), (False, True)):
        local_x = _part(x, f"S({dim})").requires_grad_()
        # Weights have all rows, also if x is sharded along the contracted dim.
        local_weights = [_part(w, "S(1)").requires_grad_() for w in weights]
        stored_weights = [w.t().contiguous().t() for w in local_weights] if transposed else local_weights
        found = sw.all_gather_matmul(
            local_x,
            stored_weights,
            biases,
            gather_dim=dim,
            size=shape[dim],
            columns=columns,
            save=save,
            **schedule,
        )
        for result, right in zip(found, expected, strict=True):
            assert torch.equal(result, right), schedule
        grads = torch.autograd.grad([f.float().square().sum() for f in found], [local_x, *local_weights, biases[0]])
        full = [t.clone().requires_grad_() for t in (x, *weights, offset)]
        products = [full[0].float() @ w.float() for w in full[1:-1]]
        products[0] = products[0] + full[-1].float()
        right_grads = torch.autograd.grad([p.square().sum() for p in products], full)
        on = [f"S({dim})", *["S(1)"] * len(weights), "S(0)"]
        rights = [_part(grad, placement) for grad, placement in zip(right_grads, on, strict=True)]
        for grad, right in zip(grads, rights, strict=True):
            assert_close(grad.cpu(), right.cpu(), rtol=0.02 if dtype == torch.bfloat16 else 0, atol=0)


CASES = [
    ((8, 6), (8,), 0),
    ((7, 5), (6, 9), 0),
    ((7, 5), (8,), 1),
    ((2, 5, 6), (8, 3), 1),
    ((3, 4, 6), (4,), 0),
    ((2, 3, 7), (5,), 2),
    ((1, 3), (2,), 0),
    ((0, 3), (2,), 0),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_all_gather_matmul(pool: Pool, world: int) -> None:
    for (shape, columns, dim), dtype in itertools.product(CASES, (torch.float32, torch.bfloat16)):
        pool.run(_gathers, world, shape, columns, dim, dtype)


def _sums(shape: tuple[int, ...], columns: int, dim: int | None, dtype: torch.dtype) -> None:
    x = _integers(shape, 1, dtype)
    weight = _integers((shape[-1], columns), 2, dtype)
    bias = _integers((columns,), 3, dtype)
    last = f"S({len(shape) - 1})"
    to = "R" if dim is None else f"S({dim})"
    for schedule, transposed in itertools.product(SCHEDULES, (False, True)):
        if dim is None and schedule.get("method") == "ring":
            continue
        local_x = _part(x, last).requires_grad_()
        local_weight = _part(weight, "S(0)").requires_grad_()
        stored_weight = local_weight.t().contiguous().t() if transposed else local_weight
        offset = bias.clone().to(meshes.device).requires_grad_()
        how = {"size": shape[-1], **schedule}
        if dim is None:
            found = sw.matmul_all_reduce(local_x, stored_weight, offset, **how)
        else:
            found = sw.matmul_reduce_scatter(local_x, stored_weight, offset, scatter_dim=dim, **how)
        assert torch.equal(found, _part((x.float() @ weight.float() + bias.float()).to(dtype), to)), schedule
        grads = torch.autograd.grad(found.float().square().sum(), [local_x, local_weight, offset])
        full = [t.clone().requires_grad_() for t in (x, weight, bias)]
        rights = torch.autograd.grad((full[0].float() @ full[1].float() + full[2].float()).square().sum(), full)
        for grad, right, placement in zip(grads, rights, (last, "S(0)", "R"), strict=True):
            assert_close(grad.cpu(), _part(right, placement).cpu(), rtol=0.02 if dtype == torch.bfloat16 else 0, atol=0)


@pytest.mark.parametrize("world", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_matmul_reduce_scatter_and_all_reduce(pool: Pool, world: int) -> None:
    for (shape, columns, dim), dtype in itertools.product(
        [((8, 6), 8, 0), ((7, 5), 9, 0), ((7, 5), 9, 1), ((2, 5, 6), 4, 1), ((1, 3), 2, 0), ((2, 5, 6), 4, None)],
        (torch.float32, torch.bfloat16),
    ):
        pool.run(_sums, world, shape, columns, dim, dtype)


def _linears(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = get_mesh(sizes)
    x = _integers(shape, 1)
    weight = _integers((5, shape[-1]), 2)
    bias = _integers((5,), 3)
    full = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.linear(*full)
    factors = _integers(expected.shape, 4)
    rights = torch.autograd.grad((expected * factors).sum(), full)
    dims = range(len(sizes))
    x_options = ["R", *(f"S({d})" for d in range(len(shape)))]
    result_options = x_options
    cases = list(
        itertools.product(
            itertools.product(x_options, repeat=len(dims)),
            itertools.product(["R", "S(0)", "S(1)"], repeat=len(dims)),
            itertools.product(result_options, repeat=len(dims)),
        )
    )
    stride = max(len(cases) // 40, 1)
    for number, (from_x, from_w, to) in enumerate(cases[::stride]):
        dx = distribute_tensor(x, mesh, [PLACEMENTS[p] for p in from_x]).requires_grad_()
        dw = distribute_tensor(weight, mesh, [PLACEMENTS[p] for p in from_w]).requires_grad_()
        on_bias = ["S(0)" if p == "S(0)" else "R" for p in from_w]
        db = distribute_tensor(bias, mesh, [PLACEMENTS[p] for p in on_bias]).requires_grad_()
        save = ("shard", "gathered")[number % 2]
        found = sw.linear(dx, dw, db, placements=[PLACEMENTS[p] for p in to], save=save)
        assert found.placements == tuple(PLACEMENTS[p] for p in to)
        assert torch.equal(found.full_tensor(), expected.detach()), (from_x, from_w, to)
        weighed = found * distribute_tensor(factors, mesh, [PLACEMENTS[p] for p in to])
        grads = torch.autograd.grad(weighed.sum(), [dx, dw, db])
        for grad, right, given in zip(grads, rights, (dx, dw, db), strict=True):
            assert isinstance(grad, DTensor)
            for found_on, given_on in zip(grad.placements, given.placements, strict=True):
                # As in PyTorch, the operand's gradient may stay a pending sum if the operand is replicated.
                assert found_on == given_on or (given is dx and given_on.is_replicate() and found_on.is_partial())
            assert torch.equal(grad.full_tensor(), right), (from_x, from_w, to)


@pytest.mark.parametrize("shape", [(8, 6), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_linear_of_dtensors(pool: Pool, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    pool.run(_linears, math.prod(sizes), sizes, shape)


def _explicit_chunks() -> None:
    x, weight = _integers((9, 6), 1), _integers((6, 8), 2)
    local_x = _part(x, "S(0)").requires_grad_()
    actual = sw.all_gather_matmul(local_x, _part(weight, "S(1)"), size=9, columns=8, chunks=[[3], [1, 2]])
    assert torch.equal(actual, _part(x @ weight, "S(1)"))
    (grad,) = torch.autograd.grad(actual.sum(), local_x)
    assert torch.equal(grad, _part(torch.ones(9, 8) @ weight.t(), "S(0)"))
    for chunks in ([[1], [2]], [[1], [2], [3], [3]], [[0], [1, 2]], [[1, 2, 4]]):
        with pytest.raises(ValueError, match="chunks must have each distance from 1 to 3 once"):
            sw.all_gather_matmul(local_x, _part(weight, "S(1)"), size=9, columns=8, chunks=chunks)


def test_ring_with_explicit_chunks(pool: Pool) -> None:
    pool.run(_explicit_chunks, 4)


def _pending_operands() -> None:
    """Operands and gradients are results of asynchronous redistributes that are still running."""
    mesh = get_mesh((4,))
    x, weight = _integers((9, 6), 1), _integers((8, 6), 2)
    full = [t.clone().requires_grad_() for t in (x, weight)]
    dx, dw = (distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in (x, weight))
    for to in ([Shard(0)], [Shard(1)], [Replicate()]):
        moved = dx.redistribute(placements=[Shard(0)], async_op=True)
        y = sw.linear(moved, dw.redistribute(placements=[Shard(0)], async_op=True), placements=to)
        loss = (y.redistribute(placements=[Replicate()], async_op=True) ** 2).sum()
        right = (full[0] @ full[1].t()).square().sum()
        assert torch.equal(loss.full_tensor(), right)
        for actual, expected in zip(torch.autograd.grad(loss, [dx, dw]), torch.autograd.grad(right, full), strict=True):
            assert torch.equal(actual.full_tensor(), expected)


def test_operands_of_asynchronous_redistributes(pool: Pool) -> None:
    pool.run(_pending_operands, 4)


def _lengths_by_rank(lengths: list[int]) -> None:
    """Shards the rows of the gathered operand, and the contracted dim, into parts of any length."""
    rank = torch.distributed.get_rank()
    rows = sum(lengths)
    x, weight = _integers((rows, 5), 1), _integers((5, 8), 2)
    left, right = _integers((6, rows), 3), _integers((rows, 7), 4)
    begin = sum(lengths[:rank])
    own = slice(begin, begin + lengths[rank])
    for schedule in SCHEDULES:
        local_x, columns = x[own].clone().requires_grad_(), _part(weight, "S(1)").requires_grad_()
        actual = sw.all_gather_matmul(local_x, columns, size=lengths, columns=8, **schedule)
        assert_close(actual, _part(x @ weight, "S(1)"), rtol=0, atol=0)
        weights = _integers((rows, 8), 5)
        (actual * _part(weights, "S(1)")).sum().backward()
        assert_close(local_x.grad, (weights @ weight.t())[own], rtol=0, atol=0)
        assert_close(columns.grad, _part(x.t() @ weights, "S(1)"), rtol=0, atol=0)
        summed, of_rows = left[:, own].clone().requires_grad_(), right[own].clone().requires_grad_()
        actual = sw.matmul_reduce_scatter(summed, of_rows, size=lengths, **schedule)
        assert_close(actual, _part(left @ right, "S(0)"), rtol=0, atol=0)
        weights = _integers((6, 7), 6)
        (actual * _part(weights, "S(0)")).sum().backward()
        assert_close(summed.grad, (weights @ right.t())[:, own], rtol=0, atol=0)
        assert_close(of_rows.grad, (left.t() @ weights)[own], rtol=0, atol=0)
    everywhere = sw.matmul_all_reduce(left[:, own], right[own], size=lengths)
    assert_close(everywhere, left @ right, rtol=0, atol=0)
    for wrong, message in (
        (lengths[:-1], "size must have one length for each of 4 ranks, got 3"),
        ([*lengths[:-1], -1], "size must have lengths of at least 0, got -1"),
        ([n + 1 for n in lengths], rf"part of rank {rank} \({lengths[rank]}\), got {lengths[rank] + 1}"),
        ([], "size must be .*, got an empty list"),
    ):
        with pytest.raises(ValueError, match=message):
            sw.all_gather_matmul(x[own], _part(weight, "S(1)"), size=wrong, columns=8)
    with pytest.raises(ValueError, match="placements must be None for plain tensors, got a list"):
        sw.matmul_reduce_scatter(left[:, own], right[own], size=lengths, placements=[Replicate()])
    on_mesh = [DTensor.from_local(each, get_mesh((4,)), [Replicate()]) for each in (left, right)]
    for argument in ({"size": 5}, {"size": lengths}, {"columns": 8}):
        with pytest.raises(ValueError, match=f"{next(iter(argument))} must be None for DTensors"):
            (sw.all_gather_matmul if "columns" in argument else sw.matmul_all_reduce)(*on_mesh, **argument)


@pytest.mark.parametrize("lengths", [[3, 1, 0, 7], [0, 0, 9, 0]], ids=str)
def test_parts_of_any_length(pool: Pool, lengths: list[int]) -> None:
    pool.run(_lengths_by_rank, 4, lengths)
