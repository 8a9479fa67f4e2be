"""Tokens to experts on a GPU: indices and rows as on the CPU, without host synchronization, and captured in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist

import routing
import shardwright as sw
from shardwright._native import _runtime

WORLD = 4
NoHostSync = Callable[[], AbstractContextManager[None]]


@pytest.mark.parametrize("placement", routing.PLACEMENTS)
def test_index_arithmetic_matches_cpu(no_host_sync: NoHostSync, placement: str) -> None:
    g = torch.Generator().manual_seed(3)
    held = _runtime.ExpertPlacement(12, routing.placement_of(placement, 12, WORLD, g))
    ids = torch.randint(-1, 12, (50, 3), generator=g)
    on_host, on_device = (_runtime.DevicePlacement(held, device) for device in ("cpu", "cuda"))
    placed = ids.cuda()
    first, last = held.first_replica[2:4]
    codes = on_host.choose(ids, 1)
    routes = on_host.route(codes, 20)
    expanded = _runtime.expand_rows_on_device(codes, first, last - first, None, 7, 100)
    with no_host_sync():
        placed_codes = on_device.choose(placed, 1)
        placed_routes = on_device.route(placed_codes, 20)
        placed_expanded = _runtime.expand_rows_on_device(placed_codes, first, last - first, None, 7, 100)
    assert torch.equal(placed_codes.cpu(), codes)
    assert all(map(torch.equal, routes, (t.cpu() for t in placed_routes)))
    assert all(map(torch.equal, expanded, (t.cpu() for t in placed_expanded)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_row_kernels_match_cpu(no_host_sync: NoHostSync, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    rows, others = (torch.randn(n, 33, generator=g).to(dtype) for n in (40, 25))
    table = torch.randint(-1, 40, (25, 3), generator=g)
    pairs = torch.randint(-1, 75, (60,), generator=g)
    weights = torch.randn(25, 3, generator=g)
    placed = [t.cuda() for t in (rows, others, table, pairs, weights)]

    def results(rows, others, table, pairs, weights) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        return [
            _runtime.take_rows(rows, pairs.remainder(40)),
            _runtime.sum_rows(rows, table, None),
            _runtime.sum_rows(rows, table, weights),
            _runtime.take_weighted_rows(others, pairs, weights),
            _runtime.dot_rows(rows, table, others, weights),
        ]

    with no_host_sync():
        actual = results(*placed)
    for result, expected in zip(actual, results(rows, others, table, pairs, weights), strict=True):
        torch.testing.assert_close(result.cpu(), expected)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def test_graph_replays_route_new_tokens(one_rank: None) -> None:
    p = routing.problem(1, 2, dtype=torch.float32)
    x, ids, scores = (t.cuda() for t in (p.x[0], p.expert_ids[0], p.scores[0]))
    placement = [list(range(p.num_experts))]

    def layer() -> torch.Tensor:
        rows, _, handle = sw.experts.dispatch(x, ids, scores, placement, overflow="drop", rows_per_rank=len(x))
        return sw.experts.combine(torch.sin(rows), handle)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for step in range(3):
        ids.copy_((p.expert_ids[0] + step).clamp_max(p.num_experts - 1))
        scores.copy_(p.scores[0] * step)
        graph.replay()
        kept = (ids.cpu() >= 0).to(torch.float32) * scores.cpu()
        torch.testing.assert_close(out.cpu(), torch.sin(p.x[0]) * kept.sum(1, keepdim=True))
