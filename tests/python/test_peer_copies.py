"""Tests of transfers by copies between the memory of peers (`sw.prepare(peer_arena_bytes=...)`).

They run on the device of tests/async_device: processes share its symmetric memory, and its signals wait on streams, as
CUDA's do. Each test has its own processes, because arenas live as long as their group.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import async_tests  # noqa: F401  (so that async_device is found)
import dtensors
import oracle
import shardwright as sw

# Slots of 256 bytes on four ranks: parts of several hundred bytes are sent in several rounds, the last one short.
ARENA_BYTES = 4 * 2 * 256
KINDS = ("R", "S(0)", "S(1)", "P(sum)")


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    import async_device

    async_device.build()


def _layouts(mesh: sw.Mesh, shape: Sequence[int], *placements: Sequence[str]) -> list[sw.Layout]:
    return [sw.Layout(mesh, list(shape), dtensors.to_placements(p)) for p in placements]


class _Move:
    """One redistribute and its expected result."""

    def __init__(self, mesh: sw.Mesh, shape: Sequence[int], src: Sequence[str], dst: Sequence[str]) -> None:
        self.mesh, self.shape, self.src, self.dst = mesh, shape, src, dst
        self.layouts = _layouts(mesh, shape, src, dst)

    def part(self, seed: int, placements: Sequence[str]) -> torch.Tensor:
        tensor = oracle.global_tensor(self.shape, torch.float32, seed, reducible=True)
        return oracle.local(tensor, self.mesh.shape, placements, self.mesh.coordinate(dist.get_rank()))

    def check(self, actual: torch.Tensor, seed: int, what: str = "") -> None:
        wrong = oracle.difference(actual, self.part(seed, self.dst))
        assert wrong is None, f"{self.src} -> {self.dst} of {self.shape}, {what}: {wrong}"

    def run(self, seed: int, async_op: bool = False) -> None:
        local = self.part(seed, self.src).to("asyncdev")
        self.check(sw.redistribute_local(local, *self.layouts, async_op=async_op) + 0, seed, f"async {async_op}")


def _begin(rank: int, size: int, path: str, sizes: dict[str, int], seconds: float = 20.0, **settings: Any) -> sw.Mesh:
    from async_device import ranks

    native = ranks.begin(rank, size, path, seconds, alone=True)
    native.set_delays(rank + 1, 0.2, 200)
    mesh = sw.Mesh(sizes)
    sw.prepare(mesh, device_type="asyncdev", **{"peer_arena_bytes": ARENA_BYTES, "peer_min_bytes": 0, **settings})
    return mesh


def _end() -> None:
    """Waits until this rank's data for others is in its arena. A wait for an empty result does not ensure that."""
    import async_device

    async_device.native().synchronize()


def _all_moves(mesh: sw.Mesh, shapes: Sequence[Sequence[int]]) -> list[_Move]:
    ends = itertools.product(
        itertools.product(KINDS, repeat=mesh.ndim), itertools.product(KINDS[:-1], repeat=mesh.ndim)
    )
    return [_Move(mesh, shape, src, dst) for (src, dst), shape in itertools.product(ends, shapes)]


def _many_redistributes(
    rank: int, size: int, path: str, sizes: dict[str, int]
) -> tuple[dict[str, Any], dict[str, int]]:
    from async_device import strict

    mesh = _begin(rank, size, path, sizes)
    for seed, move in enumerate(_all_moves(mesh, [(17, 23), (3, 2)] if mesh.ndim == 1 else [(9, 10)])):
        move.run(seed)
        move.run(seed + 1, async_op=True)
    _end()
    return sw.stats(), strict.counters()


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_redistributes_by_peer_copies_are_right(sizes: dict[str, int]) -> None:
    from async_device import ranks

    size = 1
    for n in sizes.values():
        size *= n
    for stats, counters in ranks.run(_many_redistributes, size, sizes):
        assert stats["peer_bytes"] > 0
        assert "all_gather" not in counters and "all_to_all" not in counters and "batch" not in counters
        assert counters["all_reduce"] > 0  # the process group runs the reductions


def _captured(rank: int, size: int, path: str) -> None:
    import async_device

    mesh = _begin(rank, size, path, {"a": 2})
    for move in _all_moves(mesh, [(17, 23)]):
        if move.src == move.dst:
            continue
        local = move.part(0, move.src).to("asyncdev")
        for async_op in (False, True):
            with async_device.captured() as graph:  # the first run of the move, before any eager one
                result = sw.redistribute_local(local, *move.layouts, async_op=async_op) + 0
            for turn in range(1, 4):
                local.copy_(move.part(turn, move.src))
                graph.replay()
                move.check(result, turn, "replay")
                move.run(turn + 9)  # an eager run between replays; both leave all slots free
    _end()


def test_captured_redistributes_can_be_replayed_between_eager_ones() -> None:
    from async_device import ranks

    ranks.run(_captured, 2)


def _from_two_streams(rank: int, size: int, path: str) -> None:
    import async_device

    mesh = _begin(rank, size, path, {"a": 2})
    move = _Move(mesh, (64, 33), ("S(0)",), ("R",))
    streams = [torch.Stream(device="asyncdev") for _ in range(2)]
    found = []
    for turn in range(20):
        with streams[turn % 2]:
            if turn == rank:  # the stream of the next redistribute would overtake this one
                async_device.native().sleep(30)
            found.append(sw.redistribute_local(move.part(turn, move.src).to("asyncdev"), *move.layouts))
    for turn, result in enumerate(found):
        with streams[turn % 2]:
            move.check(result, turn, "on two streams")
    _end()


def test_transfers_of_several_streams_keep_their_order() -> None:
    from async_device import ranks

    ranks.run(_from_two_streams, 2)


def _products(rank: int, size: int, path: str) -> int:
    _begin(rank, size, path, {"a": 4})
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((30, 20), (20, 12)))
    rows, columns = torch.chunk(x, size)[rank], torch.chunk(w, size, 1)[rank].contiguous()
    part, parts = torch.chunk(x, size, 1)[rank].contiguous(), torch.chunk(w, size)[rank]
    for method in ("ring", "collective"):
        found = sw.all_gather_matmul(rows.to("asyncdev"), columns.to("asyncdev"), size=30, columns=12, method=method)
        assert torch.equal(found.cpu(), x @ columns), method
        found = sw.matmul_reduce_scatter(part.to("asyncdev"), parts.to("asyncdev"), size=20, method=method)
        assert torch.equal(found.cpu(), torch.chunk(x @ w, size)[rank]), method
    _end()
    return sw.stats()["peer_bytes"]


def test_products_use_peer_copies() -> None:
    from async_device import ranks

    assert all(copied > 0 for copied in ranks.run(_products, 4))


def _small_and_large(rank: int, size: int, path: str, columns: int, destination: str) -> tuple[int, dict[str, int]]:
    import async_device
    from async_device import strict

    mesh = _begin(rank, size, path, {"a": 3}, peer_min_bytes=150)
    strict.reset_counters()
    move = _Move(mesh, (11, columns), ("S(0)",), (destination,))
    for seed in range(3):
        local = move.part(seed, move.src).to("asyncdev")
        if rank == 2:  # a rank that does not wait for the small message reads it too early
            async_device.native().sleep(30)
        move.check(sw.redistribute_local(local, *move.layouts), seed)
    _end()
    return sw.stats()["peer_bytes"], strict.counters()


# Ranks hold 4, 4 and 3 rows of floats. Ranks 0 and 1 send `num_bytes` to each other rank, rank 2 sends less than 150.
@pytest.mark.parametrize(("columns", "destination", "num_bytes"), [(12, "R", 192), (30, "S(1)", 160)])
def test_process_group_sends_small_messages(columns: int, destination: str, num_bytes: int) -> None:
    from async_device import ranks

    for rank, (copied, counters) in enumerate(ranks.run(_small_and_large, 3, columns, destination)):
        assert copied == 3 * (2 if rank == 2 else 1) * num_bytes
        assert counters["batch"] == 3


def _missing_peer(rank: int, size: int, path: str, loses_signal: bool) -> str:
    import async_device
    from async_device import ranks

    mesh = _begin(rank, size, path, {"a": 2}, seconds=3.0)
    native = async_device.native()
    move = _Move(mesh, (8, 12), ("S(0)",), ("R",))
    move.run(1)
    if rank == 1 and loses_signal:
        native.lose_signal(1)
    if rank == 0 or loses_signal:
        sw.redistribute_local(move.part(1, move.src).to("asyncdev"), *move.layouts)
    error = ranks.failure_of(native)
    dist.distributed_c10d._get_default_store().set(f"end{rank}", "1")
    ranks.wait_for_key(f"end{1 - rank}")
    return error


def test_timeout_names_missing_peer() -> None:
    from async_device import ranks

    errors = ranks.run(_missing_peer, 2, False)
    assert "rank 0 failed to receive a signal from rank 1" in errors[0] and "3000 ms" in errors[0]
    assert errors[1] == "nothing was raised"


def test_lost_signal_times_out() -> None:
    from async_device import ranks

    assert "rank 0 failed to receive a signal from rank 1" in ranks.run(_missing_peer, 2, True)[0]


def _wrong_arena_arguments(rank: int, size: int, path: str) -> list[str]:
    import async_device
    from async_device import ranks

    ranks.begin(rank, size, path, alone=True)
    mesh = sw.Mesh({"a": 2})
    errors = [
        ranks.error_of(lambda given=given: sw.prepare(mesh, **{"device_type": "asyncdev", **given}))
        for given in (
            {"peer_arena_bytes": 1023},
            {"peer_arena_bytes": "1 MiB"},
            {"peer_arena_bytes": 1 << 20, "peer_min_bytes": 0.5},
            {"peer_arena_bytes": 1 << 20, "device_type": "cpu"},
        )
    ]
    with async_device.captured():
        errors.append(ranks.error_of(lambda: sw.prepare(mesh, device_type="asyncdev", peer_arena_bytes=1 << 20)))
    sw.prepare(mesh, device_type="asyncdev", peer_arena_bytes=1 << 20)
    sw.prepare(mesh, device_type="asyncdev", peer_arena_bytes=1 << 20)
    errors.append(ranks.error_of(lambda: sw.prepare(mesh, device_type="asyncdev", peer_arena_bytes=1 << 21)))
    _Move(mesh, (7, 5), ("S(0)",), ("R",)).run(1)
    _end()
    return errors


def test_wrong_arena_arguments_raise_on_every_rank() -> None:
    from async_device import ranks

    for errors in ranks.run(_wrong_arena_arguments, 2):
        assert "peer_arena_bytes must be at least 1024 for a group of 2 ranks, got 1023" in errors[0]
        assert errors[1].startswith("ValueError: peer_arena_bytes must be an integer, got '1 MiB'")
        assert errors[2].startswith("ValueError: peer_min_bytes must be an integer, got 0.5")
        assert errors[3].startswith("ValueError: peer_arena_bytes must be None for tensors on CPU, got 1048576")
        assert "while a graph is captured" in errors[4]
        assert "peer_arena_bytes must be 1048576 as in the earlier call for this group of 2 ranks" in errors[5]


def _arenas() -> int:
    """Returns the number of arenas, of this rank and of others, that are mapped into this process."""
    return sum("/asyncdev_" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _after_groups_are_destroyed(rank: int, size: int, path: str) -> tuple[int, int]:
    mesh = _begin(rank, size, path, {"a": 2, "b": 2})
    move = _Move(mesh, (8, 12), ("S(0)", "S(1)"), ("R", "S(1)"))
    move.run(1)
    _end()
    before = _arenas()
    dist.barrier()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() == 2]
    for group in sorted(groups, key=lambda group: group.group_name):
        dist.destroy_process_group(group)
    del groups, group
    gc.collect()
    # The plan of `move` is cached and names a group that is gone. Another mesh of the same ranks needs new groups.
    _Move(sw.Mesh({"c": 2, "d": 2}), (8, 12), ("S(0)", "S(1)"), ("R", "S(1)")).run(2)
    _end()
    return before, _arenas()


def test_arenas_are_freed_with_their_groups() -> None:
    from async_device import ranks

    for before, after in ranks.run(_after_groups_are_destroyed, 4):
        assert before == 2 + 2 + 4  # in the groups of mesh dims a, b and both
        assert after == 4
