"""`torch.ops.shardwright.matmul` as an operator of PyTorch, and its error messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.matmul import running

WORLD = 2
SIZES = {"size": WORLD * 3, "columns": WORLD * 5}


def _call() -> tuple[running.Call, torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    with running.listening() as calls:
        sw.all_gather_matmul(x, weight, method="ring", chunks=2, **SIZES)
    return calls[0], x, weight


def _operator() -> None:
    call, x, weight = _call()
    arguments: tuple[Any, ...] = ([x, weight], call.program, list(call.groups), call.rank)
    torch.library.opcheck(
        torch.ops.shardwright.matmul.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (y,) = torch.ops.shardwright.matmul([x * 2, weight], call.program, list(call.groups), call.rank)
        return y.relu()

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), compute(x, weight))
    with pytest.raises(ValueError, match=r"input 1 must have shape .* on rank ., got \[4, 6\]"):
        torch.ops.shardwright.matmul([x, torch.randn(4, 6)], call.program, list(call.groups), call.rank)
    with pytest.raises(ValueError, match="inputs must be a list of 2 tensors, got 1"):
        torch.ops.shardwright.matmul([x], call.program, list(call.groups), call.rank)
    with pytest.raises(ValueError, match="input 1 must have dtype Float, as input 0, got Int"):
        torch.ops.shardwright.matmul([x, weight.to(torch.int32)], call.program, list(call.groups), call.rank)
    with pytest.raises(ValueError, match="plan bytes must begin with 'shardwright plan"):
        torch.ops.shardwright.matmul([x], "gather|nonsense", [], 0)


def test_matmul_is_an_operator(pool: Pool) -> None:
    pool.run(_operator, WORLD)


def _bad_input() -> None:
    mesh = get_mesh((WORLD,))
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    dx, dw = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, torch.randn(5, 4)))
    refused: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (sw.all_gather_matmul, (x, torch.randn(3, 5)), {}, r"weights\[0\] must have shape \(4, n\) .*, got \(3, 5\)"),
        (sw.all_gather_matmul, (x, []), {}, "weights must be .*, got none"),
        (sw.all_gather_matmul, (x, weight), {"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
        (sw.all_gather_matmul, (x, weight), {"size": 4}, "size must be a total .*, got 4"),
        (sw.all_gather_matmul, (x, weight), {}, "size must be the length of .* over all 2 ranks .*, got None"),
        (sw.all_gather_matmul, (x, weight), {"size": 6}, "columns must be the number of columns .*, got None"),
        (
            sw.all_gather_matmul,
            (x, weight),
            {"size": 6, "columns": [10, 10]},
            "columns must have one entry for each of 1 weights, got 2",
        ),
        (sw.all_gather_matmul, (x, weight), {"size": 6, "columns": 13}, "columns must be a total .*, got 13"),
        (
            sw.all_gather_matmul,
            (x, weight, torch.zeros(4)),
            SIZES,
            r"biases\[0\] must have shape \(5,\) .*, got \(4,\)",
        ),
        (
            sw.all_gather_matmul,
            (x, weight, [None, None]),
            SIZES,
            "biases must have one entry for each of 1 weights, got 2",
        ),
        (sw.matmul_all_reduce, (x, weight), {}, "size must be the length of .*, got None"),
        (sw.all_gather_matmul, (x, weight), {"method": "magic"}, "method must be one of serial, ring, .*, got 'magic'"),
        (sw.all_gather_matmul, (x, weight), {"chunks": 0}, r"chunks must be in \[1, 4096\].*, got 0"),
        (sw.all_gather_matmul, (x, weight), {"depth": 0}, r"depth must be in \[1, 4096\], got 0"),
        (sw.all_gather_matmul, (x, weight), {"depth": 4097}, r"depth must be in \[1, 4096\], got 4097"),
        (sw.all_gather_matmul, (x, weight), {"depth": "2"}, "depth must be an integer, got '2'"),
        (
            sw.all_gather_matmul,
            (x, weight),
            {"depth": 2, "method": "serial"},
            r"depth must be in \[1, 1\] for method 'serial', got 2",
        ),
        (sw.all_gather_matmul, (x, weight), {"save": "all"}, "save must be one of shard, gathered, got 'all'"),
        (sw.all_gather_matmul, (x.int(), weight.int()), {}, "x must have a floating dtype, got torch.int32"),
        (
            sw.all_gather_matmul,
            (x, weight.double()),
            {},
            r"weights\[0\] must be torch.float32 on .*, got torch.float64",
        ),
        (sw.all_gather_matmul, (x, dw), {}, "must be a plain tensor, like x, got a DTensor"),
        (
            sw.matmul_all_reduce,
            (x, weight),
            {"size": 8, "method": "ring"},
            "method must be one of serial, collective, got 'ring'",
        ),
        (sw.matmul_reduce_scatter, (x, weight), {"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
        (sw.linear, (x, dw), {}, "x must be a DTensor, got a Tensor"),
        (sw.linear, (dx, dw), {"placements": [Replicate()] * 2}, "placements must have one item per .*, got 2"),
        (
            sw.linear,
            (dx, distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])),
            {},
            r"weight must have shape \(out_features, 4\) .*, got \(5, 3\)",
        ),
        (
            sw.linear,
            (dx, dw, distribute_tensor(torch.randn(4), mesh, [Shard(0)])),
            {},
            r"bias must have shape \(5,\), got \(4,\)",
        ),
        (sw.linear, (dx, dw.double()), {}, "weight must have the dtype of x .*, got torch.float64"),
    ]
    for function, args, kwargs, message in refused:
        with pytest.raises(ValueError, match=message):
            function(*args, **kwargs)
    once = torch.randn(3, 4, requires_grad=True)
    grad = torch.autograd.grad(sw.all_gather_matmul(once, weight, **SIZES).square().sum(), once, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_bad_input_raises(pool: Pool) -> None:
    pool.run(_bad_input, WORLD)


def _error_of_compared_chunks(rank_differs: bool) -> str:
    sw.debug.check_ranks(timeout_seconds=10)
    try:
        chunks = 2 + (torch.distributed.get_rank() if rank_differs else 0)
        sw.all_gather_matmul(torch.randn(3, 4), torch.randn(4, 5), method="ring", chunks=2 * chunks, **SIZES)
    except RuntimeError as error:
        return str(error)
    finally:
        sw.debug.check_ranks(False)
    return ""


def test_check_ranks_compares_products(pool: Pool) -> None:
    assert pool.run(_error_of_compared_chunks, WORLD, False) == [""] * WORLD
    for message in pool.run(_error_of_compared_chunks, WORLD, True):
        assert "chunks: " in message and "4" in message and "6" in message


def _error_of_compared_shapes() -> str:
    sw.debug.check_ranks(timeout_seconds=10)
    try:
        rows = 3 if torch.distributed.get_rank() == 0 else 2
        sw.all_gather_matmul(torch.randn(rows, 4), torch.randn(4, 5), **SIZES)
    except RuntimeError as error:
        return str(error)
    finally:
        sw.debug.check_ranks(False)
    return ""


def test_wrong_shape_on_one_rank_raises_on_all(pool: Pool) -> None:
    for message in pool.run(_error_of_compared_shapes, WORLD):
        assert "input: " in message and "float32[2, 4]" in message


def _seen_by_modes() -> tuple[int, int]:
    mesh = get_mesh((WORLD,))
    x = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    sw.enable()  # CommDebugMode then counts messages as well
    try:
        with CommDebugMode() as mode, sw.debug.wire_meter() as meter:
            sw.linear(x, weight, method="ring")
    finally:
        sw.disable()
    return int(mode.get_total_counts()), meter.received_bytes


def test_dispatch_modes_see_the_transfers(pool: Pool) -> None:
    for count, received in pool.run(_seen_by_modes, WORLD):
        assert count > 0 and received == 3 * 4 * 4
