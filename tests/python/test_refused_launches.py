"""Kernel launches that a device refuses: the call raises on all ranks, no memory is written later, and the next call
is right. Runs on the device of tests/async_device, with each test in its own processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from test_device_rules import DEVICE, Move

MAX_LAUNCHES = 400
PRODUCTS: dict[str, Any] = {"method": "ring", "chunks": 4, "depth": 3}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    import async_device

    async_device.build()


def _refuse_each_launch(native: Any, call: Callable[[], torch.Tensor]) -> int:
    """Refuses each launch of a call in turn, on all ranks. Returns the number of launches of the call."""
    expected = call().cpu()
    for number in range(1, MAX_LAUNCHES):
        native.refuse_launch(number)
        try:
            found = call()
        except RuntimeError as error:
            assert "a launch was refused" in str(error)
        else:
            assert native.launches_before_refusal() > 0, f"launch {number} was refused, and no error was raised"
            break
        taken = [torch.full((n,), -5.0, device=DEVICE) for n in (24, 48, 96, 128) for _ in range(16)]
        native.synchronize()
        for tensor in taken:
            assert tensor.cpu().eq(-5.0).all(), f"launch {number}: something wrote to memory that was freed"
        assert torch.equal(call().cpu(), expected), f"other numbers after launch {number} was refused"
    native.refuse_launch(0)
    assert torch.equal(found.cpu(), expected)
    return number - 1


def _moves() -> list[Move]:
    mesh = sw.Mesh({"a": 2})
    pairs = (("S(0)", "R"), ("S(1)", "R"), ("S(0)", "S(1)"), ("P(sum)", "S(1)"), ("P(sum)", "R"))
    return [Move(mesh, (8, 12), (src,), (dst,)) for src, dst in pairs]


def _qkv(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 2, 8, 4, generator=generator).to(DEVICE) for _ in range(3)]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sw.attention.scaled_dot_product_attention(q, k, v, size=16, method="ring")


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return sw.all_gather_matmul(x, weight, size=8, columns=8, **PRODUCTS)


def _multiply_and_scatter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return sw.matmul_reduce_scatter(x, weight, size=8, **PRODUCTS)


def _forwards(rank: int) -> list[Callable[[], torch.Tensor]]:
    moves = _moves()
    x, weight = torch.ones(4, 6, device=DEVICE), torch.ones(6, 4, device=DEVICE)
    items = [(moves[2].local, *moves[2].layouts), (moves[1].local, *moves[1].layouts)]
    ids = torch.tensor([[0, 2], [1, 3], [2, 1]])  # as many tokens to each rank, so that ranks launch as often
    tokens = [each.to(DEVICE) for each in (torch.randn(3, 4), ids, torch.ones(3, 2))]
    qkv = _qkv(rank)

    def batch() -> torch.Tensor:
        return torch.cat([result.flatten() for result in sw.redistribute_many(items, bucket_bytes=256)])

    def experts() -> torch.Tensor:
        rows, _, handle = sw.experts.dispatch(*tokens, [[0, 1], [2, 3]])
        return sw.experts.combine(rows * 2, handle)

    calls = [batch, experts, lambda: _attend(*qkv), lambda: _multiply(x, weight)]
    calls.append(lambda: _multiply_and_scatter(weight, x))
    return calls + [lambda m=m, a=a: m.start(a) + 0 for m in moves for a in (False, True)]  # type: ignore[misc]


def _gradients(function: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> torch.Tensor:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    out = function(*leaves)
    return torch.cat([each.flatten() for each in torch.autograd.grad(out, leaves, torch.ones_like(out))])


def _backwards(rank: int) -> list[Callable[[], torch.Tensor]]:
    x, weight = torch.ones(4, 6, device=DEVICE), torch.ones(6, 4, device=DEVICE)
    qkv = _qkv(rank)

    def of_move(move: Move) -> Callable[[], torch.Tensor]:
        return lambda: _gradients(lambda local: sw.redistribute_local(local, *move.layouts), [move.local])

    calls = [of_move(move) for move in _moves()]
    calls += [lambda: _gradients(_multiply, [x, weight]), lambda: _gradients(_multiply_and_scatter, [weight, x])]
    return [*calls, lambda: _gradients(_attend, qkv)]


def _steps(rank: int) -> list[Callable[[], torch.Tensor]]:
    """Training steps under `sw.fully_shard`: the losses and the gradients."""
    mesh = init_device_mesh(DEVICE, (2,))
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(rank)).to(DEVICE)

    def of_options(options: sw.fsdp.Options) -> Callable[[], torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2)), nn.Linear(6, 6))
        model.to(DEVICE)
        for layer in model:
            sw.fully_shard(layer, mesh=mesh, options=options)
        sw.fully_shard(model, mesh=mesh, options=options)

        def step() -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            parts: list[Any] = [parameter.grad for parameter in model.parameters()]
            return torch.cat([loss.detach().view(1), *(part.to_local().flatten() for part in parts)])

        step()  # later steps follow its schedule
        return step

    return [of_options(sw.fsdp.Options()), of_options(sw.fsdp.Options(message_format=torch.bfloat16))]


def _count_launches(rank: int, size: int, path: str, make: Callable[[int], list[Any]]) -> list[int]:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    return [_refuse_each_launch(native, call) for call in make(rank)]


@pytest.mark.parametrize("make", [_forwards, _backwards, _steps])
def test_calls_survive_refusal_of_each_launch(make: Callable[[int], list[Any]]) -> None:
    from async_device import ranks

    counts, of_other = ranks.run(_count_launches, 2, make)
    assert counts == of_other and min(counts) >= 1 and max(counts) < MAX_LAUNCHES - 1, counts
