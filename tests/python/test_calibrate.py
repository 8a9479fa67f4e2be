"""Topologies measured on a job: equal on all ranks, plausible, and of use to plans. Never how fast anything is."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest
import torch.distributed as dist

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright import calibrating
from shardwright.calibrating import Point, calibrate, fit

# More than any message or KiB takes, however busy the machine.
SECOND_PS = 10**12


def _check_plausible(topology: sw.Topology) -> None:
    assert 0 <= topology.step_ps < SECOND_PS
    assert 0 < topology.memory_ps_per_kib < SECOND_PS
    for link in (topology.inside, topology.between, *topology.mesh_dims.values()):
        assert 0 <= link.message_ps < SECOND_PS
        assert 0 < link.ps_per_kib < SECOND_PS


def _load(tables: list[str], folder: pathlib.Path) -> sw.Topology:
    """The topology that all ranks returned, by way of a file."""
    assert len(set(tables)) == 1, "ranks that plan by different tables hang"
    path = folder / "topology.json"
    path.write_text(tables[0])
    topology = sw.load_topology(path)
    assert topology.to_json() == tables[0]
    _check_plausible(topology)
    return topology


# ---- on a job


def _measured(mesh_shape: tuple[int, ...] | None, ranks_per_node: int | None) -> str:
    mesh = get_mesh(mesh_shape) if mesh_shape else None
    return calibrate(name="measured", mesh=mesh, ranks_per_node=ranks_per_node, quick=True).to_json()


@pytest.mark.parametrize(("world_size", "mesh_shape"), [(2, None), (4, (2, 2))])
def test_one_node(pool: Pool, tmp_path: pathlib.Path, world_size: int, mesh_shape: tuple[int, ...] | None) -> None:
    topology = _load(pool.run(_measured, world_size, mesh_shape, None), tmp_path)
    assert (topology.name, topology.ranks_per_node) == ("measured", 0)
    assert (topology.between.message_ps, topology.between.ps_per_kib) == (
        topology.inside.message_ps,
        topology.inside.ps_per_kib,
    )
    assert sorted(topology.mesh_dims) == (["a", "b"] if mesh_shape else [])


@pytest.mark.parametrize(("ranks_per_node", "kept"), [(2, 2), (1, 1), (4, 0)])
def test_as_if_on_nodes(pool: Pool, tmp_path: pathlib.Path, ranks_per_node: int, kept: int) -> None:
    topology = _load(pool.run(_measured, 4, (2, 2), ranks_per_node), tmp_path)
    assert topology.ranks_per_node == kept, "0 where one node holds all"


def test_plans_go_by_it(pool: Pool, tmp_path: pathlib.Path) -> None:
    topology = _load(pool.run(_measured, 4, (2, 2), None), tmp_path)
    mesh = sw.Mesh({"a": 2, "b": 2})
    src, dst = (sw.Layout(mesh, (64, 64), placements) for placements in (["S(0)", "S(0)"], ["R", "R"]))
    plan = sw.plan(src, dst, backend="gloo", topology=topology)
    assert plan.topology == "measured"
    assert plan.predicted_us > 0
    plan.simulate()
    assert sw.plan(src, dst, backend="gloo", topology=str(tmp_path / "topology.json")).topology == "measured"


def _part_of_the_job() -> str | None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        return calibrate(group, quick=True).to_json()
    with pytest.raises(ValueError, match=rf"group: rank {dist.get_rank()} is not in it"):
        calibrate(group)
    return None


def test_part_of_the_job(pool: Pool, tmp_path: pathlib.Path) -> None:
    tables = pool.run(_part_of_the_job, 4)
    _load([table for table in tables if table is not None], tmp_path)
    assert [table is None for table in tables] == [True, False, True, False]


def _on_the_command_line(out: str) -> int:
    return calibrating.main(["--out", out, "--device", "cpu", "--mesh", "dp=2,tp=2", "--name", "here", "--quick"])


def test_command_line(pool: Pool, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "measured.json"
    assert pool.run(_on_the_command_line, 4, str(out)) == [0] * 4
    topology = sw.load_topology(out)
    _check_plausible(topology)
    assert topology.name == "here"
    assert sorted(topology.mesh_dims) == ["dp", "tp"]


# ---- what is not allowed


def _mistakes() -> None:
    with pytest.raises(ValueError, match="device: got 'meta'; allowed are cpu and cuda"):
        calibrate(device="meta")
    with pytest.raises(ValueError, match="ranks_per_node: -1; allowed is 0, for all, or more"):
        calibrate(ranks_per_node=-1)
    with pytest.raises(ValueError, match=r"ranks_per_node: ranks gave \[0, 1\]; allowed is one value for all"):
        calibrate(ranks_per_node=dist.get_rank())
    with pytest.raises(ValueError, match="mesh: got a Mesh; allowed is a DeviceMesh"):
        calibrate(mesh=sw.Mesh({"x": 2}))
    assert calibrating.main(["--mesh", "dp=3", "--device", "cpu"]) == 2


def test_mistakes(pool: Pool) -> None:
    pool.run(_mistakes, 2)


def _alone() -> None:
    with pytest.raises(ValueError, match="group: it has 1 rank; .* at least 2 ranks"):
        calibrate()


def test_alone(pool: Pool) -> None:
    pool.run(_alone, 1)


def test_not_initialised() -> None:
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        calibrate()


def test_command_line_outside_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert calibrating.main([]) == 2
    assert "torchrun" in capsys.readouterr().err


# ---- figures from points


def _points(step: float, message: float, byte: float, peers: tuple[int, ...]) -> list[Point]:
    return [
        Point(count, size, step + count * message + size * byte)
        for count in peers
        for size in (1 << 10, 1 << 14, 1 << 17, 1 << 20)
    ]


def test_fit_finds_the_figures() -> None:
    found = fit(_points(5e-4, 4e-5, 1e-9, (1, 3, 7)))
    assert found[:3] == pytest.approx((5e-4, 4e-5, 1e-9), rel=1e-6)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_fit_leaves_out_what_was_disturbed() -> None:
    points = _points(5e-4, 4e-5, 1e-9, (1, 3, 7))
    points[5] = points[5]._replace(seconds=20 * points[5].seconds)
    found = fit(points)
    assert found[:3] == pytest.approx((5e-4, 4e-5, 1e-9), rel=0.1)
    assert found.error > 0.05, "what was left out still counts as an error"


def test_fit_with_a_given_step() -> None:
    found = fit(_points(5e-4, 4e-5, 1e-9, (1,)), step=5e-4)
    assert found[:3] == pytest.approx((5e-4, 4e-5, 1e-9), rel=1e-6)


def test_fit_with_one_number_of_peers() -> None:
    found = fit(_points(5e-4, 4e-5, 1e-9, (3,)))
    assert found[:3] == pytest.approx((5e-4 + 3 * 4e-5, 0, 1e-9), rel=1e-6)


def test_fit_is_never_negative() -> None:
    points = [Point(1, 1 << 10, 1e-3), Point(1, 1 << 20, 9e-4), Point(3, 1 << 10, 8e-4), Point(3, 1 << 20, 7e-4)]
    assert min(fit(points)[:3]) >= 0
    assert min(fit(points, step=2e-3)[:3]) >= 0


# ---- nodes


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"),
    [
        ([0, 1, 2, 3], "aaaa", 0),
        ([0, 1, 2, 3], "aabb", 2),
        ([0, 1, 2, 3], "abcd", 1),
        ([0, 1, 2, 3], "aaab", 3),
        ([1, 2, 3], "abb", 2),
    ],
)
def test_nodes_of_hosts(ranks: list[int], hosts: str, expected: int) -> None:
    assert calibrating._nodes_of_hosts(ranks, list(hosts)) == expected


@pytest.mark.parametrize("hosts", ["abab", "abcc", "abbb"])
def test_hosts_that_are_no_nodes(hosts: str) -> None:
    with pytest.raises(ValueError, match="ranks_per_node: .*give ranks_per_node"):
        calibrating._nodes_of_hosts([0, 1, 2, 3], list(hosts))


def _by_torchrun() -> int:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return calibrate(quick=True).ranks_per_node
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_nodes_as_torchrun_says(pool: Pool) -> None:
    assert pool.run(_by_torchrun, 4) == [2] * 4


def _by_host_name() -> int:
    original = socket.gethostname
    socket.gethostname = lambda: f"host{dist.get_rank() // 2}"
    try:
        return calibrate(quick=True).ranks_per_node
    finally:
        socket.gethostname = original


def test_nodes_by_host_name(pool: Pool) -> None:
    assert pool.run(_by_host_name, 4) == [2] * 4
