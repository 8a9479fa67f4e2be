"""Tests of waits, memory and order among streams, on the device of tests/async_device.

The device runs work later than the host submits it. A read that is too early or too late returns poison.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

Placements = tuple[str, ...]
DEVICE = "asyncdev"

# Moves with one transfer and with several, packed and in place, and with sums. Without a memory limit none has rounds.
MOVES: list[tuple[tuple[int, ...], Placements, Placements]] = [
    ((4,), ("S(0)",), ("R",)),
    ((4,), ("S(1)",), ("R",)),
    ((4,), ("S(0)",), ("S(1)",)),
    ((4,), ("P(sum)",), ("S(1)",)),
    ((4,), ("P(sum)",), ("R",)),
    ((2, 2), ("S(0)", "S(1)"), ("S(1)", "S(0)")),
    ((2, 2), ("P(sum)", "S(0)"), ("S(1)", "R")),
]
SHAPES = [(8, 12), (7, 5)]


def _device() -> type:
    import async_device

    return async_device.native()


def _arguments(sizes: Sequence[int], shape: Sequence[int], src: Placements, dst: Placements, seed: int):
    """Returns the local tensor, the layouts and the expected result of one move."""
    mesh = get_mesh(sizes)
    tensor = oracle.global_tensor(shape, torch.float32, seed, reducible=True)
    layouts = [sw.Layout(sw.Mesh(mesh), shape, dtensors.to_placements(p)) for p in (src, dst)]
    return dtensors.my_local(tensor, mesh, src), layouts, dtensors.my_local(tensor, mesh, dst).cpu()


def _check(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    wrong = oracle.difference(actual, expected)
    assert wrong is None, f"{what}: {wrong}"


# ----------------------------------------------------------------------------- waits on another stream


def _waited_for_on_another_stream(rounds: int) -> None:
    streams = [torch.Stream(device=DEVICE) for _ in range(3)]
    for turn, ((sizes, src, dst), shape) in itertools.product(range(rounds), itertools.product(MOVES, SHAPES)):
        begins, ends = streams[turn % 3], streams[(turn + 1) % 3]
        with begins:
            local, layouts, expected = _arguments(sizes, shape, src, dst, turn)
            result = sw.redistribute_local(local, *layouts, async_op=True)
            # These tensors reuse memory that was freed too early, if any.
            noise = [torch.full_like(local, -1.0) for _ in range(4)]
        with ends:
            found = result + 0
            del result
            more = [torch.full_like(found, -2.0) for _ in range(4)]
            _check(found, expected, (sizes, src, dst, shape))
        del noise, more, local


def test_redistribute_can_be_waited_for_on_another_stream(async_pool: Pool) -> None:
    async_pool.run(_waited_for_on_another_stream, 4, 4)


def _batch_waited_for_on_another_stream(rounds: int) -> None:
    through_host = sw.stats()["through_host"]
    streams = [torch.Stream(device=DEVICE) for _ in range(3)]
    for turn in range(rounds):
        begins, ends = streams[turn % 3], streams[(turn + 1) % 3]
        cases = [case for case in MOVES if case[0] == (4,) and not case[1][0].startswith("P")]
        with begins:
            moves = [_arguments(sizes, shape, src, dst, turn) for (sizes, src, dst) in cases for shape in SHAPES]
            items = [(local, *layouts) for local, layouts, _ in moves]
            pending = sw.redistribute_many(items, bucket_bytes=120, buckets=2, async_op=True)
            noise = [torch.full((256,), -1.0, device=DEVICE) for _ in range(4)]
        assert isinstance(pending, sw.runtime.ManyHandle)
        with ends:
            if turn % 2:
                pending.wait_for_sources()
                for local, _, _ in items:
                    local.fill_(-2.0)
            for number, (_, _, expected) in enumerate(moves):
                _check(pending.wait_for(number), expected, number)
            pending.wait()
        del noise, pending
    assert sw.stats()["through_host"] == through_host


def test_tensor_of_batch_can_be_waited_for_on_another_stream(async_pool: Pool) -> None:
    async_pool.run(_batch_waited_for_on_another_stream, 4, 6)


def _changes_waited_for_on_another_stream(rounds: int) -> None:
    """Changed elements are copied on each rank, or sent to the other. The sources are overwritten at once."""
    rank, streams = dist.get_rank(), [torch.Stream(device=DEVICE) for _ in range(3)]
    mesh = sw.Mesh({"a": 2})
    src, dst = (sw.Layout(mesh, (64, 64), [kind]) for kind in ("S(0)", "S(1)"))
    full = torch.arange(64.0 * 64).view(64, 64)
    local = torch.zeros(32, 64, device=DEVICE)
    sources = {"sent": (local, src), "own": (local.clone(), src)}
    t = sw.transfer(sources, {"sent": dst, "own": src}, only_changed=True)
    for turn in range(rounds):
        full[turn % 64, ::8] += 1
        with streams[turn % 3]:
            for source, _ in sources.values():
                source.copy_(full.chunk(2)[rank])
            handle = t.start()
        with streams[(turn + 1) % 3]:
            handle.source_free.wait()
            for source, _ in sources.values():
                source.fill_(-2.0)
        with streams[(turn + 2) % 3]:
            while turn % 2 and not handle.is_done():
                time.sleep(0.001)
            if turn % 2 == 0:
                handle.wait()
            _check(t.tensors["sent"], full.chunk(2, 1)[rank], turn)
            _check(t.tensors["own"], full.chunk(2)[rank], turn)
            handle.wait()
        assert turn == 0 or handle.report.reason == ""


def test_changes_can_be_waited_for_on_another_stream(async_pool: Pool) -> None:
    async_pool.run(_changes_waited_for_on_another_stream, 2, 9)


def _changes_on_another_device() -> None:
    """The tensors are not on the current device of the thread, so neither are the messages."""
    rank = dist.get_rank()
    layouts = [sw.Layout(sw.Mesh({"a": 1}, [owner]), (64,), ["R"]) for owner in range(2)]
    source, destination = (torch.zeros(64, device=f"{DEVICE}:1") for _ in range(2))
    state, to = ({"w": (source, layouts[0])}, {}) if rank == 0 else (None, {"w": (destination, layouts[1])})
    t = sw.transfer(state, to, only_changed=True)
    t.start().wait()
    source[3] = 5.0
    handle = t.start()
    made = handle._run._in_flight
    assert {x.device.index for x in (made.sent, *made.received)} == {1}
    handle.wait()
    assert handle.report.reason == "" and (rank == 0 or destination.cpu().nonzero().tolist() == [[3]])


def test_changes_are_sent_from_the_device_of_the_tensors(async_pool: Pool) -> None:
    async_pool.run(_changes_on_another_device, 2)


# -------------------------------------------------------------------------------------- without a wait


def _unawaited(rounds: int) -> None:
    native = _device()
    kept = []
    for turn, ((sizes, src, dst), shape) in itertools.product(range(rounds), itertools.product(MOVES, SHAPES)):
        local, layouts, _ = _arguments(sizes, shape, src, dst, turn)
        sw.redistribute_local(local, *layouts, async_op=True)
        del local
        # These tensors reuse memory that was freed while a transfer still reads or writes it, if any.
        kept.append([torch.full((size,), float(turn), device=DEVICE) for size in (4, 16, 64, 96, 256)])
        if len(kept) > 4:
            for tensor in kept.pop(0):
                assert bool((tensor == tensor[0]).all()), "a transfer wrote to memory that was freed"
    local, layouts, expected = _arguments((4,), (8, 12), ("S(0)",), ("R",), 99)
    _check(sw.redistribute_local(local, *layouts, async_op=True) + 0, expected, "after those")
    del local, kept
    native.synchronize()
    native.empty_cache()


def test_unawaited_redistribute_does_not_corrupt_memory(async_pool: Pool) -> None:
    async_pool.run(_unawaited, 4, 6)


def _memory_of_unawaited() -> tuple[int, int]:
    native = _device()
    used = []
    for _ in range(12):
        local, layouts, _ = _arguments((4,), (64, 64), ("S(0)",), ("S(1)",), 1)
        sw.redistribute_local(local, *layouts, async_op=True)
        del local
        native.synchronize()
        used.append(native.allocated_bytes())
    return used[3], used[-1]


def test_unawaited_redistribute_does_not_leak(async_pool: Pool) -> None:
    for early, late in async_pool.run(_memory_of_unawaited, 4):
        assert late <= early


# ---------------------------------------------------------------------------------- in captured graphs


def _captured(sizes: Sequence[int], async_op: bool) -> None:
    import async_device

    mesh = get_mesh(sizes)
    shape = (9, 10)
    kinds = ("R", "S(0)", "S(1)", "P(sum)")
    for src in itertools.product(kinds, repeat=len(sizes)):
        for dst in itertools.product(kinds[:-1], repeat=len(sizes)):
            before, after = (sw.Layout(sw.Mesh(mesh), shape, dtensors.to_placements(p)) for p in (src, dst))
            tensor = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
            local = dtensors.my_local(tensor, mesh, src)
            _check(sw.redistribute_local(local, before, after), dtensors.my_local(tensor, mesh, dst), (src, dst))
            with async_device.captured() as graph:
                result = sw.redistribute_local(local, before, after, async_op=async_op)
                result = result + 0
            for turn in range(2, 4):
                tensor = oracle.global_tensor(shape, torch.float32, turn, reducible=True)
                local.copy_(dtensors.my_local(tensor, mesh, src))
                graph.replay()
                _check(result, dtensors.my_local(tensor, mesh, dst), (src, dst, "replay", turn))


@pytest.mark.parametrize("async_op", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_captured_redistributes_see_new_input(async_pool: Pool, sizes: tuple[int, ...], async_op: bool) -> None:
    size = 1
    for n in sizes:
        size *= n
    async_pool.run(_captured, size, sizes, async_op)


def _wait_across_capture() -> None:
    import async_device

    local, layouts, expected = _arguments((2,), (8, 12), ("S(0)",), ("S(1)",), 1)
    _check(sw.redistribute_local(local, *layouts), expected, "before")
    started = sw.redistribute_local(local, *layouts, async_op=True)
    with pytest.raises(RuntimeError, match="Wait for it before the capture begins"), async_device.captured():
        started + 0
    with pytest.raises(RuntimeError, match="does not wait for"), async_device.captured():
        started = sw.redistribute_local(local, *layouts, async_op=True)
    with pytest.raises(RuntimeError, match="Wait for it before the capture ends"):
        started + 0
    _check(sw.redistribute_local(local, *layouts), expected, "after")


def test_wait_across_capture_boundary_raises(async_pool: Pool) -> None:
    async_pool.run(_wait_across_capture, 2)


def _traced() -> int:
    import async_device

    local, layouts, _ = _arguments((2,), (8, 12), ("S(0)",), ("S(1)",), 1)
    sw.redistribute_local(local, *layouts)
    with sw.debug.trace() as trace:
        sw.redistribute_local(local, *layouts)
        with async_device.captured() as graph:
            sw.redistribute_local(local, *layouts)
        graph.replay()
    return len(trace)


def test_trace_omits_captured_redistributes(async_pool: Pool) -> None:
    for events in async_pool.run(_traced, 2):
        assert events > 0
