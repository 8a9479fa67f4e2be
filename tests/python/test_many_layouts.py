"""Many tensors in layouts that torch does not have, with pending reductions, and in shared memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import fuzz
import layout_fuzz
import meshes
import oracle
import shardwright as sw
from allocations import allocated_peak
from pool import Pool
from shardwright.runtime import argument_checks

WORLD_SIZE = 4
SHAPE = (6, 4, 3)
# Ranks, and the placement over them.
Side = tuple[tuple[int, ...], Any]
SIDES: list[Side] = [
    ((0, 1), sw.placements.Pieces(0, [[(4, 6), (0, 2)], [(1, 5)]])),
    ((3, 1, 2), sw.placements.Pieces(0, [[(5, 6), (0, 3)], [], [(2, 5), (0, 1)]])),
    ((1, 2), sw.placements.Ragged(dims=(0, 1), units=(5, 3))),
    ((2, 0, 3), sw.placements.Ragged(dims=(0, 1, 2), units=(1, 0, 7))),
    ((0, 1, 2, 3), sw.placements.Ragged(dims=(0, 1), units=(0, 1, 5, 2))),
    ((3, 0), sw.placements.Shard(2)),
    ((2,), "R"),
]


def _layout(side: Side, shape: tuple[int, ...], dtype: str) -> sw.Layout:
    return sw.Layout(sw.Mesh({"a": len(side[0])}, side[0]), shape, [side[1]], dtype)


def _local_part(tensor: torch.Tensor, side: Side) -> torch.Tensor:
    """Returns this rank's part."""
    ranks, placement = side
    if dist.get_rank() not in ranks:
        return tensor.new_empty(0)
    c = ranks.index(dist.get_rank())
    if isinstance(placement, sw.placements.Pieces):
        return torch.cat([tensor[:0], *(tensor[begin:end] for begin, end in placement.lists[c])])
    if isinstance(placement, sw.placements.Ragged):
        assert placement.dims is not None and placement.units is not None
        flat = tensor.flatten(0, len(placement.dims) - 1)
        unit = len(flat) // sum(placement.units)
        begin = sum(placement.units[:c]) * unit
        return flat[begin : begin + placement.units[c] * unit]
    return tensor if placement == "R" else tensor.chunk(len(ranks), dim=2)[c]


def _gaps(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.new_zeros((*tensor.shape, 2)) if tensor.dim() else tensor.new_zeros(2)
    view = wide[..., 0]
    return view.copy_(tensor)


def _rearranged(bucket_bytes: int, strided: bool) -> None:
    items, expected = [], []
    for number, (src, dst) in enumerate(itertools.product(SIDES, SIDES)):
        dtype = "float32" if number % 3 else "int64"
        tensor = oracle.global_tensor(SHAPE, getattr(torch, dtype), number).to(meshes.device)
        local = _local_part(tensor, src) if dist.get_rank() in src[0] else None
        local = _gaps(local) if strided and local is not None else local
        items.append((local, _layout(src, SHAPE, dtype), _layout(dst, SHAPE, dtype)))
        expected.append(_local_part(tensor, dst))
    out = [_gaps(torch.zeros_like(part)) for part in expected] if strided else None
    plan = sw.plan_many([(src, dst) for _, src, dst in items], bucket_bytes=bucket_bytes)
    for _ in range(2):
        with sw.debug.wire_meter() as meter:
            moved = sw.redistribute_many(items, bucket_bytes=bucket_bytes, out=out, device=meshes.device)
        for (_, src, dst), result, right in zip(items, moved, expected, strict=True):  # type: ignore[arg-type]
            wrong = oracle.difference(result, right.cpu())
            assert wrong is None or (src == dst and result.numel() == 0), f"{src} -> {dst}: {wrong}"
    assert meter.received_bytes <= plan.received_bytes_max


@pytest.mark.parametrize(("bucket_bytes", "strided"), [(64 << 20, False), (300, True)])
def test_pieces_and_flattened_dims(pool: Pool, bucket_bytes: int, strided: bool) -> None:
    pool.run(_rearranged, WORLD_SIZE, bucket_bytes, strided)


def _fuzzed(seed: str) -> int:
    """Moves random layouts of all other kinds, nested and pending. Returns the number of reductions."""
    rank = dist.get_rank()
    drawn = layout_fuzz.make_cases(seed, dist.get_world_size(), 80)
    cases = [case for case in drawn if not case.is_rounded and set(case.dst.reductions) <= {"R"}]
    items, expected = [], []
    for case in cases:
        tensor = layout_fuzz._global_tensor(case)
        part = case.src.part(tensor, rank)
        local = fuzz.lay_out(part, case.memory) if rank in case.src.ranks else None
        items.append((local, *case.layouts))
        expected.append(case.dst.part(tensor, rank))
    moved = sw.redistribute_many(items, bucket_bytes=4096, device="cpu")
    for case, result, right in zip(cases, moved, expected, strict=True):  # type: ignore[arg-type]
        assert oracle.difference(result, right) is None or result.numel() == right.numel() == 0, case
    return sum(case.src.reductions != case.src.reduced().reductions for case in cases)


@pytest.mark.cpu_only("tensors are made on the CPU")
def test_random_layouts_and_reductions(pool: Pool) -> None:
    seed = str(fuzz.seed_from_environment())
    assert pool.run(_fuzzed, WORLD_SIZE, seed)[0] >= 3, f"SHARDWRIGHT_FUZZ_SEED={seed}"


def _memory_of_reductions() -> tuple[int, int]:
    rank = dist.get_rank()
    src = sw.Layout(sw.Mesh({"a": 3}), (96, 1000), ["P"])
    dst = sw.Layout(sw.Mesh({"b": 2}, [2, 3]), (96, 1000), ["S(1)"])
    items = [(torch.full((96, 1000), float(i)) if rank < 3 else None, src, dst) for i in range(3)]
    settings: dict[str, Any] = {"bucket_bytes": 40000, "buckets": 2, "device": "cpu"}
    for i, reduced in enumerate(sw.redistribute_many(items, **settings)):  # type: ignore[arg-type]
        assert rank < 2 or torch.equal(reduced, torch.full((96, 500), 3.0 * i))
    sw.runtime.release_staging()
    moved, peak = allocated_peak(sw.redistribute_many, items, **settings)
    plan = sw.plan_many([(src, dst)] * 3, bucket_bytes=40000, buckets=2)
    assert plan.reductions == 3 and plan.reduced_bytes_max == 3 * 32 * 1000 * 4
    assert plan.reduction_bytes_sum == 3 * 2 * 96 * 1000 * 4
    assert plan.memory_bytes == plan.reduced_bytes_max + max(plan.reducing_bytes_max, 2 * 40000)
    assert "reduced before: 3 tensors" in str(plan)
    # Gloo's threads may still hold the received data of the previous two reductions.
    assert peak - sum(tensor.nbytes for tensor in moved) <= plan.memory_bytes + 2 * plan.reducing_bytes_max
    return peak - sum(tensor.nbytes for tensor in moved), plan.memory_bytes


@pytest.mark.cpu_only("counts what the CPU's allocator hands out")
def test_plan_counts_memory_of_reductions(pool: Pool) -> None:
    measured = pool.run(_memory_of_reductions, WORLD_SIZE)
    assert max(peak for peak, _ in measured) > 0.5 * measured[0][1]


def _transferred() -> None:
    rank = dist.get_rank()
    shape = (6, 4)
    full = {name: oracle.global_tensor(shape, torch.float32, i, reducible=True) for i, name in enumerate("qkv")}
    on = sw.Mesh({"a": 2})
    cuts = {
        "q": sw.placements.Pieces(0, [[(3, 6)], [(0, 3), (5, 6)]]),
        "k": sw.placements.Ragged(dims=(0, 1), units=(1, 5)),
        "v": "P(sum)",
    }
    state: dict[str, Any] = {}
    for name, placement in cuts.items():
        layout = sw.Layout(on, shape, [placement], "float32")
        local = full[name] if placement == "P(sum)" else _local_part(full[name], ((0, 1), placement))
        state[name] = (local.clone(), layout)
    to = sw.Layout(
        sw.Mesh({"b": 3}, [1, 2, 3]), (18, 4), [sw.placements.Ragged(dims=(0, 1), units=(4, 1, 4))], "bfloat16"
    )
    t = sw.transfer(
        state if rank < 2 else None,
        {"qkv": to},
        [sw.rules.fuse("qkv", ["q", "k", "v"]), sw.rules.cast(torch.bfloat16)],
        bucket_bytes=100,
    )
    for factor in (1, 3):
        t.start().wait()
        fused = torch.cat([full["q"], full["k"], 2 * full["v"]]) * factor
        right = _local_part(fused.bfloat16(), ((1, 2, 3), sw.placements.Ragged(dims=(0, 1), units=(4, 1, 4))))
        assert rank == 0 or torch.equal(t.tensors["qkv"], right)
        for name, tensor in t.receive():
            assert torch.equal(tensor, right), name
        if rank < 2 and factor == 1:
            for local, _ in state.values():
                local.mul_(3)


@pytest.mark.cpu_only("tensors are made on the CPU")
def test_transfers_of_pieces_ragged_and_pending_layouts(pool: Pool) -> None:
    pool.run(_transferred, WORLD_SIZE)


def _flattened_in_groups() -> None:
    """Either side of a transfer has flattened dims, also in a group whose ranks are in another order."""
    rank = dist.get_rank()
    group = dist.new_group([3, 2])  # of torch 2.11, a second one with local synchronization may wait forever
    replicated = sw.Layout(sw.Mesh({"a": 1}, [3]), (4, 6), ["R"])
    flat = sw.Layout(sw.Mesh({"a": 1}, [2]), (4, 6), ["S(0)"], flattened=2)
    tensor = torch.arange(24.0).view(4, 6)
    for src, dst in ((flat, replicated), (replicated, flat)):
        state = {"w": (tensor.view(src.local_shape(rank)), src)} if rank in src.mesh.ranks else None
        for chosen in (None, group) if rank > 1 else (None,):
            t = sw.transfer(state, {"w": dst} if rank in dst.mesh.ranks else None, group=chosen)
            t.start().wait()
            if rank in dst.mesh.ranks:
                assert torch.equal(t.tensors["w"], tensor.view(dst.local_shape(rank)))
    pending = sw.Layout(sw.Mesh({"a": 1}, [2]), (4, 6), ["P"], flattened=2)  # over one rank: nothing is reduced
    moved: Any = sw.redistribute_many([(tensor.flatten() if rank == 2 else None, pending, replicated)])
    assert rank != 3 or torch.equal(moved[0], tensor)


@pytest.mark.cpu_only("groups of some ranks are Gloo's here")
def test_flattened_dims_in_groups(pool: Pool) -> None:
    pool.run(_flattened_in_groups, WORLD_SIZE)


def _frees_results() -> bool:
    """Returns true if a finished run has freed its results while the progress thread is busy with an earlier run."""
    rank = dist.get_rank()
    mesh = sw.Mesh({"a": 2})
    cut, replicated = (sw.Layout(mesh, (4,), [kind]) for kind in ("S(0)", "R"))
    here, there = (sw.Layout(sw.Mesh({"a": 1}, [0]), (n,), ["R"]) for n in (8, 8))
    both = [(torch.ones(2), cut, replicated)]
    own = [(torch.ones(8) if rank == 0 else None, here, there)]
    out = [torch.zeros(8) if rank == 0 else None]
    sw.redistribute_many(both)
    sw.redistribute_many(own, out=out)
    dist.barrier()
    first = sw.redistribute_many(both, async_op=True) if rank == 0 else None
    expired = True
    if rank == 0:
        given = torch.zeros(8)
        weak = given.untyped_storage()._weak_ref()
        sw.redistribute_many(own, out=[given], async_op=True).wait()  # type: ignore[union-attr]
        del given
        expired = torch.UntypedStorage._expired(weak)
    dist.barrier()
    if first is None:
        first = sw.redistribute_many(both, async_op=True)
    assert torch.equal(first.wait()[0], torch.ones(4))  # type: ignore[union-attr]
    return expired


@pytest.mark.cpu_only("the progress thread finishes runs on the CPU")
def test_finished_run_keeps_no_memory(pool: Pool) -> None:
    assert pool.run(_frees_results, 2) == [True, True]


def _unreadable() -> str:
    rank = dist.get_rank()
    cut, replicated = (sw.Layout(sw.Mesh({"a": 2}), (4,), [kind]) for kind in ("S(0)", "R"))
    items: Any = [(torch.ones(2), cut, replicated)]
    sw.redistribute_many(items)
    said = ""
    if rank == 1:  # the other rank knows the layouts, and does not compare
        with pytest.raises(ValueError) as raised:
            sw.redistribute_many([(torch.ones(2), cut)])  # type: ignore[list-item]
        said = str(raised.value)
    assert torch.equal(sw.redistribute_many(items)[0], torch.ones(4))  # type: ignore[index]
    return said


def test_invalid_items_raise_without_waiting(pool: Pool) -> None:
    assert pool.run(_unreadable, 2)[1].endswith("got 2 entries in item 0")


def _transfer_error(state: Any, to: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as raised:
        sw.transfer(state, to, **options)
    return str(raised.value)


def _shared_memory() -> list[str]:
    """Rank 1 passes sources that share memory with destinations."""
    rank = dist.get_rank()
    layout = sw.Layout(sw.Mesh({"a": 2}), (8,), ["S(0)"])
    memory = torch.arange(12.0).view(4, 3)
    column, other = memory[:, 0], memory[:, 1]  # these interleave
    source, to = (column, other) if rank == 0 else (memory.view(12)[:4], memory.view(12)[2:6])
    errors = [_transfer_error({"w": (source, layout)}, {"w": (to, layout)})]
    apart = column if rank == 0 else torch.zeros(4)
    sw.transfer({"w": (apart, layout)}, {"w": (other, layout)}).start().wait()
    same = torch.full((4,), float(rank))
    errors.append(_transfer_error({"w": (same, layout)}, {"w": (same, layout)}))
    other_side = sw.Layout(sw.Mesh({"b": 2}, [1, 0]), (8,), ["S(0)"])
    t = sw.transfer({"w": (same, layout)}, {"w": (same, other_side)}, staging="double")
    for is_swapped in (1, 0):  # each transfer swaps the halves
        t.start().wait()
        assert torch.equal(same, torch.full((4,), float(rank if is_swapped == 0 else 1 - rank)))
    two = sw.Layout(sw.Mesh({"a": 2}), (8,), ["R"])
    many = memory.view(12)
    if rank == 1:
        items: Any = [(many[:4], layout, two)]
        out: Any = [many[2:10]]
    else:
        items, out = [(torch.zeros(4), layout, two)], [torch.zeros(8)]
    with pytest.raises((ValueError, RuntimeError)) as raised:
        sw.redistribute_many(items, out=out)
    return [*errors, str(raised.value)]


@pytest.mark.cpu_only("tensors are made on the CPU")
def test_sources_that_share_memory_with_destinations_raise(pool: Pool) -> None:
    first, second = pool.run(_shared_memory, 2)
    assert first[:2] == second[:2]
    assert "destination w: its memory must not be shared, got memory shared with source w (on rank 1)" in first[0]
    assert "; with staging='double' both may be the same tensor (on ranks 0, 1)" in first[1]
    own = "out[0] must be a tensor with memory of its own, got one sharing items[0]'s memory"
    assert own in second[2] and "on ranks [1]" in first[2]


def _devices() -> str:
    rank = dist.get_rank()
    layout = sw.Layout(sw.Mesh({"a": 2}), (8,), ["S(0)"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argument_checks, "DEVICE_TYPES", ["cpu", "cuda", "meta"])
        local = torch.zeros(4, device="meta" if rank else "cpu")
        return _transfer_error({"w": (local, layout)}, {"w": sw.Layout(sw.Mesh({"a": 2}), (8,), ["R"])})


@pytest.mark.cpu_only("has devices of its own")
def test_ranks_compare_device_types(pool: Pool) -> None:
    said = pool.run(_devices, 2)
    assert (
        said[0] == said[1] and "device must be equal on all ranks, got cpu on ranks [0]; meta on ranks [1]" in said[0]
    )


def _other_cuts_of_dtensors() -> None:
    mesh = meshes.get_mesh((2,))
    tensor = torch.arange(32.0).view(8, 4)
    x = distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_()
    for cut in (
        sw.placements.Cyclic(0, 1),
        sw.placements.Ragged(dims=(0, 1), units=(1, 3)),
        sw.placements.Pieces(0, [[(4, 8)], [(0, 4)]]),
    ):
        with pytest.raises(ValueError, match="placements must be torch's placements, got"):
            sw.redistribute(x, [cut])  # type: ignore[list-item]
    # `redistribute_local` moves local tensors, and their gradients back.
    src, dst = (sw.Layout(mesh, (8, 4), [placement]) for placement in (Shard(0), sw.placements.Cyclic(0, 1)))
    local = sw.redistribute_local(x.to_local(), src, dst)
    assert torch.equal(local, tensor[dist.get_rank() :: 2])
    (local * local).sum().backward()
    assert torch.equal(x.grad.to_local(), 2 * x.detach().to_local())  # type: ignore[union-attr]


@pytest.mark.cpu_only("tensors are made on the CPU")
def test_dtensors_reject_placements_that_torch_does_not_have(pool: Pool) -> None:
    pool.run(_other_cuts_of_dtensors, 2)


def _progress_raises() -> None:
    rank = dist.get_rank()
    cut, replicated = (sw.Layout(sw.Mesh({"a": 2}), (4,), [kind]) for kind in ("S(0)", "R"))
    calls = []

    def explode(done: int, total: int, name: str) -> None:
        calls.append(name)
        raise KeyError(name)

    state = {name: (torch.full((2,), float(rank)), cut) for name in ("v", "w")}
    t = sw.transfer(state, dict.fromkeys(state, replicated), progress=explode if rank == 0 else False)
    for round in (1, 2):
        handle = t.start()
        if rank == 0:
            with pytest.raises(KeyError):
                handle.wait()
            assert len(calls) == round  # once in each run
        handle.wait()  # the run is complete on all ranks
        assert all(torch.equal(tensor, torch.tensor([0.0, 0.0, 1.0, 1.0])) for tensor in t.tensors.values())


@pytest.mark.cpu_only("tensors are made on the CPU")
def test_transfer_completes_although_progress_raises(pool: Pool) -> None:
    pool.run(_progress_raises, 2)


def _waits_for_items() -> None:
    cut, replicated = (sw.Layout(sw.Mesh({"a": 2}), (6,), [kind]) for kind in ("S(0)", "R"))
    local = torch.full((3,), float(dist.get_rank()))
    pending = sw.redistribute_many([(local, cut, replicated)] * 2, async_op=True)
    assert isinstance(pending, sw.runtime.ManyHandle)
    for item in (-1, 2):
        with pytest.raises(ValueError, match=rf"item must be in \[0, 1\], got {item}"):
            pending.wait_for(item)
    assert torch.equal(pending.wait_for(1), torch.tensor([0.0] * 3 + [1.0] * 3))
    pending.wait()


@pytest.mark.cpu_only("tensors are made on the CPU")
def test_waits_for_items_by_number(pool: Pool) -> None:
    pool.run(_waits_for_items, 2)


def _outputs_in_one_buffer() -> None:
    cut, replicated = (sw.Layout(sw.Mesh({"a": 2}), (6,), [kind]) for kind in ("S(0)", "R"))
    items, memory = [(torch.full((3,), float(dist.get_rank())), cut, replicated)] * 2, torch.zeros(12)
    with pytest.raises(ValueError, match=r"out\[0\] must be .* of its own, got one sharing out\[1\]'s memory"):
        sw.redistribute_many(items, out=[memory[:6], memory[4:10]])
    sw.redistribute_many(items, out=[memory[::2], memory[1::2]])  # these interleave
    assert torch.equal(memory, torch.tensor([0.0] * 6 + [1.0] * 6))


@pytest.mark.cpu_only("tensors are made on the CPU")
def test_outputs_that_share_memory_raise(pool: Pool) -> None:
    pool.run(_outputs_in_one_buffer, 2)
