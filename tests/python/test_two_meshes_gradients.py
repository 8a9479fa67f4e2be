"""Gradients of DTensors that move to another mesh and are used by operators there, against unsharded autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import oracle
import shardwright as sw
from dtensors import to_placements
from pool import Pool
from two_meshes import Grid, device_mesh, dtensor, part

WORLD = 5
SHAPE = (6, 10)
PAIRS: list[tuple[Grid, Grid]] = [
    (((2,), (0, 1)), ((3,), (2, 3, 4))),
    (((3,), (0, 1, 2)), ((2,), (2, 4))),
    (((2, 2), (0, 1, 2, 3)), ((1,), (1,))),
    # Operators run on meshes whose ranks ascend, because the redistributes that PyTorch starts are wrong on others.
    (((2,), (4, 0)), ((2, 2), (0, 1, 2, 3))),
    (((2, 2), (3, 1, 2, 0)), ((2, 2), (0, 1, 2, 3))),
]


def _values() -> torch.Tensor:
    """Returns small integers of both signs, so that all sums are exact."""
    return oracle.global_tensor(SHAPE, torch.float32, 1, reducible=True) - 4


def _weight() -> torch.Tensor:
    return oracle.global_tensor((SHAPE[1], 4), torch.float32, 2, reducible=True) - 4


def _squares(y: Any, weight: Any) -> Any:
    return (y * y).sum()


def _product(y: Any, weight: Any) -> Any:
    return ((y @ weight).relu() * 3).sum()


def _mixed(y: Any, weight: Any) -> Any:
    return (y.relu() @ weight).pow(2).sum() + y.sum(0).pow(2).sum()


def _ordinary_losses(src_grid: Grid, dst_grid: Grid) -> None:
    """The gradient on the destination often has other placements than the result: S for R, R for S, or P(sum)."""
    rank = dist.get_rank()
    here, there = device_mesh(src_grid), device_mesh(dst_grid)
    kinds = itertools.product(("S(0)", "S(1)", "R", "P(sum)"), ("S(0)", "S(1)", "R"), (_squares, _product, _mixed))
    for number, (src_kind, dst_kind, loss_of) in enumerate(kinds):
        src, dst = (src_kind,) * len(src_grid[0]), (dst_kind,) * len(dst_grid[0])
        cut = (("R", "S(0)", "S(1)")[number % 3],) * len(dst)
        x = dtensor(_values(), here, src_grid, src).requires_grad_()
        weight = dtensor(_weight(), there, dst_grid, cut).requires_grad_()
        if number % 2:
            loss_of(sw.redistribute(x, to_placements(dst), there), weight).backward()
        else:
            with sw.enabled():
                loss_of(x.redistribute(there, to_placements(dst)), weight).backward()
        full, whole_weight = _values().requires_grad_(), _weight().requires_grad_()
        loss_of(full, whole_weight).backward()
        assert full.grad is not None and isinstance(x.grad, DTensor)
        back = ("R",) * len(src) if src_kind == "P(sum)" else src
        assert x.grad.placements == to_placements(back)
        wrong = oracle.difference(x.grad.to_local(), part(full.grad, src_grid, back, rank), rounded=True)
        assert wrong is None, f"{loss_of.__name__}: {src} -> {dst}, weight {cut}, on rank {rank}: {wrong}"


@pytest.mark.parametrize(("src_grid", "dst_grid"), PAIRS, ids=str)
def test_ordinary_losses(pool: Pool, src_grid: Grid, dst_grid: Grid) -> None:
    pool.run(_ordinary_losses, WORLD, src_grid, dst_grid)


def _second_derivatives(src_grid: Grid, dst_grid: Grid) -> None:
    """Differentiates a penalty on the gradient, so that gradients move there and back twice."""
    rank = dist.get_rank()
    here, there = device_mesh(src_grid), device_mesh(dst_grid)
    for src_kind, dst_kind in itertools.product(("S(0)", "R"), ("S(1)", "R")):
        src, dst = (src_kind,) * len(src_grid[0]), (dst_kind,) * len(dst_grid[0])
        x = dtensor(_values(), here, src_grid, src).requires_grad_()
        y = sw.redistribute(x, to_placements(dst), there)
        (slope,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        (slope * slope).sum().backward()
        assert isinstance(x.grad, DTensor)
        expected = part(36 * _values() ** 3, src_grid, src, rank)  # the gradient of (3 x^2)^2
        wrong = oracle.difference(x.grad.to_local(), expected, rounded=True)
        assert wrong is None, f"{src} -> {dst} on rank {rank}: {wrong}"


@pytest.mark.parametrize(("src_grid", "dst_grid"), PAIRS[:4], ids=str)
def test_second_derivatives_between_meshes(pool: Pool, src_grid: Grid, dst_grid: Grid) -> None:
    pool.run(_second_derivatives, WORLD, src_grid, dst_grid)


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: DTensor) -> DTensor:  # type: ignore[override]
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> None:  # type: ignore[override]
        return None


def _gradients_outside_destination() -> None:
    """The gradient on a rank outside the destination's mesh does not matter. It may be None or zeros."""
    rank = dist.get_rank()
    (src_grid, dst_grid), full = PAIRS[0], _values()
    here, there = device_mesh(src_grid), device_mesh(dst_grid)
    for outside in ("none", "zeros", "async"):
        x = dtensor(full, here, src_grid, ("S(0)",)).requires_grad_()
        y = sw.redistribute(x, [Replicate()], there, async_op=outside == "async")
        if rank in dst_grid[1]:
            (y * y).sum().backward()
        elif outside == "none":
            _GivesNone.apply(y).sum().backward()  # type: ignore[no-untyped-call]
        else:
            (y * 0).sum().backward()
        assert isinstance(x.grad, DTensor) and x.grad.dtype == torch.float32
        assert oracle.difference(x.grad.to_local(), part(2 * full, src_grid, ("S(0)",), rank)) is None, outside
    # A destination mesh without any gradient sends zeros.
    x = dtensor(full, here, src_grid, ("S(0)",)).requires_grad_()
    y = sw.redistribute(x, [Shard(1)], there)
    (_GivesNone.apply(y) if rank in dst_grid[1] else y).sum().backward()  # type: ignore[no-untyped-call]
    assert isinstance(x.grad, DTensor)
    assert oracle.difference(x.grad.to_local(), part(0 * full, src_grid, ("S(0)",), rank)) is None


def _incomplete_gradients() -> None:
    """Moves large gradients that an asynchronous redistribute on the destination's mesh has not completed yet."""
    rank, (src_grid, dst_grid) = dist.get_rank(), PAIRS[0]
    here, there = device_mesh(src_grid), device_mesh(dst_grid)
    full = oracle.global_tensor((600, 500), torch.float32, 3, reducible=True)
    x = dtensor(full, here, src_grid, ("S(0)",)).requires_grad_()
    with sw.enabled():
        y = x.redistribute(there, [Shard(1)], async_op=True)
        z = y.redistribute(placements=[Shard(0)], async_op=True)
        (z * z).sum().backward()
    assert isinstance(x.grad, DTensor)
    assert oracle.difference(x.grad.to_local() + 0, part(2 * full, src_grid, ("S(0)",), rank)) is None


def test_incomplete_gradients_are_waited_for(pool: Pool) -> None:
    pool.run(_incomplete_gradients, WORLD)


def test_gradients_outside_destination_are_ignored(pool: Pool) -> None:
    pool.run(_gradients_outside_destination, WORLD)


def _dtypes() -> None:
    """The gradient moves in `backward_dtype` and has the dtype of x."""
    rank = dist.get_rank()
    (src_grid, dst_grid), full = PAIRS[1], _values() / 3
    here, there = device_mesh(src_grid), device_mesh(dst_grid)
    x = dtensor(full, here, src_grid, ("S(1)",)).requires_grad_()
    for forward, backward in ((None, torch.bfloat16), (torch.float64, None), (torch.bfloat16, torch.float64)):
        x.grad = None
        y = sw.redistribute(x, [Replicate()], there, forward_dtype=forward, backward_dtype=backward)
        assert y.dtype == (forward or torch.float32)
        (y * y).sum().backward()
        plain = full.to(forward or torch.float32)
        gradient = (2 * plain).to(backward or torch.float32).to(torch.float32)
        assert isinstance(x.grad, DTensor)
        wrong = oracle.difference(x.grad.to_local(), part(gradient, src_grid, ("S(1)",), rank))
        assert wrong is None, f"{forward}, {backward}: {wrong}"


def test_gradients_use_backward_dtype(pool: Pool) -> None:
    pool.run(_dtypes, WORLD)
