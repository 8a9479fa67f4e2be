"""Fallbacks to PyTorch are counted with a reason and logged once; if strict, they raise."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import shardwright as sw
from meshes import get_mesh
from pool import Pool

WORLD = 4


def _subclass() -> None:
    mesh = get_mesh((WORLD,))
    local = TwoTensor(torch.ones(2, 6), torch.zeros(2, 6))
    x = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    result = x.redistribute(mesh, [Shard(1)])._local_tensor
    assert isinstance(result, TwoTensor)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _counted(call: Callable[[], None]) -> tuple[dict[str, int], list[str]]:
    """Returns the fallback reasons that two calls count, and the lines that they log."""
    log, lines = logging.getLogger("shardwright"), _Lines()
    log.addHandler(lines)
    sw.reset_stats()
    try:
        with sw.enabled():
            call()
            call()
        stats = sw.stats()
        assert stats["fallbacks"] == sum(stats["fallback_reasons"].values())
        with sw.enabled(strict=True), pytest.raises(RuntimeError, match="strict"):
            call()
    finally:
        log.removeHandler(lines)
    return stats["fallback_reasons"], lines.lines


@pytest.mark.parametrize(("call", "named"), [(_subclass, "TwoTensor")])
def test_fallback_is_counted_with_its_reason(pool: Pool, call: Callable[[], None], named: str) -> None:
    for reasons, lines in pool.run(_counted, WORLD, call):
        assert sum(reasons.values()) >= 2 and any(named in reason for reason in reasons), reasons
        about = [line for line in lines if named in line]
        assert len(about) == 1, f"logged {len(about)} times: {lines}"


class _Odd(Shard):
    """A subclass of Shard that only PyTorch handles."""


def _unsupported_placement() -> tuple[dict[str, int], list[str]]:
    mesh = get_mesh((WORLD,))
    log, lines = logging.getLogger("shardwright"), _Lines()
    log.addHandler(lines)
    sw.reset_stats()
    try:
        with sw.enabled():
            for rows in (1, 2, 3):
                for dim in (0, 1):
                    x = DTensor.from_local(torch.ones(rows, rows), mesh, [_Odd(dim)], run_check=False)
                    gathered = x.redistribute(mesh, [Replicate()]).to_local()
                    assert gathered.shape[dim] == WORLD * rows
    finally:
        log.removeHandler(lines)
    return sw.stats()["fallback_reasons"], lines.lines


def test_fallback_reason_does_not_depend_on_shapes_and_dims(pool: Pool) -> None:
    """An unsupported placement counts as one reason for all shapes and dims. Its first case is logged in full."""
    for reasons, lines in pool.run(_unsupported_placement, WORLD):
        ((reason, count),) = reasons.items()
        assert count == 6
        assert "_Odd" in reason and "placements must be" in reason and not any(c.isdigit() for c in reason), reason
        assert len(lines) == 1 and "got Shard(dim=0), a _Odd" in lines[0], lines


def _counters() -> None:
    mesh = get_mesh((WORLD,))
    x = DTensor.from_local(torch.ones(3, 8), mesh, [Shard(0)], run_check=False)
    sw.reset_stats()
    assert sw.stats()["calls"] == sw.stats()["fallbacks"] == sw.stats()["bytes"] == 0
    with sw.enabled(strict=True), sw.debug.wire_meter() as meter:
        for _ in range(3):
            x.redistribute(mesh, [Shard(1)])
    stats = sw.stats()
    assert stats["calls"] == 3 and stats["fallbacks"] == 0 and not stats["fallback_reasons"]
    assert stats["plans"] <= 1 and stats["cache_hits"] >= 2
    assert stats["bytes"] == meter.received_bytes > 0
    x.redistribute(mesh, [Shard(1)])
    assert sw.stats()["calls"] == 3, "counted although disabled"


def test_stats_count_calls_plans_and_bytes(pool: Pool) -> None:
    pool.run(_counters, WORLD)
