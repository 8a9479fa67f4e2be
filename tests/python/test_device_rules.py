"""Rules for devices with streams, tested on the device of tests/async_device with its strict process groups.

Each test has its own processes, because a broken rule leaves groups unusable.
"""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist

import async_tests  # noqa: F401  (so that async_device is found)
import dtensors
import oracle
import shardwright as sw
from shardwright._native import _runtime
from shardwright.fsdp import scheduler
from shardwright.runtime import executables, groups

DEVICE = "asyncdev"
SHORT_SECONDS = 5.0


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    import async_device

    async_device.build()


class Move:
    """One redistribute on the ranks of a mesh, compared with the global tensor."""

    def __init__(
        self, mesh: sw.Mesh, shape: tuple[int, ...], src: tuple[str, ...], dst: tuple[str, ...], index: int = 0
    ) -> None:
        full = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
        coordinate = mesh.coordinate(dist.get_rank())
        self.local = oracle.local(full, mesh.shape, src, coordinate).to(f"{DEVICE}:{index}")
        self.expected = oracle.local(full, mesh.shape, dst, coordinate)
        self.layouts = [sw.Layout(mesh, shape, dtensors.to_placements(placements)) for placements in (src, dst)]

    def start(self, async_op: bool = False) -> torch.Tensor:
        return sw.redistribute_local(self.local, *self.layouts, async_op=async_op)

    def check(self, actual: torch.Tensor) -> None:
        wrong = oracle.difference(actual, self.expected)
        assert wrong is None, wrong

    def run(self) -> None:
        self.check(self.start())


def _gather(mesh: sw.Mesh | None = None) -> Move:
    return Move(mesh or sw.Mesh({"a": 2}), (8, 12), ("S(0)",), ("R",))


def _messages() -> Move:
    return Move(sw.Mesh({"a": 2}), (5, 4), ("S(0)",), ("R",))  # parts differ in size


# ------------------------------------------------------------------------------------------------------ connecting


def _captured_first(rank: int, size: int, path: str, prepares: bool) -> None:
    import async_device
    from async_device import ranks, strict

    ranks.begin(rank, size, path, SHORT_SECONDS, alone=True)
    move = _gather()
    if not prepares:
        with pytest.raises(RuntimeError, match=f"no communicator on {DEVICE}:0 yet"), async_device.captured():
            move.start()
        return
    sw.prepare(sw.Mesh({"a": 2}), device_type=DEVICE)
    assert strict.counters()["rendezvous"] == 1
    with async_device.captured() as graph:
        result = move.start() + 0
    graph.replay()
    move.check(result)


@pytest.mark.parametrize("prepares", [True, False])
def test_capture_needs_connected_groups(prepares: bool) -> None:
    from async_device import ranks

    ranks.run(_captured_first, 2, prepares)


def _threads_that_connect(rank: int, size: int, path: str) -> None:
    from async_device import ranks

    ranks.begin(rank, size, path, 20.0, alone=True)
    move = _gather()
    if rank == 1:
        time.sleep(0.8)
        move.run()
        return move.run()
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(move.start())) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert len(found) == 2  # the second thread has waited for the communicator
    for result in found:
        move.check(result)
    return None


def test_second_thread_waits_until_the_group_is_connected() -> None:
    from async_device import ranks

    ranks.run(_threads_that_connect, 2)


def _in_an_open_group_call(rank: int, size: int, path: str) -> None:
    from async_device import ranks

    ranks.begin(rank, size, path, SHORT_SECONDS, alone=True, holds_thread=True)
    move, other = _gather(), dist.new_group([0, 1])
    move.run()
    dist.all_reduce(ranks.numbers(1.0), group=other)
    with dist.distributed_c10d._coalescing_manager(group=other, device=torch.device(DEVICE, 0)):
        with pytest.raises(RuntimeError, match="_coalescing_manager"):
            move.start()
        with pytest.raises(RuntimeError, match="_coalescing_manager"):
            sw.redistribute_many([(move.local, *move.layouts)])
    move.run()


def test_redistributes_inside_an_open_group_call_raise() -> None:
    from async_device import ranks

    ranks.run(_in_an_open_group_call, 2)


# Driver calls of a redistribute whose program is cached: maximum number of launches, exact numbers of event records and
# of event waits. They determine the time of redistributes of a few kilobytes.
BUDGETS = {
    ("S(0)", "R", False): (2, 1, 0),
    ("P(sum)", "R", False): (3, 1, 0),
    ("S(0)", "S(1)", False): (5, 1, 0),
    ("S(0)", "S(1)", True): (4, 7, 3),
}


def _counted(rank: int, size: int, path: str) -> None:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    looked_up = []
    find_or_make = groups.find_or_make
    groups.find_or_make = lambda *args, **how: looked_up.append(args) or find_or_make(*args, **how)  # type: ignore
    counted = {}
    for src, dst, async_op in BUDGETS:
        move = Move(sw.Mesh({"a": 2}), (8, 12), (src,), (dst,))
        for _ in range(3):
            looked_up.clear()
            before = native.counts()
            result = move.start(async_op)
            after = native.counts()
            move.check(result + 0)
        counted[src, dst, async_op] = tuple(after[name] - before[name] for name in ("works", "events", "waits"))
        assert not looked_up
    for key, (launches, *events_and_waits) in counted.items():
        assert launches <= BUDGETS[key][0] and events_and_waits == list(BUDGETS[key][1:]), counted


def test_calls_keep_their_launch_budget() -> None:
    from async_device import ranks

    ranks.run(_counted, 2)


# -------------------------------------------------------------------------------------------------------- failed runs


def _refused_batch(rank: int, size: int, path: str) -> None:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    move = Move(sw.Mesh({"a": 2}), (64, 64), ("S(0)",), ("S(1)",))
    items = [(move.local, *move.layouts)]
    move.check(sw.redistribute_many(items, bucket_bytes=1024)[0])
    for turn in range(4):
        if turn % 2 == rank:
            time.sleep(0.05)  # the other rank's first round is in flight when its second one is refused
        native.refuse_message(3)
        with pytest.raises(RuntimeError, match="was refused"):
            sw.redistribute_many(items, bucket_bytes=1024)
        taken = [torch.full((n,), -5.0, device=DEVICE) for n in (128, 256, 512) for _ in range(32)]
        native.synchronize()
        for tensor in taken:
            assert tensor.cpu().eq(-5.0).all(), "a round wrote to memory that the batch had freed"


def test_failed_batch_frees_buckets_after_its_rounds() -> None:
    from async_device import ranks

    ranks.run(_refused_batch, 2)


def _refused_in_a_later_step(rank: int, size: int, path: str) -> None:
    """Refuses the second message of a batch of the second step on rank 0. The first one receives."""
    from async_device import ranks

    native = ranks.begin(rank, size, path, 2.0, alone=True)
    mesh = sw.Mesh({"a": 2})
    src, middle, dst = (sw.Layout(mesh, (64, 65), [p]) for p in ("S(0)", "S(1)", "R"))
    plan = sw.plan(src, dst, through=[middle])
    executable = executables.bind(plan)
    local = torch.ones(32, 65, device=DEVICE)
    executable.run(local)
    native.synchronize()
    if rank == 1:
        native.sleep(300)
        executable.start(local)
        ranks.failure_of(native)  # rank 0 sends nothing
        return
    native.refuse_message(2)
    with pytest.raises(RuntimeError, match="was refused"):
        executable.start(local)
    taken = []
    device_type = torch.accelerator.current_stream().device_type
    for number in range(33, 65):  # one of these high-priority streams runs the later steps of programs
        with torch.Stream(stream_id=number, device_index=0, device_type=device_type):
            taken += [torch.full((n,), -5.0, device=DEVICE) for n in (64 * 32, 64 * 33, 64 * 65)]
    native.synchronize()
    for tensor in taken:
        assert tensor.cpu().eq(-5.0).all(), "a transfer wrote to memory that the run had freed"


def test_failed_async_run_frees_memory_after_its_transfers() -> None:
    from async_device import ranks

    ranks.run(_refused_in_a_later_step, 2)


# ------------------------------------------------------------------------------------------------ order among streams


def _on_two_streams(rank: int, size: int, path: str, async_op: bool) -> None:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    mesh = sw.Mesh({"a": 2, "b": 2})
    by_rows = Move(mesh, (8, 12), ("S(0)", "R"), ("R", "R"))
    by_columns = Move(mesh, (8, 12), ("R", "S(1)"), ("R", "R"))  # uses another group
    for move in (by_rows, by_columns):
        move.run()
    first_stream, second_stream = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    done = torch.Event(device=DEVICE)
    native.synchronize()
    with first_stream:
        native.sleep(600)
        result = by_rows.start(async_op) + 0
        done.record(first_stream)
    with second_stream:
        second = by_columns.start()
    second_stream.synchronize()
    deadline = time.monotonic() + 0.4  # time for the work after the program; shorter than the sleep before it
    while not done.query():
        assert time.monotonic() < deadline, "two communicators were used at the same time"
        time.sleep(0.001)
    by_rows.check(result)
    by_columns.check(second)


@pytest.mark.parametrize("async_op", [False, True])
def test_programs_on_two_streams_do_not_overlap(async_op: bool) -> None:
    from async_device import ranks

    ranks.run(_on_two_streams, 4, async_op)


def _events_made(rank: int, size: int, path: str) -> None:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    move = Move(sw.Mesh({"a": 2}), (8, 12), ("S(0)",), ("S(1)",))
    made = []
    for _ in range(8):
        for async_op in (True, False):
            move.check(move.start(async_op) + 0)
        sw.redistribute_many([(move.local, *move.layouts)])
        native.synchronize()
        made.append(_runtime.num_stream_events_made())
    assert made[-1] == made[3] and made[-1] > 0


def test_events_are_reused() -> None:
    from async_device import ranks

    ranks.run(_events_made, 2)


# -------------------------------------------------------------------------------------------------------- two devices


def _on_the_second_device(rank: int, size: int, path: str) -> None:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    mesh = sw.Mesh({"a": 2})
    for src, dst in ((("S(0)",), ("R",)), (("P(sum)",), ("S(1)",)), (("S(0)",), ("S(1)",))):
        move = Move(mesh, (7, 6), src, dst, index=1)
        for async_op in (False, True):
            move.check(move.start(async_op) + 0)
        (found,) = sw.redistribute_many([(move.local, *move.layouts)]) if "P(sum)" not in src else (move.start(),)
        move.check(found)
    assert native.current_device() == 0
    clock = scheduler.Clock(torch.device(DEVICE, 1))
    clock.mark()
    native.set_device(1)
    native.sleep(100)
    native.set_device(0)
    clock.mark()
    assert clock.intervals_ps()[0] >= 90e9, "the time of another device's stream"


def test_tensors_may_be_on_another_device_than_the_current_one() -> None:
    from async_device import ranks

    ranks.run(_on_the_second_device, 2)


def _capture_on_the_second_device(rank: int, size: int, path: str) -> None:
    import async_device
    from async_device import ranks

    native = ranks.begin(rank, size, path, SHORT_SECONDS, alone=True)
    native.set_device(1)
    with async_device.captured():
        native.set_device(0)
        try:
            assert groups._is_capturing()
            assert _runtime.is_capturing(f"{DEVICE}:1") and not _runtime.is_capturing(f"{DEVICE}:0")
        finally:
            native.set_device(1)
    assert not groups._is_capturing()


def test_capture_on_another_device_is_detected() -> None:
    from async_device import ranks

    ranks.run(_capture_on_the_second_device, 1)


# ------------------------------------------------------------------------------------------------------------- memory


def _arena_views(rank: int, size: int, path: str) -> None:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True, records_streams=True)
    native.refuse_unknown_memory(True)  # like cudaMallocAsync
    move = _messages()
    arena = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    view = torch.empty_like(move.local)
    _runtime.view_arena(view, arena, 512)
    move.local = view.copy_(move.local)
    for async_op in (False, True):
        move.check(move.start(async_op) + 0)
    # Two views of one arena have separate memory.
    part, full = torch.empty(4, device=DEVICE), torch.empty(8, device=DEVICE)
    _runtime.view_arena(part, arena, 1024)
    _runtime.view_arena(full, arena, 2048)
    part.copy_(torch.arange(8.0).chunk(2)[rank])
    flat = [sw.Layout(sw.Mesh({"a": 2}), (8,), [placement]) for placement in ("S(0)", "R")]
    sw.redistribute_local(part, *flat, out=full)
    assert full.tolist() == list(range(8))
    _runtime.release_memory(part, "it was given back")
    _runtime.release_memory(full, "it was given back")
    kept = view.cpu()
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    copy = torch.empty_like(kept, device=DEVICE)
    with side:
        native.sleep(100)
        copy.copy_(view)
    _runtime.record_use(view, side)
    _runtime.release_memory(view, "it was given back")
    del arena
    gc.collect()
    noise = [torch.full((4096,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    native.synchronize()
    assert torch.equal(copy.cpu(), kept), "memory of an arena was used again while a stream still read it"
    del noise


def test_streams_are_recorded_for_the_arena_of_a_view() -> None:
    from async_device import ranks

    ranks.run(_arena_views, 2)


# ---------------------------------------------------------------------------------------------------------------- end


def _destroyed_before_its_graph(rank: int, size: int, path: str) -> None:
    import async_device
    from async_device import ranks

    ranks.begin(rank, size, path, SHORT_SECONDS, alone=True, refuses_to_end=True)
    move = _gather()
    move.run()
    with async_device.captured() as graph:
        result = move.start() + 0
    graph.replay()
    move.check(result)
    with pytest.raises(RuntimeError, match="1 captured graphs have operations of it"):
        dist.destroy_process_group()
    del graph
    gc.collect()
    dist.destroy_process_group()  # shardwright does not keep the graph alive


def test_group_ends_once_its_graphs_are_gone() -> None:
    from async_device import ranks

    ranks.run(_destroyed_before_its_graph, 2)
