"""What shardwright does not handle is left to PyTorch: counted with a reason, logged once, and an error if strict."""

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
    """The reasons that two calls count, and what they log."""
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
def test_counted_with_its_reason(pool: Pool, call: Callable[[], None], named: str) -> None:
    for reasons, lines in pool.run(_counted, WORLD, call):
        assert sum(reasons.values()) >= 2 and any(named in reason for reason in reasons), reasons
        about = [line for line in lines if named in line]
        assert len(about) == 1, f"logged {len(about)} times: {lines}"


class _Odd(Shard):
    """A cut that only PyTorch knows."""


def _one_cause_many_cases() -> tuple[dict[str, int], list[str]]:
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


def test_one_cause_is_one_reason(pool: Pool) -> None:
    """However many shapes and dims it meets; the first of them is logged in full."""
    for reasons, lines in pool.run(_one_cause_many_cases, WORLD):
        ((reason, count),) = reasons.items()
        assert count == 6
        assert "_Odd" in reason and "placements must be" in reason and not any(c.isdigit() for c in reason), reason
        assert len(lines) == 1 and "got _Odd(dim=0)" in lines[0], lines


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


def test_counters(pool: Pool) -> None:
    pool.run(_counters, WORLD)
