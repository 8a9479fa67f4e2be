"""`use="float8"` of `sw.fully_shard`: products of weights as they arrive, against those of what their codes say."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from fsdp_models import Mlp, batch, full, part, shard
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import float8_products
from test_fsdp_dtypes import expected_of, float8
from test_fully_shard_streams import poisoned

_MISSING = float8_products._why_not("cpu", True)
NEEDS_SCALES_OF_ROWS = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))


class _Quantized(torch.autograd.Function):
    """A product of quantised factors. Gradients are those of a product with the quantised weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, wire: str) -> torch.Tensor:  # type: ignore[override]
        written = expected_of(wire, weight)
        ctx.save_for_backward(x, written)
        largest = x.abs().amax(-1, keepdim=True) if wire == "float8_rowwise" else x.abs().max()
        return float8(x, torch.where(largest > 0, largest / 448, 1.0)) @ written.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, written = ctx.saved_tensors
        return gradients[0] @ written, gradients[0].T @ x, None


class Oracle(nn.Module):
    """The whole model on one rank, with such products in place of its Linear modules'."""

    def __init__(self, wire: str) -> None:
        super().__init__()
        self.model = Mlp(width=10, tied=False)
        self.wire = wire

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
            y = _Quantized.apply(x, module.weight, self.wire)  # type: ignore[no-untyped-call]
            return y if module.bias is None else y + module.bias

        x = linear(self.model.enter, x)
        for layer in self.model.layers:
            first, _, last = layer
            x = x + linear(last, torch.tanh(linear(first, x)))
        return linear(self.model.leave, x)


def _trains(wire: str) -> None:
    """With widths that are no multiples of 16, whatever is in memory that was released."""
    world = dist.get_world_size()
    oracle = Oracle(wire)
    model = shard(copy.deepcopy(oracle.model), sw.fully_shard, get_mesh((world,)), wire=wire, use="float8")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle)]
    sw.reset_stats()
    for step in range(4):
        losses = [oracle(batch(step, rank)).square().mean() for rank in range(world)]
        torch.stack(losses).mean().backward()
        with poisoned():
            loss = model(batch(step)).square().mean()
            loss.backward()
        torch.testing.assert_close(loss, losses[dist.get_rank()], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            assert theirs.grad is not None and ours.grad is not None
            # Gradients travel in bfloat16.
            torch.testing.assert_close(
                full(ours.grad), theirs.grad, rtol=0.02, atol=0.02 * float(theirs.grad.abs().max())
            )
        with torch.no_grad():  # from the same weights again
            for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
                theirs.grad = full(ours.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sw.stats()["unplanned_steps"] == 0


@pytest.mark.parametrize(
    ("wire", "world"), [("float8", 2), pytest.param("float8_rowwise", 3, marks=NEEDS_SCALES_OF_ROWS)]
)
def test_products_of_codes_and_scales(pool: Pool, wire: str, world: int) -> None:
    pool.run(_trains, world, wire)


def _memory() -> None:
    """A weight takes a byte for each element, and what padding takes; its messages carry no more than before."""
    sizes, received = {}, {}
    for use in (None, "float8"):
        model: Any = shard(Mlp(width=64, tied=False), sw.fully_shard, get_mesh((2,)), wire="float8", use=use)
        model(batch(0, width=64)).sum().backward()
        sizes[use] = sw.schedule(model).arena_bytes
        with sw.wire_meter() as meter:
            model.layers[0].unshard()
        received[use] = meter.received_bytes
    elements = 64 * 129 * 2
    assert sizes["float8"] < sizes[None] / 3
    # Rows of 129 elements are padded to 144.
    assert received["float8"] - received[None] <= 32 * (144 - 129) < elements / 16


def test_memory_of_weights_as_they_arrive(pool: Pool) -> None:
    pool.run(_memory, 2)


def _read(wire: str) -> None:
    """Who reads a weight during its use gets its numbers, and gradients reach it; its module is left as it was."""
    model: Any = shard(Mlp(tied=False), sw.fully_shard, get_mesh((2,)), wire=wire, use="float8")
    linear = model.layers[1][0]
    for step in range(4):
        whole = full(linear.weight.detach()).clone()
        seen = []

        def look(
            module: Any, args: Any, output: torch.Tensor, seen: list[Any] = seen, step: int = step
        ) -> torch.Tensor:
            seen.append(module.weight.detach().clone())
            return output + module.weight.sum() if step % 2 else output

        hook = linear.register_forward_hook(look)
        with poisoned():
            model(batch(step)).square().mean().backward()
        hook.remove()
        assert torch.equal(seen[0], expected_of(wire, whole))
        assert type(linear) is nn.Linear and type(linear.weight) is not torch.Tensor
        assert part(linear.weight.grad).isfinite().all()
        model.zero_grad()


@pytest.mark.parametrize("wire", ["float8", pytest.param("float8_rowwise", marks=NEEDS_SCALES_OF_ROWS)])
def test_weights_that_are_read(pool: Pool, wire: str) -> None:
    pool.run(_read, 2, wire)


def _refusals() -> None:
    mesh = get_mesh((2,))
    linear = nn.Linear(6, 4)

    def refuses(text: str, **options: Any) -> None:
        float8_products._why_not.cache_clear()
        with pytest.raises(ValueError, match=text):
            sw.fully_shard(linear, mesh=mesh, **options)
        assert type(linear) is nn.Linear

    refuses("use: got 'mxfp8'; allowed are 'float8' and None", use="mxfp8", wire="float8")
    refuses("use: got 'float8' for weight besides keep=", use="float8", wire="float8", reshard_after_forward=2)
    with mock.patch.object(torch, "_scaled_mm", side_effect=RuntimeError("no units for float8")):
        refuses(
            "use: got 'float8' for weight with a scale for each row on cpu, where torch._scaled_mm raises "
            "RuntimeError: no units for float8; allowed there is use=None",
            use="float8",
            wire="float8_rowwise",
        )
    float8_products._why_not.cache_clear()


def test_refusals(pool: Pool) -> None:
    pool.run(_refusals, 2)
