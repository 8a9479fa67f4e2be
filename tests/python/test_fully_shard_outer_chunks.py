"""`sw.fsdp.Options(chunked=True)`: gradients of units around other units are reduced in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshes
import shardwright as sw
from fsdp_models import flat_fully_shard, full, last_reduction_is_in_chunks, received_bytes, without_packing
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import api, runner

WIDTH, VOCABULARY, DEPTH = 512, 1027, 2


class Language(nn.Module):
    """An embedding and a projection around sharded layers; the projection is uneven over any number of ranks."""

    def __init__(self, recomputes: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
        self.project = nn.Linear(WIDTH, VOCABULARY)
        self.recomputes = recomputes
        self.is_twice = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(self.embedding(tokens))
        if self.is_twice:
            x = self.enter(torch.tanh(x))
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recomputes == "layers" else layer(x))
        if self.recomputes == "projection":
            return checkpoint(self.project, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.project(x)  # type: ignore[no-any-return]


class Timed(runner.Runner):
    """A runner for which each use takes much longer than any transfer."""

    def _agreed_times(self, *args: Any) -> Any:
        found = super()._agreed_times(*args)
        return found._replace(uses=[100 * self.units[0].gather_ps] * len(found.uses))


def make(recomputes: str = "", **options: Any) -> Any:
    model = Language(recomputes).to(meshes.device)
    mesh = get_mesh((dist.get_world_size(),))
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh)
    return flat_fully_shard(model, mesh=mesh, options=sw.fsdp.Options(chunked=True), **options)


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    """Returns the loss of a rank's tokens. Ranks have different numbers of tokens."""
    rank = dist.get_rank() if rank is None else rank
    tokens = torch.randint(VOCABULARY, (5 + rank,), generator=torch.Generator().manual_seed(100 * step + rank))
    tokens = tokens.to(meshes.device)
    return F.cross_entropy(model(tokens), tokens.flip(0))


def assert_same_gradients(model: nn.Module, unsharded: nn.Module, steps: list[int]) -> None:
    world = dist.get_world_size()
    losses = [loss_of(unsharded, step, rank) for step in steps for rank in range(world)]
    (torch.stack(losses).sum() / world).backward()
    for (name, p), q in zip(model.named_parameters(), unsharded.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023
    for each in (model, unsharded):
        each.zero_grad()


def received_by(model: Any) -> int:
    return received_bytes(model, [[model.embedding, model.enter, model.project], *model.layers])


def reduced_in_chunks(schedule: Any) -> list[tuple[int, int]]:
    """Returns pairs of a unit and a use during which chunks of the unit's gradient are sent."""
    return sorted({(unit, use) for unit, use, is_reduction, _ in schedule.lanes["chunks"] if is_reduction})


class timed:
    def __enter__(self) -> None:
        self.runner, api.Runner = api.Runner, Timed  # type: ignore[misc]

    def __exit__(self, *_: object) -> None:
        api.Runner = self.runner  # type: ignore[misc]


@without_packing()
def _trains(recomputes: str) -> None:
    with timed():
        model, unsharded = make(recomputes), Language().to(meshes.device)
        for step in range(4):
            loss_of(model, step).backward()
            assert_same_gradients(model, unsharded, [step])
        schedule = sw.fsdp.schedule(model)
        if dist.get_world_size() == 1:
            assert not any(in_chunks for *_, in_chunks in schedule.reductions), "nothing is moved"
            return
        if dist.get_world_size() > 2 and meshes.device != "cpu":
            return  # links are predicted to be so fast that more chunks take longer
        backwards = [use for use, (_, kind, *_) in enumerate(schedule.uses) if kind == "backward"]
        assert [unit for unit, *_, in_chunks in schedule.reductions if in_chunks] == [0], str(schedule)
        # The gradient of `project` is reduced in the first use of the backward, that of `enter` in the last one.
        assert reduced_in_chunks(schedule) == [(0, backwards[0]), (0, backwards[-1])], str(schedule)
        lines = str(schedule).splitlines()
        for use in (backwards[0], backwards[-1]):
            assert "in chunks: reduce the gradient of Language" in lines[use], lines[use]
        if recomputes != "projection":
            with sw.debug.wire_meter() as meter:
                loss_of(model, 8).backward()
            assert meter.received_bytes == received_by(model), (meter.received_bytes, received_by(model))
            assert_same_gradients(model, unsharded, [8])
        assert {type(module) for module in (model.enter, model.project)} == {nn.Linear}


@pytest.mark.parametrize(
    "world, recomputes", [(1, ""), (2, ""), (2, "layers"), (2, "projection"), (3, ""), (4, "layers")]
)
def test_trains_as_the_unsharded_model(pool: Pool, world: int, recomputes: str) -> None:
    pool.run(_trains, world, recomputes)


@without_packing()
def _accumulates() -> None:
    """Accumulates gradients over several backwards, with steps of other kinds in between."""
    with timed():
        model, unsharded = make(), Language().to(meshes.device)
        for step in range(4):
            loss_of(model, step).backward()
            model.zero_grad()
        assert last_reduction_is_in_chunks(sw.fsdp.schedule(model))
        for _ in range(3):
            model.set_requires_gradient_sync(False)
            for step in (0, 1):
                loss_of(model, step).backward()
            model.set_requires_gradient_sync(True)
            loss_of(model, 2).backward()
            assert_same_gradients(model, unsharded, [0, 1, 2])
            loss_of(model, 3).backward()
            assert_same_gradients(model, unsharded, [3])
        # Gradients are added to gradients that are already reduced.
        for step in (0, 1):
            loss_of(model, step).backward()
        assert_same_gradients(model, unsharded, [0, 1])
        # Two forwards run before their backward, and one without gradients.
        losses = [loss_of(model, 0), loss_of(model, 1)]
        with torch.no_grad():
            loss_of(model, 2)
        (losses[0] + losses[1]).backward()
        assert_same_gradients(model, unsharded, [0, 1])
        # The gradient of a module that is called twice is reduced once.
        for each in (model, unsharded):
            each.is_twice = True
        for step in range(4):
            with sw.debug.wire_meter() as meter:
                loss_of(model, step).backward()
            assert_same_gradients(model, unsharded, [step])
        schedule = sw.fsdp.schedule(model)
        assert last_reduction_is_in_chunks(schedule) and meter.received_bytes == received_by(model), str(schedule)
        for each in (model, unsharded):
            each.is_twice = False
        # A frozen projection has no gradient.
        for each in (model, unsharded):
            each.project.requires_grad_(False)
        for step in range(3):
            loss_of(model, step).backward()
            assert model.project.weight.grad is None
            assert_same_gradients(model, unsharded, [step])


def test_accumulates_in_steps_of_different_kinds(pool: Pool) -> None:
    pool.run(_accumulates, 2)


@without_packing()
def _traced() -> tuple[list[tuple[str, int, float, float]], list[str]]:
    """Returns events of the projection's gradient, the first product of a backward with transfers, and all runs."""
    with timed():
        model = make()
        for step in range(4):
            loss_of(model, step).backward()
        assert last_reduction_is_in_chunks(sw.fsdp.schedule(model))
        tokens = torch.randint(VOCABULARY, (256,), generator=torch.Generator().manual_seed(7)).to(meshes.device)
        loss = F.cross_entropy(model(tokens), tokens)
        dist.barrier()
        with sw.debug.trace() as events:
            loss.backward()
    runs = sorted({event.run for event in events if event.instruction.startswith("gemm")})
    first = [event for event in events if event.run == runs[0]]
    return [
        (e.lane, e.chunk, e.start, e.end) for e in first if e.lane == "communication" or e.instruction[:4] == "gemm"
    ], [str(run) for run in runs]


@pytest.mark.cpu_only("a host's program starts each transfer when it gets there")
@pytest.mark.parametrize("world", [2, 3])
def test_chunks_are_sent_during_the_product(pool: Pool, world: int) -> None:
    for events, runs in pool.run(_traced, world):
        assert len(runs) == 2, "the projection, and what enters"
        sent = sorted((start, end) for lane, chunk, start, end in events if lane == "communication" and chunk >= 0)
        multiplied = sorted((start, end) for lane, _, start, end in events if lane == "compute")
        assert len(sent) >= 4 and len(multiplied) >= 8
        assert sent[0][0] < multiplied[-1][0], "the first chunk is on its way when the last one is computed"
        assert sent[-1][1] > multiplied[-1][1], "the last one is reduced afterwards"


@without_packing()
def _calls_differ() -> None:
    with timed():
        model = make()
        for step in range(4):
            loss_of(model, step).backward()
            model.zero_grad()
        assert last_reduction_is_in_chunks(sw.fsdp.schedule(model))
        sw.debug.check_ranks()
        try:
            loss_of(model, 0).backward()
            model.zero_grad()
            model.is_twice = dist.get_rank() == 1
            loss = loss_of(model, 1)
            with pytest.raises(ValueError, match=r"(?s)chunked: the ranks .*enter.*: 1 calls on ranks \[0\]; 2 calls"):
                loss.backward()
        finally:
            sw.debug.check_ranks(False)


def test_check_ranks_names_ranks_with_more_calls(pool: Pool) -> None:
    pool.run(_calls_differ, 2)
