"""Measured topologies are equal on all ranks, plausible, and used by plans. No test depends on speed."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import socket
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

import dtensors
import shardwright as sw
from meshes import get_mesh
from pool import Pool, run_isolated
from shardwright.calibration import calibrate, products
from shardwright.calibration.job import ranks_per_host
from shardwright.cli import calibrate as command
from shardwright.layouts import tables
from shardwright.matmul import running
from shardwright.runtime import executables

# An upper bound of the time of a message or a KiB, even on a busy machine.
SECOND_PS = 10**12


def _check_plausible(topology: sw.Topology) -> None:
    assert 0 <= topology.step_ps < SECOND_PS
    assert 0 < topology.memory_ps_per_kib < SECOND_PS
    for link in (topology.inside, topology.between, *topology.mesh_dims.values()):
        assert 0 <= link.message_ps < SECOND_PS
        assert 0 < link.ps_per_kib < SECOND_PS


def _load(tables: list[str], folder: pathlib.Path) -> sw.Topology:
    """Checks that all ranks returned the same topology, and loads it from a file."""
    assert len(set(tables)) == 1, "ranks that plan by different tables hang"
    path = folder / "topology.json"
    path.write_text(tables[0])
    topology = sw.planning.load_topology(path)
    assert topology.to_json() == tables[0]
    _check_plausible(topology)
    return topology


def _links(*args: Any, **kwargs: Any) -> sw.Topology:
    """Measures only links, without effects on other tests in this process."""
    return calibrate(*args, quick=True, dtypes=(), apply=False, **kwargs)


# ---- measuring


def _measured(mesh_shape: tuple[int, ...] | None, ranks_per_node: int | None) -> str:
    mesh = get_mesh(mesh_shape) if mesh_shape else None
    return _links(name="measured", mesh=mesh, ranks_per_node=ranks_per_node).to_json()


@pytest.mark.parametrize(("world_size", "mesh_shape"), [(2, None), (4, (2, 2))])
def test_topology_of_one_node(
    pool: Pool, tmp_path: pathlib.Path, world_size: int, mesh_shape: tuple[int, ...] | None
) -> None:
    topology = _load(pool.run(_measured, world_size, mesh_shape, None), tmp_path)
    assert (topology.name, topology.ranks_per_node) == ("measured", 0)
    assert (topology.between.message_ps, topology.between.ps_per_kib) == (
        topology.inside.message_ps,
        topology.inside.ps_per_kib,
    )
    assert sorted(topology.mesh_dims) == (["a", "b"] if mesh_shape else [])


@pytest.mark.parametrize(("ranks_per_node", "kept"), [(2, 2), (1, 1), (4, 0)])
def test_topology_with_given_ranks_per_node(pool: Pool, tmp_path: pathlib.Path, ranks_per_node: int, kept: int) -> None:
    topology = _load(pool.run(_measured, 4, (2, 2), ranks_per_node), tmp_path)
    assert topology.ranks_per_node == kept, "0 where one node holds all"


def test_plans_use_the_measured_topology(pool: Pool, tmp_path: pathlib.Path) -> None:
    topology = _load(pool.run(_measured, 4, (2, 2), None), tmp_path)
    mesh = sw.Mesh({"a": 2, "b": 2})
    src, dst = (sw.Layout(mesh, (64, 64), placements) for placements in (["S(0)", "S(0)"], ["R", "R"]))
    plan = sw.plan(src, dst, backend="gloo", topology=topology)
    assert plan.topology == "measured"
    assert plan.predicted_us > 0
    plan.simulate()
    assert sw.plan(src, dst, backend="gloo", topology=str(tmp_path / "topology.json")).topology == "measured"


def _measure_some_ranks() -> str | None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        return _links(group).to_json()
    with pytest.raises(ValueError, match=f"group must contain this rank, got a group without rank {dist.get_rank()}"):
        calibrate(group)
    return None


def test_topology_of_some_ranks(pool: Pool, tmp_path: pathlib.Path) -> None:
    tables = pool.run(_measure_some_ranks, 4)
    _load([table for table in tables if table is not None], tmp_path)
    assert [table is None for table in tables] == [True, False, True, False]


def _run_command(out: str) -> int:
    return command.main(["--out", out, "--device", "cpu", "--mesh", "dp=2,tp=2", "--name", "here", "--quick"])


def test_calibrate_command(pool: Pool, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "measured.json"
    assert pool.run(_run_command, 4, str(out)) == [0] * 4
    topology = sw.planning.load_topology(out)
    _check_plausible(topology)
    assert topology.name == "here"
    assert sorted(topology.mesh_dims) == ["dp", "tp"]


# ---- use of the measured tables


def _table_names() -> tuple[str, str]:
    """Returns the names of the tables that a redistribute and a product of this process use."""
    mesh = get_mesh((4,))
    src, dst = (sw.Layout(sw.Mesh(mesh), (8, 8), placements) for placements in (["S(0)"], ["R"]))
    topology = executables.make_plan(src, dst, "cpu").topology
    x = dtensors.distribute(torch.ones(8, 8), mesh, ["S(0)"])
    with running.listening() as heard:
        sw.linear(x, x, placements=dtensors.to_placements(["S(1)"]))
    return topology, heard[0].model.name


def _table_names_around_calibrate() -> list[Any]:
    before = _table_names()
    topology = calibrate(get_mesh((4,)), name="mine", quick=True, dtypes=[torch.float32])
    try:
        after = _table_names()
        explicit = sw.plan(
            *(sw.Layout(sw.Mesh({"x": 4}), (8, 8), p) for p in (["S(0)"], ["R"])),
            backend="gloo",
            topology="gloo-local",
        ).topology
        model = tables.measured_gemm_model("cpu", "float32")
        assert model is not None
        said = repr(
            [getattr(model, field) for field in ("flops_per_us", "launch_ps", "contention_percent", "chunk_ps")]
        )
    finally:
        sw.calibration.forget()
    return [before, after, explicit, _table_names(), topology.to_json() + said]


def test_later_plans_and_products_use_the_measured_tables(pool: Pool) -> None:
    found = pool.run(_table_names_around_calibrate, 4)
    default, measured = ("gloo-local", "cpu"), ("mine", "measured on cpu")
    for before, after, explicit, forgotten, _ in found:
        assert (before, after, explicit, forgotten) == (default, measured, "gloo-local", default)
    assert len({tables for *_, tables in found}) == 1, "ranks that plan by different tables hang"


@pytest.mark.parametrize("late", [0.0, 0.003])
@pytest.mark.parametrize(
    ("message", "slowdown", "together"),
    [
        (2.0, 0.0, lambda n: 2.0 + 1.0 / n),  # the last slice of the product starts after all messages
        (2.0, 0.5, lambda n: 2.0 + 1.0 / n),  # slower slices do not matter: the messages hide them
        (0.5, 0.0, lambda n: 0.5 / n + 1.0),  # all slices start after the first message
        (0.5, 0.5, lambda n: 0.5 / n + 1.0 + 0.5 * 0.5 * (n - 1) / n),  # all slices but the last are slowed
    ],
)
def test_late_time_per_chunk(message: float, slowdown: float, together: Callable[[int], float], late: float) -> None:
    times = [time for n in (2, 8) for time in (message, together(n) + n * late + 0.01)]
    assert products.delay_per_chunk(times, 1.0, slowdown) == pytest.approx(late, abs=1e-12)


def _calibrate_with_a_slow_rank() -> str:
    """Rank 1 also has fewer processors."""
    base = products.tables.default_gemm_model("cpu")
    fields = ("tile_rows", "tile_columns", "contention_percent")
    smaller = types.SimpleNamespace(num_processors=1, **{field: getattr(base, field) for field in fields})
    if dist.get_rank() == 1:
        products._MAX_SECONDS = 0.0
        products.tables.default_gemm_model = lambda _: smaller
    model = sw.calibration.calibrate_gemm(dtype=torch.float32)
    fields = ("flops_per_us", "launch_ps", "memory_ps_per_kib", "num_processors", "tile_rows")
    return repr([getattr(model, field) for field in fields])


def test_slow_rank_gets_the_same_table() -> None:
    outcomes = run_isolated(_calibrate_with_a_slow_rank, 3)
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert len({outcome.value for outcome in outcomes}) == 1


def _calibrate_some_ranks() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() in (0, 1):
        calibrate(group, quick=True, dtypes=[])
        with pytest.raises(ValueError, match="apply must be False for a part of the job, got True for 2 of 4 ranks"):
            calibrate(group, quick=True, dtypes=[], apply=True)
    assert tables.measured_topology("gloo") is None


def test_calibrating_some_ranks_does_not_change_plans(pool: Pool) -> None:
    pool.run(_calibrate_some_ranks, 4)


def _next_job(folder: str) -> list[str]:
    rank = dist.get_rank()
    found = []
    calibrate(quick=True, dtypes=[])
    for job in range(2):
        found.append("default" if tables.measured_topology("gloo") is None else "measured")
        dist.destroy_process_group()
        gc.collect()
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{job}", 2), rank=rank, world_size=2)
    return found


def test_measured_tables_end_with_the_job(tmp_path: pathlib.Path) -> None:
    for outcome in run_isolated(_next_job, 2, str(tmp_path)):
        assert outcome.value == ["measured", "default"], outcome.error


def _logged_messages(calibrates: bool) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "default table" in record.getMessage())
    log = logging.getLogger("shardwright")
    log.addHandler(handler)
    mesh = get_mesh((2,))
    x = dtensors.distribute(torch.ones(8, 8), mesh, ["S(0)"])
    with sw.enabled(strict=True):
        x.redistribute(placements=dtensors.to_placements(["S(1)"]))
        sw.linear(x, x, placements=dtensors.to_placements(["S(1)"]))
        assert not said  # logged at level INFO, not WARNING
    log.setLevel(logging.INFO)
    if calibrates:
        calibrate(quick=True)
    with sw.enabled(strict=True):
        x.redistribute(placements=dtensors.to_placements(["R"]))
        assert not said  # a single gather: the plan does not depend on the table
        for rows in (16, 24):
            x = dtensors.distribute(torch.ones(rows, 8), mesh, ["S(0)"])
            sw.linear(x, x, placements=dtensors.to_placements(["S(1)"]))
    return said


@pytest.mark.parametrize("calibrates", [False, True])
def test_default_tables_are_logged_once(calibrates: bool) -> None:
    first, second = run_isolated(_logged_messages, 2, calibrates)
    assert first.ok and second.ok, first.error or second.error
    assert second.value == []
    assert len(first.value) == (0 if calibrates else 1)
    assert calibrates or first.value[0].startswith("plans are chosen with the default table 'cpu'; shardwright.calib")


# ---- invalid arguments


def _invalid_arguments() -> None:
    fake = dist.new_group(backend="fake")
    with pytest.raises(ValueError, match="group must be a group with the default group's backend for cpu, gloo, got"):
        calibrate(fake, device="cpu", quick=True)
    with pytest.raises(ValueError, match="device must be cpu or cuda.*, got 'meta'"):
        calibrate(device="meta")
    with pytest.raises(ValueError, match="ranks_per_node must be at least 0 .*, got -1"):
        calibrate(ranks_per_node=-1)
    with pytest.raises(ValueError, match=r"ranks_per_node must be equal on all ranks, got \[0, 1\]"):
        calibrate(ranks_per_node=dist.get_rank())
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh, got a Mesh"):
        calibrate(mesh=sw.Mesh({"x": 2}))
    with pytest.raises(ValueError, match="dtypes must be a floating-point torch.dtype .*16 bits, got torch.int32"):
        calibrate(dtypes=[torch.int32])
    assert command.main(["--mesh", "dp=3", "--device", "cpu"]) == 2


def test_invalid_calibrate_arguments(pool: Pool) -> None:
    pool.run(_invalid_arguments, 2)


def _calibrate_on_one_rank() -> None:
    with pytest.raises(ValueError, match="group must have at least 2 ranks, got 1"):
        calibrate()


def test_calibrate_needs_two_ranks(pool: Pool) -> None:
    pool.run(_calibrate_on_one_rank, 1)


def test_calibrate_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        calibrate()


def test_calibrate_command_outside_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert command.main([]) == 2
    assert "torchrun" in capsys.readouterr().err


# ---- ranks per node


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
def test_ranks_per_node_of_hosts(ranks: list[int], hosts: str, expected: int) -> None:
    assert ranks_per_host(ranks, list(hosts)) == expected


@pytest.mark.parametrize("hosts", ["abab", "abcc", "abbb"])
def test_hosts_with_irregular_nodes_raise(hosts: str) -> None:
    with pytest.raises(ValueError, match="ranks_per_node must be given unless each host"):
        ranks_per_host([0, 1, 2, 3], list(hosts))


def _by_torchrun() -> int:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return _links().ranks_per_node
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_ranks_per_node_from_torchrun(pool: Pool) -> None:
    assert pool.run(_by_torchrun, 4) == [2] * 4


def _by_host_name() -> int:
    original = socket.gethostname
    socket.gethostname = lambda: f"host{dist.get_rank() // 2}"
    try:
        return _links().ranks_per_node
    finally:
        socket.gethostname = original


def test_ranks_per_node_by_host_name(pool: Pool) -> None:
    assert pool.run(_by_host_name, 4) == [2] * 4
