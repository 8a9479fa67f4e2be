"""Logs each plan that is made for a call, at level DEBUG of the logger ``shardwright``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .._native import _planner
from ..layouts import tables

_log = logging.getLogger("shardwright")


def note(plan: _planner.Plan, why: str) -> None:
    """Logs a plan: layouts, steps, bytes, and the reason `why` it was chosen."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    ends, *moves = str(plan).splitlines()
    steps = [move.strip().partition(". ")[2].partition(": ")[0] for move in moves[: len(plan.steps)]]
    _log.debug(
        "plan: %s; %s; a rank receives at most %d B in %d messages, about %.0f us; %s",
        ends,
        ", ".join(steps) or "no steps",
        plan.wire_bytes_max,
        plan.messages_max,
        plan.predicted_us,
        why,
    )


def note_batch(batch: _planner.Batch) -> None:
    """Logs the plan of tensors that move together."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    plan = _planner.BatchPlan(batch)
    _log.debug(
        "plan: %d tensors in %d rounds; a rank receives at most %d B in %d messages; fewest bytes",
        plan.num_items,
        plan.num_rounds,
        plan.received_bytes_max,
        plan.messages_max,
    )


def note_product(plan: _planner.ProductPlan) -> None:
    """Logs the first line of a product's plan: its axes, its cuts, and whether it overlaps with transfers."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("plan: product %s", str(plan).splitlines()[0])


def why_chosen(plan: _planner.Plan, usable: Sequence[Sequence[int]] | None) -> str:
    """Returns the reason why the planner chose a plan.

    `usable` has the sets of mesh dims whose groups it could use.
    """
    what = "the least predicted time" if plan.objective == "time" else "the fewest bytes"
    groups = "any groups"
    if usable is not None:
        names = plan.src.mesh.dim_names
        groups = f"existing groups ({', '.join('+'.join(names[dim] for dim in dims) for dims in usable) or 'none'})"
    return f"chosen for {what} with the {_origin_of_topology(plan)}, over {groups}"


def _origin_of_topology(plan: _planner.Plan) -> str:
    """Returns a text about the topology that predicted times come from."""
    if plan.src.mesh.topology is not None or plan.dst.mesh.topology is not None:
        return "topology of the mesh"
    if tables.measured_topology(plan.backend) is not None:
        return "topology that calibrate measured"
    return "default topology" if tables.current.environment is None else "topology of SHARDWRIGHT_TOPOLOGY"
