"""Plans keep their promises: bytes are counted at the process group, memory at the allocator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

import oracle
import shardwright as sw
from allocations import allocated_peak
from pool import Pool

Sample = tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]

NUM_SAMPLES = 60
MAX_RUNS = 10
SEED = 20
# ATen allocates a tensor for a scalar divisor.
SCALAR_BYTES = 16
SHAPES = [(64, 64), (7, 5), (5, 3), (2, 3, 5)]


def _samples(mesh_shape: Sequence[int]) -> list[Sample]:
    """Returns random pairs of layouts, with and without pending sums."""
    generator = random.Random(SEED)
    samples = []
    while len(samples) < NUM_SAMPLES:
        shape = generator.choice(SHAPES)
        kinds = ["R", "P(sum)", *(f"S({d})" for d in range(len(shape)))]
        src, dst = (tuple(generator.choice(kinds) for _ in mesh_shape) for _ in range(2))
        if src != dst:
            samples.append((shape, src, dst))
    return samples


def _broken_promises(mesh_shape: tuple[int, ...], samples: list[Sample]) -> list[str]:
    """Runs every sample on this rank and returns the broken promises."""
    rank = dist.get_rank()
    mesh = sw.Mesh({f"m{d}": size for d, size in enumerate(mesh_shape)})
    broken = []
    for shape, src, dst in samples:
        src_layout, dst_layout = sw.Layout(mesh, shape, src), sw.Layout(mesh, shape, dst)
        plan = sw.plan(src_layout, dst_layout, backend="gloo")
        reducible = "P(sum)" in src
        tensor = oracle.global_tensor(shape, torch.float32, SEED, reducible)
        local = oracle.local(tensor, mesh_shape, src, mesh.coordinate(rank)).contiguous()
        sw.redistribute_local(local, src_layout, dst_layout)  # plans, groups and caches are made here
        with sw.debug.wire_meter() as meter:
            sw.redistribute_local(local, src_layout, dst_layout)
        # Gloo's threads free sent tensors shortly after the wait, so the smallest peak of several runs counts.
        promised = plan.rank_peak_bytes(rank)
        result, peak = allocated_peak(sw.redistribute_local, local, src_layout, dst_layout)
        for _ in range(MAX_RUNS):
            # All ranks must go on together.
            done = torch.tensor(float(abs(peak - promised) <= SCALAR_BYTES))
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if done.item():
                break
            result, again = allocated_peak(sw.redistribute_local, local, src_layout, dst_layout)
            peak = min(peak, again)
        name = f"{shape} {src} -> {dst}"
        if meter.received_bytes != plan.wire_bytes(rank):
            broken.append(f"{name}: received {meter.received_bytes} bytes, promised {plan.wire_bytes(rank)}")
        if not 0 <= peak - promised <= SCALAR_BYTES:
            broken.append(f"{name}: allocated {peak} bytes, promised {promised}")
        if tuple(result.shape) != tuple(dst_layout.local_shape(rank)):
            broken.append(f"{name}: shape {tuple(result.shape)}")
    return broken


@pytest.mark.parametrize(("world", "mesh_shape"), [(4, (2, 2)), (3, (3,)), (8, (2, 2, 2))])
def test_bytes_and_peak_are_as_promised(pool: Pool, world: int, mesh_shape: tuple[int, ...]) -> None:
    broken = itertools.chain(*pool.run(_broken_promises, world, mesh_shape, _samples(mesh_shape)))
    assert not list(broken)
