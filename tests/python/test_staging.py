"""Temporaries of large redistributes on CPU are kept for the next run, within bounds, and never shared by two runs."""

from __future__ import annotations

import torch
import torch.distributed as dist

import oracle
import shardwright as sw
from pool import Pool

WORLD = 4
MESH = (2, 2)
SHAPE = (1024, 1025)
CAP = 256 << 20


def _layouts(src: list[str], dst: list[str]) -> tuple[sw.Layout, sw.Layout]:
    mesh = sw.Mesh({"dp": 2, "tp": 2})
    return sw.Layout(mesh, SHAPE, src), sw.Layout(mesh, SHAPE, dst)


def _kept_and_released() -> None:
    rank = dist.get_rank()
    src, dst = _layouts(["P", "P"], ["S(1)", "S(1)"])
    coordinate = src.mesh.coordinate(rank)
    tensor = oracle.global_tensor(SHAPE, torch.float32, 5, True)
    local = oracle.local(tensor, MESH, ["P(sum)", "P(sum)"], coordinate).contiguous()
    expected = oracle.local(tensor, MESH, ["S(1)", "S(1)"], coordinate)
    sw.runtime.release_staging()
    assert sw.stats()["staging_bytes"] == 0
    kept = []
    for _ in range(3):
        assert oracle.difference(sw.redistribute_local(local, src, dst), expected, rounded=True) is None
        kept.append(sw.stats()["staging_bytes"])
    assert 0 < kept[0] <= CAP
    assert kept == kept[:1] * 3, "each run takes what the one before gave back"
    with torch.inference_mode():
        sw.redistribute_local(local, src, dst)
    assert oracle.difference(sw.redistribute_local(local, src, dst), expected, rounded=True) is None
    sw.runtime.release_staging()
    assert sw.stats()["staging_bytes"] == 0


def test_staging_is_kept_and_released(pool: Pool) -> None:
    pool.run(_kept_and_released, WORLD)


def _several_in_flight() -> None:
    rank = dist.get_rank()
    src, dst = _layouts(["S(0)", "S(0)"], ["S(1)", "S(1)"])
    coordinate = src.mesh.coordinate(rank)
    tensors = [oracle.global_tensor(SHAPE, torch.float32, seed) for seed in range(4)]
    locals_ = [oracle.local(t, MESH, ["S(0)", "S(0)"], coordinate).contiguous() for t in tensors]
    for _ in range(2):
        results = [sw.redistribute_local(local, src, dst, async_op=True) for local in locals_]
        for tensor, result in zip(tensors, results, strict=True):
            expected = oracle.local(tensor, MESH, ["S(1)", "S(1)"], coordinate)
            assert oracle.difference(result + 0, expected) is None


def test_concurrent_runs_do_not_share_staging(pool: Pool) -> None:
    pool.run(_several_in_flight, WORLD)
