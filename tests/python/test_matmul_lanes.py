"""That transfers and products really go on at once, and what is held meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from allocations import allocated_peak
from pool import Pool

WORLD = 4
ROWS, K, COLUMNS = 512, 256, 384


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, K), torch.randn(K, COLUMNS)


def _traced_ring() -> list[tuple[str, int, float, float]]:
    x, weight = _operands()
    sw.all_gather_matmul(x, weight, method="ring", chunks=WORLD)
    dist.barrier()
    with sw.trace() as events:
        sw.all_gather_matmul(x, weight, method="ring", chunks=WORLD)
    assert {event["cat"] for event in json.loads(events.to_chrome())["traceEvents"]} == {"compute", "communication"}
    return [(event.lane, event.chunk, event.start, event.end) for event in events]


def test_next_chunk_travels_while_one_is_multiplied(pool: Pool) -> None:
    for events in pool.run(_traced_ring, WORLD):
        travels = {chunk: (start, end) for lane, chunk, start, end in events if lane == "communication"}
        multiplied = {chunk: (start, end) for lane, chunk, start, end in events if lane == "compute"}
        assert sorted(multiplied) == list(range(WORLD)) and sorted(travels) == list(range(1, WORLD))
        for chunk in range(WORLD - 1):
            begin, end = multiplied[chunk]
            next_begin, next_end = travels[chunk + 1]
            assert next_begin <= begin and next_end >= end, f"chunk {chunk + 1} was not under way beside {chunk}"
            assert multiplied[chunk + 1][0] >= next_end


def _trace_is_exclusive() -> None:
    with sw.trace(), pytest.raises(RuntimeError, match="another trace"), sw.trace():
        pass
    with sw.trace() as events:
        pass
    assert events == []


def test_one_trace_at_a_time(pool: Pool) -> None:
    pool.run(_trace_is_exclusive, 1)


def _peak(method: str, save: str) -> int:
    """The most that is allocated at once beside what is there before, in bytes."""
    x, weight = torch.randn(2048, 512), torch.randn(512, 8)
    x.requires_grad_(save == "gathered")
    arguments: dict[str, Any] = {"method": method, "chunks": 1 if method == "serial" else WORLD, "save": save}
    sw.all_gather_matmul(x, weight, **arguments)
    sw.release_staging()
    return int(allocated_peak(sw.all_gather_matmul, x, weight, **arguments)[1])


def test_gathered_operand_does_not_exist(pool: Pool) -> None:
    shard = 2048 * 512 * 4
    result = WORLD * 2048 * 8 * 4
    room = 1 << 20
    for serial, ring, kept in zip(
        pool.run(_peak, WORLD, "serial", "shard"),
        pool.run(_peak, WORLD, "ring", "shard"),
        pool.run(_peak, WORLD, "ring", "gathered"),
        strict=True,
    ):
        assert serial >= WORLD * shard + result
        assert ring <= 2 * shard + result + room
        assert WORLD * shard + result <= kept <= (WORLD + 1) * shard + result + room
