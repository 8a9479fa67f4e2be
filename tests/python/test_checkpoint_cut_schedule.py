"""`sw.fsdp.checkpoint_cut` in models under `sw.fully_shard`: schedules contain the gathers of activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshes
import shardwright as sw
from fsdp_models import flat_fully_shard
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import activations
from test_checkpoint_cut import LAYERS, WIDTH, Model


def sharded(mesh: Any, cuts: bool = True, reentrant: bool | None = None, min_bytes: int = 0, **options: Any) -> Any:
    """Returns a model whose weights are sharded over one mesh dim and activations over the other."""
    model = Model(mesh["b"] if cuts else None, reentrant, min_bytes)
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh["a"])
    return flat_fully_shard(model, mesh=mesh["a"], **options)


def batch(step: int, data_rank: int, more_rows: int = 0) -> torch.Tensor:
    """Returns the batch of a data-parallel rank. Each rank has `more_rows` more rows than the previous one."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    x = 0.3 * torch.randn(2 + data_rank * more_rows, 2, WIDTH, generator=generator)
    return x.to(meshes.device).requires_grad_()


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x).square().sum()
    loss.backward()
    assert x.grad is not None
    found = [loss.detach(), x.grad, *(p.grad.to_local().clone() for p in model.parameters())]  # type: ignore
    model.zero_grad()
    return found


def _scheduled(mesh_shape: tuple[int, ...], reentrant: bool | None) -> None:
    mesh = get_mesh(mesh_shape)
    data_rank = mesh.get_local_rank("a")
    cut, uncut = (sharded(mesh, cuts, reentrant) for cuts in (True, False))
    for step in range(4):
        assert all(map(torch.equal, run(cut, batch(step, data_rank, 3)), run(uncut, batch(step, data_rank, 3))))
        if step == 0:
            assert not sw.fsdp.schedule(cut).activations, "the first step that follows a schedule finds them"
    schedule, without = sw.fsdp.schedule(cut), sw.fsdp.schedule(uncut)
    # The inputs of the layers, from the last to the first, with their size on the rank with most rows.
    rows = 2 + 3 * (mesh_shape[0] - 1)
    size = 4 * rows * 2 * WIDTH
    kinds = [kind for _, kind, *_ in schedule.uses]
    assert len(schedule.activations) == LAYERS and not without.activations
    for name, kept_bytes, full_bytes, gather_ps, saved, first, last, _ in schedule.activations:
        assert name.startswith("float32[") and full_bytes == size
        assert kept_bytes == 4 * -(-size // 4 // mesh_shape[1])
        assert (gather_ps > 0) == (mesh_shape[1] > 1)
        assert kinds[saved] == "forward" and {kinds[first], kinds[last]} <= {"backward", "recompute"}
    turns = [saved for *_, saved, _, _, _ in schedule.activations]
    assert turns == sorted(turns, reverse=True)
    # The first gather starts before the backward, each other one during the use before its own.
    starts = [trigger for _, trigger in schedule.activation_gathers]
    assert starts == [-1, *range(LAYERS - 1)]
    assert kinds[schedule.activation_gathers[0][0] - 1] == "forward"
    assert schedule.peak_activation_bytes == 2 * size
    assert without.peak_bytes < schedule.peak_bytes <= without.peak_bytes + 2 * size
    assert "gather activations 0" in str(schedule) and f"activations {2 * size} B" in str(schedule)
    lanes = schedule.lanes
    assert (lanes is not None) == (mesh_shape[0] > 1), "without transfers of weights there are none to predict"
    if lanes is not None:
        gather_ps = [each_ps for _, _, _, each_ps, *_ in schedule.activations]
        assert [end - begin for begin, end in lanes["activations"]] == gather_ps
        for (*_, first, _, _), (begin, _) in zip(schedule.activations, lanes["activations"]):
            _, end_of_use = lanes["uses"][first]
            assert begin <= end_of_use
        (explained,) = sw.explain(lambda: run(cut, batch(9, data_rank, 3)))[-1:]
        gathers = [event for event in explained.predicted if event.instruction.startswith("gather activation")]
        assert len(gathers) == LAYERS
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, sw.fsdp.schedule(cut).to_json().split('"uses"')[1].split('"budget')[0] and str(starts))
    assert len(set(told)) == 1


@pytest.mark.parametrize(
    "mesh_shape, reentrant", [((1, 1), None), ((1, 2), None), ((2, 2), False), ((2, 2), True)], ids=str
)
def test_activations_are_in_the_schedule(pool: Pool, mesh_shape: tuple[int, ...], reentrant: bool | None) -> None:
    pool.run(_scheduled, torch.Size(mesh_shape).numel(), mesh_shape, reentrant)


def _gather_starts() -> None:
    """Gathers start as scheduled: one use ahead, or at their own use if the memory limit is low."""
    log: list[str] = []

    class Logged(activations._ShardedActivation):
        def start_gather(self) -> None:
            if self._gathered is None:
                log.append(f"start {self._number}")
            super().start_gather()

        def unpack(self, sequence: Any) -> torch.Tensor:
            if self._num_unpacked == 0:
                log.append(f"need {self._number}")
            return super().unpack(sequence)

    mesh = get_mesh((1, 2))
    plain, activations._ShardedActivation = activations._ShardedActivation, Logged  # type: ignore[misc]
    try:
        limits = {}
        for limit in (None, "small"):
            model = sharded(mesh, memory_limit=limits.get(limit), prefetch="auto")
            for step in range(3):
                run(model, batch(step, 0))
            schedule = sw.fsdp.schedule(model)
            if limit is None:
                # The minimum of the error assumes gathers at their own use, so one activation fewer is whole at a time.
                limits["small"] = _least_limit(mesh)
            else:
                assert schedule.peak_bytes <= limits["small"]
            log.clear()
            expected = run(sharded(mesh, False), batch(3, 0))
            log.clear()
            assert all(map(torch.equal, run(model, batch(3, 0)), expected))
            if limit is None:
                ahead = ["start 2", "need 2", "start 1", "need 1", "start 0", "need 0"]
                assert log == ahead
            else:
                assert log == ["need 2", "start 2", "need 1", "start 1", "need 0", "start 0"]
    finally:
        activations._ShardedActivation = plain  # type: ignore[misc]


def _least_limit(mesh: Any) -> int:
    """Returns the least memory limit, as errors name it: at first for weights and gradients, later with activations."""
    limit = 1
    while True:
        model = sharded(mesh, memory_limit=limit)
        try:
            for step in range(3):
                run(model, batch(step, 0))
        except ValueError as error:
            limit = int(str(error).split("at least ")[1].split(",")[0])
        else:
            return limit


def test_gathers_start_as_scheduled(pool: Pool) -> None:
    pool.run(_gather_starts, 2)


def _differing_activations() -> None:
    """If data-parallel ranks cut different activations, schedules have none. Activations are still gathered."""
    mesh = get_mesh((2, 2))
    data_rank = mesh.get_local_rank("a")
    cut, uncut = sharded(mesh, min_bytes=4 * 3 * 2 * WIDTH), sharded(mesh, False)
    for step in range(4):
        sw.reset_stats()
        assert all(map(torch.equal, run(cut, batch(step, data_rank, 3)), run(uncut, batch(step, data_rank, 3))))
        assert sw.stats()["activation_gathers"] == (LAYERS if data_rank else 0)
    assert not sw.fsdp.schedule(cut).activations
    assert sw.fsdp.schedule(cut).lanes is not None


def test_no_scheduled_activations_if_ranks_differ(pool: Pool) -> None:
    pool.run(_differing_activations, 4)


def _unusual_orders() -> None:
    """Two forwards before their backwards, two backwards through one graph, and backwards in another order."""
    mesh = get_mesh((1, 2))
    cut, uncut = sharded(mesh), sharded(mesh, False)
    for step in range(6):
        results = []
        for model in (cut, uncut):
            x, y = batch(step, 0), batch(step + 50, 0)
            first, second = model(x).square().sum(), model(y).sum()
            losses = [second, first] if step % 3 == 2 else [first, second]
            losses[0].backward(retain_graph=step % 3 == 1)
            losses[1].backward()
            if step % 3 == 1:
                losses[0].backward()
            results.append([x.grad, y.grad, *(p.grad.to_local().clone() for p in model.parameters())])
            model.zero_grad()
        assert all(map(torch.equal, *results))


def test_unusual_orders_of_backwards(pool: Pool) -> None:
    pool.run(_unusual_orders, 2)
