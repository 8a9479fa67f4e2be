"""Tests of the bytes that transfers send and of the ranks that send them, counted on the wire."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import meshes
import oracle
import shardwright as sw
from pool import Pool


def _casts(source: torch.dtype, destination: torch.dtype) -> int:
    """Moves a tensor from rank 0 to rank 1 with a cast, and returns the bytes that this rank receives."""
    rank = dist.get_rank()
    here, there = (sw.Mesh({"one": 1}, [rank_of_mesh]) for rank_of_mesh in (0, 1))
    full = oracle.global_tensor((300, 200), source, 5)
    layout = sw.Layout(here, full.shape, ["R"], source)
    state = {"w": (full.to(meshes.device), layout)} if rank == 0 else None
    to = {"w": sw.Layout(there, full.shape, ["R"], destination)}
    t = sw.transfer(state, to, sw.rules.cast(destination, "w"), bucket_bytes=10_000, device=meshes.device)
    t.start().wait()  # later starts compare nothing between ranks
    with sw.debug.wire_meter() as meter:
        t.start().wait()
    if rank == 1:
        assert torch.equal(t.tensors["w"].cpu(), full.to(destination))
    return meter.received_bytes


@pytest.mark.parametrize(
    "source, destination, item_bytes",
    [
        (torch.bfloat16, torch.float32, 2),
        (torch.float32, torch.bfloat16, 2),
        (torch.uint8, torch.float64, 1),
        (torch.int64, torch.float32, 4),
        (torch.float16, torch.bfloat16, 2),
    ],
    ids=str,
)
def test_elements_are_sent_in_smaller_dtype(
    pool: Pool, source: torch.dtype, destination: torch.dtype, item_bytes: int
) -> None:
    assert pool.run(_casts, 2, source, destination) == [0, 300 * 200 * item_bytes]


def _experts(streams: bool) -> int:
    """Stacks experts of three replicas on a fourth rank, and returns the bytes that this rank sends."""
    rank = dist.get_rank()
    train, serve = sw.Mesh({"dp": 3}, [0, 1, 2]), sw.Mesh({"tp": 1}, [3])
    layout = sw.Layout(train, (32, 16), ["R"])
    names = [f"l.{i}.e.{j}.w" for i in range(9) for j in range(8)]
    full = {name: oracle.global_tensor((32, 16), torch.float32, seed) for seed, name in enumerate(names)}
    state = {name: (x.to(meshes.device), layout) for name, x in full.items()} if rank < 3 else None
    to = {f"l.{i}.e.w": sw.Layout(serve, (8, 32, 16), ["S(0)"]) for i in range(9)}
    t = sw.transfer(state, to, sw.rules.stack("l.*.e.{}.w"), bucket_bytes=16 << 10, buckets=2, device=meshes.device)
    with sw.debug.wire_meter() as meter:
        if streams:
            found = dict(t.receive())
        else:
            t.start().wait()
            found = t.tensors
    for name, x in found.items():
        assert torch.equal(x.cpu(), torch.stack([full[name.replace(".w", f".{j}.w")] for j in range(8)]))
    return meter.sent_bytes


@pytest.mark.parametrize("streams", [False, True])
def test_replicas_send_equal_bytes_of_stacked_experts(pool: Pool, streams: bool) -> None:
    assert pool.run(_experts, 4, streams) == [9 * 8 * 32 * 16 * 4 // 3] * 3 + [0]
