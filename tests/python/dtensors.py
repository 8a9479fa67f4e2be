"""Converts between the oracle's strings and DTensors, for tests that run inside a worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard

import meshes
import oracle

# PyTorch 2.15 made Shard -> Partial("sum") a public conversion; before that it is undefined.
SHARD_TO_PARTIAL_IS_DEFINED = hasattr(Shard, "_to_partial_tensor")

# One redistribute of each kind that PyTorch has, on one mesh dim.
MOVES: list[tuple[Placement, Placement]] = [
    (Shard(0), Replicate()),
    (Shard(1), Replicate()),
    (Shard(0), Shard(1)),
    (Partial(), Replicate()),
    (Partial(), Shard(0)),
    (Replicate(), Shard(1)),
]


def to_placement(text: str) -> Placement:
    dim = oracle.shard_dim(text)
    if dim is not None:
        return _StridedShard(dim, split_factor=oracle.split_factor(text)) if oracle.is_strided(text) else Shard(dim)
    op = oracle.reduce_op(text)
    if op == "norm":
        power = oracle.norm_type(text)
        return _NormPartial(int(power) if power == int(power) else power)
    return Replicate() if op is None else Partial(op)


def to_placements(texts: Sequence[str]) -> tuple[Placement, ...]:
    return tuple(map(to_placement, texts))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


def make_spec(
    mesh: DeviceMesh,
    shape: Sequence[int],
    placements: Sequence[str],
    dtype: torch.dtype,
    shard_order: oracle.ShardOrder | None = None,
    strided: str = "order",
) -> DTensorSpec:
    """Returns a DTensorSpec of a contiguous global tensor, with the arguments of oracle.local_indices."""
    order = None
    if shard_order is not None:
        order = tuple(ShardOrderEntry(dim, tuple(cutters)) for dim, cutters in sorted(shard_order.items()))
    return DTensorSpec(
        mesh,
        to_placements(placements),
        tensor_meta=TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype),
        shard_order=order,
        use_strided_shard_as_shard_order=False if strided == "literal" else None,
    )


def wrap(local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[str]) -> DTensor:
    """Returns the DTensor of a contiguous global `shape` whose part on this rank is `local`."""
    return DTensor.from_local(
        local,
        mesh,
        to_placements(placements),
        run_check=False,
        shape=torch.Size(shape),
        stride=contiguous_stride(shape),
    )


def my_local(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[str]) -> torch.Tensor:
    """Returns this rank's part of a global tensor, computed by the oracle."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return oracle.local(tensor, mesh.shape, placements, coordinate).to(meshes.device)


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[str]) -> DTensor:
    """Returns a DTensor made from a global tensor that every rank has, without communication."""
    return wrap(my_local(tensor, mesh, placements), mesh, tensor.shape, placements)


def check(result: DTensor, tensor: torch.Tensor, placements: Sequence[str], rounded: bool = False) -> None:
    """Raises AssertionError unless `result` is the global tensor with these placements, without pending reductions."""
    assert result.placements == to_placements(placements), f"placements {result.placements}, expected {placements}"
    wrong = oracle.difference(
        result.to_local().detach(), my_local(tensor, result.device_mesh, placements), rounded=rounded
    )
    assert wrong is None, f"to {placements} on {tuple(result.device_mesh.shape)}: {wrong}"
