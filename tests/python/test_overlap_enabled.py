"""`sw.enable(overlap=True)`: DTensor's own linear and matmul, with a gather that overlaps with the product."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.matmul import overlapping

WORLD = 4


def _products_of(function: object, *args: object) -> tuple[DTensor, int]:
    before = sw.stats()["products"]
    result = function(*args)  # type: ignore[operator]
    return result, sw.stats()["products"] - before


def _linear_and_matmul(rows: int) -> None:
    mesh = get_mesh((WORLD,))
    torch.manual_seed(3)
    tensors = [torch.randint(-2, 3, shape).float() for shape in ((rows, 6), (8, 6), (8,), (6, 8))]
    x, weight, bias, turned = tensors
    dx, dw, db, dt = (
        distribute_tensor(t, mesh, [p]).requires_grad_()
        for t, p in zip(tensors, (Shard(0), Shard(0), Shard(0), Shard(1)), strict=True)
    )
    full = [t.clone().requires_grad_() for t in tensors]
    calls = [
        (lambda a, w, b, t: torch.nn.functional.linear(a, w, b)),
        (lambda a, w, b, t: torch.nn.functional.linear(a, w) * b),
        (lambda a, w, b, t: (a @ t) + b),
        (lambda a, w, b, t: torch.mm(a, t) + b),
        (lambda a, w, b, t: torch.matmul(a, t) + b),
    ]
    for call in calls:
        with sw.enabled(overlap=True):
            result, products = _products_of(call, dx, dw, db, dt)
            assert products == 1 and result.placements == (Shard(1),)
        assert torch.equal(result.full_tensor(), call(*tensors))
        factors = torch.randint(-2, 3, result.shape).float()
        with sw.enabled(overlap=True):
            (result * distribute_tensor(factors, mesh, [Shard(1)])).sum().backward()
        (call(*full) * factors).sum().backward()
    for actual, right in zip((dx, dw, db, dt), full, strict=True):
        assert actual.grad is not None and torch.equal(actual.grad.full_tensor(), right.grad)
    _, products = _products_of(calls[0], dx, dw, db, dt)
    assert products == 0, "switched off with the block"
    with sw.enabled(overlap=True):
        for operand, other in ((distribute_tensor(x, mesh, [Replicate()]), dt), (dx, distribute_tensor(turned, mesh))):
            result, products = _products_of(lambda a, b: a @ b, operand, other)
            assert products == 0, "nothing is gathered"
            assert torch.equal(result.full_tensor(), x @ turned)
        assert type(dx + 1) is DTensor and torch.equal((dx + 1).full_tensor(), x + 1)
        with sw.enabled():
            assert _products_of(lambda a, b: a @ b, dx, dt)[1] == 0, "an inner block decides"
        assert _products_of(lambda a, b: a @ b, dx, dt)[1] == 1


@pytest.mark.parametrize("rows", [8, 7])
def test_gathers_of_linear_and_matmul_overlap(pool: Pool, rows: int) -> None:
    pool.run(_linear_and_matmul, WORLD, rows)


def _under_torchs_styles() -> tuple[int, list[str]]:
    """Runs PyTorch's styles, which gather with their own redistribute before the linear layer."""
    mesh = get_mesh((WORLD,))
    overlapping._warned = False
    torch.manual_seed(4)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    x = torch.randn(2, 8, 6)
    expected = plain(x)
    styles = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    parallel = parallelize_module(plain, mesh, styles)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    before = sw.stats()["products"]
    try:
        with sw.enabled(overlap=True):
            for _ in range(2):
                rank = mesh.get_rank()
                actual = parallel(x[:, 2 * rank : 2 * rank + 2])
    finally:
        logging.getLogger("shardwright").removeHandler(handler)
    torch.testing.assert_close(actual.cpu(), expected[:, 2 * rank : 2 * rank + 2])
    return sw.stats()["products"] - before, [line for line in lines if line.startswith("enable(overlap=True)")]


def test_torch_styles_log_one_warning(pool: Pool) -> None:
    for products, lines in pool.run(_under_torchs_styles, WORLD):
        assert products == 0
        assert len(lines) == 1 and "shardwright.parallel" in lines[0], lines
