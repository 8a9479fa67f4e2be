"""Tests of transfers that send only what changed: every bit, the bytes on the wire, and when everything is sent."""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import meshes
import shardwright as sw
from map_rules import random_rules
from parts import part_of
from pool import Pool
from shardwright.versions.changes import Changes
from shardwright.versions.messages import Message, words_of
from shardwright.versions.pieces import Ends

WORLD_SIZE = 4
TRAIN = sw.Mesh({"dp": 2, "tp": 2}, [0, 1, 2, 3])
SERVE = sw.Mesh({"tp": 3}, [1, 3, 2])

State = dict[str, torch.Tensor]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: torch.Tensor, is_cast: bool) -> torch.Tensor:
    """Returns the bits of a tensor. Those of NaN after a cast depend on the position in PyTorch's vectors."""
    x = torch.where(x.isnan(), float("nan"), x) if is_cast else x
    return x.contiguous().view(_INTEGERS[x.itemsize]).cpu()


def _check(tensors: dict[str, Any], state: State, layouts: dict[str, sw.Layout], is_cast: bool, about: str) -> None:
    rank = dist.get_rank()
    for name, x in tensors.items():
        expected = part_of(state[name], layouts[name], rank)
        assert torch.equal(_bits(x, is_cast), _bits(expected, is_cast)), f"{about}: {name} on rank {rank}"


def _placed(draw: random.Random, state: State, mesh: sw.Mesh, kinds: list[str]) -> dict[str, sw.Layout]:
    return {
        name: sw.Layout(mesh, x.shape, [draw.choice(kinds) for _ in range(mesh.ndim)], str(x.dtype))
        for name, x in state.items()
    }


def _mutated(draw: random.Random, state: State, share: float) -> State:
    """Returns the state with new bits in about this share of the elements; at least one element."""
    result = {}
    for name, x in state.items():
        flat = x.clone().view(-1)
        for i in range(len(flat)):
            if draw.random() < share:
                flat[i] = draw.choice((float("nan"), -0.0, 0.0, draw.uniform(-9, 9), -float(flat[i])))
        result[name] = flat.view(x.shape)
    return result


def _random_case(seed: int, block_bytes: int, bucket_bytes: int) -> None:
    """Starts a transfer by random rules and layouts several times. Compares bits with torch, and bytes on the wire."""
    draw = random.Random(seed)
    rank = dist.get_rank()
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    state: State = {
        f"x.{i}": torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)
    }
    rules, mapped = random_rules(draw, state)
    cast = draw.choice((torch.float32, torch.bfloat16, dtype))
    rules.append(sw.rules.cast(cast))

    def served(values: State) -> State:
        again = random.Random(seed)
        again.choice((0, 0, 0))
        return {name: x.to(cast) for name, x in random_rules(again, values)[1].items()}

    sources = _placed(draw, state, TRAIN, ["R", "S(0)", "S(1)", sw.placements.Cyclic(2, 3)])
    pieces = sw.placements.Cyclic(0, 1)
    targets = _placed(draw, served(state), SERVE, ["R", "S(0)", "S(1)", pieces])
    given = {name: (part_of(state[name], y, rank).to(meshes.device), y) for name, y in sources.items()}
    t = sw.transfer(
        given, targets, rules, only_changed=block_bytes, bucket_bytes=bucket_bytes, buckets=1, device=meshes.device
    )
    for turn, share in enumerate((1.0, 0.0, 0.01, 0.3, 0.02, 1.0, 0.01)):
        state = _mutated(draw, state, share) if turn else state
        for name, (local, layout) in given.items():
            local.copy_(part_of(state[name], layout, rank))
        with sw.debug.wire_meter() as meter:
            handle = t.start()
            handle.source_free.wait()
            for local, _ in given.values():
                local.fill_(7)
            handle.wait()
        assert handle.report is not None
        _check(t.tensors, served(state), targets, cast != dtype, f"seed {seed}, turn {turn}")
        if turn == 0:
            assert "first start" in handle.report.reason
        if not handle.report.reason:
            assert meter.sent_bytes == handle.report.sent_bytes
            assert meter.received_bytes == handle.report.received_bytes
        if turn == 1:
            assert handle.report.reason == "" and meter.sent_bytes == 0
        if turn == 5:
            assert "the changes take" in handle.report.reason


SIZES = ((4, 4096), (8, 1 << 20), (32, 2048), (256, 1 << 20))  # bytes of blocks and of buckets


@pytest.mark.parametrize("seed", range(12))
def test_changes_equal_a_full_transfer(pool: Pool, seed: int) -> None:
    pool.run(_random_case, WORLD_SIZE, seed, *SIZES[seed // 2 % 4])  # every second seed has all sizes


FROM, TO = sw.Mesh({"a": 2}, [0, 1]), sw.Mesh({"b": 2}, [2, 3])


def _pair(shape: tuple[int, ...], dtype: str, served: str = "", **options: Any) -> tuple[torch.Tensor | None, Any]:
    """Returns this rank's source, rows of zeros on ranks 0 and 1, and a transfer to columns on ranks 2 and 3."""
    src, dst = sw.Layout(FROM, shape, ["S(0)"], dtype), sw.Layout(TO, shape, ["S(1)"], served or dtype)
    rank = dist.get_rank()
    local = torch.zeros(src.local_shape(rank), dtype=getattr(torch, dtype), device=meshes.device) if rank < 2 else None
    rules = [sw.rules.cast(served)] if served else []
    state = {"w": (local, src)} if rank < 2 else None
    return local, sw.transfer(state, {"w": dst}, rules, device=meshes.device, **options)


def _count() -> None:
    """One element of 64 x 64 changes: one block of 8 bytes and one byte of its number cross the wire."""
    local, t = _pair((64, 64), "float32", only_changed=True)
    sw.reset_stats()
    assert t.start().report is not None
    if local is not None and dist.get_rank() == 1:
        local[3, 5] = 2.5
    handle = t.start()
    handle.wait()
    full = 32 * 64 * 4 if local is not None else 64 * 32 * 4
    number = 32 * (3 * 32 // 32) // 2 + 5 // 2  # of the block in the message, in rows of 32
    assert number < 256
    sent, received = (9 if dist.get_rank() == 1 else 0), (9 if dist.get_rank() == 2 else 0)
    sides = (full, 0) if local is not None else (0, full)
    assert tuple(handle.report) == ("", sent, received, *sides), handle.report
    assert (sw.stats()["changed_starts"], sw.stats()["full_starts"]) == (1, 1)
    assert sw.stats()["bytes"] == (0 if local is not None else full + received)
    if local is None:
        expected = torch.zeros(64, 64)
        expected[35, 5] = 2.5
        assert torch.equal(t.tensors["w"].cpu(), expected.chunk(2, 1)[dist.get_rank() - 2])


def test_bytes_are_those_of_changed_blocks(pool: Pool) -> None:
    pool.run(_count, WORLD_SIZE)


def _invisible() -> None:
    """A change that the cast rounds away is not sent."""
    local, t = _pair((64, 64), "float32", "bfloat16", only_changed=True)
    if local is not None:
        local.fill_(1.0)
    t.start().wait()
    if local is not None:
        local.add_(1e-5)
    handle = t.start()
    handle.wait()
    assert handle.report.reason == "" and handle.report.sent_bytes == handle.report.received_bytes == 0


def test_changes_are_those_of_the_sent_dtype(pool: Pool) -> None:
    pool.run(_invisible, WORLD_SIZE)


def _everything() -> list[str]:
    """Returns the reason of each start, after events that require that everything is sent."""
    rank = dist.get_rank()
    local, t = _pair((8, 8), "float32", only_changed=64)
    reasons = []

    def start(**options: Any) -> None:
        handle = t.start(**options)
        handle.wait()
        reasons.append(handle.report.reason)
        if local is None:
            assert bool((t.tensors["w"] == 3).all())

    if local is not None:
        local.fill_(3)
    start()
    start()
    if rank == 3:
        t.tensors["w"].mul_(2)  # by an operator
    start()
    start()
    if rank == 3:
        t.tensors["w"].data.zero_()  # without another version
    start()
    start(everything=rank == 0)
    start()
    if local is not None:
        local.resize_(8, 8)
        with pytest.raises(ValueError, match="nothing was moved"):
            t.start()
        local.resize_(4, 8)
    else:
        with pytest.raises(ValueError, match="nothing was moved"):
            t.start()
    start()
    start()
    return reasons


def test_everything_is_sent_if_changes_are_not_enough(pool: Pool) -> None:
    for reasons in pool.run(_everything, WORLD_SIZE):
        expected = (
            "first start",
            "",
            "other values",
            "",
            "other values",
            "everything=True",
            "",
            "did not complete",
            "",
        )
        assert len(reasons) == len(expected)
        for reason, part in zip(reasons, expected):
            assert part in reason and bool(part) == bool(reason), reasons


def _dtensors_and_scalars() -> None:
    """A DTensor's own operators write without another version of its local tensor. A tensor without dims changes."""
    rank = dist.get_rank()
    mesh = DeviceMesh(meshes.device, [2, 3])
    w, s = torch.full((4, 8), 3.0, device=meshes.device), torch.tensor(1.0, device=meshes.device)
    source = {"w": (w, sw.Layout(FROM, (8, 8), ["S(0)"])), "s": (s, sw.Layout(FROM, (), ["R"]))}
    if rank >= 2:
        placed = DTensor.from_local(torch.zeros(8, 4, device=meshes.device), mesh, [Shard(1)])
        scalar = torch.zeros((), device=meshes.device)
        to = {"w": placed, "s": (scalar, sw.Layout(TO, (), ["R"]))}
    t = sw.transfer(source if rank < 2 else None, to if rank >= 2 else None, only_changed=True, device=meshes.device)
    for update, reason in enumerate(("first start", "", "other values", "")):
        s.fill_(update)
        if rank == 3 and update == 2:
            with torch.no_grad():
                placed.zero_()
        handle = t.start()
        handle.wait()
        assert reason in handle.report.reason and bool(reason) == bool(handle.report.reason), handle.report
        assert rank < 2 or (placed.to_local().eq(3).all() and scalar.item() == update)


def test_changes_of_dtensors_and_scalars(pool: Pool) -> None:
    pool.run(_dtensors_and_scalars, WORLD_SIZE)


def _rearranged(dtype: str) -> None:
    """Elements of a destination change places, which keeps the sum of their bits, or all change their signs."""
    rank = dist.get_rank()
    local, t = _pair((64, 64), dtype, only_changed=8)
    if local is not None:
        local.copy_(torch.arange(1, 1 + local.numel()).view(local.shape) + rank)
    t.start().wait()
    expected = t.tensors["w"].clone() if local is None else None
    for change in (torch.neg, lambda x: x.roll(8, 1), lambda x: x.roll(1, 0), lambda x: -x.roll(16, 1)):
        if local is None:
            t.tensors["w"].copy_(change(expected))
        handle = t.start()
        handle.wait()
        assert "other values" in handle.report.reason, (change, handle.report)
        assert local is not None or torch.equal(t.tensors["w"], expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_destinations_with_moved_elements_get_everything(pool: Pool, dtype: str) -> None:
    pool.run(_rearranged, WORLD_SIZE, dtype)


def _other_memory() -> None:
    """A destination gets other memory: a function returns another tensor at the third start."""
    rank = dist.get_rank()
    src, dst = sw.Layout(FROM, (8, 8), ["S(0)"]), sw.Layout(TO, (8, 8), ["S(1)"])
    local = torch.full((4, 8), 3.0, device=meshes.device)
    into = [torch.zeros(8, 4, device=meshes.device), torch.zeros(8, 4, device=meshes.device)]
    which = 0
    with torch.inference_mode():
        into.append(torch.zeros(8, 4, device=meshes.device))  # a tensor without versions
    t = sw.transfer(
        {"w": (local, src)} if rank < 2 else None,
        (lambda: {"w": (into[which], dst)}) if rank >= 2 else None,
        only_changed=True,
        device=meshes.device,
    )
    for which in (0, 0, 1, 2, 2):
        if rank == 0:
            local[0, 0] = which
        handle = t.start()
        handle.wait()
        if rank == 2:
            expected = torch.full((8, 4), 3.0)
            expected[0, 0] = which
            assert torch.equal(into[which].cpu(), expected)
    assert handle.report.reason == ""


def test_destinations_with_other_memory_get_everything(pool: Pool) -> None:
    pool.run(_other_memory, WORLD_SIZE)


def _failed_write() -> None:
    """Rank 2 fails once to write the last of several rounds, as if it had no memory left."""
    rank = dist.get_rank()
    local, t = _pair((64, 64), "float32", only_changed=8, bucket_bytes=256, buckets=2)
    t.start().wait()
    if local is not None:
        local[::2, ::2] = 5
    handle = t.start()
    if rank == 2:
        failing = mock.patch.object(Message, "_write", side_effect=MemoryError("no memory"))
        for write in (failing, contextlib.nullcontext(), contextlib.nullcontext()):
            with write, pytest.raises(MemoryError, match="no memory"):
                handle.wait()
    else:
        handle.wait()
    handle = t.start()
    handle.wait()
    assert "did not complete (rank 2" in handle.report.reason
    if local is None:
        expected = torch.zeros(64, 32)
        expected[::2, ::2] = 5
        assert torch.equal(t.tensors["w"].cpu(), expected)


def test_failed_writes_are_not_repeated(pool: Pool) -> None:
    pool.run(_failed_write, WORLD_SIZE)


def _broken_group() -> None:
    """Messages to rank 2 fail. Its later starts raise the error instead of sending more over the group."""
    local, t = _pair((64, 64), "float32", only_changed=True)
    t.start().wait()
    if local is not None:
        local[0, 0] = 5
    handle = t.start()
    if dist.get_rank() == 2:
        handle._run._in_flight.work.wait()
        work = mock.Mock(wait=mock.Mock(side_effect=RuntimeError("connection closed")))
        handle._run._in_flight = handle._run._in_flight._replace(work=work)
        for wait in (t.start, handle.wait, t.start):
            with pytest.raises(dist.DistBackendError, match="rank 2 of the group failed .*: connection closed"):
                wait()
    else:
        handle.wait()
    dist.barrier()


def test_starts_after_failed_messages_raise(pool: Pool) -> None:
    pool.run(_broken_group, WORLD_SIZE)


def _refusals() -> None:
    for options, message in (
        ({"only_changed": 24}, "only_changed must be True, False or a power of two, got 24"),
        ({"only_changed": -8}, "only_changed must be True, False or a power of two, got -8"),
        ({"only_changed": 2}, "only_changed must be at least 4 bytes, the size of an element, got 2"),
        ({"only_changed": 8, "staging": "double"}, "staging must be None with only_changed, got 'double'"),
        ({"only_changed": 8 << dist.get_rank() % 2}, "only_changed must be equal on all ranks"),
    ):
        with pytest.raises(ValueError) as raised:
            _pair((8, 8), "float32", **options)
        assert message in str(raised.value)
    pending = sw.Layout(FROM, (8, 8), ["P(sum)"])
    state = {"w": (torch.zeros(8, 8), pending)} if dist.get_rank() < 2 else None
    with pytest.raises(ValueError, match="only_changed must be False, or .* without pending reductions"):
        sw.transfer(state, {"w": sw.Layout(TO, (8, 8), ["S(0)"])}, only_changed=True)
    _, t = _pair((8, 8), "float32", only_changed=True)
    with pytest.raises(ValueError, match=r"receive: only_changed must be False, got 8; call start\(\) instead"):
        t.receive()


@pytest.mark.cpu_only("passes tensors on the CPU")
def test_unsupported_arguments_are_errors(pool: Pool) -> None:
    pool.run(_refusals, WORLD_SIZE)


def _hashes() -> None:
    """Flipped signs in two words of a block change its hash: a sum of multiples of the words would stay the same."""
    layout = sw.Layout(sw.Mesh({"one": 1}, [0]), (4, 16), ["R"])
    changes = Changes(Ends([layout], [layout], [], 0), 64, None)
    x = torch.randn(4, 16)
    before = changes._hashes(x.view(-1))
    assert torch.equal(before, changes._hashes(x.view(-1).clone()))
    y = x.clone()
    y[2, 1::2] *= -1  # the highest bits of all words of block 2
    y[3, 3] *= -1
    assert (before != changes._hashes(y.view(-1))).tolist() == [False, False, True, True]
    assert words_of(torch.ones(3), 8).tolist() == [[0x3F8000003F800000], [0x3F800000]]


def test_hashes_find_flipped_signs(pool: Pool) -> None:
    pool.run(_hashes, 1)
