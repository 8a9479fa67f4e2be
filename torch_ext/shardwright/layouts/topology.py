"""Topologies: the latencies and bandwidths with which plans are chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .._planner import Link, Lowering, PlanningTables, Topology
from . import tables
from .errors import argument_error
from .json_files import json_object, read_json, read_text

__all__ = ["Link", "Topology", "load_topology"]

ENVIRONMENT_VARIABLE = "SHARDWRIGHT_TOPOLOGY"

_LINK = ("message_ps", "ps_per_kib")
_FIELDS = ("version", "name", "ranks_per_node", "step_ps", "memory_ps_per_kib", "inside", "between", "mesh_dims")
_FILE_VERSION = 1


def load_topology(source: str | os.PathLike[str] | dict[str, Any]) -> Topology:
    """Reads a topology from a JSON file, or from the contents of such a file.

    Args:
        source: the path of a file that ``shardwright calibrate`` or ``Topology.to_json`` wrote, or a dict of its
            contents: ``version``, ``name``, ``ranks_per_node`` (0: all ranks are on one node), ``step_ps``,
            ``memory_ps_per_kib``, ``inside`` and ``between`` with ``message_ps`` and ``ps_per_kib`` each, and
            ``mesh_dims``, links by the name of a mesh dim. Times are integers in picoseconds: per step, per message,
            per KiB.

    Raises:
        ValueError: the file or a field is invalid; the message has its name, the allowed values and the given value.
    """
    if isinstance(source, dict):
        return _topology(source, "topology")
    if not isinstance(source, (str, os.PathLike)):
        raise argument_error("topology", "a path or a dict", f"a {type(source).__name__}")
    path = Path(source)
    where = f"topology: {str(path)!r}"
    return _topology(read_json(read_text(path, where), where), where)


_last_variable: str | None = None  # the variable's value when the tables were updated


def tables_now() -> PlanningTables:
    """Updates the current tables from the environment variable, and returns them. Planning must call this."""
    global _last_variable
    variable = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if variable != _last_variable:
        tables.change(tables.current.with_environment(named_topology(variable)))
        _last_variable = variable
    return tables.current


def default_topology(lowering: Lowering) -> Topology:
    """Returns the topology that was measured, else the environment's, else the built-in one of a lowering."""
    now = tables_now()
    return now.measured_topology(lowering.name) or now.environment or lowering.default_topology


def named_topology(topology: Topology | str | None) -> Topology | None:
    """Returns the topology with this name or from this file. Returns a Topology or None unchanged."""
    if topology is None or isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str):
        raise argument_error("topology", "a Topology, a name or a file", f"a {type(topology).__name__}")
    if topology.endswith(".json"):
        return load_topology(topology)
    if topology not in Topology.names():
        names = ", ".join(Topology.names())
        raise argument_error("topology", f"one of {names}, or the path of a .json file", repr(topology))
    return Topology.named(topology)


def _topology(table: Any, where: str) -> Topology:
    """Returns the topology of a JSON object. Errors begin with `where`."""
    table = json_object(table, where)
    if table.get("version") != _FILE_VERSION:
        raise argument_error(f"{where}.version", str(_FILE_VERSION), repr(table.get("version")))
    json_object(table, where, _FIELDS)
    mesh_dims = json_object(table.get("mesh_dims", {}), f"{where}.mesh_dims")
    return Topology(
        str(table.get("name", "unnamed")),
        ranks_per_node=_integer(table, "ranks_per_node", where),
        step_ps=_integer(table, "step_ps", where),
        memory_ps_per_kib=_integer(table, "memory_ps_per_kib", where),
        inside=_link(table.get("inside"), f"{where}.inside"),
        between=_link(table.get("between"), f"{where}.between"),
        mesh_dims={name: _link(link, f"{where}.mesh_dims.{name}") for name, link in mesh_dims.items()},
    )


def _link(link: Any, where: str) -> Link:
    """Returns the link of a JSON object. Errors begin with `where`."""
    table = json_object(link, where, _LINK)
    return Link(*(_integer(table, name, where) for name in _LINK))


def _integer(table: dict[str, Any], name: str, where: str) -> int:
    """Returns a field of a JSON object. Raises ValueError unless it is an integer in [0, 2**40]."""
    value = table.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 40:
        raise argument_error(f"{where}.{name}", "an integer in [0, 2**40]", repr(value))
    return value
