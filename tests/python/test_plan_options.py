"""Tests of the options of `sw.plan` and of their errors."""

from __future__ import annotations

import pytest

import shardwright as sw

pytestmark = pytest.mark.any_torch

NODES = {"node": 8, "gpu": 8}


def _ends(
    mesh: dict[str, int], src: list[str], dst: list[str], shape: tuple[int, ...] = (4096, 4096)
) -> list[sw.Layout]:
    grid = sw.Mesh(mesh)
    return [sw.Layout(grid, shape, placements) for placements in (src, dst)]


def _ops_and_dims(plan: sw.Plan) -> list[tuple[str, tuple[int, ...]]]:
    return [(step.op, step.mesh_dims) for step in plan.steps]


def test_topology_changes_plan() -> None:
    ends = _ends(NODES, ["S(0)", "S(0)"], ["R", "R"])
    assert _ops_and_dims(sw.plan(*ends, topology="64x8")) == [("all_gather", (0,)), ("all_gather", (1,))]
    plan = sw.plan(*ends, topology="8xNVLink", objective="bytes")
    assert _ops_and_dims(plan) == [("all_gather", (0, 1))]
    assert (plan.topology, plan.objective, plan.backend) == ("8xNVLink", "bytes", "nccl")


def test_topology_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _ends(NODES, ["S(0)", "S(0)"], ["R", "R"])
    assert sw.plan(*ends).topology == "64x8"
    assert sw.plan(*ends, backend="gloo").topology == "gloo-local"
    monkeypatch.setenv("SHARDWRIGHT_TOPOLOGY", "8xNVLink")
    assert sw.plan(*ends).topology == "8xNVLink"
    assert sw.plan(*ends, topology="64x8").topology == "64x8"
    monkeypatch.setenv("SHARDWRIGHT_TOPOLOGY", "ring")
    with pytest.raises(
        ValueError, match="topology must be one of 8xNVLink, 64x8, gloo-local, or the path of a .json file, got 'ring'"
    ):
        sw.plan(*ends)


def test_bytes_objective_shares_sending_among_replicas() -> None:
    ends = _ends({"a": 4, "b": 4}, ["S(0)", "R"], ["R", "S(0)"], (64, 64))
    plan = sw.plan(*ends, objective="bytes")
    assert [step.replica_policy for step in plan.steps] == ["even_bytes"]
    assert "replicas share the sending" in str(plan)
    assert plan.wire_bytes_sum == plan.bound_bytes_sum
    nearest = sw.plan(*ends, through=[])
    assert nearest.wire_bytes_sum == plan.wire_bytes_sum
    assert nearest.send_bytes_max == 4 * plan.send_bytes_max, "one of four replicas sends it all"
    assert plan.simulate() == plan.wire_bytes_sum
    again = sw.Plan.from_bytes(plan.to_bytes())
    assert str(again) == str(plan) and again.send_bytes_max == plan.send_bytes_max


def test_groups_limit_mesh_dims_of_steps() -> None:
    ends = _ends({"a": 2, "b": 2, "c": 2}, ["S(0)", "S(0)", "S(0)"], ["R", "R", "R"])
    found = _ops_and_dims(sw.plan(*ends, groups=[("a",), ("b", "c")]))
    assert sorted(found) == [("all_gather", (0,)), ("all_gather", (1, 2))]
    with pytest.raises(ValueError, match="groups must allow a sequence of moves"):
        sw.plan(*ends, groups=[])
    with pytest.raises(ValueError, match="groups: mesh dim must be one of .*, got 'd'"):
        sw.plan(*ends, groups=[("d",)])


def test_plan_goes_through_given_layouts() -> None:
    src, dst = _ends({"a": 2, "b": 2}, ["S(0)", "S(1)"], ["R", "R"], (8, 8))
    middle = sw.Layout(src.mesh, (8, 8), ["R", "S(1)"])
    assert _ops_and_dims(sw.plan(src, dst, through=[middle])) == [("all_gather", (0,)), ("all_gather", (1,))]
    pending = sw.Layout(src.mesh, (8, 8), ["P", "R"])
    with pytest.raises(ValueError, match="through: neighbors must be at most one move apart, got .* add a layout"):
        sw.plan(src, dst, through=[pending])
    with pytest.raises(ValueError, match="shape"):
        sw.plan(src, dst, through=[sw.Layout(src.mesh, (8, 9), ["R", "R"])])
    assert len(sw.plan(src, dst, through=[middle, src] * 14 + [middle]).steps) == 30
    with pytest.raises(ValueError, match="through must have at most 30 moves, got 32"):
        sw.plan(src, dst, through=[middle, src] * 15 + [middle])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"objective": "speed"}, "objective must be one of time, bytes, got 'speed'"),
        ({"backend": "mpi"}, "backend must be one of nccl, gloo, got 'mpi'"),
        ({"topology": "torus"}, "topology must be one of .*, got 'torus'"),
        ({"reduce": "twice"}, "reduce must be one of fast, float32, ordered, got 'twice'"),
    ],
)
def test_unknown_option_values_raise(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sw.plan(*_ends({"a": 2}, ["S(0)"], ["R"]), **arguments)  # type: ignore[arg-type]
