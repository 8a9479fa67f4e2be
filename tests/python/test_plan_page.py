"""The page of ``shardwright plan --html``: its numbers, its form, and that it loads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import shardwright as sw
from shardwright.cli import main as cli
from shardwright.pages import plan_page
from shardwright.pages.step_costs import classes_of, costs_of, ranks_of
from shardwright.planning import Link

pytestmark = pytest.mark.any_torch

NODES_OF_TWO = sw.Topology("test", 2, 1000, 10, Link(1000, 100), Link(5000, 400))


def _plan(
    mesh: dict[str, int], shape: Sequence[int], src: Sequence[str], dst: Sequence[str], **options: object
) -> sw.Plan:
    ends = [sw.Layout(sw.Mesh(mesh), shape, placements) for placements in (src, dst)]
    return sw.plan(*ends, **options)


def _crossing(rows: int, ranks: int) -> sw.Plan:
    """Returns a plan from two ranks to others."""
    src = sw.Layout(sw.Mesh({"a": 2}), (rows, 4096), ["S(0)"])
    return sw.plan(src, sw.Layout(sw.Mesh({"c": ranks}, range(8, 8 + ranks)), (rows, 4096), ["R"]))


PLANS = {
    "even": lambda: _plan({"dp": 2, "tp": 4}, (64, 64), ["S(0)", "P"], ["R", "S(1)"]),
    "uneven": lambda: _plan({"dp": 2, "tp": 4}, (5, 7), ["S(0)", "P"], ["R", "S(1)"]),
    "uneven swap": lambda: _plan({"dp": 8, "tp": 8}, (1003, 517), ["S(0)", "P"], ["S(1)", "S(0)"]),
    "local": lambda: _plan({"a": 2, "b": 2}, (8, 8), ["R", "R"], ["S(0)", "R"]),
    "nothing": lambda: _plan({"a": 2}, (8, 8), ["R"], ["R"]),
    "rounds": lambda: _plan({"a": 8}, (1 << 12, 1 << 12), ["S(0)"], ["S(1)"], memory_limit=9 << 20),
    "named": lambda: _plan({'<b>&"': 4}, (8, 8), ["S(0)"], ["S(1)"]),
    "large": lambda: _plan({"a": 1024, "b": 64}, (1 << 16, 1 << 6), ["S(0)", "P"], ["R", "S(1)"]),
    "segments": lambda: _crossing(40960, 4),
    "two meshes": lambda: _crossing(10, 3),
    "scalar": lambda: _plan({"a": 2}, (), ["P"], ["R"]),
}


@pytest.mark.parametrize("name", PLANS)
def test_page_is_one_file_that_runs_and_loads_nothing(name: str) -> None:
    plan = PLANS[name]()
    text = plan.to_html()
    page = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    tags = {element.tag.rpartition("}")[2] for element in page.iter()}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed"}), tags
    assert {key for element in page.iter() for key in element.attrib}.isdisjoint({"src", "href"})
    assert "@import" not in text
    assert [url for url in re.findall(r"url\(([^)]*)\)", text) if not url.startswith("#")] == []
    shown = " ".join("".join(page.itertext()).split())
    assert " ".join(str(plan).split()) in shown
    for remark in plan.remarks:
        assert " ".join(remark.split()) in shown


@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("segments", "large")])
def test_bytes_of_steps_add_up_to_those_of_the_plan(name: str) -> None:
    plan = PLANS[name]()
    costs, ranks = costs_of(plan), ranks_of(plan)
    assert [entry.step.op for entry in costs] == [step.op for step in plan.steps]
    for index, rank in enumerate(ranks):
        assert sum(entry.received_by_rank[index] for entry in costs) == plan.wire_bytes(rank), rank
    for entry in costs:
        assert max(entry.received_by_rank) == entry.step.wire_bytes_max
        assert entry.bytes_inside + entry.bytes_between == max(entry.step.wire_bytes_max, entry.step.send_bytes_max)
    classes = classes_of(ranks, costs)
    assert sorted(rank for members in classes.values() for rank in members) == (ranks if costs else [])


@pytest.mark.parametrize(
    ("ranks", "inside", "between"), [([0, 1], 512, 0), ([0, 2], 0, 512), ([1, 2], 0, 512), ([0, 1, 2, 3], 0, 3 * 256)]
)
def test_bytes_within_and_between_nodes(ranks: list[int], inside: int, between: int) -> None:
    """A gather of 1,024 bytes on nodes of two ranks: its group is on one node or on two."""
    mesh = sw.Mesh({"a": len(ranks)}, ranks)
    ends = [sw.Layout(mesh, (256,), [placement]) for placement in ("S(0)", "R")]
    costs = costs_of(sw.plan(*ends, topology=NODES_OF_TWO))
    assert sum(entry.bytes_inside for entry in costs) == inside
    assert sum(entry.bytes_between for entry in costs) == between


@pytest.mark.parametrize(
    ("source", "inside", "between"), [(["R", "S(0)"], 1 << 17, 0), (["S(0)", "R"], 1 << 15, 1 << 15)]
)
def test_crossing_that_prefers_its_own_node(source: list[str], inside: int, between: int) -> None:
    """With a replica of the source on each node, nothing passes between nodes; with half of it, half of the bytes do.

    The tensor has 256 KiB. In the first case each rank receives half of it, in the second a quarter before a gather.
    """
    topology = sw.Topology("test", 4, 1000, 10, Link(1000, 100), Link(5000, 4000))
    src = sw.Layout(sw.Mesh({"n": 2, "a": 2}, [0, 1, 4, 5]), (1 << 10, 64), source)
    dst = sw.Layout(sw.Mesh({"m": 2, "b": 2}, [2, 3, 6, 7]), (1 << 10, 64), ["S(1)", "R"])
    entry = costs_of(sw.plan(src, dst, topology=topology))[0]
    assert (entry.step.op, entry.step.replica_policy) == ("cross", "node_local")
    assert (entry.bytes_inside, entry.bytes_between) == (inside, between)


def test_bars_are_proportional_to_predicted_times() -> None:
    plan = _plan({"node": 64, "gpu": 8}, (4096, 4096), ["P", "P"], ["R", "R"])
    text = plan_page(plan)
    times = [step.predicted_us for step in plan.steps]
    shares = [time / sum(times) for time in times]
    assert [float(share) for share in re.findall(r'style="flex: ([\d.]+) ', text)] == pytest.approx(shares, abs=1e-4)
    spans = re.findall(r'class="span" style="left: ([\d.]+)%; width: ([\d.]+)%', text)
    begins = [sum(shares[:index]) for index in range(len(shares))]
    assert [float(left) / 100 for left, _ in spans] == pytest.approx(begins, abs=1e-4)
    assert [float(width) / 100 for _, width in spans] == pytest.approx(shares, abs=1e-4)


def test_timeline_has_a_row_for_each_class_of_ranks() -> None:
    """5 rows over 2 ranks are 3 and 2, so the ranks of dp=0 receive more in the reduction and less in the gather."""
    text = plan_page(_plan({"dp": 2, "tp": 4}, (5, 64), ["S(0)", "P"], ["R", "S(1)"]))
    assert "ranks 0–3</span>" in text and "ranks 4–7</span>" in text
    filled = [float(share) for share in re.findall(r'class="fill" style="width: ([\d.]+)%"', text)]
    assert filled == pytest.approx([100, 200 / 3, 200 / 3, 100], abs=0.1)


def test_command_writes_the_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    pair = ["--mesh", "a=2,b=2", "--shape", "8,8", "--src", "S(0),R", "--dst", "R,S(1)"]
    assert cli.main(["plan", *pair, "--html", str(file)]) == 0
    plan = _plan({"a": 2, "b": 2}, (8, 8), ["S(0)", "R"], ["R", "S(1)"])
    assert file.read_text(encoding="utf-8") == plan_page(plan)
