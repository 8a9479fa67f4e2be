"""Costs of each step of a plan, by kind of link and by rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._native import _planner
from .._planner import Plan, Step

MAX_RANKS_BY_CLASS = 4096  # plans of more ranks have one class of ranks

# Topologies under which the predicted picoseconds of a step are its bytes. _BETWEEN_ONLY counts bytes between nodes.
# _BOTH counts bytes within nodes once and bytes between nodes _BETWEEN times.
_BETWEEN = 1 << 12
_BETWEEN_ONLY = (_planner.Link(0, 0), _planner.Link(0, 1024))
_BOTH = (_planner.Link(0, 1024), _planner.Link(0, 1024 * _BETWEEN))


class StepCosts(NamedTuple):
    """Costs of one step.

    Attributes:
        name: the operation and the mesh dims, as in the plan's text.
        layouts: the placements before and after, as in the plan's text.
        predicted_us: the predicted time of the step alone.
        bytes_inside, bytes_between: bytes within nodes and between nodes: the received or sent bytes of the worst rank,
            the larger number. All bytes of a collective whose group spans nodes count as bytes between nodes, as in
            predicted times.
        peak_bytes: maximum memory of a rank for the result and temporaries of the step.
        received_by_rank: bytes by rank, in the order of `ranks_of`; empty above MAX_RANKS_BY_CLASS ranks.
    """

    step: Step
    name: str
    layouts: str
    predicted_us: float
    bytes_inside: int
    bytes_between: int
    peak_bytes: int
    received_by_rank: list[int]

    @property
    def is_local(self) -> bool:
        """True if no rank sends anything."""
        return self.step.messages_max == 0


def ranks_of(plan: Plan) -> list[int]:
    """Returns the ranks of both meshes, ascending."""
    return sorted({*plan.src.mesh.ranks, *plan.dst.mesh.ranks})


def costs_of(plan: Plan) -> list[StepCosts]:
    """Returns the costs of each step of the plan."""
    table = json.loads(plan.to_json())
    lines = [line.strip() for line in str(plan).splitlines()[1:]]
    ranks = ranks_of(plan)
    ranks = ranks if len(ranks) <= MAX_RANKS_BY_CLASS else []
    found = []
    for number, (step, entry, line) in enumerate(zip(plan.steps, table["steps"], lines, strict=False), 1):
        name, _, rest = line.removeprefix(f"{number}. ").partition(": ")
        alone = [_alone(plan, table, step, entry, links) for links in (_BETWEEN_ONLY, _BOTH)]
        inside, between = _by_link(step, *(round(p.steps[0].predicted_us * 1e6) for p in alone))
        found.append(
            StepCosts(
                step=step,
                name=name,
                layouts=rest.partition(", receives ")[0].removesuffix(", local"),
                predicted_us=step.predicted_us,
                bytes_inside=inside,
                bytes_between=between,
                peak_bytes=alone[0].peak_bytes,
                received_by_rank=[_received(alone[0], rank) for rank in ranks],
            )
        )
    return found


def classes_of(ranks: Sequence[int], costs: Sequence[StepCosts]) -> dict[tuple[int, ...], list[int]]:
    """Returns {received bytes by step: ranks}, ordered by first rank. Empty above MAX_RANKS_BY_CLASS ranks."""
    classes: dict[tuple[int, ...], list[int]] = {}
    if costs and costs[0].received_by_rank:
        for rank, *received in zip(ranks, *(entry.received_by_rank for entry in costs), strict=True):
            classes.setdefault(tuple(received), []).append(rank)
    return classes


def _by_link(step: Step, between: int, both: int) -> tuple[int, int]:
    """Returns bytes within nodes and between nodes, from the step's times under the two topologies.

    A step over one kind of link has the exact bytes of the worst rank: predicted times of uneven parts may consider
    only ranks at the corners of the mesh.
    """
    inside = both - between * _BETWEEN
    if inside and between:
        return inside, between
    worst = max(step.wire_bytes_max, step.send_bytes_max)
    return (worst, 0) if inside else (0, worst)


def _alone(
    plan: Plan, table: dict[str, Any], step: Step, entry: dict[str, Any], links: tuple[_planner.Link, _planner.Link]
) -> Plan:
    """Returns the plan of one step, under a topology of these links without latencies."""
    topology = _planner.Topology("bytes", table["topology"]["ranks_per_node"], 0, 0, *links)
    how = step.replica_policy, step.rounds, step.ordered, entry.get("ranks_per_node", 0)
    moves = [(step.op, step.mesh_dims, step.before, step.after, *how)]
    ends = step.before, step.after
    named_only = table["named_groups_only"]
    return _planner.plan_of_steps(*ends, moves, plan.backend, plan.objective, topology, named_only, 0, 1)


def _received(plan: Plan, rank: int) -> int:
    """Returns the bytes that a rank receives; 0 if it is not on the plan's meshes."""
    on_mesh = any(mesh.coordinate(rank) is not None for mesh in (plan.src.mesh, plan.dst.mesh))
    return plan.wire_bytes(rank) if on_mesh else 0
