"""Tokens to experts on the device of tests/async_device: captured in graphs, beside redistributes on other streams, and
over Gloo by way of host memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshes
import routing
import shardwright as sw
from pool import Pool
from shardwright.experts import ranks as expert_ranks
from test_device_rules import Move

WORLD = 4
TOKENS = 9


def _padded(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Pads to TOKENS tokens."""
    padding = tensor.new_full((TOKENS - len(tensor), tensor.shape[1]), value)
    return torch.cat([tensor, padding])


def _inputs(p: routing.Problem, rank: int) -> list[torch.Tensor]:
    return [_padded(p.x[rank], 0), _padded(p.expert_ids[rank], -1), _padded(p.scores[rank], 0)]


def _captured(placement: str, capacity: int | None) -> None:
    import async_device

    rank = dist.get_rank()
    problems = [
        routing.problem(WORLD, seed, load=load, placement=placement) for seed in (1, 2) for load in routing.LOADS
    ]
    held = problems[0].placement
    x, ids, scores = (tensor.to(meshes.device) for tensor in _inputs(problems[0], rank))

    def layer(rows_per_rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        rows, _, handle = sw.experts.dispatch(
            x, ids, scores, held, capacity, overflow="drop", rows_per_rank=rows_per_rank
        )
        return sw.experts.combine(torch.sin(rows), handle), torch.as_tensor(handle.dropped)

    layer(TOKENS)  # uploads the tables of the placement
    with async_device.captured() as graph:
        captured = layer(TOKENS)
    for p in problems:
        for tensor, new in zip((x, ids, scores), _inputs(p, rank), strict=True):
            tensor.copy_(new)
        graph.replay()
        assert torch.equal(captured[0].cpu(), layer(None)[0].cpu())
        totals = [layer_dropped.cpu().to(torch.int64) for layer_dropped in (captured[1], layer(None)[1])]
        for total in totals:
            dist.all_reduce(total)
        assert totals[0] == totals[1]


# Tokens, routes and scores of the replays differ from those of the capture.
@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("placement", routing.PLACEMENTS)
def test_replays_with_other_tokens(async_pool: Pool, placement: str, capacity: int | None) -> None:
    async_pool.run(_captured, WORLD, placement, capacity)


def _forgotten_placement() -> None:
    """Replays a graph after all cached tables of its placement are gone and their memory is reused."""
    import async_device

    rank = dist.get_rank()
    p = routing.problem(WORLD, 3, placement="copies")
    x, ids, scores = (tensor.to(meshes.device) for tensor in _inputs(p, rank))

    def layer() -> torch.Tensor:
        fixed = {"overflow": "drop", "rows_per_rank": TOKENS}
        rows, _, handle = sw.experts.dispatch(x, ids, scores, p.placement, **fixed)  # type: ignore[arg-type]
        return sw.experts.combine(torch.sin(rows), handle)

    expected = layer().cpu()
    with async_device.captured() as graph:
        captured = layer()
    tables = weakref.WeakSet([expert_ranks.expert_ranks(p.placement, None, None)])
    expert_ranks._ranks_by_key.clear()
    gc.collect()
    assert not tables, "the placement is kept somewhere else"
    used_again = [torch.full((n,), -(10**6), device=meshes.device) for n in range(1, 64) for _ in range(4)]
    captured.zero_()
    graph.replay()
    assert torch.equal(captured.cpu(), expected) and used_again


def test_graphs_outlive_cached_placement_tables(async_pool: Pool) -> None:
    async_pool.run(_forgotten_placement, WORLD)


# ------------------------------------------------------------------------------- beside redistributes on other streams


def _layer(turn: int) -> Callable[[], None]:
    """Starts a layer whose experts double their rows. Returns a function that checks its result."""
    p = routing.problem(WORLD, turn, placement=routing.PLACEMENTS[turn % 3])
    x, ids, scores = _inputs(p, dist.get_rank())
    fixed: dict[str, Any] = {"rows_per_rank": TOKENS, "overflow": "drop"} if turn % 2 else {}
    given = [tensor.to(meshes.device) for tensor in (x, ids, scores)]
    rows, _, handle = sw.experts.dispatch(*given, p.placement, **fixed)
    out = sw.experts.combine(rows * 2, handle)
    expected = 2 * x * (scores * (ids >= 0)).sum(1, keepdim=True)
    return lambda: torch.testing.assert_close(out.cpu(), expected, rtol=1e-11, atol=1e-12)


def _move(turn: int) -> Callable[[], None]:
    """Starts a redistribute in which every rank takes part, asynchronous in every second turn. Returns a function that
    checks its result."""
    ends = [(("S(0)", "S(1)"), ("R", "S(1)")), (("P(sum)", "S(0)"), ("S(1)", "R")), (("R", "S(1)"), ("R", "R"))]
    move = Move(sw.Mesh({"a": 2, "b": 2}), (7 + turn, 6), *ends[turn % 3])
    result = move.start(async_op=turn % 2 == 0)
    return lambda: move.check(result + 0)


def _beside(rounds: int, has_threads: bool) -> list[int]:
    """Starts layers on one stream and redistributes on another, in turn. Returns the groups of all operations."""
    import async_device

    calls = (_layer, _move)
    streams = [torch.Stream(device=meshes.device) for _ in calls]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    errors: list[BaseException] = []

    def run(which: int) -> None:
        try:
            with streams[which]:
                for turn in range(rounds):
                    if has_threads:
                        turns[which].acquire()
                    check = calls[which](turn)
                    turns[1 - which].release()
                    check()
        except BaseException as error:
            errors.append(error)
            turns[1 - which].release(rounds)

    for call in calls:
        call(0)()  # makes the groups
    async_device.native().take_launched_groups()
    if has_threads:
        threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    else:
        for turn in range(rounds):
            checks = []
            for which in (0, 1) if turn % 3 else (1, 0):
                with streams[which]:
                    checks.append(calls[which](turn))
            for check, which in zip(checks, (0, 1) if turn % 3 else (1, 0), strict=True):
                with streams[which]:
                    check()
    seen: dict[int, int] = {}
    return [seen.setdefault(number, len(seen)) for number in async_device.native().take_launched_groups()]


@pytest.mark.parametrize("has_threads", [False, True], ids=["one thread", "two threads"])
def test_layers_beside_redistributes(async_pool: Pool, has_threads: bool) -> None:
    first, *others = async_pool.run(_beside, WORLD, 12, has_threads)
    assert len(set(first)) >= 3, "layers and redistributes use different groups"
    assert all(other == first for other in others), "ranks launch operations in different orders"


def _not_at_the_same_time(rank: int, size: int, path: str, layer_is_first: bool) -> None:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    move = Move(sw.Mesh({"a": 2, "b": 2}), (8, 12), ("R", "S(1)"), ("R", "R"))
    x, ids, scores = (
        tensor.to("asyncdev") for tensor in (torch.ones(2, 4), torch.arange(2)[:, None], torch.ones(2, 1))
    )

    def layer() -> torch.Tensor:
        rows, _, handle = sw.experts.dispatch(
            x, ids + 2 * (rank % 2), scores, [[0], [1], [2], [3]], rows_per_rank=2, overflow="drop"
        )
        return sw.experts.combine(rows * 2, handle)

    calls = (layer, lambda: move.start(async_op=True) + 0)
    first, second = calls if layer_is_first else calls[::-1]
    for call in (first, second):
        call()
    streams = [torch.Stream(device="asyncdev") for _ in range(2)]
    done = torch.Event(device="asyncdev")
    native.synchronize()
    with streams[0]:
        native.sleep(600)
        early = first()
        done.record(streams[0])
    with streams[1]:
        late = second()
    streams[1].synchronize()
    deadline = time.monotonic() + 0.4  # time for the work after the communication; shorter than the sleep before it
    while not done.query():
        assert time.monotonic() < deadline, "two communicators were used at the same time"
        time.sleep(0.001)
    of_layer, moved = (early, late) if layer_is_first else (late, early)
    move.check(moved)
    assert of_layer.eq(2).all()


@pytest.mark.parametrize("layer_is_first", [True, False])
def test_layer_and_redistribute_on_two_streams_do_not_overlap(async_pool: Pool, layer_is_first: bool) -> None:
    from async_device import ranks

    ranks.run(_not_at_the_same_time, 4, layer_is_first)


# ------------------------------------------------------------------------------------------------------------ over Gloo


def _over_gloo(rank: int, size: int, path: str) -> int:
    from async_device import ranks

    ranks.begin_on_gloo(rank, size, path)
    p = routing.problem(size, 4)
    outs, x_grads, score_grads, _ = routing.unsharded(p)
    for options in ({}, {"rows_per_rank": TOKENS, "overflow": "drop"}):
        x, scores = (of_ranks[rank].to("asyncdev").requires_grad_() for of_ranks in (p.x, p.scores))
        ids, weights = p.expert_ids[rank].to("asyncdev"), p.weights.to("asyncdev")
        rows, counts, handle = sw.experts.dispatch(x, ids, scores, p.placement, **options)  # type: ignore[arg-type]
        number = int(counts.sum())
        parts = zip(handle.experts, rows[:number].split(counts.tolist()), strict=True)
        done = [routing.expert(weights[e], part) for e, part in parts]
        out = sw.experts.combine(torch.cat([*done, rows[number:]]), handle)
        out.backward(p.gradients[rank].to("asyncdev"))
        for actual, expected in ((out, outs), (x.grad, x_grads), (scores.grad, score_grads)):
            assert actual is not None
            torch.testing.assert_close(actual.detach().cpu(), expected[rank])
    return int(sw.stats()["through_host"])


def test_device_tensors_over_gloo(async_pool: Pool) -> None:
    """Rows and sums pass through host memory, forward and backward, with both kinds of counts. Counts need no copy."""
    from async_device import ranks

    assert ranks.run(_over_gloo, 3) == [8] * 3
