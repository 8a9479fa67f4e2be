"""shardwright keeps no process group or its threads alive after `destroy_process_group`. When the last reference to a
group is released, entries cached for the next group stay."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported before threads are counted: its defaults keep the current group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwright as sw
from pairs import two_dims
from pool import run_isolated
from shardwright.attention import problem

WORLD = 4
LIVES = 2
EXITS = 3
DEADLINE_SECONDS = 10.0
PAIRS = two_dims("swap", "gather one", "sum one, cut the other")


def _threads() -> list[str]:
    return [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]


def _redistribute_local(mesh: sw.Mesh) -> None:
    rank = dist.get_rank()
    group = dist.new_group(list(range(WORLD)))
    for src_placements, dst_placements in PAIRS:
        src, dst = sw.Layout(mesh, (8, 8), src_placements), sw.Layout(mesh, (8, 8), dst_placements)
        local = torch.ones(src.local_shape(rank))
        for _ in range(2):
            sw.redistribute_local(local, src, dst)
            sw.redistribute_local(local, src, dst, group=group)
        waited_for = sw.redistribute_local(local, src, dst, async_op=True)
        assert waited_for.shape == tuple(dst.local_shape(rank))
        waited_for.add(0)
        sw.redistribute_local(local, src, dst, async_op=True)  # never waited for


def _calibrate(mesh: sw.Mesh) -> None:
    sw.calibrate(quick=True)


def _operate(mesh: sw.Mesh) -> None:
    src, dst = sw.Layout(mesh, (8, 8), ["S(0)", "R"]), sw.Layout(mesh, (8, 8), ["R", "S(1)"])
    sw.graph.operator(src, dst)(torch.ones(src.local_shape(dist.get_rank())))


def _over_a_device_mesh(mesh: sw.Mesh) -> None:
    """Uses our caches for DeviceMeshes. Without DTensors, because PyTorch's own caches keep their meshes."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = dist.get_rank()
    for src_placements, dst_placements in PAIRS:
        src, dst = sw.Layout(device_mesh, (8, 8), src_placements), sw.Layout(device_mesh, (8, 8), dst_placements)
        sw.prepare(device_mesh, redistributes=[(src, dst)])
        for _ in range(2):
            sw.redistribute_local(torch.ones(src.local_shape(rank)), src, dst, device_mesh=device_mesh)
        sw.graph.operator(src, dst, device_mesh=device_mesh)(torch.ones(src.local_shape(rank)))
    sw.prepare(device_mesh)


def _multiply(mesh: sw.Mesh) -> None:
    group = dist.new_group(list(range(WORLD)))
    for over in (None, group):
        sw.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 3), group=over, size=2 * WORLD, columns=3 * WORLD)
        sw.matmul_reduce_scatter(torch.ones(8, 4), torch.ones(4, 3), group=over, size=4 * WORLD)


def _new_threads(before: list[str]) -> list[str]:
    """Returns the threads that are not in `before`, after waiting for them to end."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        gc.collect()
        after = _threads()
        for name in before:
            if name in after:
                after.remove(name)
        if not after or time.monotonic() > deadline:
            return after
        time.sleep(0.05)


def _threads_left_after(use: str, scratch: str) -> list[list[str]]:
    """Returns the threads that survive each life of the default process group."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    left = []
    for life in range(LIVES):
        before = _threads()
        store = dist.FileStore(f"{scratch}/life_{life}", WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        globals()[use](sw.Mesh({"a": 2, "b": 2}))
        dist.barrier()
        dist.destroy_process_group()
        del store
        left.append(_new_threads(before))
    return left


def _release_late(scratch: str) -> None:
    """One rank releases a default group while it plans with the next one, as garbage collection may do."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{scratch}/first", 4), rank=rank, world_size=4)
    sw.redistribute_local(torch.ones(2), *(sw.Layout(sw.Mesh({"a": 4}), (8,), [p]) for p in ("S(0)", "R")))
    held = [dist.group.WORLD]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{scratch}/second", 4), rank=rank, world_size=4)
    x = distribute_tensor(torch.ones(1, 2, 6, 8), init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(2)])

    def make_late(*args: Any) -> Any:
        held.clear()
        gc.collect()
        return make(*args)

    make = problem._plan_and_bind
    if rank == 0:
        problem._plan_and_bind = make_late
    for _ in range(2):
        sw.attention.scaled_dot_product_attention(x, x, x)


def test_ranks_release_a_group_at_different_times(tmp_path: pathlib.Path) -> None:
    """Ranks agree on a plan when they make it, so no rank may drop it alone."""
    for outcome in run_isolated(_release_late, 4, str(tmp_path), collective_timeout_seconds=10):
        assert outcome.ok, outcome.error


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("use", ["_redistribute_local", "_calibrate", "_operate", "_over_a_device_mesh", "_multiply"])
def test_no_thread_survives_destroy(use: str, tmp_path: pathlib.Path) -> None:
    for outcome in run_isolated(_threads_left_after, WORLD, use, str(tmp_path)):
        assert outcome.ok, outcome.error
        assert outcome.value == [[]] * LIVES


_EXITING = """
import sys, torch, torch.distributed as dist, shardwright as sw
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
mesh = sw.Mesh({"x": 2})
src, dst = sw.Layout(mesh, (512, 512), ["S(0)"]), sw.Layout(mesh, (512, 512), ["S(1)"])
for _ in range(8):
    pending = sw.redistribute_local(torch.ones(256, 512), src, dst, async_op=True)
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_exit_with_redistributes_in_flight(end: str, tmp_path: pathlib.Path) -> None:
    """A program exits without abort or hang, with or without cleanup."""
    for number in range(EXITS):
        command = [sys.executable, "-c", _EXITING]
        ranks = [
            subprocess.Popen([*command, str(rank), str(tmp_path / f"{number}"), end], stderr=subprocess.PIPE)
            for rank in range(2)
        ]
        for process in ranks:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors.decode()
