"""A dispatch whose counts stay on the device is captured in a graph, and replays with other tokens, routes and scores."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import meshes
import routing
import shardwright as sw
from pool import Pool

WORLD = 4
TOKENS = 9


def _padded(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """To a number of tokens that is the same for all problems."""
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
        rows, _, handle = sw.dispatch(x, ids, scores, held, capacity, overflow="drop", rows_per_rank=rows_per_rank)
        return sw.combine(torch.sin(rows), handle), torch.as_tensor(handle.dropped)

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


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("placement", routing.PLACEMENTS)
def test_replays_with_other_tokens(async_pool: Pool, placement: str, capacity: int | None) -> None:
    async_pool.run(_captured, WORLD, placement, capacity)
