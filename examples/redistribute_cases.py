"""The redistributes of the demo and the benchmarks, with the part of each rank before and after.

Nothing here calls DTensor to cut a tensor: `local_shard` cuts with `torch.chunk`, one mesh dim after the other in
shard order, so its results are an independent reference. Placements are written as strings:

    "R"        a copy on every rank of the mesh dim
    "S(0)"     tensor dim 0 sharded along the mesh dim
    "SS(0,2)"  the same, but mesh dims to the right, 2 ranks together, cut first: _StridedShard(0, split_factor=2)
    "P"        one contribution per rank, the tensor is their sum; "P(max)", "P(min)", "P(avg)" likewise
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Coordinate = tuple[int, ...]

_PLACEMENT = re.compile(r"R|S\((?P<dim>\d+)\)|SS\((?P<strided>\d+),(?P<split>\d+)\)|P(\((?P<op>sum|avg|min|max)\))?")
_REDUCE = {
    "sum": lambda parts: parts.sum(dim=0),
    "avg": lambda parts: parts.mean(dim=0),
    "min": lambda parts: parts.amin(dim=0),
    "max": lambda parts: parts.amax(dim=0),
}


@dataclass(frozen=True)
class Case:
    """One redistribute of a matrix of about n x n elements.

    `extra` is added to n in each tensor dim: (0, 0) divides evenly for n = 64, 256, ..., (1, -1) does not.
    """

    name: str
    src: tuple[str, ...]
    dst: tuple[str, ...]
    extra: tuple[int, int] = (0, 0)
    mesh_shape: tuple[int, ...] = (2, 2)

    def shape(self, n: int) -> tuple[int, int]:
        """Returns the global shape for size n."""
        return (n + self.extra[0], n + self.extra[1])

    @property
    def changes_every_shard(self) -> bool:
        """Returns whether every mesh dim goes from one sharding to another; then an all-to-all saves most."""
        return all(a.startswith("S") and b.startswith("S") and a != b for a, b in zip(self.src, self.dst, strict=True))


TWELVE = (
    Case("gather one mesh dim", ("S(0)", "R"), ("R", "R")),
    Case("gather both", ("S(0)", "S(0)"), ("R", "R")),
    Case("gather both, uneven", ("S(0)", "S(0)"), ("R", "R"), extra=(1, -1)),
    Case("gather outer, uneven", ("S(0)", "S(0)"), ("R", "S(0)"), extra=(1, -1)),
    Case("shard to shard, both", ("S(0)", "S(0)"), ("S(1)", "S(1)")),
    Case("swap", ("S(0)", "S(1)"), ("S(1)", "S(0)")),
    Case("swap, uneven", ("S(0)", "S(1)"), ("S(1)", "S(0)"), extra=(1, -1)),
    Case("to the other mesh dim", ("S(0)", "R"), ("R", "S(0)")),
    Case("strided to plain", ("SS(0,2)", "S(0)"), ("S(0)", "S(0)")),
    Case("strided, shard to shard", ("SS(0,2)", "S(0)"), ("S(1)", "S(1)")),
    Case("sum and copy", ("P", "P"), ("R", "R")),
    Case("sum and cut, uneven", ("P", "P"), ("S(0)", "S(0)"), extra=(1, -1)),
)
"""On a mesh of 2 x 2. Stock PyTorch returns wrong rows for both uneven gathers when the mesh has a flattened dim."""

GRADIENTS = Case("gradients", ("P", "P", "P"), ("R", "S(0)", "R"), mesh_shape=(2, 2, 2))
"""Every rank of a 2 x 2 x 2 mesh has a contribution to a gradient that stays sharded along one mesh dim."""

STRIDED_TO_PLAIN = Case("FSDP+TP to plain shards", ("SS(0,2)", "S(0)"), ("S(0)", "S(0)"))
"""From FSDP2 over dp of a weight that tensor parallelism has sharded in dim 0, to shards in plain rank order."""


def torch_placements(placements: Sequence[str]) -> tuple:
    """Returns the strings as PyTorch's placement objects."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def to_placement(text: str):
        match = _match(text)
        if match["dim"] is not None:
            return Shard(int(match["dim"]))
        if match["strided"] is not None:
            return _StridedShard(int(match["strided"]), split_factor=int(match["split"]))
        return Replicate() if text == "R" else Partial(match["op"] or "sum")

    return tuple(to_placement(text) for text in placements)


def local_shard(
    tensor: torch.Tensor, placements: Sequence[str], mesh_shape: Sequence[int], coordinate: Coordinate
) -> torch.Tensor:
    """Returns the contiguous part of `tensor` that the rank at `coordinate` holds; "P" counts as a replica."""
    for tensor_dim in range(tensor.dim()):
        for mesh_dim in cut_order(placements, mesh_shape, tensor_dim):
            tensor = _chunk(tensor, tensor_dim, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return tensor.contiguous()


def cut_order(placements: Sequence[str], mesh_shape: Sequence[int], tensor_dim: int) -> list[int]:
    """Returns the mesh dims that cut `tensor_dim`, first cut first.

    A mesh dim with split factor f is cut when the mesh dims to its right that cut before it have f ranks together:
    ["SS(0,2)", "S(0)"] on 2 x 2 gives [1, 0].
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        match = _match(placements[mesh_dim])
        if tensor_dim not in (_int(match["dim"]), _int(match["strided"])):
            continue
        split_factor = _int(match["split"]) or 1
        for position in range(len(order) + 1):
            if math.prod(mesh_shape[d] for d in order[:position]) == split_factor:
                order.insert(position, mesh_dim)
                break
        else:
            raise ValueError(f"no shard order has {placements[mesh_dim]} on mesh dim {mesh_dim} of {tuple(mesh_shape)}")
    return order


def assemble(
    parts: dict[Coordinate, torch.Tensor], shape: Sequence[int], placements: Sequence[str], mesh_shape: Sequence[int]
) -> torch.Tensor:
    """Returns the global tensor of which each rank holds its part ("S", "SS" and "R" only)."""
    element_ids = torch.arange(math.prod(shape)).reshape(tuple(shape))
    full = next(iter(parts.values())).new_empty(math.prod(shape))
    for coordinate, part in parts.items():
        full[local_shard(element_ids, placements, mesh_shape, coordinate).flatten()] = part.flatten()
    return full.reshape(tuple(shape))


def global_tensor(case: Case, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the global tensor of a case, reduced if it is partial. Small integers keep every sum exact."""
    coordinates = list(itertools.product(*[range(k) for k in case.mesh_shape]))
    partial_dims = _partial_dims(case.src)
    contributions = {tuple(c[d] for d in partial_dims): _contribution(case, n, c, dtype) for c in coordinates}
    if not partial_dims:
        return contributions[()]
    reduce_op = _match(case.src[partial_dims[0]])["op"] or "sum"
    return _REDUCE[reduce_op](torch.stack(list(contributions.values())))


def source_local(case: Case, n: int, coordinate: Coordinate, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the source part of the rank at `coordinate`."""
    return local_shard(_contribution(case, n, coordinate, dtype), case.src, case.mesh_shape, coordinate)


def expected_local(case: Case, n: int, coordinate: Coordinate, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the expected destination part of the rank at `coordinate`."""
    return local_shard(global_tensor(case, n, dtype), case.dst, case.mesh_shape, coordinate)


def _contribution(case: Case, n: int, coordinate: Coordinate, dtype: torch.dtype) -> torch.Tensor:
    """Returns a global tensor of numbers 0..100; ranks that differ in a partial mesh dim get different ones."""
    rows, columns = case.shape(n)
    seed = sum(coordinate[d] * 5 ** (1 + d) for d in _partial_dims(case.src))
    return ((torch.arange(rows)[:, None] * 31 + torch.arange(columns) * 7 + seed) % 101).to(dtype)


def _partial_dims(placements: Sequence[str]) -> list[int]:
    return [d for d, text in enumerate(placements) if text.startswith("P")]


def _chunk(tensor: torch.Tensor, dim: int, num_chunks: int, index: int) -> torch.Tensor:
    """Like torch.chunk, but with the empty chunks that it leaves out at the end."""
    chunks = torch.chunk(tensor, num_chunks, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def _match(text: str) -> re.Match:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise ValueError(f'placement {text!r} is none of "R", "S(dim)", "SS(dim,split_factor)", "P", "P(op)"')
    return match


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)
