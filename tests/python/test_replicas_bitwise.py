"""After every reduction all replicas of an element are equal bit by bit, and right.

Random floats make the order of additions visible. A sum that two groups compute separately, or in two steps whose
order differs between ranks, shows here.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh, subsets
from pool import Pool

Mesh = tuple[int, ...]
Placements = tuple[str, ...]

MOVES: list[tuple[Mesh, Placements, Placements]] = [
    ((3,), ("P(sum)",), ("R",)),
    ((8,), ("P(sum)",), ("R",)),
    ((8,), ("P(avg)",), ("R",)),
    ((2, 4), ("P(sum)", "P(sum)"), ("R", "R")),
    ((2, 4), ("P(sum)", "R"), ("R", "R")),
    ((4, 2), ("P(avg)", "P(sum)"), ("R", "R")),
    ((4, 2), ("P(sum)", "P(sum)"), ("S(0)", "R")),
    ((4, 2), ("P(sum)", "P(sum)"), ("R", "S(1)")),
    ((2, 3), ("P(sum)", "S(0)"), ("R", "R")),
    ((2, 2, 2), ("P(sum)", "P(sum)", "P(sum)"), ("R", "R", "R")),
    ((2, 2, 2), ("P(sum)", "R", "P(sum)"), ("R", "R", "R")),
    ((2, 2, 2), ("P(sum)", "P(sum)", "P(sum)"), ("R", "S(0)", "R")),
    ((2, 2, 2), ("P(sum)", "S(0)", "P(sum)"), ("R", "R", "S(0)")),
    ((2, 2, 2), ("P(norm 2)", "R", "P(norm 2)"), ("R", "R", "R")),
]


def _moved(
    mesh_shape: Mesh, src: Placements, dst: Placements, flatten: tuple, shape: tuple, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's contribution, in global shape, and its part of the result."""
    mesh = get_mesh(mesh_shape, flatten=flatten)
    coordinate = mesh.get_coordinate()
    pending = [c if oracle.reduce_op(p) else 0 for c, p in zip(coordinate, src, strict=True)]
    seed = 1 + sum(c * 10**i for i, c in enumerate(pending))
    contribution = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if "P(norm 2)" in src:
        contribution = contribution.abs()
    local = oracle.take(contribution, oracle.local_indices(shape, mesh_shape, src, coordinate))
    with sw.enabled(strict=True):
        source = dtensors.wrap(local, mesh, shape, src)
        result = source.redistribute(mesh, dtensors.to_placements(dst)).to_local()
    return contribution.cpu(), result.cpu()


def _true_result(contributions: list[torch.Tensor], mesh_shape: Mesh, src: Placements) -> torch.Tensor:
    """Returns the reduction in double precision, over one rank for each coordinate of the pending mesh dims."""
    grid = torch.arange(len(contributions)).view(mesh_shape)
    index = tuple(slice(None) if oracle.reduce_op(p) else 0 for p in src)
    ranks = grid[index].flatten().tolist()
    pending = [d for d, p in enumerate(src) if oracle.reduce_op(p)]
    held = [contributions[rank].double() for rank in ranks]
    return oracle.reduce_all(held, [src[d] for d in pending], [mesh_shape[d] for d in pending])


def _check(actual: list[tuple[torch.Tensor, torch.Tensor]], mesh_shape: Mesh, src: Placements, dst: Placements) -> None:
    contributions, results = [pair[0] for pair in actual], [pair[1] for pair in actual]
    dtype = results[0].dtype
    expected = _true_result(contributions, mesh_shape, src).to(dtype)
    by_region: dict[str, tuple[int, torch.Tensor]] = {}
    for rank, result in enumerate(results):
        coordinate = [int(c) for c in (torch.arange(len(actual)).view(mesh_shape) == rank).nonzero()[0]]
        indices = oracle.local_indices(expected.shape, mesh_shape, dst, coordinate)
        wrong = oracle.difference(result, oracle.take(expected, indices), rounded=True)
        assert wrong is None, f"rank {rank}: {wrong}"
        first, other = by_region.setdefault(str(indices), (rank, result))
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        different = int((result.contiguous().view(bits) != other.contiguous().view(bits)).sum()) if result.ndim else 0
        assert different == 0, f"ranks {first} and {rank} hold the same {different} elements with different bits"


@pytest.mark.parametrize("flattened", [False, True], ids=["plain", "flattened"])
@pytest.mark.parametrize(("mesh_shape", "src", "dst"), MOVES, ids=str)
def test_replica_bits_match(pool: Pool, mesh_shape: Mesh, src: Placements, dst: Placements, flattened: bool) -> None:
    flatten = tuple(subsets("abc"[: len(mesh_shape)])) if flattened else ()
    world_size = torch.Size(mesh_shape).numel()
    for shape, dtype in [((64, 48), torch.float32), ((7, 5), torch.float32), ((37, 3), torch.bfloat16)]:
        found = pool.run(_moved, world_size, mesh_shape, src, dst, flatten, shape, dtype)
        _check(found, mesh_shape, src, dst)


def _gradient_norm() -> float:
    """Returns the norm that gradient clipping uses. If ranks disagree about it, their weights drift apart."""
    mesh = get_mesh((2, 2, 2), flatten="all")
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient = dtensors.wrap(torch.randn(3, 5, generator=generator), mesh, (12, 10), ["S(0)", "S(1)", "S(0)"])
    with sw.enabled(strict=True):
        norm = torch.nn.utils.get_total_norm([gradient, gradient * 2])
        return norm.full_tensor().item()


def test_gradient_norm_is_equal_on_all_ranks(pool: Pool) -> None:
    norms = pool.run(_gradient_norm, 8)
    parts = [torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)).double() for rank in range(8)]
    expected = torch.stack([part * factor for part in parts for factor in (1, 2)]).norm().item()
    assert len(set(norms)) == 1, norms
    assert abs(norms[0] - expected) < 1e-5 * expected
