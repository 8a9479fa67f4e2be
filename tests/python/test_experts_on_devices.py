"""Tokens to experts on the device of tests/async_device: captured in graphs, and over Gloo by way of host memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import meshes
import routing
import shardwright as sw
from pool import Pool
from shardwright.experts import ranks as expert_ranks

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
