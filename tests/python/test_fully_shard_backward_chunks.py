"""`sw.fsdp.Options(chunked=True)` in backwards: weights are gathered, and gradients reduced, in chunks."""

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
from allocations import allocated_peak
from fsdp_models import flat_fully_shard, full, last_reduction_is_in_chunks, received_bytes, without_packing
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import api, runner
from shardwright.fsdp.methods import ATTRIBUTE

DEPTH = 3
CHUNKS: dict[str, Any] = {"chunked": True, "prefetch": 0}


class Layer(nn.Module):
    """A linear layer. If `is_odd`, it also calls its module a second time and reads its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.is_odd = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.is_odd:
            y = self.linear(torch.tanh(y)) + F.linear(x, self.linear.weight)
        return torch.tanh(y)


class Chain(nn.Module):
    """A chain of layers, which the backward recomputes if `recomputes`."""

    def __init__(self, width: int, recomputes: bool = False, layer: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(width) for _ in range(DEPTH))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def chain(mesh: Any, width: int, recomputes: bool = False, layer: type[Layer] = Layer, **options: Any) -> Any:
    model = Chain(width, recomputes, layer).to(meshes.device)
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh)
    return flat_fully_shard(model, mesh=mesh, **options)


def batch(step: int, rank: int, width: int) -> torch.Tensor:
    """Returns the batch of a rank. Ranks have different numbers of rows."""
    x = torch.randn(3 + rank, width, generator=torch.Generator().manual_seed(100 * step + rank))
    return x.to(meshes.device).requires_grad_()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().sum()
    return loss


def assert_trains_as_unsharded(model: Any, unsharded: Chain, width: int, steps: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, unsharded)]
    for step in range(steps):
        local_batch = batch(step, rank, width)
        loss_of(model, local_batch).backward()
        theirs = [batch(step, each, width) for each in range(world)]
        torch.stack([loss_of(unsharded, x) for x in theirs]).sum().div(world).backward()
        assert local_batch.grad is not None and theirs[rank].grad is not None
        torch.testing.assert_close(local_batch.grad, theirs[rank].grad * world, rtol=1e-4, atol=1e-5)
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Timed(runner.Runner):
    """A runner for which each use of a layer takes ten times as long as its gather, and other uses take 1 ns."""

    def _make_plan(self, key: Any, uses: Any, timed: Any, variants: Any) -> None:
        if timed is not None:
            long_ps = 10 * self.units[1].gather_ps
            timed = timed._replace(uses=[1000 if use.units == (0,) else long_ps for use in uses])
        super()._make_plan(key, uses, timed, variants)


class timed:
    def __enter__(self) -> None:
        self.runner, api.Runner = api.Runner, Timed  # type: ignore[misc]

    def __exit__(self, *_: object) -> None:
        api.Runner = self.runner  # type: ignore[misc]


def gathered_in_chunks(schedule: Any) -> list[tuple[str, int]]:
    """Returns the pass (forward or backward) and the unit of each use that gathers a unit in chunks."""
    original_of = schedule.original_of
    return [(kind, original_of[w]) for weights, kind, *_ in schedule.uses for w in weights if original_of[w] >= 0]


@without_packing()
def _trains(mesh_shape: tuple[int, ...], recomputes: bool) -> None:
    mesh, width = get_mesh(mesh_shape), 512
    with timed():
        model = chain(mesh, width, recomputes, chunked=True, prefetch=0)
        assert_trains_as_unsharded(model, Chain(width).to(meshes.device), width, 5)
        schedule = sw.fsdp.schedule(model)
        if mesh.size() == 1:
            assert max(schedule.original_of) < 0 and not last_reduction_is_in_chunks(schedule), "nothing is moved"
            return
        in_chunks = gathered_in_chunks(schedule)
        backwards = [unit for kind, unit in in_chunks if kind == "backward"]
        # The last layer stays unsharded from its forward; recomputation has unsharded the others.
        if len(mesh_shape) == 1:
            assert sorted(backwards) == ([] if recomputes else [1, 2]), str(schedule)
        if len(mesh_shape) > 1 and meshes.device != "cpu":
            return  # one all-reduce over both mesh dims, without chunks, is predicted to be faster
        assert last_reduction_is_in_chunks(schedule) and schedule.reductions[-1][0] == 1, str(schedule)
        assert "in chunks: reduce the gradient of layers.0" in str(schedule)
        texts: list[str] = [""] * mesh.size()
        dist.all_gather_object(texts, str(schedule))
        assert len(set(texts)) == 1, "ranks follow different schedules"
        kinds = {(unit, is_reduction) for unit, _, is_reduction, _ in schedule.lanes["chunks"]}
        assert (1, True) in kinds and any(not is_reduction for _, is_reduction in kinds)
        if len(mesh_shape) == 1:
            loss_of(model, batch(8, dist.get_rank(), width)).backward()
            x = batch(9, dist.get_rank(), width)
            with sw.debug.wire_meter() as meter:
                loss_of(model, x).backward()
            expected = received_bytes(model, [[], *model.layers])
            assert meter.received_bytes == expected, (meter.received_bytes, expected)
        (explained,) = sw.explain(lambda: loss_of(model, batch(9, dist.get_rank(), width)).backward())[-1:]
        assert any(event.instruction == "reduce layers.0 in chunks" for event in explained.predicted)
        assert all(type(layer.linear) is nn.Linear for layer in model.layers)


@pytest.mark.parametrize(
    "mesh_shape, recomputes",
    [((1,), False), ((2,), False), ((2,), True), ((3,), False), ((4,), False), ((2, 2), False)],
    ids=str,
)
def test_trains_as_the_unsharded_model(pool: Pool, mesh_shape: tuple[int, ...], recomputes: bool) -> None:
    pool.run(_trains, torch.Size(mesh_shape).numel(), mesh_shape, recomputes)


@without_packing()
def _traced() -> tuple[list[Any], list[Any]]:
    """Returns the events of the first and the last product of a backward: lane, chunk, begin and end."""
    width = 512
    with timed():
        model = chain(get_mesh((dist.get_world_size(),)), width, chunked=True, prefetch=0)
        x = torch.randn(256, width).to(meshes.device).requires_grad_()
        for _ in range(4):
            loss_of(model, x).backward()
        assert last_reduction_is_in_chunks(sw.fsdp.schedule(model))
        loss = loss_of(model, x)
        dist.barrier()
        with sw.debug.trace() as events:
            loss.backward()
    runs = sorted({event.run for event in events if event.instruction.startswith("gemm")})
    found = [[event for event in events if event.run == run] for run in (runs[0], runs[-1])]
    moves_or_multiplies = [
        [(e.lane, e.chunk, e.start, e.end) for e in each if e.lane == "communication" or e.instruction[:4] == "gemm"]
        for each in found
    ]
    return moves_or_multiplies[0], moves_or_multiplies[1]


def _by_chunk(events: list[Any], lane: str) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for event_lane, chunk, start, end in events:
        if event_lane == lane and chunk >= 0:
            begin, until = found.get(chunk, (start, end))
            found[chunk] = min(begin, start), max(until, end)
    return found


@pytest.mark.cpu_only("a host's program starts each transfer when it gets there")
@pytest.mark.parametrize("world", [2, 4])
def test_chunks_are_sent_during_products(pool: Pool, world: int) -> None:
    for first, last in pool.run(_traced, world):
        moved, multiplied = _by_chunk(first, "communication"), _by_chunk(first, "compute")
        assert len(moved) >= 4
        for chunk in sorted(set(moved) - {min(moved)}):
            begin, end = multiplied[chunk - 1]
            assert moved[chunk][0] <= begin and moved[chunk][1] >= end, f"{chunk} does not come during {chunk - 1}"
        moved, multiplied = _by_chunk(last, "communication"), _by_chunk(last, "compute")
        assert len(moved) >= 4
        for chunk in moved:
            begin, end = multiplied[chunk + 1]
            assert moved[chunk][0] <= begin and moved[chunk][1] >= end, f"{chunk} does not go during {chunk + 1}"


@without_packing()
def _takes_less_memory() -> None:
    """Runs a step in less memory than a weight and its gradient take."""
    mesh, width = get_mesh((2,)), 512
    weight = 4 * width * width
    limit = weight * 3 // 2
    with pytest.raises(ValueError, match=rf"budget_bytes must be at least \d+, got {limit}"):
        loss_of(chain(mesh, width, memory_limit=limit), batch(0, dist.get_rank(), width)).backward()
    peaks = []
    for options in ({}, {"memory_limit": limit, "chunked": True}):
        model = chain(mesh, width, prefetch=0, **options)
        x = batch(0, dist.get_rank(), width)

        def step(model: Any = model, x: torch.Tensor = x) -> None:
            loss_of(model, x).backward()
            model.zero_grad()

        for _ in range(4):
            step()
        sw.runtime.release_staging()
        # On a busy machine, the threads of transfers release their buffers late.
        allocated = min(allocated_peak(step)[1] for _ in range(3))
        runner = getattr(model, ATTRIBUTE).runner
        peaks.append((runner._arena.numel() + allocated, sw.fsdp.schedule(model).peak_bytes))
    (whole, planned), (chunked, in_chunks) = peaks
    assert planned >= 2 * weight and in_chunks <= limit
    kinds = {kind for kind, _ in gathered_in_chunks(sw.fsdp.schedule(model))}
    assert kinds == {"forward", "backward"}
    # Allocated besides: reduced gradients, received contributions, and a gradient that a transfer still holds.
    besides = DEPTH * weight // 2 + weight // 2 + weight + (1 << 19)
    assert whole >= planned and chunked <= in_chunks + besides, peaks
    assert_trains_as_unsharded(model, Chain(width).to(meshes.device), width, 2)


@pytest.mark.cpu_only("the profiler counts the host's memory")
def test_chunked_step_takes_less_memory(pool: Pool) -> None:
    pool.run(_takes_less_memory, 2)


def _other_steps(recomputes: bool) -> None:
    """Uses weights in other ways, and runs backwards that differ from those of the schedule."""
    mesh, width, rank = get_mesh((2,)), 512, dist.get_rank()
    unsharded = Chain(width).to(meshes.device)
    model = chain(mesh, width, recomputes, chunked=True, prefetch=0)
    assert_trains_as_unsharded(model, unsharded, width, 4)
    assert recomputes or "backward" in {kind for kind, _ in gathered_in_chunks(sw.fsdp.schedule(model))}
    assert last_reduction_is_in_chunks(sw.fsdp.schedule(model))

    def assert_same_gradients(ours: list[torch.Tensor], factor: float = 1.0) -> None:
        """Compares with gradients of the unsharded model. `ours` are this rank's losses of batches 0, 1, ..."""
        averaged = [loss_of(unsharded, batch(step, r, width)) for step in range(len(ours)) for r in range(2)]
        (torch.stack(averaged).sum() * factor / 2).backward()
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-5)
        for each in (model, unsharded):
            each.zero_grad()

    def forward(step: int) -> torch.Tensor:
        return loss_of(model, batch(step, rank, width))

    # A backward computes the gradient of the input alone.
    x = batch(0, rank, width).requires_grad_()
    torch.autograd.grad(loss_of(model, x), x)
    assert all(p.grad is None for p in model.parameters())
    # Two forwards come before their backwards.
    losses = [forward(0), forward(1)]
    (losses[0] + losses[1]).backward()
    assert_same_gradients(losses)
    for _ in range(3):
        first = forward(0)
        with torch.no_grad():
            forward(0)
        losses = [first, forward(1)]
        losses[1].backward()
        losses[0].backward()
        assert_same_gradients(losses)
    # Two backwards run through one graph.
    loss = forward(0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same_gradients([loss], 2.0)
    # Gradients are accumulated, then summed instead of averaged.
    model.set_requires_gradient_sync(False)
    losses = [forward(0)]
    losses[0].backward()
    model.set_requires_gradient_sync(True)
    losses.append(forward(1))
    losses[1].backward()
    assert_same_gradients(losses)
    for layer in model.layers:
        layer.set_gradient_divide_factor(1.0)
    losses = [forward(0)]
    losses[0].backward()
    assert_same_gradients(losses, 2.0)
    for layer in model.layers:
        layer._shardwright_unit.unit.unit_options.divides_by = None
    # Layers read their weight, and call their module twice.
    for is_odd in (True, False):
        for each in (*model.layers, *unsharded.layers):
            each.is_odd = is_odd
        for _ in range(3):
            losses = [forward(0)]
            losses[0].backward()
            assert_same_gradients(losses)
    # A backward raises.
    x = batch(0, rank, width)
    hidden = model.layers[0](x)
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hidden.square().sum().backward()
    losses = [forward(0)]
    losses[0].backward()
    assert_same_gradients(losses)


@without_packing()
def _other_steps_timed(recomputes: bool) -> None:
    with timed():
        _other_steps(recomputes)


@pytest.mark.parametrize("recomputes", [False, True])
def test_steps_that_differ_from_the_schedule(pool: Pool, recomputes: bool) -> None:
    pool.run(_other_steps_timed, 2, recomputes)


class Recomputing(Layer):
    """A layer whose product the backward recomputes, by a checkpoint within the unit."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(checkpoint(self.linear, x, use_reentrant=False)[:, :-1])  # type: ignore[index]


@without_packing()
def _recomputes_within() -> None:
    """The recomputation multiplies as the forward did, and the backward gathers the weight only once."""
    width = 512
    with timed():
        model, unsharded = chain(get_mesh((2,)), width, layer=Recomputing, **CHUNKS), Chain(width, layer=Recomputing)
        assert_trains_as_unsharded(model, unsharded.to(meshes.device), width, 5)
        schedule = sw.fsdp.schedule(model)
        assert "backward" in {kind for kind, _ in gathered_in_chunks(schedule)}
        assert last_reduction_is_in_chunks(schedule)
        with sw.debug.wire_meter() as meter:
            loss_of(model, batch(9, dist.get_rank(), width)).backward()
        expected = received_bytes(model, [[], *model.layers])
        assert meter.received_bytes == expected, (meter.received_bytes, expected)


def test_checkpoints_within_units_gather_weights_once(pool: Pool) -> None:
    pool.run(_recomputes_within, 2)
