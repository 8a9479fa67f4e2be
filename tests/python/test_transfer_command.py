"""Tests of `shardwright transfer` and of the files that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright._native import _planner
from shardwright.cli import main as cli
from shardwright.rules import files
from shardwright.rules.explaining import explain

pytestmark = pytest.mark.any_torch

TRAIN = sw.Mesh({"dp": 2, "tp": 2}, [3, 2, 1, 0])
SERVE = sw.Mesh({"tp": 3}, [4, 5, 6])


def _written(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def _files(folder: Path) -> list[str]:
    sources = {
        f"m.{name}": sw.Layout(TRAIN, (6, 4), ["S(0)", "S(0)"], shard_order={0: ["tp", "dp"]}) for name in ("q", "k")
    }
    sources["m.bias"] = sw.Layout(TRAIN, (5,), ["R", "Cyclic(0,2)"])
    destinations = {
        "qk": sw.Layout(SERVE, (4, 12), ["S(1)"], "bfloat16"),
        "bias": sw.Layout(SERVE, (5,), [sw.placements.Ragged(0, [5, 0, 0])], "bfloat16"),
    }
    rules = [
        {"fuse": {"name": "m.qk", "parts": ["m.q", "m.k"]}},
        {"transpose": {"names": "m.qk", "dims": [1, 0]}},
        {"rename": {"names": {"m.*": "*"}}},
        {"cast": {"dtype": "bf16"}},
    ]
    source = _written(folder, "from.json", files.write_layouts(sources))
    destination = _written(folder, "to.json", files.write_layouts(destinations))
    assert files.read_layouts(source) == sources
    assert files.read_layouts(destination) == destinations
    return [source, destination, "--map", _written(folder, "rules.json", rules)]


def test_layout_files_round_trip(tmp_path: Path) -> None:
    mesh = sw.Mesh({"a": 2})
    layouts = {
        "flat": sw.Layout(mesh, (4, 6), ["S(0)"], flattened=2),
        "ragged": sw.Layout(mesh, (4, 6), [sw.placements.Ragged(dims=(0, 1), units=(1, 2))]),
    }
    (tmp_path / "layouts.json").write_text(files.write_layouts(layouts))
    assert files.read_layouts(str(tmp_path / "layouts.json")) == layouts


def test_command_prints_moved_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["transfer", *_files(tmp_path), "--backend", "gloo"]) == 0
    printed = capsys.readouterr().out
    # 48 + 5 elements of two bytes. No rank is on both sides.
    assert "106 B by all ranks; both are the minimum" in printed
    assert "with topology 'gloo-local'" in printed
    tensors, links = printed.split("\n\n")[1:]
    assert [line.split()[:6] for line in tensors.splitlines()[1:]] == [
        ["qk", "96", "B", "32", "B", "0"],
        ["bias", "10", "B", "10", "B", "0"],
    ]
    assert sum(int(line.split()[3]) for line in links.splitlines()[1:]) == 106
    monkeypatch.setenv("SHARDWRIGHT_TOPOLOGY", "8xNVLink")
    assert cli.main(["transfer", *_files(tmp_path)]) == 0
    assert "with topology '8xNVLink'" in capsys.readouterr().out


def test_long_tables_are_truncated() -> None:
    src, dst = sw.Layout(TRAIN, (64,), ["S(0)", "R"]), sw.Layout(SERVE, (64,), ["S(0)"])
    batch = _planner.Batch([src] * 5, [dst] * 5, [(i, i, None) for i in range(5)])
    text = explain(batch, [f"t{i}" for i in range(5)], sw.Topology.named("64x8"), limit=2)
    assert text.count("\nt") == 3  # the header, t0 and t1
    assert "and 3 more with 768 B" in text


def test_command_reports_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _files(tmp_path)
    assert cli.main(["transfer", *given[:2]]) == 2
    said = capsys.readouterr().err
    assert "shardwright transfer: nothing can be moved, because" in said
    assert "bias: the destination has it, and no source is mapped to it" in said
    assert "m.bias: the map makes it from m.bias, and the destination has no such tensor" in said
    assert cli.main(["transfer", *given, "--bucket-bytes", "1"]) == 2
    assert "bucket_bytes must be at least 2, got 1: destination qk" in capsys.readouterr().err
    assert cli.main(["transfer", *given, "--limit", "-1"]) == 2
    assert "shardwright transfer: limit must be at least 0, got -1" in capsys.readouterr().err
    assert cli.main(["transfer", *given, "--limit", "0"]) == 0
    assert "and 2 more with 106 B" in capsys.readouterr().out
    assert cli.main(["transfer", str(tmp_path / "none.json"), given[1]]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ([], "must be a JSON object, got a list"),
        ({"meshes": {"a": {"dims": {"x": 0}}}}, "meshes.a: "),
        ({"meshes": {"a": {"sizes": 2}}}, "meshes.a must have only the keys dims, ranks, got sizes"),
        ('{"meshes": {}, "tensors": {"w": {}, "w": {}}}', "must have each key of an object once, got 'w' twice"),
        ({"meshes": {}, "tensors": {}, "rules": []}, "must have only the keys meshes, tensors, got rules"),
        ({"meshes": {}, "tensors": {"w": {"mesh": "b"}}}, "tensors.w.mesh must be one of , got 'b'"),
        ({"meshes": {}, "tensors": {"w": {"mesh": ["b"]}}}, "tensors.w.mesh must be one of , got ['b']"),
        ({"meshes": {"a": {"dims": {"x": 2}}}, "tensors": {"w": {"mesh": "a"}}}, "tensors.w: "),
        (
            {"meshes": {"a": {"dims": {"x": 2}}}, "tensors": {"w": {"mesh": "a", "shard_order": {"-1": ["x"]}}}},
            "tensors.w.shard_order: keys must be tensor dims: 0, 1, 2, ..., got '-1'",
        ),
        (
            {"meshes": {"a": {"dims": {"x": 2}}}, "tensors": {"w": {"mesh": "a", "shape": [2], "placements": ["T"]}}},
            "tensors.w: placements",
        ),
    ],
)
def test_invalid_layout_files_are_refused(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        files.read_layouts(_written(tmp_path, "layouts.json", content))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "must hold a list of rules, got a dict"),
        ([{"fuze": {}}], "[0] must be one of fuse, "),
        ([{"fuse": {"name": "a"}}], "[0].fuse: "),
        ([{"rename": {"names": "a", "into": "b"}}], "[0].rename must have only the keys names, to, got into"),
        ([{"cast": {"dtype": "bf17"}}], "[0].cast: "),
    ],
)
def test_invalid_rule_files_are_refused(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        files.read_rules(_written(tmp_path, "rules.json", content))
    assert said in str(raised.value)
