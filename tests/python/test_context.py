"""A plan depends only on its inputs. A change of topology, pinned plans or calibration takes effect at once, whatever
this rank or others have planned before."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import dtensors
import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.layouts import tables
from shardwright.layouts.topology import ENVIRONMENT_VARIABLE
from shardwright.runtime import executables, groups

WORLD = 4
SHAPE = (8, 8)


def _topology(name: str, message_ps: int, ps_per_kib: int) -> sw.Topology:
    link = sw.planning.Link(message_ps, ps_per_kib)
    return sw.Topology(name, ranks_per_node=0, step_ps=1000, memory_ps_per_kib=1, inside=link, between=link)


# With expensive messages a plan has fewer messages and more bytes; with expensive bytes, the reverse.
FAR = _topology("far", 10**10, 1)
THIN = _topology("thin", 1, 10**8)
PLACEMENTS = (["S(0)", "S(0)"], ["S(1)", "S(1)"])
BYTES = {"far": 64, "thin": 48, "detour": 192}  # bytes received by a rank, which has 64 of 256 itself


def _layouts(topology: sw.Topology | None = None) -> tuple[sw.Layout, sw.Layout]:
    src, dst = (sw.Layout(sw.Mesh({"a": 2, "b": 2}, topology=topology), SHAPE, p) for p in PLACEMENTS)
    return src, dst


def _detour(topology: sw.Topology = THIN) -> sw.Plan:
    """Returns a plan that first gathers the whole tensor."""
    src, dst = _layouts()
    return sw.plan(src, dst, backend="gloo", topology=topology, through=[sw.Layout(src.mesh, SHAPE, ["R", "R"])])


def _local(values: torch.Tensor, layout: sw.Layout) -> torch.Tensor:
    return values[tuple(slice(*dim[0]) for dim in layout.region(dist.get_rank()))].contiguous()


def _bytes_of(call: Callable[[], Any]) -> int:
    with sw.debug.wire_meter() as meter:
        call()
    return meter.received_bytes


def _moved_bytes(src: sw.Layout, dst: sw.Layout) -> int:
    """Returns the bytes received in a redistribute of plain tensors. Checks its result."""
    values = torch.arange(64.0).reshape(SHAPE)

    def redistribute() -> None:
        assert torch.equal(sw.redistribute_local(_local(values, src), src, dst), _local(values, dst))

    return _bytes_of(redistribute)


def _drop_in_bytes() -> int:
    values = torch.arange(64.0).reshape(SHAPE)
    src, dst = (dtensors.distribute(values, get_mesh((2, 2)), list(p)) for p in PLACEMENTS)

    def redistribute() -> None:
        moved = src.redistribute(placements=[Shard(1), Shard(1)])
        assert torch.equal(moved.to_local(), dst.to_local())

    with sw.enabled(strict=True):
        return _bytes_of(redistribute)


def _product_bytes() -> int:
    """Returns the bytes received in a product whose input needs the same move. Without it only sums would move."""
    mesh = get_mesh((2, 2))
    x = dtensors.distribute(torch.eye(8), mesh, ["S(0)", "S(0)"])
    weight = dtensors.distribute(torch.arange(64.0).reshape(SHAPE), mesh, ["S(1)", "S(1)"])

    def multiply() -> None:
        y = sw.linear(x, weight, placements=[Shard(1), Shard(1)])
        assert torch.equal(y.full_tensor(), torch.arange(64.0).reshape(SHAPE).T)

    with sw.enabled(strict=True):
        return _bytes_of(multiply)


@contextlib.contextmanager
def _measured(topology: sw.Topology) -> Iterator[None]:
    groups.note_world()  # as `calibrate` does before it measures
    tables.set_measured("gloo", topology, {})
    try:
        yield
    finally:
        tables.forget_measured()


@contextlib.contextmanager
def _pinned(plan: sw.Plan) -> Iterator[None]:
    sw.pin(plan)
    try:
        yield
    finally:
        sw.unpin(plan)


# ---- changes that take effect


def _other_topologies() -> None:
    for _ in range(2):
        for topology in (FAR, THIN, FAR):
            assert sw.plan(*_layouts(topology), backend="gloo").wire_bytes(dist.get_rank()) == BYTES[topology.name]
            assert _moved_bytes(*_layouts(topology)) == BYTES[topology.name]


def test_plans_follow_the_topology_of_the_mesh(pool: Pool) -> None:
    pool.run(_other_topologies, WORLD)


def _other_calibrations() -> None:
    for _ in range(2):
        for topology in (FAR, THIN, FAR):
            with _measured(topology):
                for _ in range(2):
                    assert _moved_bytes(*_layouts()) == BYTES[topology.name]
                    assert _drop_in_bytes() == BYTES[topology.name]


def test_redistributes_follow_the_calibration(pool: Pool) -> None:
    pool.run(_other_calibrations, WORLD)


def _other_pins() -> None:
    detour = _detour()
    for _ in range(2):
        with _measured(THIN):
            assert _moved_bytes(*_layouts()) == _drop_in_bytes() == BYTES["thin"]
        with _pinned(detour):
            for _ in range(2):
                # The pin also applies to a mesh with another topology.
                assert _moved_bytes(*_layouts()) == _drop_in_bytes() == _moved_bytes(*_layouts(FAR)) == BYTES["detour"]
        assert _moved_bytes(*_layouts(FAR)) == BYTES["far"]


def test_redistributes_follow_pinned_plans(pool: Pool) -> None:
    pool.run(_other_pins, WORLD)


def _product_bytes_by_setting() -> list[int]:
    """Returns the bytes under each setting. Runs the settings twice, in different orders."""
    settings = [lambda: _measured(FAR), lambda: _measured(THIN), lambda: _pinned(_detour())]
    found = {}
    for order in ([0, 1, 2], [2, 0, 1, 0]):
        for number in order:
            with settings[number]():
                moved = _product_bytes()
            assert found.setdefault(number, moved) == moved, "the setting alone decides"
    return [found[number] for number in range(3)]


def _product_with_pinned_gather() -> None:
    """A product gathers its operand by the plan that is pinned for the gather."""
    x = torch.arange(64.0).reshape(SHAPE)[2 * dist.get_rank() :][:2].contiguous()
    mesh = sw.Mesh({"group": WORLD})
    src, between, dst = (sw.Layout(mesh, SHAPE, [p]) for p in ("S(0)", "S(1)", "R"))
    detour = sw.plan(src, dst, backend="gloo", through=[between])
    straight = 3 * 16 * 4  # three other quarters

    def multiply() -> None:
        y = sw.all_gather_matmul(x, torch.eye(8), size=8, columns=8 * WORLD)
        assert torch.equal(y, torch.arange(64.0).reshape(SHAPE))

    for _ in range(2):
        assert _bytes_of(multiply) == straight
        with _pinned(detour):
            assert _bytes_of(multiply) == detour.wire_bytes(dist.get_rank()) == straight + 3 * 4 * 4
        assert _bytes_of(multiply) == straight


def test_product_uses_the_pinned_gather(pool: Pool) -> None:
    pool.run(_product_with_pinned_gather, WORLD)


def test_product_plans_depend_only_on_the_setting(pool: Pool) -> None:
    for far, thin, _ in pool.run(_product_bytes_by_setting, WORLD):
        assert far > thin


def _operator_with_sizes() -> None:
    """A graph with symbolic sizes plans when the sizes are known, and plans again when tables change."""
    mesh = sw.Mesh({"a": WORLD})
    example = [sw.Layout(mesh, SHAPE, [p]) for p in ("S(0)", "R")]
    src, between, dst = (sw.Layout(mesh, (16, 8), [p]) for p in ("S(0)", "S(1)", "R"))
    detour = sw.plan(src, dst, backend="gloo", through=[between])
    values = torch.arange(128.0).reshape(16, 8)
    arguments = sw.graph.operator(*example).keywords
    plan, names, rank = arguments["plan"], arguments["groups"], arguments["rank"]
    local = _local(values, src)

    def run() -> int:
        before = sw.stats()["bytes"]  # dispatch modes do not see calls inside an operator
        handle = torch.ops.shardwright.redistribute_start(local, plan, names, rank, [16, 8])
        assert torch.equal(torch.ops.shardwright.redistribute_wait(handle, local, plan, rank, [16, 8]), values)
        received: int = sw.stats()["bytes"] - before
        return received

    straight = 3 * 32 * 4
    for _ in range(2):
        assert run() == straight
        with _pinned(detour):
            assert run() == straight + 3 * 8 * 4
        assert run() == straight


def test_operators_with_symbolic_sizes_use_pinned_plans(pool: Pool) -> None:
    pool.run(_operator_with_sizes, WORLD)


# ---- ranks with different earlier plans


def _bytes_after_different_plans(world_size: int) -> list[int]:
    """Each rank first plans with its own settings, without communication. Then all run with the same settings."""
    mesh = sw.Mesh({"a": world_size // 2, "b": 2})
    ends = [sw.Layout(mesh, SHAPE, p) for p in PLACEMENTS]
    middle = sw.Layout(mesh, SHAPE, ["R", "R"])
    detour = sw.plan(*ends, backend="gloo", through=[middle])
    settings = [contextlib.nullcontext, lambda: _measured(FAR), lambda: _measured(THIN), lambda: _pinned(detour)]
    rank = dist.get_rank()
    warming = [settings[(rank + i) % len(settings)] for i in range(rank + 1)]
    for setting in warming:
        with setting():
            executables.make_plan(*ends, "cpu")
            sw.plan(*ends, backend="gloo")
    moved = []
    for setting in (*settings, *reversed(settings)):
        with setting():
            moved.append(_moved_bytes(*ends))
    assert moved[: len(settings)] == moved[: len(settings) - 1 : -1]
    return moved


@pytest.mark.parametrize("world_size", [2, 4])
def test_earlier_plans_do_not_affect_later_ones(pool: Pool, world_size: int) -> None:
    by_rank = pool.run(_bytes_after_different_plans, world_size, world_size)
    assert all(moved == by_rank[0] for moved in by_rank)
    assert len(set(by_rank[0])) > 1, "the settings differ"


def _differing_tables() -> list[str]:
    """Returns this rank's errors if ranks have different tables. Here both tables give the same plan."""
    said = []
    elsewhere = [sw.Layout(sw.Mesh({"a": WORLD}), SHAPE, [p]) for p in ("S(0)", "R")]
    local = torch.ones(2, 8)
    first = dist.get_rank() == 0
    for setting in (_measured(FAR if first else THIN), _pinned(_detour(FAR if first else THIN))):
        with setting, pytest.raises(RuntimeError, match="the ranks differ") as error:
            sw.debug.check_ranks(timeout_seconds=30)
            try:
                sw.redistribute_local(local, *elsewhere)
            finally:
                sw.debug.check_ranks(False)
        said.append(str(error.value))
    return said


def test_check_ranks_reports_differing_tables(pool: Pool) -> None:
    for measured, pinned in pool.run(_differing_tables, WORLD):
        assert "measured topologies: gloo: far with hash" in measured
        assert "gloo: thin with hash" in measured
        assert "pinned plans: 1 with hash" in pinned
        assert "measured" not in pinned


# ---- meshes and topologies


def test_equality_of_layouts_with_topologies() -> None:
    plain, far, thin = (_layouts(topology) for topology in (None, FAR, THIN))
    assert far == _layouts(FAR)
    assert hash(far[0]) == hash(_layouts(FAR)[0])
    assert far[0] != thin[0] != plain[0] != far[0]
    assert far[0].mesh != plain[0].mesh
    assert far[0].mesh.has_same_ranks(plain[0].mesh)
    assert not far[0].mesh.has_same_ranks(sw.Mesh({"a": 4}))
    assert len({plain[0]: 0, far[0]: 1, thin[0]: 2}) == 3
    assert sw.plan(plain[0], far[1]).topology == sw.plan(far[0], plain[1]).topology == "far"
    assert sw.plan(far[0], thin[1]).topology == "far"
    assert sw.plan(plain[0], far[1], through=[]).topology == "far"
    assert sw.plan(far[0], thin[0]).steps == []  # the same elements in the same places
    read = sw.Plan.from_bytes(sw.plan(*far).to_bytes())
    assert read.topology == "far"
    assert read.src.mesh.has_same_ranks(far[0].mesh)


def test_topology_follows_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sw.plan(*_layouts()).topology == "64x8"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "8xNVLink")
    assert sw.plan(*_layouts()).topology == "8xNVLink"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nowhere")
    for _ in range(2):
        with pytest.raises(ValueError, match="topology must be one of .*, got 'nowhere'"):
            sw.plan(*_layouts())
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert sw.plan(*_layouts()).topology == "64x8"


# ---- caches


# Plans many layouts, and prints the growth of resident memory in KiB and the sizes of both caches.
_MANY_LAYOUTS = """
import gc, re
import shardwright as sw
from shardwright.runtime import executables

mesh = sw.Mesh({"a": 2})
kept = executables.PlanningCache()

def resident_kib():
    gc.collect()
    return int(re.search(r"VmRSS:\\s*(\\d+)", open("/proc/self/status").read())[1])

def plan(sizes):
    for size in sizes:
        src, dst = sw.Layout(mesh, (size,), ["S(0)"]), sw.Layout(mesh, (size,), ["R"])
        sw.plan(src, dst)
        kept.get_or_make((src, dst), lambda dst=dst: dst)

plan(range(1, 8001))
before = resident_kib()
plan(range(8001, 20001))
print(resident_kib() - before, sw.stats()["plan_cache_size"], len(kept))
"""


@pytest.mark.any_torch
def test_many_layouts_leave_memory_bounded() -> None:
    """In a process of its own: the memory of this one depends on the tests before."""
    shown = subprocess.run([sys.executable, "-c", _MANY_LAYOUTS], capture_output=True, text=True, check=True).stdout
    grown_kib, plans, kept = map(int, shown.split())
    assert plans <= 4096 and kept <= executables.MAX_EXECUTABLES
    assert grown_kib < 4 * 1024


def test_cache_entries_belong_to_their_tables() -> None:
    kept: executables.PlanningCache[str] = executables.PlanningCache()
    kept.get_or_make("key", lambda: "by default")
    for times in range(3):
        with _measured(FAR):
            assert kept.get_or_make("key", lambda: "far") == "far"
            assert len(kept) == 2
        assert kept.get("key") == "by default", times
    for number in range(2 * executables.MAX_EARLIER_TABLES):
        with _measured(_topology("other", number, 1)):
            kept.get_or_make("key", lambda: "other")
    assert len(kept) <= 1 + executables.MAX_EARLIER_TABLES

    def change_meanwhile() -> str:
        tables.set_measured("gloo", THIN, {})
        return "made while tables changed"

    try:
        kept.get_or_make("late", change_meanwhile)
        assert kept.get("late") is None
        kept.get("late")
        tables.forget_measured()
        kept.put("late", "made before they changed")
        assert kept.get("late") is None
    finally:
        tables.forget_measured()


def _groups_end() -> None:
    group = dist.new_group(list(range(WORLD)))
    mesh = sw.Mesh({"a": WORLD})
    src, dst = sw.Layout(mesh, SHAPE, ["S(0)"]), sw.Layout(mesh, SHAPE, ["S(1)"])
    detour = sw.plan(src, dst, backend="gloo", through=[sw.Layout(mesh, SHAPE, ["R"])])
    for setting in (contextlib.nullcontext(), _measured(FAR), _pinned(detour)):
        with setting:
            sw.redistribute_local(torch.ones(2, 8), src, dst, group=group)
            sw.graph.operator(src, dst, group=group)(torch.ones(2, 8))
            sw.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 8), group=group, size=8, columns=8 * WORLD)
            sw.redistribute_many([(torch.ones(2, 8), src, dst)], group=group)
            sw.attention.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 8), group=group, size=2 * WORLD)
            ids = torch.zeros(2, 1, dtype=torch.int64)
            rows, _, handle = sw.experts.dispatch(torch.ones(2, 8), ids, None, [[r] for r in range(WORLD)], group=group)
            sw.experts.combine(rows, handle)
            with sw.fsdp.jit_weight(torch.ones(2, 8), src, sw.Layout(mesh, SHAPE, ["R"]), group=group) as full:
                full.sum()
            del rows, handle, full
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None, gc.get_referrers(alive())


def test_groups_are_not_kept_alive(pool: Pool) -> None:
    pool.run(_groups_end, WORLD)
