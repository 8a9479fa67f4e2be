"""Two jobs with separate worlds make one group, move tensors between them, and report differences."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import jobs
import oracle
import parts
import shardwright as sw
from shardwright import builds

JOBS = {"trainer": 2, "server": 3}  # the server's ranks come first, because roles are sorted by name
SHAPE = (9, 7)


def _layouts(link: Any) -> tuple[sw.Layout, sw.Layout]:
    src = sw.Layout(sw.Mesh({"dp": 2}, link.ranks("trainer")), SHAPE, ["S(0)"])
    return src, sw.Layout(sw.Mesh({"tp": 3}, link.ranks("server")), SHAPE, ["S(1)"])


def _move(shared: Any, role: str, rank: int) -> None:
    link = sw.connect(shared, role, 5, declared={"version": 1})
    assert link.ranks("server") == (0, 1, 2) and link.ranks("trainer") == (3, 4)
    assert link.rank == link.ranks(role)[rank] and link.world_size == 5
    assert dist.get_rank(link.group) == link.rank and dist.get_rank() == rank
    src, dst = _layouts(link)
    link.compare({"weights": [src, dst]})
    full = oracle.global_tensor(SHAPE, torch.float32, 1)
    gradient = oracle.global_tensor(SHAPE, torch.float32, 2)
    held = parts.part_of(full, src, link.rank) if role == "trainer" else torch.empty(0)
    wanted = parts.part_of(full, dst, link.rank) if role == "server" else torch.empty(0)
    held.requires_grad_()
    moved = sw.redistribute_local(held, src, dst, group=link.group)
    assert oracle.difference(moved.detach(), wanted) is None
    moved.backward(parts.part_of(gradient, dst, link.rank) if role == "server" else torch.empty(0))
    if role == "trainer":
        assert held.grad is not None
        assert oracle.difference(held.grad, parts.part_of(gradient, src, link.rank)) is None
    # A sum over the ranks of one job, sent to one rank of the other.
    pending = sw.Layout(sw.Mesh({"dp": 2}, link.ranks("trainer")), SHAPE, ["P(sum)"])
    on_one_server = sw.Layout(sw.Mesh({"one": 1}, link.ranks("server")[1:2]), SHAPE, ["R"])
    share = full * (1 + rank) if role == "trainer" else None
    summed = (
        sw.redistribute_local(share, pending, on_one_server, group=link.group)
        if role == "trainer" or rank == 1
        else None
    )
    if role == "server" and rank == 1:
        assert summed is not None and torch.equal(summed, full * 3)
    # In debug mode the ranks of both jobs compare their calls.
    sw.debug.check_ranks(timeout_seconds=30)
    for _ in range(3):
        assert oracle.difference(sw.redistribute_local(held.detach(), src, dst, group=link.group), wanted) is None
    with pytest.raises(RuntimeError, match=r"dst: \[S\(1\)\] on ranks \[0, 1, 3, 4\]; \[S\(0\)\] on ranks \[2\]"):
        other = sw.Layout(dst.mesh, SHAPE, ["S(0)" if link.rank == 2 else "S(1)"])
        sw.redistribute_local(held.detach(), src, other, group=link.group)
    sw.debug.check_ranks(False)
    # Each job's own world still works.
    own = torch.ones(1)
    dist.all_reduce(own)
    assert own.item() == JOBS[role]
    link.close()
    again = sw.connect(shared, role, 5)
    assert again.group is not link.group
    assert oracle.difference(sw.redistribute_local(held.detach(), src, dst, group=again.group), wanted) is None


def test_tensors_move_between_jobs(tmp_path: pathlib.Path) -> None:
    jobs.launch(tmp_path, _move, JOBS)


def _transfer(shared: Any, role: str, rank: int) -> None:
    link = sw.connect(shared, role, 5)
    src, dst = _layouts(link)
    full = oracle.global_tensor(SHAPE, torch.float32, 1)
    pending = sw.Layout(src.mesh, SHAPE, ["P(sum)"])
    state = None
    if role == "trainer":
        state = {"w": (parts.part_of(full, src, link.rank), src), "sum": (full * (1 + rank), pending)}
    calls: list[tuple[int, int, str]] = []
    t = sw.transfer(state, {"w": dst, "sum": dst}, progress=lambda *said: calls.append(said), group=link.group)
    t.start().wait()
    received = dict(t.receive())
    if role == "server":
        for tensors in (t.tensors, received):
            assert oracle.difference(tensors["w"], parts.part_of(full, dst, link.rank)) is None
            assert oracle.difference(tensors["sum"], parts.part_of(full * 3, dst, link.rank)) is None
    assert len(calls) == 4
    with pytest.raises(ValueError) as raised:
        sw.transfer({"w": (torch.zeros(1), src)} if link.rank == 4 else state, {"w": dst}, group=link.group)
    assert "source w: the local tensor must have shape" in str(raised.value) and "(on rank 4)" in str(raised.value)
    mesh = DeviceMesh("cpu", list(range(JOBS[role])))
    state = {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}
    with pytest.raises(ValueError, match="source w: .*must be a pair of a local tensor and a Layout.*, got a DTensor"):
        sw.transfer(state if role == "trainer" else None, {"w": dst}, group=link.group)
    link.close()


def test_transfers_between_jobs(tmp_path: pathlib.Path) -> None:
    jobs.launch(tmp_path, _transfer, JOBS)


def _wait_for_all(shared: Any, key: str) -> None:
    shared.add(key, 1)
    while shared.add(key, 0) < 5:
        time.sleep(0.02)


def _late_start(shared: Any, role: str, rank: int) -> None:
    """One rank starts a transfer after the connection's timeout, which is shorter than the default group's."""
    _wait_for_all(shared, "here")
    link = sw.connect(shared, role, 5, timeout_seconds=5)
    src, dst = _layouts(link)
    held = torch.ones(src.local_shape(link.rank)) if role == "trainer" else None
    t = sw.transfer({"w": (held, src)} if role == "trainer" else None, {"w": dst}, group=link.group)
    if (role, rank) == ("server", 1):
        shared.get("late")
    with pytest.raises(RuntimeError, match=r"waited 5 s for ranks \[1\] to call the start of a transfer"):
        t.start()
    shared.set("late", "")
    t.start().wait()
    link.close()


def test_starts_have_the_timeout_of_the_connection(tmp_path: pathlib.Path) -> None:
    jobs.launch(tmp_path, _late_start, JOBS)


def _connect_with_a_late_rank(shared: Any, role: str, rank: int) -> None:
    """One rank calls only after the others timed out. Then all connect twice."""
    if (role, rank) != ("server", 1):
        with pytest.raises(RuntimeError, match="waited 1 s for 5 ranks"):
            sw.connect(shared, role, 5, timeout_seconds=1)
    _wait_for_all(shared, "failed")
    for _ in range(2):
        link = sw.connect(shared, role, 5, timeout_seconds=30)
        assert link.ranks("trainer") == (3, 4)
        link.close()


def test_connect_may_be_retried(tmp_path: pathlib.Path) -> None:
    jobs.launch(tmp_path, _connect_with_a_late_rank, JOBS)


def _connect_with_other_backends(shared: Any, role: str, rank: int) -> None:
    """The jobs' default groups have different backends, so that they must name one for the connection."""
    if role == "trainer":
        dist.destroy_process_group()
        store = dist.PrefixStore("other", shared)
        dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=JOBS[role])
    differing = "backend must be the same in all jobs, got cpu:gloo .*trainer 0, 1.*; cpu:gloo,cuda:gloo .*server 0"
    with pytest.raises(RuntimeError, match=differing):
        sw.connect(shared, role, 5)
    link = sw.connect(shared, role, 5, backend="cpu:gloo")
    assert str(dist.get_backend_config(link.group)) == "cpu:gloo"
    src, dst = _layouts(link)
    full = oracle.global_tensor(SHAPE, torch.float32, 1)
    wanted = parts.part_of(full, dst, link.rank) if link.rank in dst.mesh.ranks else None
    held = parts.part_of(full, src, link.rank) if role == "trainer" else None
    moved = sw.redistribute_local(held, src, dst, group=link.group)
    assert wanted is None or oracle.difference(moved, wanted) is None
    link.close()


def test_jobs_with_different_default_backends_name_one(tmp_path: pathlib.Path) -> None:
    jobs.launch(tmp_path, _connect_with_other_backends, JOBS)


def _message_of(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call()
    return str(raised.value)


def _differing_connects(shared: Any, role: str, rank: int) -> list[str]:
    """Returns the errors of several connections over one store."""
    mesh = sw.Mesh({"tp": 3})
    shape = SHAPE if role == "server" else (9, 8)
    told = {"steps": 3, "weights": sw.Layout(mesh, shape, ["S(0)"])} | ({"extra": "x"} if role == "trainer" else {})
    size = 5 if (role, rank) != ("trainer", 1) else 6
    connects: list[Callable[[], Any]] = [
        lambda: sw.connect(shared, role, 5, declared=told, name="a"),
        lambda: sw.connect(shared, role, size, name="b", timeout_seconds=2),
        lambda: sw.connect(shared, "trainer", 5, name="c"),
        lambda: sw.connect(shared, role, 7, name="d", timeout_seconds=1),
    ]
    messages = []
    for connect in connects:
        messages.append(_message_of(connect))
        dist.barrier()
    return messages


def test_all_ranks_report_differences(tmp_path: pathlib.Path) -> None:
    said = jobs.launch(tmp_path, _differing_connects, JOBS)
    declared, world_size, role, late = zip(*said.values(), strict=True)
    assert len(set(declared)) == 1
    for text in (
        "weights: ",
        "[9, 7]",
        "[9, 8]",
        " on server 0, server 1",
        " on trainer 0",
        "extra: not given on server 0",
    ):
        assert text in declared[0], declared[0]
    assert "steps" not in declared[0]
    assert any("must be the same in all jobs, got 5 (" in text and "; 6 (trainer 1)" in text for text in world_size)
    expected = ("world_size must be the same in all jobs", " called: ", "must be all ranks of")
    assert all(any(part in text for part in expected) for text in world_size), world_size
    assert all("must be all ranks of two or more jobs" in text for text in role), role
    assert all("waited 1 s for 7 ranks, but only 5 called: server 0, 1, 2; trainer 0, 1" in t for t in late), late


def _differing_planning_inputs(shared: Any, role: str, rank: int) -> list[str]:
    """Returns errors about inputs of planning other than names, shapes and placements, over one connection."""
    is_server = role == "server"
    link = sw.connect(shared, f"{role}/one", 5, declared={"same": 1})
    mesh = sw.Mesh({"dp": 2}, link.ranks("trainer/one"))
    slow = sw.Topology("slow", 0, 1, 1, sw.planning.Link(1, 1), sw.planning.Link(1, 2 + is_server))
    placed = sw.Layout(sw.Mesh({"dp": 2}, mesh.ranks, topology=slow), SHAPE, ["S(0)"])
    layouts = [sw.Layout(mesh, (9, 7 + (is_server and i == 30)), ["S(0)"]) for i in range(60)]
    messages = [
        _message_of(lambda: link.compare({"placed": placed})),
        _message_of(lambda: link.compare({"l": layouts})),
    ]
    src, dst = sw.Layout(mesh, SHAPE, ["S(0)"]), sw.Layout(mesh, SHAPE, ["S(1)"])
    with pytest.MonkeyPatch.context() as changing:
        if is_server:
            changing.setenv("SHARDWRIGHT_TOPOLOGY", "64x8")
        messages.append(_message_of(lambda: link.compare({"same": 1})))
        messages.append(_message_of(lambda: sw.connect(shared, role, 5, name="by tables")))
    plan = sw.plan(src, dst, backend="gloo")
    if is_server:
        sw.pin(plan)
    messages.append(_message_of(lambda: link.compare({"same": 1})))
    if is_server:
        sw.unpin(plan)
    with pytest.MonkeyPatch.context() as changing:
        if is_server:
            changing.setattr(builds, "version", lambda: "0.0.7")
        messages.append(_message_of(lambda: sw.connect(shared, role, 5, name="by version")))
    link.compare({"same": 1, "roles": [src, dst, mesh]})
    return messages


def test_inputs_of_planning_are_compared(tmp_path: pathlib.Path) -> None:
    said = list(jobs.launch(tmp_path, _differing_planning_inputs, JOBS).values())
    assert all(messages == said[0] for messages in said)
    placed, long, environment, connecting, pins, version = said[0]
    assert "placed: " in placed and '"ps_per_kib": 3' in placed and '"ps_per_kib": 2' in placed, placed
    assert " on server/one 0, server/one 1, server/one 2; " in placed and " on trainer/one 0" in placed, placed
    assert "[9, 8]" in long and len(long) < 1000, long
    for text in (environment, connecting):
        assert "topology of the environment: 64x8 with hash " in text and "; none on trainer" in text, text
        assert "pinned" not in text and "version" not in text, text
    assert "pinned plans: 1 with hash " in pins and "; none on trainer/one 0" in pins, pins
    assert "version of shardwright: 0.0.7 on server 0, " in version, version


def test_invalid_connect_arguments() -> None:
    store = dist.HashStore()
    for given, text in (
        ((None, "a", 2), "store must be a torch.distributed.Store, got a NoneType"),
        ((store, "", 2), "role must be a nonempty string, got ''"),
        ((store, "a", 1), "world_size must be .* at least 2, got 1"),
        ((store, "a", "x"), "world_size"),
    ):
        with pytest.raises(ValueError, match=text):
            sw.connect(*given)
    with pytest.raises(ValueError, match=r"declared\['w'\] must be .*, got a set"):
        sw.connect(store, "a", 2, declared={"w": set()})
    with pytest.raises(RuntimeError, match="not initialized"):
        sw.connect(store, "a", 2)
