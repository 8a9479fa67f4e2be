"""Measured times of uses determine how far ahead `sw.fully_shard` gathers, equally on all ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from fsdp_models import flat_fully_shard
from meshes import get_mesh
from pool import Pool
from shardwright._planner import StepSchedule
from shardwright.fsdp import scheduler
from shardwright.fsdp.scheduler import Clock
from shardwright.fsdp.units import Unit
from test_fully_shard import Model, loss_of, parts, shard, tokens_of, train
from test_fully_shard_streams import replaced

pytestmark = pytest.mark.on_device

USE_PS = 1000


def _prefetch_distance() -> None:
    """The last layer is gathered two changes ahead if its gather is slow, and one if all gathers take equally long."""
    mesh = get_mesh((2,))
    rank = dist.get_rank()

    def durations(clock: Clock) -> list[int]:
        return [USE_PS * (1 + (i + rank) % 2) for i in range(len(clock._marks) // 2)]

    expected = parts(train(shard(Model(), flat_fully_shard, mesh, prefetch=1), 4))
    for slow, ahead, limit in ((1, 1, None), (8, 2, 1 << 20), (8, 1, 6900)):

        def gather_ps(unit: Unit, slow: int = slow) -> int:
            return USE_PS * (slow if unit.name == "layers.2" else 1)

        replacements = {"gather_ps": property(gather_ps), "reduce_ps": property(lambda unit: USE_PS)}
        with replaced(Clock, intervals_ps=durations), replaced(Unit, **replacements):  # type: ignore[arg-type]
            model = shard(Model(), flat_fully_shard, mesh, memory_limit=limit)
            found = parts(train(model, 4))
        assert all(map(torch.equal, found, expected))
        schedule = sw.fsdp.schedule(model)
        texts: list[str] = [""] * 2
        dist.all_gather_object(texts, str(schedule))
        assert texts[0] == texts[1], "ranks follow different schedules"
        assert schedule.lanes is not None and all(end - begin == 2 * USE_PS for begin, end in schedule.lanes["uses"])
        assert schedule.prefetch == ahead, f"{slow}, {limit}: {schedule}"
        assert limit is None or schedule.peak_bytes <= limit


def test_prefetch_distance_follows_from_times(pool: Pool) -> None:
    pool.run(_prefetch_distance, 2)


def _timed() -> None:
    model = shard(Model(), flat_fully_shard, get_mesh((3,)))
    with pytest.raises(ValueError, match="module must be a module under sw.fully_shard, got a Linear"):
        sw.fsdp.schedule(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="module must have ended a step, got none"):
        sw.fsdp.schedule(model)
    with torch.no_grad():
        loss_of(model, tokens_of(0))
    assert not sw.fsdp.schedule(model).reductions
    train(model, 1, evaluate=True)
    schedule = sw.fsdp.schedule(model)
    assert schedule.reductions and schedule.lanes is None and "predicted" not in str(schedule)
    train(model, 1, evaluate=True)
    schedule = sw.fsdp.schedule(model)
    lanes = schedule.lanes
    assert lanes is not None and lanes["compute_ps"] == sum(end - begin for begin, end in lanes["uses"]) > 0
    assert lanes["transfer_ps"] > 0 and lanes["total_ps"] == json.loads(schedule.to_json())["predicted_ps"]
    assert "are exposed\n  compute, by use" in str(schedule)
    drawn = ElementTree.fromstring(schedule.to_svg()).iter()
    titles = [path[0].text for path in drawn if path.tag.endswith("path") and len(path)]
    assert sum(str(title).startswith("gather ") for title in titles) == len(schedule.gathers)
    train(model, 1, evaluate=True)
    assert sw.fsdp.schedule(model).to_json() == schedule.to_json(), "only one step is timed"


class _Clock:
    """Two uses of 50 ps."""

    def intervals_ps(self) -> list[int]:
        return [50, 50]


def test_copies_of_gathers_in_chunks_are_averaged() -> None:
    """Unit a is gathered in chunks in its first use and whole in its last; each gather copies its bias from the host.

    The step has two gathers of unit a, so two copies of 30 and 50 ps take 40 ps each.
    """
    weights = [(name, 0, 100, 0, 0, 30, 0, 0, 0) for name in ("a", "b")]
    uses = [([unit], "forward", [], 50) for unit in (0, 1, 0)]
    chunked = [(0, 10, 1, 20, 30, 3, False, ([], 0, 0))]
    schedule = StepSchedule(weights, uses, budget_bytes=250, alignment_bytes=1, chunked_weights=chunked)
    assert schedule.original_of == [-1, -1, 0], str(schedule)
    assert sorted(weight for weight, *_ in schedule.gathers) == [0, 1, 2], str(schedule)
    copies: Any = [[SimpleNamespace(to_host=False, length_ps=ps) for ps in (30, 50)], []]
    clock: Any = _Clock()
    times = scheduler.own_times(clock, copies, schedule, scheduler.StepActivations(None))
    assert times.copies == [(40, 0), (0, 0)]


def test_one_step_is_timed(pool: Pool) -> None:
    pool.run(_timed, 3)
