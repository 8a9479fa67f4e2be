"""Tests of plans and topologies as JSON, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import shardwright as sw
from shardwright.cli import main as cli

pytestmark = pytest.mark.any_torch

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "plan.schema.json").read_text())


def _plans() -> list[sw.Plan]:
    mesh = sw.Mesh({"dp": 2, "tp": 4})
    shuffled = sw.Mesh({"a": 2, "b": 2}, ranks=[3, 1, 0, 2])
    strided = sw.Layout(mesh, (64, 64), ["SS(0,4)", "R"], strided="literal")

    def layout(placements: list[str], order: dict | None = None, shape: tuple[int, ...] = (64, 64)) -> sw.Layout:
        return sw.Layout(mesh, shape, placements, shard_order=order)

    return [
        sw.plan(layout(["S(0)", "R"]), layout(["R", "S(1)"])),
        sw.plan(layout(["S(0)", "S(0)"], {0: [1, 0]}), layout(["S(1)", "R"]), objective="bytes"),
        sw.plan(layout(["P", "P(sum)"]), layout(["R", "S(0)"]), backend="gloo", reduce="ordered"),
        sw.plan(layout(["S(0)", "S(1)"], shape=(7, 5)), layout(["S(1)", "S(0)"], shape=(7, 5)), topology="64x8"),
        sw.plan(strided, layout(["S(0)", "R"])),
        sw.plan(layout(["S(0)", "R"]), layout(["S(1)", "R"]), memory_limit=64 * 64 * 4 // 2 + 3000),
        sw.plan(layout(["R", "R"]), layout(["R", "R"])),
        sw.plan(sw.Layout(shuffled, (8,), ["S(0)", "P"]), sw.Layout(shuffled, (8,), ["R", "R"])),
    ]


@pytest.mark.parametrize("plan", _plans(), ids=str)
def test_json_round_trip(plan: sw.Plan) -> None:
    again = sw.planning.plan_from_json(plan.to_json())
    assert again.to_bytes() == plan.to_bytes()
    assert again.to_json() == plan.to_json()
    again.simulate()


def test_json_contains_segments() -> None:
    src = sw.Layout(sw.Mesh({"a": 16}), (128, 1536, 4096), ["S(0)"])
    dst = sw.Layout(sw.Mesh({"b": 8, "c": 8}, range(16, 80)), (128, 1536, 4096), ["R", "S(1)"])
    plan = sw.plan(src, dst)
    table = json.loads(plan.to_json())
    assert table["segments"]["count"] == plan.segments > 1
    jsonschema.validate(table, SCHEMA)
    assert sw.planning.plan_from_json(json.dumps(table)).to_bytes() == plan.to_bytes()
    table["pieces"] = table.pop("segments")  # the older name of segments
    assert sw.planning.plan_from_json(json.dumps(table)).to_bytes() == plan.to_bytes()
    table["pieces"]["count"] = 33
    with pytest.raises(ValueError, match="segments must divide .*, got 33 segments of tensor dim 2"):
        sw.planning.plan_from_json(json.dumps(table))


def test_json_contains_relay_meshes() -> None:
    slow = sw.planning.Link(1_000_000_000, 1000)
    topology = sw.Topology("slow messages", 8, 1000, 100, slow, slow)
    src = sw.Layout(sw.Mesh({"a": 1}), (77,), ["R"])
    dst = sw.Layout(sw.Mesh({"b": 40}, range(1, 41)), (77,), ["S(0)"])
    for ends in ((src, dst), (dst, src)):
        plan = sw.plan(*ends, topology=topology)
        table = json.loads(plan.to_json())
        relay_meshes = table["relay_meshes"]
        assert [step.op for step in plan.steps] == ["cross"] * (len(relay_meshes) + 1) and len(relay_meshes) > 1
        assert all(grid["dim_names"] == ["relay"] for grid in relay_meshes)
        jsonschema.validate(table, SCHEMA)
        read = sw.planning.plan_from_json(json.dumps(table))
        assert read.to_bytes() == plan.to_bytes()
        assert read.simulate() == plan.wire_bytes_sum
        table["relay_meshes"] = relay_meshes[:-1]
        with pytest.raises(ValueError, match=r"placements: number of sizes of .* must be (40|1), one per coordinate"):
            sw.planning.plan_from_json(json.dumps(table))


def test_json_accepts_older_name_of_relay_meshes() -> None:
    slow = sw.planning.Link(1_000_000_000, 1000)
    topology = sw.Topology("slow messages and steps", 8, 3_000_000_000, 100, slow, slow)
    src = sw.Layout(sw.Mesh({"a": 1}), (16,), ["R"])
    dst = sw.Layout(sw.Mesh({"b": 16}, range(1, 17)), (16,), ["S(0)"])
    plan = sw.plan(src, dst, topology=topology)
    table = json.loads(plan.to_json())
    (table["relay_mesh"],) = table.pop("relay_meshes")
    assert sw.planning.plan_from_json(json.dumps(table)).to_bytes() == plan.to_bytes()


@pytest.mark.parametrize("plan", _plans(), ids=str)
def test_json_matches_schema(plan: sw.Plan) -> None:
    jsonschema.validate(json.loads(plan.to_json()), SCHEMA)


def test_certificate_tells_whether_maxima_are_exact() -> None:
    mesh = sw.Mesh({"a": 32, "b": 16, "c": 16})
    for rows, is_exact in ((10007, False), (65536, True)):
        ends = [sw.Layout(mesh, (rows, 3), ["S(0)"] * 3, shard_order={0: order}) for order in ([0, 1, 2], [2, 1, 0])]
        plan = sw.plan(*ends)
        certificate = json.loads(plan.to_json())["certificate"]
        assert (plan.maxima_are_exact, plan.peak_bytes_is_exact) == (is_exact, is_exact)
        assert (certificate["maxima_are_exact"], certificate["peak_bytes_is_exact"]) == (is_exact, is_exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(version=3), "version must be 5, got 3"),
        (lambda t: t.pop("steps"), "missing"),
        (lambda t: t["steps"][0].update(op="teleport"), "op must be one of .*, got 'teleport'"),
        (lambda t: t["steps"][0].update(rounds=0), "rounds must be in .*, got 0"),
        (lambda t: t["steps"][0].update(mesh_dims=[]), "mesh dims of a step must be .*, got"),
        (lambda t: t["steps"][0].update(after=t["source"]), "plan"),
        (lambda t: t["mesh"].update(dim_sizes=[2, 0]), "mesh: size of dim .* must be at least 1, got 0"),
        (lambda t: t["topology"].update(step_ps=-1), "step_ps"),
        (lambda t: t.update(segment={}), "plan must have only the keys version, .*, got segment"),
        (lambda t: t["mesh"].update(rank=[4, 5]), "plan: mesh must have only the keys .*, got rank"),
        (lambda t: t["source"].update(flat=2), "plan: source must have only the keys .*, got flat"),
        (lambda t: t["steps"][0].update(ranks_per_nodes=8), "step must have only the keys .*, got ranks_per_nodes"),
        (lambda t: t["steps"][0]["after"].update(flat=2), "plan: after must have only the keys .*, got flat"),
        (lambda t: t["topology"].update(steps_ps=1), "topology must have only the keys .*, got steps_ps"),
        (lambda t: t["topology"]["inside"].update(ps=1), "topology.inside must have only the keys .*, got ps"),
        (lambda t: t.update(segments={"tensor_dim": 2**40, "count": 1}), "must be in .*, got 1099511627776"),
    ],
)
def test_malformed_json_is_refused(change, message: str) -> None:
    table = json.loads(_plans()[0].to_json())
    change(table)
    with pytest.raises(ValueError, match=message):
        sw.planning.plan_from_json(json.dumps(table))


def test_json_with_a_detour_over_another_mesh_is_refused() -> None:
    mesh, other = sw.Mesh({"a": 2}), sw.Mesh({"b": 2}, [1, 2])
    table = json.loads(sw.plan(sw.Layout(mesh, (8,), ["R"]), sw.Layout(other, (8,), ["R"])).to_json())
    table["relay_meshes"] = [table.pop("destination_mesh")]
    table["steps"] *= 2
    with pytest.raises(ValueError, match="must stay on the mesh of its source and destination, got 2 steps"):
        sw.planning.plan_from_json(json.dumps(table))


def test_topology_is_read_from_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = sw.Topology(
        "slow tp", 0, 1000, 10, sw.planning.Link(5, 7), sw.planning.Link(5, 7), {"tp": sw.planning.Link(1000, 10**9)}
    )
    path = tmp_path / "slow.json"
    path.write_text(slow.to_json())
    assert sw.planning.load_topology(path) == slow
    mesh = sw.Mesh({"dp": 2, "tp": 4}, topology=str(path))
    ends = [sw.Layout(mesh, (64, 64), placements) for placements in (["S(0)", "S(1)"], ["R", "S(1)"])]
    assert sw.plan(*ends).topology == "slow tp"
    assert sw.plan(*ends, topology="8xNVLink").topology == "8xNVLink"
    without = [sw.Layout(sw.Mesh({"dp": 2, "tp": 4}), end.shape, end.placements, end.dtype) for end in ends]
    assert sw.plan(*without, topology="8xNVLink").src.mesh.topology is None
    elsewhere = [
        sw.Layout(sw.Mesh({"dp": 2, "tp": 4}), (64, 64), placements) for placements in (["S(0)", "R"], ["R", "R"])
    ]
    monkeypatch.setenv("SHARDWRIGHT_TOPOLOGY", str(path))
    assert sw.plan(*elsewhere).topology == "slow tp"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "must be a JSON object, got a list"),
        ('{"version": 7}', "version must be 1, got 7"),
        ('{"version": 1, "version": 1}', "broken.json' must have each key of an object once, got 'version' twice"),
        ('{"version": 1, "inside": {}}', "ranks_per_node must be an integer in \\[0, 2\\*\\*40\\], got None"),
    ],
)
def test_malformed_topologies_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        sw.planning.load_topology(path)
    with pytest.raises(ValueError, match="cannot be read"):
        sw.planning.load_topology(tmp_path / "absent.json")


def test_command_line_compares_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--mesh", "a=64,b=8", "--shape", "4096,4096", "--src", "S(0),S(0)", "--dst", "R,R"]
    for name, objective in (("time", "time"), ("bytes", "bytes")):
        assert cli.main(["plan", *pair, "--objective", objective, "--json"]) == 0
        (tmp_path / f"{name}.json").write_text(capsys.readouterr().out)
    assert cli.main(["plan", "--diff", str(tmp_path / "time.json"), str(tmp_path / "bytes.json")]) == 0
    shown = capsys.readouterr().out
    assert "- 2. all_gather over" in shown
    assert "messages_max" in shown
    assert cli.main(["plan", "--load", str(tmp_path / "time.json")]) == 0
    assert "certificate:" in capsys.readouterr().out
    assert cli.main(["plan", "--load", str(tmp_path / "absent.json")]) == 2
    (tmp_path / "old.json").write_text('{"version": 4}')
    assert cli.main(["plan", "--diff", str(tmp_path / "time.json"), str(tmp_path / "old.json")]) == 2
    assert f"shardwright plan: {tmp_path}/old.json: plan: version must be 5, got 4\n" in capsys.readouterr().err


def test_command_line_draws_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--mesh", "a=2,b=2", "--shape", "8,8", "--src", "S(0),R", "--dst", "R,S(1)"]
    svg, html = tmp_path / "plan.svg", tmp_path / "plan.html"
    assert cli.main(["plan", *pair, "--svg", str(svg), "--html", str(html)]) == 0
    assert svg.read_text().startswith("<svg") and svg.read_text().rstrip().endswith("</svg>")
    assert "<svg" in html.read_text() and "</html>" in html.read_text()


def test_plan_cache_counts_hits_and_misses(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.Mesh({"a": 3})
    ends = [sw.Layout(mesh, (17, 3), placements) for placements in (["S(0)"], ["R"])]
    before = sw.stats()
    first, second = sw.plan(*ends), sw.plan(*ends)
    after = sw.stats()
    assert first.to_bytes() == second.to_bytes()
    assert after["plan_cache_hits"] - before["plan_cache_hits"] == 1
    assert after["plan_cache_misses"] - before["plan_cache_misses"] == 1


def test_cuts_over_mesh_dims_of_size_one_survive_json() -> None:
    mesh = sw.Mesh({"a": 2, "b": 1, "c": 1})
    for placements, order in (
        (["S(0)", "Packed(0,5:3)", "R"], ["b", "a"]),
        (["R", "Packed(0,5:3)", "S(0)"], ["c", "b"]),
        (["Ragged(0,3:5)", "S(0)", "Blocks(0,2)"], ["a", "c", "b"]),
    ):
        source = sw.Layout(mesh, (8,), placements, shard_order={0: order})
        plan = sw.plan(source, sw.Layout(mesh, (8,), ["R", "R", "R"]))
        again = sw.planning.plan_from_json(plan.to_json())
        assert again.to_json() == plan.to_json()
        assert again.src == plan.src
        again.simulate()
