"""``sw.stats(by="layout")``: calls, bytes and times of each pair of layouts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.runtime import executables, layout_stats

WORLD = 4
GATHER = "float32[20, 8] on a=4: [S(0)] -> [R]"
EXCHANGE = "float32[20, 8] on a=4: [S(0)] -> [S(1)]"
SLICE = "float32[20, 8] on a=4: [R] -> [S(0)]"


def _tensor(mesh: DeviceMesh, requires_grad: bool = False) -> DTensor:
    local = torch.ones(5, 8)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False).detach().requires_grad_(requires_grad)


def _recorded() -> tuple[dict[str, Any], float, int]:
    """Returns the rows of some redistributes, the time that all of them took, and the bytes that a meter saw."""
    mesh = get_mesh((WORLD,))
    x, leaf = _tensor(mesh), _tensor(mesh, requires_grad=True)
    sw.reset_stats()
    sw.debug.record_layouts()
    begin = time.perf_counter()
    try:
        with sw.enabled(strict=True), sw.debug.wire_meter() as meter:
            for _ in range(3):
                x.redistribute(placements=[Replicate()])
            x.redistribute(placements=[Shard(1)], async_op=True).to_local().sum()
            leaf.redistribute(placements=[Replicate()]).to_local().sum().backward()
            src, dst = (sw.Layout(sw.Mesh(mesh), x.shape, [placement]) for placement in ("S(0)", "S(1)"))
            out = torch.empty(20, 2)
            sw.redistribute_local(x.to_local(), src, dst, device_mesh=mesh, out=out)
    finally:
        sw.debug.record_layouts(False)
    return sw.stats(by="layout"), time.perf_counter() - begin, meter.received_bytes


@pytest.mark.cpu_only("its tensors are on the CPU")
def test_calls_bytes_and_times_by_layout(pool: Pool) -> None:
    for rows, seconds, metered in pool.run(_recorded, WORLD):
        calls = {key: row["calls"] for key, row in rows.items()}
        assert calls == {GATHER: 4, EXCHANGE: 2, SLICE: 1}
        assert rows[GATHER]["bytes"] == 4 * 15 * 8 * 4
        assert rows[EXCHANGE]["bytes"] == 2 * 15 * 2 * 4
        assert rows[SLICE]["bytes"] == 0
        assert sum(row["bytes"] for row in rows.values()) == metered
        assert 0 < sum(row["seconds"] for row in rows.values()) < seconds
        assert all(row["slowest"] <= row["seconds"] <= row["calls"] * row["slowest"] for row in rows.values())
        assert [row["seconds"] for row in rows.values()] == sorted(
            (row["seconds"] for row in rows.values()), reverse=True
        )


def _started() -> dict[str, Any]:
    """Returns the rows of calls that wait in another place: the result of one is not ready when it returns."""
    mesh = get_mesh((WORLD,))
    src, dst = (sw.Layout(sw.Mesh(mesh), (20, 8), [placement]) for placement in ("S(0)", "R"))
    executable = executables.bind(executables.make_plan(src, dst, "cpu"), device_mesh=mesh)
    out = torch.empty(20, 8)
    sw.reset_stats()
    sw.debug.record_layouts()
    try:
        work = executables.start_into(executable, torch.ones(5, 8), out)
        if work is not None:
            work.wait()
    finally:
        sw.debug.record_layouts(False)
    assert out.eq(1).all()
    return sw.stats(by="layout")


@pytest.mark.cpu_only("its tensors are on the CPU")
def test_started_transfers_are_recorded(pool: Pool) -> None:
    for rows in pool.run(_started, WORLD):
        assert {key: (row["calls"], row["bytes"]) for key, row in rows.items()} == {GATHER: (1, 15 * 8 * 4)}


def _without_recording() -> int:
    mesh = get_mesh((WORLD,))
    sw.reset_stats()
    with sw.enabled(strict=True):
        _tensor(mesh).redistribute(placements=[Replicate()])
    with pytest.raises(RuntimeError, match="call sw.debug.record_layouts"):
        sw.stats(by="layout")
    return sw.stats()["calls"]


@pytest.mark.cpu_only("its tensors are on the CPU")
def test_nothing_is_recorded_by_default(pool: Pool) -> None:
    assert pool.run(_without_recording, WORLD) == [1] * WORLD


@pytest.mark.any_torch
def test_reset_drops_rows() -> None:
    class Executable:
        signature = {"tensor": "t", "mesh": "m", "src": "a", "dst": "b"}
        received_bytes = 7

    sw.reset_stats()
    executable = Executable()
    assert layout_stats.measure(executable, lambda: 5) == 5  # type: ignore[arg-type]
    assert sw.stats(by="layout")["t on m: a -> b"]["bytes"] == 7
    sw.reset_stats()
    with pytest.raises(RuntimeError, match="nothing is recorded"):
        sw.stats(by="layout")
    with pytest.raises(ValueError, match="by must be None or 'layout', got 'mesh'"):
        sw.stats(by="mesh")
