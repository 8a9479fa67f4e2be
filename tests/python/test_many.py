"""Many tensors at once: every element, planned bytes and messages, strided outputs, errors on all ranks."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import meshes
import oracle
import shardwright as sw
from allocations import allocated_peak
from meshes import NAMES
from pool import Pool
from shardwright.runtime import executables, many

# A mesh: its shape, and its ranks in row-major order.
Grid = tuple[tuple[int, ...], tuple[int, ...]]
Case = tuple[tuple[int, ...], torch.dtype, Grid, tuple[str, ...], Grid, tuple[str, ...]]

WORLD_SIZE = 5
GRIDS: list[Grid] = [
    ((2,), (0, 1)),
    ((3,), (2, 3, 4)),
    ((2, 2), (3, 1, 2, 0)),
    ((5,), (0, 1, 2, 3, 4)),
    ((1,), (4,)),
]
SHAPES = [(8, 6), (5, 7), (0, 3), (13,), (), (3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.float8_e4m3fn, torch.bool]


def _cases(seed: int, count: int) -> list[Case]:
    draw = random.Random(seed)  # the same on all ranks

    def placements(grid: Grid, shape: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(draw.choice(["R", *(f"S({t})" for t in range(len(shape)))]) for _ in grid[0])

    cases: list[Case] = []
    for _ in range(count):
        shape, dtype, src, dst = draw.choice(SHAPES), draw.choice(DTYPES), draw.choice(GRIDS), draw.choice(GRIDS)
        cases.append((shape, dtype, src, placements(src, shape), dst, placements(dst, shape)))
    return cases


def _layout(grid: Grid, shape: tuple[int, ...], placements: tuple[str, ...], dtype: torch.dtype) -> sw.Layout:
    mesh = sw.Mesh(dict(zip(NAMES, grid[0], strict=False)), grid[1])
    return sw.Layout(mesh, shape, placements, dtype)


def _part(tensor: torch.Tensor, grid: Grid, placements: tuple[str, ...], rank: int) -> torch.Tensor:
    if rank not in grid[1]:
        return tensor.new_empty(0)
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(grid[1].index(rank)), grid[0]))
    return oracle.local(tensor, grid[0], placements, where)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with gaps between elements, and with the dims of its memory in reverse order."""
    wide = tensor.new_zeros((*reversed([2 * n for n in tensor.shape]), 1))
    view = wide.permute(*reversed(range(wide.dim())))[0]
    view = view[tuple(slice(0, 2 * n, 2) for n in tensor.shape)]
    view.copy_(tensor)
    return view


def _items(cases: list[Case], rank: int, strided: bool = False) -> tuple[list[Any], list[torch.Tensor]]:
    """Returns this rank's arguments, and its expected results."""
    items, expected = [], []
    for number, (shape, dtype, src, src_placements, dst, dst_placements) in enumerate(cases):
        tensor = oracle.global_tensor(shape, dtype, number).to(meshes.device)
        local = _part(tensor.cpu(), src, src_placements, rank).to(meshes.device)
        given = None if rank not in src[1] else _strided(local) if strided else local
        items.append((given, _layout(src, shape, src_placements, dtype), _layout(dst, shape, dst_placements, dtype)))
        expected.append(_part(tensor.cpu(), dst, dst_placements, rank))
    return items, expected


def _check(results: Any, expected: list[torch.Tensor], cases: list[Case]) -> None:
    assert len(results) == len(expected)
    for result, right, case in zip(results, expected, cases, strict=True):
        assert result.dtype == right.dtype
        wrong = oracle.difference(result, right)
        assert wrong is None, f"rank {dist.get_rank()}: {case}: {wrong}"


def _move(seed: int, bucket_bytes: int, buckets: int, strided: bool) -> tuple[int, int]:
    rank = dist.get_rank()
    cases = _cases(seed, 30)
    items, expected = _items(cases, rank, strided)
    kept = [None if local is None else local.clone() for local, _, _ in items]
    plan = sw.plan_many([(src, dst) for _, src, dst in items], bucket_bytes=bucket_bytes, buckets=buckets)
    with sw.debug.wire_meter() as meter:
        results = sw.redistribute_many(items, bucket_bytes=bucket_bytes, buckets=buckets)
    _check(results, expected, cases)
    for (local, _, _), before in zip(items, kept, strict=True):
        assert local is None or oracle.difference(local, before.cpu()) is None
    first = meter.received_bytes
    with sw.debug.wire_meter() as meter, sw.debug.trace() as events:
        again = sw.redistribute_many(items, bucket_bytes=bucket_bytes, buckets=buckets)
    _check(again, expected, cases)
    sent = [event for event in events if event.instruction.startswith("send_receive")]
    assert {event.lane for event in sent} == {"communication"}
    assert 1 <= len(sent) <= plan.num_rounds
    assert meter.received_bytes < first or dist.get_world_size() == 1  # ranks compare layouts in the first call only
    assert meter.received_bytes <= plan.received_bytes_max

    # Results are written to views with gaps, which keep their addresses.
    out = [_strided(torch.zeros_like(right)).to(meshes.device) if right.numel() else None for right in expected]
    out = [
        torch.empty_like(right, device=meshes.device) if tensor is None and rank in case[4][1] else tensor
        for tensor, right, case in zip(out, expected, cases, strict=True)
    ]
    places = [None if tensor is None else (tensor.data_ptr(), tensor.stride()) for tensor in out]
    written = sw.redistribute_many(items, bucket_bytes=bucket_bytes, buckets=buckets, out=out)
    _check(written, expected, cases)
    assert isinstance(written, list)
    for result, given_tensor, place in zip(written, out, places, strict=True):
        assert given_tensor is None or (
            result is given_tensor and (given_tensor.data_ptr(), given_tensor.stride()) == place
        )

    pending = sw.redistribute_many(items, bucket_bytes=bucket_bytes, buckets=buckets, async_op=True)
    assert isinstance(pending, sw.runtime.ManyHandle)
    pending.wait_for_sources()
    for local, _, _ in items:
        if local is not None:
            local.zero_()
    for number in range(0, len(items), 7):
        assert (
            oracle.difference(pending.wait_for(number), expected[number]) is None
            or items[number][1] == items[number][2]
        )
    moved = pending.wait()
    assert pending.is_done() or meshes.device != "cpu"  # the device may still be at work
    different = [i for i, (_, src, dst) in enumerate(items) if src != dst]
    _check([moved[i] for i in different], [expected[i] for i in different], [cases[i] for i in different])
    return meter.received_bytes, plan.received_bytes_sum


@pytest.mark.parametrize(
    ("seed", "bucket_bytes", "buckets", "strided"),
    [(1, 64 << 20, 3, False), (2, 700, 2, True), (3, 900, 1, False), (4, 2000, 4, True)],
)
def test_every_element_is_right(pool: Pool, seed: int, bucket_bytes: int, buckets: int, strided: bool) -> None:
    counted = pool.run(_move, WORLD_SIZE, seed, bucket_bytes, buckets, strided)
    assert sum(received for received, _ in counted) == counted[0][1]


def _memory(bucket_bytes: int, buckets: int) -> tuple[int, int, int]:
    """Returns the bytes that a call allocates besides its results, the planned bytes, and the number of rounds."""
    rank = dist.get_rank()
    train, serve = sw.Mesh({"a": 2}), sw.Mesh({"b": 2}, [1, 2])
    pairs = [
        (sw.Layout(train, (500, 40), ["S(0)"], dtype), sw.Layout(serve, (500, 40), [to], dtype))
        for dtype in ("float32", "bf16")
        for to in ("S(1)", "R")
    ]
    # Every other column, so that packing reads memory with gaps.
    items = [
        (None if rank == 2 else torch.ones(250, 80, dtype=getattr(torch, src.dtype))[:, ::2], src, dst)
        for src, dst in pairs
    ]
    settings: dict[str, Any] = {"bucket_bytes": bucket_bytes, "buckets": buckets, "device": "cpu"}
    sw.redistribute_many(items, **settings)
    sw.runtime.release_staging()
    moved, peak = allocated_peak(sw.redistribute_many, items, **settings)
    plan = sw.plan_many(pairs, bucket_bytes=bucket_bytes, buckets=buckets)
    return peak - sum(tensor.nbytes for tensor in moved), plan.memory_bytes, plan.num_rounds


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(4096, 3), (20000, 1), (1 << 20, 8)])
def test_memory_is_as_planned(pool: Pool, bucket_bytes: int, buckets: int) -> None:
    taken = pool.run(_memory, 3, bucket_bytes, buckets)
    # A rank's bucket is only as large as its own rounds.
    assert max(peak for peak, _, _ in taken) > 0.9 * taken[0][1] or taken[0][2] < buckets
    for peak, promised, rounds in taken:
        assert peak <= promised
        assert promised <= bucket_bytes * buckets
        assert promised > 0.9 * bucket_bytes * buckets or rounds < buckets


def test_redistribute_many_on_one_rank(pool: Pool) -> None:
    pool.run(_alone, 1)


def _alone() -> None:
    grid: Grid = ((1,), (0,))
    cases: list[Case] = [
        ((4, 4), torch.float32, grid, ("S(0)",), grid, ("R",)),
        ((), torch.int8, grid, ("R",), grid, ("R",)),
    ]
    items, expected = _items(cases, 0)
    _check(sw.redistribute_many(items), expected, cases)
    assert sw.redistribute_many([]) == []


def _reductions() -> None:
    rank = dist.get_rank()
    grid, other = GRIDS[2], GRIDS[1]
    shape = (7, 6)
    tensor = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
    items, expected = [], []
    for src, dst in [(("P(sum)", "P(sum)"), ("S(0)",)), (("S(1)", "P(sum)"), ("R",)), (("P(sum)", "R"), ("S(1)",))]:
        local = _part(tensor, grid, src, rank).to(meshes.device) if rank in grid[1] else None
        items.append((local, _layout(grid, shape, src, torch.float32), _layout(other, shape, dst, torch.float32)))
        expected.append(_part(tensor, other, dst, rank))
    moved = sw.redistribute_many(items, device=meshes.device)
    for result, right in zip(moved, expected, strict=True):  # type: ignore[arg-type]
        assert oracle.difference(result, right) is None
    local, same, _ = items[0]
    largest = _layout(grid, shape, ("P(max)", "P(max)"), torch.float32)  # it has no gradient, but does not move
    unmoved = sw.redistribute_many([(local, same, same), (local, largest, largest)], device=meshes.device)
    assert all(returned is local for returned in unmoved) or rank not in grid[1]  # type: ignore[union-attr]


def test_pending_reductions_are_reduced_first(pool: Pool) -> None:
    pool.run(_reductions, WORLD_SIZE)


def _error(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _disagreements() -> list[str]:
    rank = dist.get_rank()
    cases = _cases(5, 9)
    items, expected = _items(cases, rank)
    errors = []
    swapped = [*items[:4], items[5], items[4], *items[6:]]
    errors.append(_error(lambda: sw.redistribute_many(swapped if rank == 3 else items)))
    errors.append(_error(lambda: sw.redistribute_many(items[:-1] if rank == 1 else items)))
    errors.append(_error(lambda: sw.redistribute_many(items, bucket_bytes=1 << 20 if rank == 0 else 1 << 21)))
    wrong = [*items[:2], (torch.zeros(99), *items[2][1:]), *items[3:]]
    errors.append(_error(lambda: sw.redistribute_many(wrong if rank == 2 else items)))
    errors.append(_error(lambda: sw.redistribute_many(items, bucket_bytes=1)))
    errors.append(_error(lambda: sw.redistribute_many(items, buckets=0)))
    _check(sw.redistribute_many(items), expected, cases)  # errors leave no state behind
    return errors


def test_ranks_that_disagree_all_raise(pool: Pool) -> None:
    for rank, errors in enumerate(pool.run(_disagreements, WORLD_SIZE)):
        swapped, fewer, bucket, wrong, small, none = errors
        assert "item 4, the first that differs: " in swapped, swapped
        assert f"this is rank {rank})" in swapped
        assert ") on ranks [0, 1, 2, 4]; " in swapped and ") on ranks [3]" in swapped, swapped
        assert "number of items: 9 on ranks [0, 2, 3, 4]; 8 on ranks [1]" in fewer, fewer
        assert "bucket_bytes: 1048576 on ranks [0]; 2097152 on ranks [1, 2, 3, 4]" in bucket, bucket
        if rank == 2:
            assert wrong.startswith("ValueError: the local part of items[2] must be of shape ") and "got (99,)" in wrong
        else:
            assert "on ranks [2] the arguments are not allowed" in wrong, wrong
            assert "arguments: the local part of items[2] must be of shape " in wrong and "got (99,)" in wrong, wrong
        assert small.startswith("ValueError: bucket_bytes must be at least ") and ", got 1: item" in small, small
        assert none.startswith("ValueError: buckets must be at least 1, got 0"), none


def _invalid_arguments() -> list[str]:
    mesh = sw.Mesh({"a": 2})
    cut, replicated = sw.Layout(mesh, (4,), ["S(0)"]), sw.Layout(mesh, (4,), ["R"])
    partial = sw.Layout(mesh, (4,), ["P"])
    beyond = sw.Layout(sw.Mesh({"a": 2}, [1, 2]), (4,), ["R"])
    local, both = torch.zeros(2), torch.zeros(4)
    return [
        _error(call)
        for call in (
            lambda: sw.redistribute_many([(local, cut)]),  # type: ignore[list-item]
            lambda: sw.redistribute_many([(local, cut, "R")]),  # type: ignore[list-item]
            lambda: sw.redistribute_many([(None, cut, replicated)], device=local.device),
            lambda: sw.redistribute_many([(local.double(), cut, replicated)]),
            lambda: sw.redistribute_many([(local.clone().requires_grad_(), cut, replicated)], async_op=True),
            lambda: sw.redistribute_many([(local, cut, partial)]),
            lambda: sw.redistribute_many([(local, cut, sw.Layout(mesh, (2, 2), ["R"]))]),
            lambda: sw.redistribute_many([(local, cut, replicated)], out=[]),
            lambda: sw.redistribute_many([(local, cut, replicated)], out=[torch.zeros(3)]),
            lambda: sw.redistribute_many([(torch.zeros(4), replicated, beyond)]),
            lambda: sw.redistribute_many([(local, cut, replicated)], bucket_bytes="big"),  # type: ignore[arg-type]
            lambda: sw.redistribute_many([(local, cut, replicated)], device="cuda"),
            lambda: sw.redistribute_many([(local, cut, replicated)], out=[torch._neg_view(both)]),
            lambda: sw.redistribute_many([(local, cut, replicated)], out=[torch.zeros(1).expand(4)]),
            lambda: sw.redistribute_many(
                [(torch.zeros(4), replicated, replicated), (both, replicated, replicated)], out=[both, both]
            ),
        )
    ]


def test_errors_name_the_argument(pool: Pool) -> None:
    texts = (
        "got 2 entries in item 0",
        "items: item 0",
        "the local part of items[0] must be a tensor of shape ",
        "the local part of items[0] must be of dtype float32",
        "without gradients in calls with out= or async_op=True, got one that requires a gradient",
        "destination 0 must be",
        "must have two layouts of one shape, got",
        "out must be a list of 1, one per item, got 0",
        "out[0] must be of shape ",
        "group must have rank 2 of the layouts' meshes, got 2 ranks",
        "bucket_bytes must be an integer, got 'big'",
        "device must be cpu, where the tensors are, got cuda",
        "out[0] must be a tensor whose memory holds its elements, got a negated view",
        "out[0] must have an address for each element, got shape (4,) and strides (0,)",
        "out[0] must be a tensor with memory of its own, got one sharing items[1]'s memory",
    )
    for errors in pool.run(_invalid_arguments, 2):
        for error, text in zip(errors, texts, strict=True):
            assert error.startswith("ValueError") and text in error, f"{error!r} lacks {text!r}"


def _invalid_arguments_on_one_rank() -> list[str]:
    """Rank 1 passes invalid arguments with layouts that all ranks have compared. It raises alone, and all continue."""
    twice, expandable = torch.zeros(4, 1), torch.zeros(1)
    mesh = sw.Mesh({"a": 2})
    src, dst = sw.Layout(mesh, (4, 2), ["S(0)"]), sw.Layout(mesh, (4, 2), ["S(1)"])
    items = [(torch.ones(2, 2), src, dst)] * 2

    def moved(**given: Any) -> Any:
        return sw.redistribute_many(items, **{"out": [torch.zeros(4, 1), torch.zeros(4, 1)], **given})

    moved()
    wrong: list[dict[str, Any]] = [{"out": [None] * 3}, {"out": 3}, {"device": "moon"}, {"out": [twice, twice]}]
    wrong.append({"out": [expandable.expand(4, 1), twice]})
    errors = [_error(functools.partial(moved, **given)) for given in wrong if dist.get_rank() == 1]
    assert torch.equal(moved()[0], torch.ones(4, 1))
    return errors


def test_invalid_arguments_with_known_layouts_raise_on_one_rank(pool: Pool) -> None:
    lengths, kind, device, memory, expanded = pool.run(_invalid_arguments_on_one_rank, 2)[1]
    assert lengths.startswith("ValueError: out must be a list of 2, one per item, got 3"), lengths
    assert kind.startswith("ValueError: out must be "), kind
    assert device.startswith("ValueError: device must be cpu or cuda") and device.endswith("got 'moon'"), device
    assert memory.startswith("ValueError: out[1] must be a tensor with memory of its own") and "out[0]'s" in memory
    assert expanded.startswith("ValueError: out[0] must have an address for each element"), expanded


def _conjugated(transfers: bool) -> None:
    """Moves views whose memory has the conjugates or negatives of their elements, also in asynchronous runs."""
    rank = dist.get_rank()
    z = torch.complex(torch.arange(8.0), torch.arange(8.0) + 1).view(4, 2)
    mesh = sw.Mesh({"a": 2})
    for full in (z.conj(), z.conj().imag):
        assert full.is_conj() or full.is_neg()
        src, dst = (sw.Layout(mesh, (4, 2), [kind], full.dtype) for kind in ("S(0)", "S(1)"))
        local, right = full[2 * rank : 2 * rank + 2], full[:, rank : rank + 1]
        if transfers:
            t = sw.transfer({"w": (local, src)}, {"w": dst})
            t.start().wait()
            assert torch.equal(t.tensors["w"], right)
            assert torch.equal(dict(t.receive())["w"], right)
            continue
        out = torch.zeros(4, 1, dtype=full.dtype)
        for _ in range(2):
            assert torch.equal(sw.redistribute_many([(local, src, dst)], out=[out])[0], right)  # type: ignore[index]
        pending = sw.redistribute_many([(local, src, dst)], async_op=True)
        assert isinstance(pending, sw.runtime.ManyHandle)
        assert torch.equal(pending.wait()[0], right)
        view = out.conj() if full.is_complex() else torch._neg_view(out)
        # Raised alone, in a call with known layouts.
        with pytest.raises(ValueError, match=r"out\[0\] must be a tensor whose memory holds its elements"):
            sw.redistribute_many([(local, src, dst)], out=[view])


@pytest.mark.cpu_only("tensors of any device have the bits")
@pytest.mark.parametrize("transfers", [False, True])
def test_conjugated_and_negated_views_are_resolved(pool: Pool, transfers: bool) -> None:
    pool.run(_conjugated, 2, transfers)


def _saved_for_backward() -> None:
    rank = dist.get_rank()
    cut, replicated = (sw.Layout(sw.Mesh({"a": 2}), (4,), [kind]) for kind in ("S(0)", "R"))
    new = torch.arange(2.0 * rank, 2.0 * rank + 2)

    def batch(out: torch.Tensor) -> None:
        sw.redistribute_many([(new, cut, replicated)], out=[out])

    def start(out: Any, staging: str | None = None) -> None:
        to = out if isinstance(out, DTensor) else (out, replicated)
        sw.transfer({"w": (new, cut)}, {"w": to}, staging=staging).start().wait()

    def receive(out: Any) -> None:
        list(sw.transfer({"w": (new, cut)}, {"w": out}).receive())

    for write, distributed in (
        (batch, False),
        (batch, False),  # with known layouts
        (start, False),
        (functools.partial(start, staging="double"), False),
        (start, True),
        (receive, True),
    ):
        out: Any = torch.zeros(4)
        factor: Any = torch.ones(4, requires_grad=True)
        if distributed:
            mesh = meshes.get_mesh((2,))
            out, factor = (DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in (out, factor))
        loss = (factor * out).sum()
        write(out)
        assert torch.equal(out.to_local() if distributed else out, torch.arange(4.0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss.to_local() if distributed else loss).backward()


@pytest.mark.cpu_only("versions are counted alike on all devices")
def test_autograd_detects_writes_to_outputs(pool: Pool) -> None:
    pool.run(_saved_for_backward, 2)


def _unknown_device() -> list[str]:
    """Rank 1 passes no tensors, and the group has backends for CPU and CUDA, as Gloo has on machines with a GPU."""
    rank = dist.get_rank()
    here, there = (sw.Layout(sw.Mesh({"a": 1}, [owner]), (4,), ["R"]) for owner in range(2))
    items = [(torch.ones(4) if rank == 0 else None, here, there)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
            patch.setattr(executables, "communicates_on", lambda device_type, group: True)
        errors = [_error(lambda: sw.redistribute_many(items))]
        sw.redistribute_many(items, device="cpu")
        assert sw.redistribute_many([]) == []
        if rank == 1:  # all ranks have compared the layouts
            errors.append(_error(lambda: sw.redistribute_many(items)))
        moved = sw.redistribute_many(items, device="cpu")
        state = {"w": (torch.ones(4), here)} if rank == 0 else None
        errors.append(_error(lambda: sw.transfer(state, {"w": there} if rank else None)))
        errors.append(_error(lambda: sw.transfer(state, {"w": there} if rank else None, device="moon")))
        t = sw.transfer(state, {"w": there} if rank else None, device="cpu")
        t.start().wait()
    if rank == 1:
        assert torch.equal(moved[0], torch.ones(4)) and torch.equal(t.tensors["w"], torch.ones(4))  # type: ignore[index]
    return errors


@pytest.mark.cpu_only("has its own device")
def test_unknown_device_raises_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(_unknown_device, 2)
    said = "device must be the device of the other ranks' tensors, got None on rank 1, which passes no tensors"
    assert "on ranks [1] the arguments are not allowed" in first[0], first
    assert second[0] == second[1] and second[0].startswith(f"ValueError: {said}"), second
    assert first[1:] == second[2:] and said in first[1], (first, second)
    assert "device must be cpu or cuda, got 'moon' (on ranks 0, 1)" in first[2], first


def _cached_layouts() -> list[int]:
    mesh = sw.Mesh({"a": 2})
    items = [(torch.zeros(2), sw.Layout(mesh, (4,), ["S(0)"]), sw.Layout(mesh, (4,), ["R"]))] * 3
    sw.reset_stats()
    sizes = []
    for _ in range(3):
        sw.redistribute_many(items)
        sizes.append(len(many._batches_of(None)))
    stats = sw.stats()
    return [*sizes, stats["batches"], stats["batched_tensors"], stats["bytes"]]


def test_calls_are_counted_and_cached(pool: Pool) -> None:
    for first, second, third, batches, tensors, received in pool.run(_cached_layouts, 2):
        assert first == second == third
        assert (batches, tensors) == (3, 9)
        assert received >= 3 * 3 * 2 * 4


def _busy_in_another_group() -> None:
    """Rank 0 runs more batches in its own group than are cached. The batch of all ranks stays cached."""
    rank = dist.get_rank()
    own = [dist.new_group([r]) for r in range(2)]
    cut, replicated = (sw.Layout(sw.Mesh({"a": 2}), (4,), [kind]) for kind in ("S(0)", "R"))
    items = [(torch.ones(2), cut, replicated)]
    sw.redistribute_many(items)
    for n in range(many.MAX_BATCHES + 1 if rank == 0 else 0):
        alone = sw.Layout(sw.Mesh({"a": 1}, [0]), (n,), ["R"])
        sw.redistribute_many([(torch.ones(n), alone, alone)], group=own[0])
    assert torch.equal(sw.redistribute_many(items)[0], torch.ones(4))  # type: ignore[index]
    with pytest.raises(ValueError, match="group must be a group with this rank, got one without rank ."):
        sw.redistribute_many(items, group=own[1 - rank])
    del own
    assert len(many._batches_of(None)) <= many.MAX_BATCHES


@pytest.mark.cpu_only("groups of some ranks are Gloo's here")
def test_batches_are_cached_by_group(pool: Pool) -> None:
    pool.run(_busy_in_another_group, 2)


def test_plan_reports_its_costs() -> None:
    train, serve = sw.Mesh({"dp": 4, "tp": 2}), sw.Mesh({"tp": 4}, range(8, 12))
    pairs = [(sw.Layout(train, (256, 64), ["S(0)", "S(1)"]), sw.Layout(serve, (256, 64), ["S(0)"]))] * 6
    plan = sw.plan_many(pairs, bucket_bytes=16384, buckets=2)
    assert plan.num_items == 6 and plan.num_kinds == 1 and plan.ranks == list(range(12))
    assert plan.received_bytes_max == 6 * 256 * 64 * 4 // 4
    assert plan.received_bytes_sum == 6 * 256 * 64 * 4
    assert plan.sent_bytes_max == plan.sent_bytes_bound == 6 * 256 * 64 * 4 // 8
    assert plan.num_rounds == plan.rounds_bound == 6
    assert plan.messages_sum == 8 * 6  # each rank of train sends to one rank of serve
    assert plan.memory_bytes == 2 * 16384
    costs = json.loads(plan.to_json())
    assert costs["memory_bytes"] == plan.memory_bytes and costs["messages_max"] == plan.messages_max
    assert "extra memory: 32 KiB on each rank, 2 buckets of 16 KiB" in str(plan)
    with pytest.raises(ValueError, match="pairs must be a list of pairs of layouts, .*, got 1 entries in item 0"):
        sw.plan_many([(pairs[0][0],)])  # type: ignore[list-item]
