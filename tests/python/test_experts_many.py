"""Tokens to as many experts as large models have: results of an unsharded layer, and bytes equal to the bound."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import meshes
import routing
import shardwright as sw
from pool import Pool

WORLD = 8
SIZES = {"top_k": 8, "hidden": 12, "most_tokens": 20}


def _problem(load: str, num_experts: int, placement: str) -> routing.Problem:
    return routing.problem(WORLD, 11, load=load, placement=placement, num_experts=num_experts, **SIZES)  # type: ignore[arg-type]


def _layer(load: str, num_experts: int, placement: str) -> tuple[int, int]:
    """Compares this rank's outputs and gradients. Returns its received token bytes and its number of experts."""
    rank = dist.get_rank()
    p = _problem(load, num_experts, placement)
    outs, x_grads, score_grads, _ = routing.unsharded(p)
    x, scores = (of_ranks[rank].to(meshes.device).requires_grad_() for of_ranks in (p.x, p.scores))
    with sw.debug.wire_meter() as meter:
        rows, counts, handle = sw.experts.dispatch(x, p.expert_ids[rank].to(meshes.device), scores, p.placement)
    assert meter.received_bytes == handle.payload_bytes + handle.metadata_bytes
    weights = p.weights.to(meshes.device)
    parts = zip(handle.experts, rows.split(counts.tolist()), strict=True)
    done = [routing.expert(weights[e], part) for e, part in parts]
    out = sw.experts.combine(torch.cat(done) if done else rows, handle)
    out.backward(p.gradients[rank].to(meshes.device))
    for actual, expected in ((out, outs), (x.grad, x_grads), (scores.grad, score_grads)):
        assert actual is not None
        torch.testing.assert_close(actual.detach().cpu(), expected[rank])
    return handle.payload_bytes, len(handle.experts)


@pytest.mark.parametrize(
    ("num_experts", "load", "placement"),
    [(128, "uniform", "even"), (128, "zipf", "uneven"), (256, "uniform", "uneven"), (256, "zipf", "even")],
)
def test_layer_matches_unsharded_with_fewest_bytes(pool: Pool, num_experts: int, load: str, placement: str) -> None:
    p = _problem(load, num_experts, placement)
    home, row_bytes = p.rank_of_token(), SIZES["hidden"] * 8
    bound = [0] * WORLD
    for token, ranks in enumerate(routing.destinations(p)):
        for rank in ranks - {home[token]}:
            bound[rank] += row_bytes
    received = pool.run(_layer, WORLD, load, num_experts, placement)
    assert [payload for payload, _ in received] == bound
    assert sum(held for _, held in received) == num_experts
    # A naive dispatch sends each token to each of its experts.
    rank_of = {e: rank for rank, experts in enumerate(p.placement) for e in experts}
    ids = [row for ids_of_rank in p.expert_ids for row in ids_of_rank.tolist()]
    naive = sum(rank_of[e] != home[t] for t, row in enumerate(ids) for e in row if e >= 0) * row_bytes
    assert sum(bound) < 0.8 * naive
