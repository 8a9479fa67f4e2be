"""Reads plans from JSON."""

from __future__ import annotations

import functools
from typing import Any

from .._native import _planner
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.json_files import json_object, read_json, shard_order
from ..layouts.layout import Layout, Mesh
from ..layouts.topology import load_topology

_VERSION = 5  # of the JSON format

# The keys that docs/plan.schema.json allows. Costs are ignored.
_COSTS = ("wire_bytes_max", "wire_bytes_sum", "send_bytes_max", "messages_max", "sent_messages_max", "predicted_ps")
_STEP_OPTIONS = ("replica_policy", "rounds", "ordered", "ranks_per_node", "leads_to_another_mesh")
_STEP = ("op", "mesh_dims", "before", "after", *_STEP_OPTIONS, *_COSTS)
_TENSOR = ("mesh", "destination_mesh", "relay_meshes", "reached_mesh", "shape", "dtype", "source", "destination")
_OPTIONS = ("backend", "objective", "topology", "named_groups_only", "segments")
_OLDER_NAMES = ("relay_mesh", "pieces")
_PLAN = ("version", *_OPTIONS, *_TENSOR, "steps", "certificate", *_OLDER_NAMES)


def plan_from_json(text: str | bytes | bytearray) -> _planner.Plan:
    """Reads a plan that ``Plan.to_json`` wrote, or one written by hand according to docs/plan.schema.json.

    Costs are not read but computed again.

    Args:
        text: JSON.

    Raises:
        ValueError: the text is not JSON, the version is not supported, a field is missing, unknown, repeated or
            invalid, or a step does not begin with the layout in which the previous one ends.
    """
    if not isinstance(text, (str, bytes, bytearray)):
        raise argument_error("plan", "JSON, as Plan.to_json returns", f"a {type(text).__name__}")
    table = read_json(text, "plan: the text")
    if not isinstance(table, dict) or table.get("version") != _VERSION:
        version = table.get("version") if isinstance(table, dict) else type(table).__name__
        raise argument_error("plan: version", str(_VERSION), repr(version))
    try:
        return _plan(table)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"plan: a field is missing or of the wrong type: {error!r}") from None


def _plan(table: dict[str, Any]) -> _planner.Plan:
    """Returns the plan of a JSON object. Raises KeyError, TypeError, AttributeError or ValueError if it is invalid."""
    json_object(table, "plan", _PLAN)
    here = source_mesh = _mesh(table["mesh"], "mesh")  # `here`: mesh on which the next step begins
    destination_mesh = (
        _mesh(table["destination_mesh"], "destination_mesh") if "destination_mesh" in table else source_mesh
    )
    older = [table["relay_mesh"]] if "relay_mesh" in table else []  # an older name, for a single mesh
    relay_meshes = [_mesh(grid, "relay_meshes") for grid in _list(table.get("relay_meshes", older), "relay_meshes")]
    reached_mesh = _mesh(table["reached_mesh"], "reached_mesh") if "reached_mesh" in table else destination_mesh

    def layout(mesh: Mesh, owner: dict[str, Any], field: str) -> Layout:
        entry = json_object(owner[field], f"plan: {field}", ("placements", "shard_order", "flattened"))
        return Layout(
            mesh,
            table["shape"],
            entry["placements"],
            _text(table["dtype"], "dtype"),
            shard_order(entry["shard_order"], f"plan: shard_order of {field}"),
            "literal",
            argument_values.integer(entry.get("flattened", 1), "plan: flattened"),
        )

    steps = []
    for step in _list(table["steps"], "steps"):
        json_object(step, "plan: step", _STEP)
        op = _text(step["op"], "op")
        before = layout(here, step, "before")
        names = here.dim_names
        if op == "cross" or (op == "rearrange" and _flag(step["leads_to_another_mesh"], "leads_to_another_mesh")):
            here = relay_meshes.pop(0) if relay_meshes else reached_mesh
        steps.append(
            (
                op,
                argument_values.mesh_dim_indices(names, step["mesh_dims"], "plan: mesh_dims of a step"),
                before,
                layout(here, step, "after"),
                _text(step["replica_policy"], "replica_policy"),
                argument_values.integer(step["rounds"], "plan: rounds"),
                _flag(step["ordered"], "ordered"),
                argument_values.integer(step.get("ranks_per_node", 0), "plan: ranks_per_node"),
            )
        )
    full = {"tensor_dim": 0, "count": 1}
    given = table.get("segments", table.get("pieces", full))  # "pieces" is an older name
    segments = json_object(given, "plan: segments", ("tensor_dim", "count"))
    return _planner.plan_of_steps(
        layout(source_mesh, table, "source"),
        layout(destination_mesh, table, "destination"),
        steps,
        _text(table["backend"], "backend"),
        _text(table["objective"], "objective"),
        load_topology(json_object(table["topology"], "plan: topology")),
        _flag(table["named_groups_only"], "named_groups_only"),
        argument_values.integer(segments["tensor_dim"], "plan: tensor_dim of segments"),
        argument_values.integer(segments["count"], "plan: count of segments"),
    )


def _mesh(grid: dict[str, Any], field: str) -> Mesh:
    """Returns the mesh of a JSON object. `field` names it in errors."""
    json_object(grid, f"plan: {field}", ("dim_names", "dim_sizes", "ranks"))
    names = [_text(name, f"{field}.dim_names") for name in _list(grid["dim_names"], f"{field}.dim_names")]
    sizes = _list(grid["dim_sizes"], f"{field}.dim_sizes")
    if len(names) != len(sizes) or len(set(names)) != len(names):
        raise argument_error(f"plan: dim_names of {field}", f"distinct, one per dim_size of {sizes}", names)
    return Mesh(dict(zip(names, sizes, strict=True)), grid.get("ranks"))


def _expect(kind: type, value: Any, field: str) -> Any:
    """Returns `value`. Raises ValueError if it is not of this type."""
    if not isinstance(value, kind):
        raise argument_error(f"plan: {field}", f"a {kind.__name__}", f"a {type(value).__name__}")
    return value


_text = functools.partial(_expect, str)
_list = functools.partial(_expect, list)
_flag = functools.partial(_expect, bool)
