"""Plans back from JSON."""

from __future__ import annotations

import json
from typing import Any

from . import _planner
from .layout import Layout, Mesh
from .topology import load_topology

_VERSION = 3


def plan_from_json(text: str) -> _planner.Plan:
    """The plan that ``Plan.to_json`` wrote, or that was written by hand after docs/plan.schema.json.

    Figures are not read but worked out anew.

    Raises:
        ValueError: on text that is not JSON, another version, a field that is missing or not what is allowed, and steps
            that do not follow from one another.
    """
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ValueError(f"plan: not JSON: {error}") from None
    if not isinstance(table, dict) or table.get("version") != _VERSION:
        found = table.get("version") if isinstance(table, dict) else type(table).__name__
        raise ValueError(f"plan: version {found!r}; allowed is {_VERSION}")
    try:
        return _plan(table)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"plan: a field is missing or of the wrong type: {error!r}") from None


def _plan(table: dict[str, Any]) -> _planner.Plan:
    grid = table["mesh"]
    mesh = Mesh(dict(zip(grid["dim_names"], grid["dim_sizes"], strict=True)), grid.get("ranks"))

    def layout(entry: dict[str, Any]) -> Layout:
        order = {int(tensor_dim): mesh_dims for tensor_dim, mesh_dims in entry["shard_order"].items()}
        return Layout(mesh, table["shape"], entry["placements"], table["dtype"], order, strided="literal")

    steps = [
        (
            step["op"],
            [grid["dim_names"].index(name) for name in step["mesh_dims"]],
            layout(step["before"]),
            layout(step["after"]),
            step["sharing"],
            step["rounds"],
            step["ordered"],
        )
        for step in table["steps"]
    ]
    return _planner.plan_of_steps(
        layout(table["source"]),
        layout(table["destination"]),
        steps,
        table["backend"],
        table["objective"],
        load_topology(table["topology"]),
        table["named_groups_only"],
    )
