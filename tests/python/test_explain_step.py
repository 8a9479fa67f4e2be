"""`sw.explain` on a training step of a model under `sw.fully_shard`."""

from __future__ import annotations

import json
import time
from typing import Any

from torch import nn

import shardwright as sw
from fsdp_models import Mlp, batch, flat_fully_shard, loss_of, shard
from meshes import get_mesh
from pool import Pool

SLEEP_SECONDS = 0.05


def _explained() -> None:
    model = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    slow: nn.Module = model.layers[1]
    slow[1].register_forward_hook(lambda *_: time.sleep(SLEEP_SECONDS))  # type: ignore[index,operator]
    found: Any = sw.explain(lambda: loss_of(model, batch(0)).backward())
    (step,) = found
    schedule = sw.fsdp.schedule(model)
    assert str(step.schedule) == str(schedule)

    def of(trace: Any, lane: str) -> list[Any]:
        return [event for event in trace if event.lane == lane]

    # The prediction has the events of the schedule, in its order.
    assert len(of(step.predicted, "compute")) == len(schedule.uses)
    transfers = [event.instruction.split()[0] for event in of(step.predicted, "communication")]
    assert transfers.count("gather") == len(schedule.gathers) and transfers.count("reduce") == len(schedule.reductions)
    for trace in (step.predicted, step.measured):
        uses = of(trace, "compute")
        assert [use.instruction for use in uses][:2] == ["forward Mlp", "forward Mlp, layers.0"]
        assert all(before.end <= after.start for before, after in zip(uses, uses[1:]))
        late = [use for use in uses if use.instruction == "forward Mlp, layers.1"]
        assert len(late) == 1 and late[0].end - late[0].start >= SLEEP_SECONDS
    # Measured transfers are within the step, on the same clock as its uses.
    begin, end = of(step.measured, "compute")[0].start, of(step.measured, "compute")[-1].end
    moved = of(step.measured, "communication")
    assert moved and all(begin <= event.end and event.start <= end for event in moved)
    lines = str(found).splitlines()
    assert lines[0].startswith(f"a step of {len(schedule.uses)} uses, {len(schedule.gathers)} gathers")
    assert sum("compute " in line and "|" in line for line in lines) == 2
    names = {event["name"] for event in json.loads(found.to_chrome())["traceEvents"]}
    assert {"gather layers.0", "backward Mlp"} <= names
    # Nothing is recorded after the call.
    loss_of(model, batch(1)).backward()
    assert str(sw.explain(lambda: None)) == "no products with anything to move, and no step of a sharded model"


def test_explain_shows_the_predicted_and_measured_step(pool: Pool) -> None:
    pool.run(_explained, 2)
