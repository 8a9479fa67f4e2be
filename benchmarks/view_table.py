#!/usr/bin/env python3
"""Counts the outcomes of DTensor views of small tensors: stock, and with ``sw.enable(views=True)``.

    python benchmarks/view_table.py

Prints Markdown. All views of tensors of 12 to 24 elements between shapes of up to three dims are made on meshes of
(2,), (4,), (2, 2) and (2, 3), from every even placement. One process represents all ranks: it uses torch's fake process
group, and compares the part of each rank according to DTensor with its part before the view. So it needs no
communication, and detects wrong results on every rank.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.dtensor.specs import layout_of_spec

MESHES = ((2,), (4,), (2, 2), (2, 3))
SIZES = range(12, 25)
OUTCOMES = ("free", "communicates", "refuses", "wrong")


def shapes(size: int) -> list[tuple[int, ...]]:
    found = [(size,)]
    for count in (2, 3):
        divisors = [d for d in range(2, size) if size % d == 0]
        found += [shape for shape in itertools.product(divisors, repeat=count) if math.prod(shape) == size]
    return found


def sources(mesh: DeviceMesh, shape: tuple[int, ...], strided: bool) -> Iterator[tuple[Placement, ...]]:
    """Returns all even placements that cut something: chunks only, or with at least one strided cut."""
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    if strided:
        choices += [_StridedShard(d, split_factor=f) for d, n in enumerate(shape) for f in range(2, n) if n % f == 0]
    for placements in itertools.product(choices, repeat=mesh.ndim):
        kinds = {type(placement) for placement in placements}
        if kinds == {Replicate} or strided != (_StridedShard in kinds):
            continue
        left, even = list(shape), True
        for mesh_dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                factor = getattr(placement, "split_factor", 1)
                even = even and left[placement.dim] % (factor * mesh.size(mesh_dim)) == 0
                left[placement.dim] //= mesh.size(mesh_dim)
        if even:
            yield placements


def elements(layout: sw.Layout, rank: int) -> list[int]:
    """Returns the row-major indices of the rank's elements, in local order."""
    tensor = torch.arange(math.prod(layout.shape)).view(layout.shape)
    for dim, intervals in enumerate(layout.region(rank)):
        tensor = tensor.index_select(dim, torch.tensor([i for begin, end in intervals for i in range(begin, end)]))
    return tensor.flatten().tolist()


def outcome(x: DTensor, held: list[list[int]], shape: tuple[int, ...], mesh: DeviceMesh) -> str:
    with CommDebugMode() as communication:
        try:
            result = x.view(shape)
        except (RuntimeError, AssertionError, ValueError):
            return "refuses"
    if communication.get_total_counts():
        return "communicates"
    there = layout_of_spec(result._spec, shape, x.dtype)
    return "free" if held == [elements(there, rank) for rank in range(mesh.size())] else "wrong"


def count(strided: bool) -> dict[str, collections.Counter[str]]:
    """Returns the outcomes of all views by kind: no move with a DTensor layout, with another layout, or with none."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for mesh_shape in MESHES:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
        for size in SIZES:
            for shape in shapes(size):
                for placements in sources(mesh, shape, strided):
                    meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
                    spec = DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=False)
                    layout = layout_of_spec(spec, shape, torch.float32)
                    x = DTensor(torch.zeros(layout.local_shape(0)), spec, requires_grad=False)
                    held = [elements(layout, rank) for rank in range(mesh.size())]
                    for other in shapes(size):
                        if other != shape:
                            counts[need(layout, other)][outcome(x, held, other, mesh)] += 1
    return counts


def need(layout: sw.Layout, shape: tuple[int, ...]) -> str:
    if isinstance(sw._planner.view_of(layout, shape), str):
        return "something must move"
    known = not isinstance(sw._planner.view_of(layout, shape, True), str)
    return "nothing need move" if known else "nothing need move, on a split mesh"


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    print(f"torch {torch.__version__}\n")
    print("| source | what need be done | views | | " + " | ".join(OUTCOMES) + " |")
    print("|---|---|--:|---|" + "--:|" * len(OUTCOMES))
    for strided in (False, True):
        stock = count(strided)
        with sw.enabled(views=True):
            ours = count(strided)
        for kind in sorted(stock):
            for name, counts in (("stock", stock[kind]), ("`views=True`", ours[kind])):
                shown = " | ".join(str(counts[kind_of_outcome]) for kind_of_outcome in OUTCOMES)
                source = "strided" if strided else "chunks"
                print(f"| {source} | {kind} | {sum(counts.values()):,} | {name} | {shown} |")


if __name__ == "__main__":
    main()
