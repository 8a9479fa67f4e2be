"""torchao's weights of few bits train under `sw.fully_shard`: the losses are those of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwright as sw
from pool import Pool

STEPS = 4


def _convert(model: nn.Module, kind: str) -> None:
    from torchao import quantize_
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype import quantized_training

    if kind.startswith("float8"):
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=kind == "float8 messages", emulate=True)
        convert_to_float8_training(model, config=config)
    elif kind == "int8 mixed precision":
        quantize_(model, quantized_training.Int8MixedPrecisionTrainingConfig())
    else:
        name = {"int8 weights": "int8_weight_only_quantized_training", "bitnet": "bitnet_training"}[kind]
        quantize_(model, getattr(quantized_training, name)())


def _losses(shard: Callable[..., Any], kind: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False)) for _ in range(2))
    )
    _convert(model, kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trains(kind: str) -> None:
    # FSDP2 cannot send 8-bit floats over Gloo. Converted before or after the message, weights have the same values.
    expected = _losses(fully_shard, kind.replace("float8 messages", "float8"))
    assert _losses(sw.fully_shard, kind) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("kind", ["float8", "float8 messages", "int8 weights", "int8 mixed precision", "bitnet"])
def test_losses_are_those_of_fsdp2(pool: Pool, kind: str) -> None:
    pool.run(_trains, 2, kind)
