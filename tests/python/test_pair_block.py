"""The block of examples/pair_block.py, sharded along both axes of its pair tensor, trains as it does on one device."""

from __future__ import annotations

import pathlib
import sys

import torch
from torch.distributed.tensor import distribute_tensor

import shardwright as sw
from meshes import device, get_mesh
from pool import Pool

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

import pair_block

SHAPE = (1, 8, 8, 4)


def _trains() -> int:
    mesh = get_mesh((2, 2))
    torch.manual_seed(0)
    block, plain = pair_block.PairBlock(SHAPE[-1]).to(device), pair_block.PairBlock(SHAPE[-1]).to(device)
    plain.load_state_dict(block.state_dict())
    pair_block.replicate(block, mesh)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-2) for module in (block, plain)]
    received = 0
    for _ in range(2):
        full = torch.randn(SHAPE).to(device)
        there = full.clone().requires_grad_()
        z = distribute_tensor(full, mesh, pair_block.PAIR).requires_grad_()
        with sw.enabled(views=True):
            with sw.debug.wire_meter() as wire:
                result = pair_block.step(block, z)
            received = wire.received_bytes
            expected = pair_block.step(plain, there)
            assert result.placements == pair_block.PAIR
            torch.testing.assert_close(result.full_tensor(), expected)
            assert z.grad is not None and there.grad is not None
            torch.testing.assert_close(z.grad.full_tensor(), there.grad, rtol=1e-4, atol=1e-4)
            for parameter, other in zip(block.parameters(), plain.parameters(), strict=True):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                torch.testing.assert_close(parameter.grad.to_local(), other.grad, rtol=1e-4, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return received


def test_pair_block_trains_as_unsharded_in_needed_bytes(pool: Pool) -> None:
    for received in pool.run(_trains, 4):
        assert received <= pair_block.needed_bytes(SHAPE, (2, 2))
