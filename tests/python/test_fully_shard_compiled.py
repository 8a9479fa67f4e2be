"""`torch.compile` and models under `sw.fully_shard`: what is compiled, and that results are those of eager code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import shardwright as sw
from fsdp_models import Mlp, batch, loss_of, part, shard
from meshes import get_mesh
from pool import Pool


def train(model: nn.Module, run: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        loss = loss_of(run, batch(step))
        loss.backward()
        found += [loss.detach(), *(part(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(run, batch(100 + step)))
    return found


def _compiled() -> None:
    mesh = get_mesh((2,))
    eager = shard(Mlp(), sw.fully_shard, mesh)
    expected = train(eager, eager, 4)
    gathers = [len(schedule.gathers) for schedule in sw.fsdp.schedules(eager)]
    for is_around in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = Mlp()
        if not is_around:  # what is inside of a unit, as a whole
            for i, layer in enumerate(model.layers):
                model.layers[i] = torch.compile(layer, backend=counter, fullgraph=True)
        shard(model, sw.fully_shard, mesh)
        sw.reset_stats()
        found = train(model, torch.compile(model, backend=counter) if is_around else model, 4)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        assert sw.stats()["unplanned_steps"] == 0
        assert [len(schedule.gathers) for schedule in sw.fsdp.schedules(model)] == gathers
        # One graph for all layers with gradients and one without, since weights are the same tensors in every step.
        assert is_around or 0 < counter.frame_count <= 2 * len(model.layers)
    torch._dynamo.reset()
    model = shard(Mlp(), sw.fully_shard, mesh)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        loss_of(torch.compile(model, backend="aot_eager", fullgraph=True), batch(0))
    torch._dynamo.reset()
    for a, b in zip(train(model, model, 4), expected, strict=True):
        assert torch.equal(a, b), "the refused call has left nothing behind"


def test_compiled_as_eager(pool: Pool) -> None:
    pool.run(_compiled, 2)
