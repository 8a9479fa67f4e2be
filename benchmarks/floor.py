"""A hand-written floor for the time of a redistribute on Gloo: pack, one raw all-to-all, unpack.

`Floor` moves only what must move, over the smallest process group that contains all ranks which exchange data with each
other. Every slice, view and staging buffer is made beforehand; a call allocates only the result, as a redistribute
must. For a sum, a rank receives the contributions to its own part and adds them up. If all ranks need the sum, each
adds up a quarter, and a second all-to-all sends the quarters to all.

Nothing here uses shardwright: which rank holds which rectangle of the matrix is computed with `torch.chunk`.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from redistribute_cases import Case, Coordinate, cut_order


@dataclass(frozen=True)
class Rectangle:
    """Rows [top, bottom) and columns [left, right) of the global matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return max(self.bottom - self.top, 0) * max(self.right - self.left, 0)

    def within(self, other: "Rectangle") -> "Rectangle":
        """Returns the intersection."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        return Rectangle(top, min(self.bottom, other.bottom), left, min(self.right, other.right))

    def slices(self, origin: "Rectangle") -> tuple[slice, slice]:
        """Returns where the rectangle is in the local tensor that holds `origin`."""
        return (
            slice(self.top - origin.top, self.bottom - origin.top),
            slice(self.left - origin.left, self.right - origin.left),
        )


def rectangle(case: Case, shape: Sequence[int], placements: Sequence[str], coordinate: Coordinate) -> Rectangle:
    """Returns the rectangle of the rank at `coordinate`; "P" counts as a replica."""
    bounds = []
    for tensor_dim, extent in enumerate(shape):
        indices = torch.arange(extent)
        for mesh_dim in cut_order(placements, case.mesh_shape, tensor_dim):
            chunks = torch.chunk(indices, case.mesh_shape[mesh_dim])
            indices = chunks[coordinate[mesh_dim]] if coordinate[mesh_dim] < len(chunks) else indices[:0]
        first = int(indices[0]) if len(indices) else 0
        bounds += [first, first + len(indices)]
    return Rectangle(*bounds)


class Groups:
    """Process groups by their ranks, made once. All ranks must ask for the same ones in the same order."""

    def __init__(self) -> None:
        self._made = {tuple(range(dist.get_world_size())): dist.group.WORLD}

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Returns the group of these ranks; on other ranks an object that must not be used."""
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks))
        return self._made[ranks]


class _Transfer:
    """One all-to-all with its staging buffers."""

    def __init__(
        self,
        groups: Groups,
        ranks: tuple[int, ...],
        dtype: torch.dtype,
        sends: dict[int, torch.Tensor],
        receives: dict[int, int],
    ) -> None:
        """`sends` has the views to send by rank, which are read at each call; `receives` has counts by rank."""
        self._group = groups.get(ranks)
        self._send_counts = [sends[r].numel() if r in sends else 0 for r in ranks]
        self._receive_counts = [receives.get(r, 0) for r in ranks]
        self._send = torch.empty(sum(self._send_counts), dtype=dtype)
        self._receive = torch.empty(sum(self._receive_counts), dtype=dtype)
        sent = dict(zip(ranks, self._send.split(self._send_counts), strict=True))
        received = dict(zip(ranks, self._receive.split(self._receive_counts), strict=True))
        self._packing = [(sent[r].view(part.shape), part) for r, part in sends.items()]
        self.received = {r: received[r] for r in receives}
        """The data received from each rank, flat."""

    def __call__(self) -> None:
        for packed, part in self._packing:
            packed.copy_(part)
        dist.all_to_all_single(self._receive, self._send, self._receive_counts, self._send_counts, group=self._group)


class Floor:
    """A callable that redistributes `local`, the same tensor in each call. Returns a new tensor."""

    def __init__(self, case: Case, n: int, coordinate: Coordinate, local: torch.Tensor, groups: Groups) -> None:
        shape = case.shape(n)
        coordinates = list(itertools.product(*[range(k) for k in case.mesh_shape]))
        self._rank = coordinates.index(coordinate)
        self._held = [rectangle(case, shape, case.src, c) for c in coordinates]
        self._needed = [rectangle(case, shape, case.dst, c) for c in coordinates]
        self._local = local
        need = self._needed[self._rank]
        self._shape = (need.bottom - need.top, need.right - need.left)
        self._transfers: list[_Transfer] = []
        if not any(text.startswith("P") for text in case.src):
            self._prepare_exchange(coordinates, groups)
            self._run = self._exchange
        elif all(text == "R" for text in case.dst):
            self._prepare_sum(self._flat_chunks(math.prod(shape)), groups)
            self._prepare_sharing(groups)
            self._run = self._sum_and_share
        else:
            self._prepare_sum([local[r.slices(self._held[0])] for r in self._needed], groups)
            self._run = self._sum

    def __call__(self) -> torch.Tensor:
        return self._run()

    # ---- shards and replicas

    def _prepare_exchange(self, coordinates: list[Coordinate], groups: Groups) -> None:
        moves: dict[tuple[int, int], Rectangle] = {}  # (from, to)
        for receiver, need in enumerate(self._needed):
            nearest_first = sorted(
                range(len(coordinates)), key=lambda r, to=receiver: _distance(coordinates[r], coordinates[to])
            )
            seen: set[Rectangle] = set()  # replicas hold the same rectangle, others hold disjoint ones
            for sender in nearest_first:
                shared = self._held[sender].within(need)
                if self._held[sender] not in seen and sender != receiver and shared.size > 0:
                    moves[sender, receiver] = shared
                seen.add(self._held[sender])
        ranks = _connected(moves, len(coordinates), self._rank, groups)
        me = self._rank
        held, need = self._held[me], self._needed[me]
        self._own_source = self._local[held.within(need).slices(held)] if held.within(need).size > 0 else None
        self._own_place = held.within(need).slices(need)
        self._unpacking: list[tuple[tuple[slice, slice], torch.Tensor]] = []
        if len(ranks) == 1:
            return
        outgoing = {receiver: part for (sender, receiver), part in moves.items() if sender == me}
        incoming = {sender: part for (sender, receiver), part in moves.items() if receiver == me}
        sends = {r: self._local[part.slices(held)] for r, part in outgoing.items()}
        transfer = _Transfer(groups, ranks, self._local.dtype, sends, {r: part.size for r, part in incoming.items()})
        for sender, part in incoming.items():
            arrived = transfer.received[sender].view(part.bottom - part.top, part.right - part.left)
            self._unpacking.append((part.slices(need), arrived))
        self._transfers.append(transfer)

    def _exchange(self) -> torch.Tensor:
        for transfer in self._transfers:
            transfer()
        result = torch.empty(self._shape, dtype=self._local.dtype)
        if self._own_source is not None:
            result[self._own_place].copy_(self._own_source)
        for place, part in self._unpacking:
            result[place].copy_(part)
        return result

    # ---- sums of one contribution per rank

    def _flat_chunks(self, count: int) -> list[torch.Tensor]:
        world = len(self._held)
        flat = self._local.view(-1)
        return [flat[r * count // world : (r + 1) * count // world] for r in range(world)]

    def _prepare_sum(self, chunks: list[torch.Tensor], groups: Groups) -> None:
        everyone = tuple(range(len(chunks)))
        others = [r for r in everyone if r != self._rank]
        self._chunk_sizes = [chunk.numel() for chunk in chunks]
        self._own_chunk = chunks[self._rank]
        counts = dict.fromkeys(others, self._own_chunk.numel())
        transfer = _Transfer(groups, everyone, self._local.dtype, {r: chunks[r] for r in others}, counts)
        self._contributions = [part.view(self._own_chunk.shape) for part in transfer.received.values()]
        self._transfers.append(transfer)

    def _sum(self) -> torch.Tensor:
        result = torch.empty(self._shape, dtype=self._local.dtype)
        self._sum_into(result)
        return result

    def _sum_into(self, result: torch.Tensor) -> None:
        self._transfers[0]()
        torch.add(self._own_chunk, self._contributions[0], out=result)
        for contribution in self._contributions[1:]:
            result.add_(contribution)

    def _prepare_sharing(self, groups: Groups) -> None:
        """Prepares the second transfer: each rank sends its part of the sum to all other ranks."""
        everyone = tuple(range(len(self._held)))
        others = [r for r in everyone if r != self._rank]
        self._own_sum = torch.empty_like(self._own_chunk)
        counts = {r: self._chunk_sizes[r] for r in others}
        transfer = _Transfer(groups, everyone, self._local.dtype, dict.fromkeys(others, self._own_sum), counts)
        self._parts = [transfer.received.get(r, self._own_sum) for r in everyone]
        self._transfers.append(transfer)

    def _sum_and_share(self) -> torch.Tensor:
        self._sum_into(self._own_sum)
        self._transfers[1]()
        result = torch.empty(self._shape, dtype=self._local.dtype)
        for place, part in zip(result.view(-1).split(self._chunk_sizes), self._parts, strict=True):
            place.copy_(part)
        return result


def _distance(a: Coordinate, b: Coordinate) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def _connected(moves: Iterable[tuple[int, int]], num_ranks: int, rank: int, groups: Groups) -> tuple[int, ...]:
    """Returns the ranks connected to `rank` by exchanges, itself included. Makes the groups of all such sets."""
    label = list(range(num_ranks))
    for sender, receiver in moves:
        old, new = label[sender], label[receiver]
        label = [new if value == old else value for value in label]
    sets = {tuple(r for r in range(num_ranks) if label[r] == value) for value in label}
    for ranks in sorted(sets):
        if len(ranks) > 1:
            groups.get(ranks)
    return next(ranks for ranks in sets if rank in ranks)
