"""Layouts, meshes, topologies and plans are pickled and copied without loss, also by another process."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import shardwright as sw

MESH = sw.Mesh({"a": 2, "b": 4, "c": 1}, ranks=[7, 6, 5, 4, 3, 2, 1, 0], topology="64x8")
LAYOUTS = {
    "order": sw.Layout(MESH, (8, 12), ["S(0)", "S(0)", "P(max)"], "bfloat16", {0: ["b", "a"]}),
    "literal": sw.Layout(MESH, (8, 12), ["SS(0,2)", "S(0)", "R"], strided="literal"),
    "flattened": sw.Layout(MESH, (8, 12), [sw.placements.Ragged(dims=(0, 1), units=[1, 2]), "R", "R"]),
    "components": sw.Layout(
        MESH, (12, 8), [sw.placements.Packed(0, [4, 8]), sw.placements.Blocks(1, 2), "R"], "float8_e4m3fn"
    ),
    "pieces": sw.Layout(MESH, (8,), [sw.placements.Pieces.zigzag(0, 8, 2), "R", "P(avg)"]),
    "owned": sw.Layout(MESH, (8, 4), [sw.placements.Owned(1), sw.placements.Cyclic(1, 2), "R"]),
    "empty": sw.Layout(MESH, (0, 4), ["S(0)", "S(1)", "R"], torch.int64),
}


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": lambda value: copy.deepcopy([value])[0],
    "torch.save": _saved,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_survive_copies(name: str, way: str) -> None:
    layout = LAYOUTS[name]
    again = COPIES[way](layout)
    assert type(again) is sw.Layout
    assert again == layout
    assert hash(again) == hash(layout)
    assert repr(again) == repr(layout)
    assert [again.region(rank) for rank in MESH.ranks] == [layout.region(rank) for rank in MESH.ranks]
    assert again.shape == layout.shape
    assert again.mesh == MESH
    assert again.mesh.topology.to_json() == MESH.topology.to_json()


@pytest.mark.parametrize("way", COPIES)
def test_plans_and_their_steps_survive_copies(way: str) -> None:
    plan = sw.plan(LAYOUTS["order"], sw.Layout(MESH, (8, 12), ["R", "S(1)", "R"], "bfloat16"), memory_limit=4096)
    again = COPIES[way](plan)
    assert again.to_bytes() == plan.to_bytes()
    assert str(again) == str(plan)
    for step in plan.steps:
        assert COPIES[way](step.before) == step.before
        assert COPIES[way](step.before.mesh) == step.before.mesh


def test_meshes_and_topologies_survive_copies() -> None:
    for way in COPIES.values():
        assert type(way(MESH)) is sw.Mesh
        assert way(MESH) == MESH
        assert way(MESH.topology).to_json() == MESH.topology.to_json()
        own = sw.Topology(
            "own", 2, 3, 4, sw.planning.Link(5, 6), sw.planning.Link(7, 8), {"a": sw.planning.Link(9, 10)}
        )
        assert way(own).to_json() == own.to_json()


def test_another_process_unpickles_without_torch() -> None:
    data = pickle.dumps([LAYOUTS["pieces"], sw.plan(LAYOUTS["literal"], LAYOUTS["literal"])])
    code = "import pickle, sys; print(*pickle.load(sys.stdin.buffer), 'torch' in sys.modules)"
    read = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert read.stdout.decode().split()[-1] == "False"
    assert str(LAYOUTS["pieces"]) in read.stdout.decode()
