"""Layouts of state dicts, and rules, in JSON files.

{"meshes": {"train": {"dims": {"dp": 2, "tp": 2}, "ranks": [0, 1, 2, 3]}},
 "tensors": {"w": {"mesh": "train", "shape": [8, 4], "dtype": "bfloat16", "placements": ["S(0)", "R"]}}}

[{"fuse": {"name": "qkv", "parts": ["q", "k", "v"], "dim": 0}}, {"rename": {"names": "model.**", "to": "**"}}]
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._native import _planner
from ..layouts.errors import argument_error
from ..layouts.json_files import json_object, read_json, read_text, shard_order
from ..layouts.layout import Layout, Mesh
from . import functions as rules
from .kinds import Rule

_RULES = {
    rule.__name__: rule
    for rule in (rules.fuse, rules.split, rules.transpose, rules.stack, rules.unstack, rules.rename, rules.cast)
}


def read_layouts(path: str) -> dict[str, Layout]:
    """Returns the layouts of a JSON file by name. A ValueError names the file and the invalid entry."""
    table = json_object(read_json(read_text(Path(path), path), path), path, ("meshes", "tensors"))
    meshes = {}
    for name, value in json_object(table.get("meshes"), f"{path}: meshes").items():
        where = f"{path}: meshes.{name}"
        meshes[name] = _made(where, Mesh, json_object(value, where), ("dims", "ranks"))
    layouts = {}
    for name, value in json_object(table.get("tensors"), f"{path}: tensors").items():
        where = f"{path}: tensors.{name}"
        entry = dict(json_object(value, where))
        mesh = entry.get("mesh")
        if not isinstance(mesh, str) or mesh not in meshes:
            raise argument_error(f"{where}.mesh", f"one of {', '.join(meshes)}", repr(mesh))
        entry["mesh"] = meshes[mesh]
        if "shard_order" in entry:
            entry["shard_order"] = shard_order(entry["shard_order"], f"{where}.shard_order")
        allowed = ("mesh", "shape", "dtype", "placements", "shard_order", "strided", "flattened")
        layouts[name] = _made(where, Layout, entry, allowed)
    return layouts


def write_layouts(layouts: Mapping[str, _planner.Layout]) -> str:
    """Returns JSON that `read_layouts` reads."""
    meshes: list[_planner.Mesh] = []
    tensors = {}
    for name, layout in layouts.items():
        if layout.mesh not in meshes:
            meshes.append(layout.mesh)
        tensors[name] = {
            "mesh": f"mesh{meshes.index(layout.mesh)}",
            "shape": list(layout.shape),
            "dtype": layout.dtype,
            "placements": list(layout.placements),
            "shard_order": layout.shard_order,
            "strided": "literal",
            "flattened": layout.flattened,
        }
    described = {
        f"mesh{i}": {"dims": dict(zip(mesh.dim_names, mesh.shape)), "ranks": list(mesh.ranks)}
        for i, mesh in enumerate(meshes)
    }
    return json.dumps({"meshes": described, "tensors": tensors}, indent=1)


def read_rules(path: str) -> list[Rule]:
    """Reads a list of rules. Each is an object with one key, the name of the rule, whose value is its arguments."""
    listed_rules = read_json(read_text(Path(path), path), path)
    if not isinstance(listed_rules, list):
        raise ValueError(f"{path} must hold a list of rules, got a {type(listed_rules).__name__}")
    parsed_rules = []
    for i, entry in enumerate(listed_rules):
        where = f"{path}[{i}]"
        entries = list(json_object(entry, where).items())
        if len(entries) != 1 or entries[0][0] not in _RULES:
            raise ValueError(
                f"{where} must be one of {', '.join(_RULES)} with its arguments, got {json.dumps(entry)[:80]}"
            )
        name, arguments = entries[0]
        rule: Rule = _made(f"{where}.{name}", _RULES[name], json_object(arguments, where), None)
        parsed_rules.append(rule)
    return parsed_rules


def _made(where: str, maker: Any, arguments: dict[str, Any], keys: tuple[str, ...] | None) -> Any:
    """Returns ``maker(**arguments)``. Its errors, and the error about unknown keys, begin with `where`.

    `keys` are the allowed keys; None means the parameters of `maker`.
    """
    json_object(arguments, where, keys if keys is not None else tuple(inspect.signature(maker).parameters))
    try:
        return maker(**arguments)
    except TypeError as error:  # an argument is missing
        raise ValueError(f"{where}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
