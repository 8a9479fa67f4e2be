"""Small moves of a unit's weights that share one message.

A message takes a constant time besides the time for its bytes. So small tensors are packed: their parts are copied to
one buffer, which is moved in one message, and from the received buffer to their outputs. Example: weights of 4 x 3 and
8 elements are gathered from two ranks. Each rank sends the 6 + 4 elements of its shards. It copies elements 0-5 and
10-15 of the 20 that it receives to the first weight, and 6-9 and 16-19 to the second.

Moves share a message if they are on one mesh and communicate over the same mesh dims, in sums also with one dtype, and
if the copies of each tensor take less time than a message. This depends on layouts alone, so all ranks decide the same.

One side of each move is sharded over a mesh dim, the *shard mesh dim*: the source of a gather, the target of a
reduction. On the *full side*, a rank's tensor has the parts of all coordinates along that mesh dim.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from .._native import _planner
from ..layouts.layout import Layout
from ..runtime import executables
from .moves import Moves

Pair: TypeAlias = tuple[_planner.Layout, _planner.Layout]  # source and target of a move

ALIGNMENT = 256  # alignment of each buffer in the arena, in bytes

# Assumed speed of copies to and from a message, by device type. On GPUs it is about a third of the memory bandwidth.
COPIED_BYTES_PER_US = {"cpu": 4e3, "cuda": 1e6}
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHARDED = re.compile(r"(?:S|SS|Ragged)\((\d+)")  # placements whose parts are intervals


def aligned(size_bytes: int) -> int:
    """Rounds up to a multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def empty_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Returns new memory for gathers. Also in inference mode, it is a tensor that later gathers may write."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


class _Kind(NamedTuple):
    """The communication of a move. Moves of one kind can share a message."""

    mesh: _planner.Mesh
    dtype: str  # dtype of the summed elements; "uint8" for gathers, which move bytes
    # By mesh dim: "gather", or the reduction, such as "P(avg)". Without communication: "" if all ranks along the dim
    # have equal data, "own" if they do not.
    dims: tuple[str, ...]
    shard_mesh_dim: int | None  # None for an all-reduce

    @property
    def gathers(self) -> bool:
        """True for a gather, false for a reduction."""
        return self.shard_mesh_dim is not None and self.dims[self.shard_mesh_dim] == "gather"

    def coordinate(self, rank: int) -> int:
        """Returns a rank's coordinate along the shard mesh dim; 0 without one."""
        coordinates = self.mesh.coordinate(rank)
        assert coordinates is not None
        return 0 if self.shard_mesh_dim is None else coordinates[self.shard_mesh_dim]


def _kind_of(src: _planner.Layout, dst: _planner.Layout) -> _Kind | None:
    """Returns the communication of a move, equal for moves that may share a message.

    None if the move communicates nothing, or cannot share a message.
    """
    if max(src.flattened, dst.flattened) > 1 or src.mesh != dst.mesh or src.dtype != dst.dtype:
        return None
    dims = []
    shard_mesh_dims = []
    for dim, (p, q) in enumerate(zip(src.placements, dst.placements)):
        is_reduced = p.startswith("P(") and (q == "R" or _SHARDED.match(q) is not None)
        is_gathered = q == "R" and _SHARDED.match(p) is not None
        if p == q or src.mesh.shape[dim] == 1:
            dims.append("own" if p != "R" and src.mesh.shape[dim] > 1 else "")
        elif is_reduced or is_gathered:
            dims.append(p if is_reduced else "gather")
            if is_gathered or q != "R":
                shard_mesh_dims.append(dim)
        else:
            return None
    operations = {text for text in dims if text not in ("", "own")}
    if not operations or len(shard_mesh_dims) > 1 or (len(operations) > 1 and "gather" in operations):
        return None
    dtype = "uint8" if "gather" in operations else src.dtype
    return _Kind(src.mesh, dtype, tuple(dims), next(iter(shard_mesh_dims), None))


class _Item(NamedTuple):
    """The parts of a tensor in a message. Lists are by coordinate along the shard mesh dim."""

    move: int  # index of the move
    dtype: torch.dtype
    dim: int  # the tensor dim that is sharded
    numels: list[int]  # number of elements of each part
    bounds: list[tuple[int, int]]  # begin and end of each part along `dim`, in this rank's tensor on the full side
    full_shape: list[int]  # shape of this rank's tensor on the full side

    def parts(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts as views of a tensor on the full side, which may be viewed as a smaller dtype."""
        if not self.full_shape:
            return [full]
        # Such a view has more elements along its last dim.
        times = self.dtype.itemsize // full.itemsize if self.dim == len(self.full_shape) - 1 else 1
        return [full.narrow(self.dim, begin * times, (end - begin) * times) for begin, end in self.bounds]


def _item_of(index: int, kind: _Kind, src: _planner.Layout, dst: _planner.Layout) -> _Item | None:
    """Returns the parts of a move, whose index is `index`.

    Returns None if the parts are not intervals of the full tensor, or if ranks with one coordinate along the shard mesh
    dim have parts of different sizes.
    """
    sharded, full = (src, dst) if kind.gathers else (dst, src)
    found = None if kind.shard_mesh_dim is None else _SHARDED.match(sharded.placements[kind.shard_mesh_dim])
    dim = 0 if found is None else int(found[1])
    count = 1 if kind.shard_mesh_dim is None else kind.mesh.shape[kind.shard_mesh_dim]
    numels: list[set[int]] = [set() for _ in range(count)]
    bounds = [(0, 0)] * count
    own = dist.get_rank()
    # The ranks with the parts of this rank's full tensor.
    part_ranks = [own] if kind.shard_mesh_dim is None else kind.mesh.group_ranks(own, [kind.shard_mesh_dim])
    shape: list[int] = []
    for rank in kind.mesh.ranks:
        lengths, numel = [], 1
        for d, (inner, outer) in enumerate(zip(sharded.region(rank), full.region(rank), strict=True)):
            length = sum(end - begin for begin, end in outer)
            interval = _interval_within(inner, outer)
            if interval is None or (d != dim and interval != (0, length)):
                return None
            if d == dim and rank in part_ranks:
                bounds[kind.coordinate(rank)] = interval
            numel *= interval[1] - interval[0]
            lengths.append(length)
        numels[kind.coordinate(rank)].add(numel)
        shape = lengths if rank == own else shape
    if any(len(each) > 1 for each in numels):
        return None
    return _Item(index, getattr(torch, src.dtype), dim, [each.pop() for each in numels], bounds, shape)


def _interval_within(inner: list[tuple[int, int]], outer: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the positions of the elements of `inner` in `outer`, as one interval; None if they are not consecutive.

    Example: outer [0, 4) and [8, 12) has elements 0 to 3 and 8 to 11, at positions 0 to 7. Inner [2, 4) and [8, 10) has
    positions 2 to 5: (2, 6). Inner [0, 2) and [8, 10) has positions 0, 1, 4 and 5, which is None.
    """
    found: list[tuple[int, int]] = []
    starts = [0, *itertools.accumulate(end - begin for begin, end in outer)]
    for begin, end in inner:
        at = next((s + begin - b for s, (b, e) in zip(starts, outer) if b <= begin and end <= e), None)
        if at is None or (found and found[-1][1] != at):
            return None
        found.append((at, at + end - begin))
    return (found[0][0], found[-1][1]) if found else (0, 0)


class Message:
    """A message that several moves share: a move of one tensor, the buffer, from layout `src` to layout `dst`."""

    def __init__(self, kind: _Kind, items: Sequence[_Item]) -> None:
        self.items = items
        self.gathers = kind.gathers
        # The dtype of the copies: that of all tensors. If a gather has several, an integer of the smallest size.
        dtypes = {item.dtype for item in items}
        least = min(dtype.itemsize for dtype in dtypes)
        self._copy_dtype = dtypes.pop() if len(dtypes) == 1 else _INTEGER_OF_SIZE[least]
        self._numels = [[n * item.dtype.itemsize // self._copy_dtype.itemsize for n in item.numels] for item in items]
        # Number of elements in the message, in the dtype of the copies, by coordinate along the shard mesh dim.
        self._totals = [sum(each) for each in zip(*self._numels)]
        self._converts = any(item.dtype != self._copy_dtype for item in items)
        self._is_even = all(item.dim == 0 and len(set(item.numels)) == 1 for item in items)
        dtype: torch.dtype = getattr(torch, kind.dtype)
        totals = [total * self._copy_dtype.itemsize // dtype.itemsize for total in self._totals]
        # The buffer has a leading dim for each "own" mesh dim, sharded over it. Its last dim has the elements.
        own = [dim for dim, text in enumerate(kind.dims) if text == "own"]
        sharded = f"S({len(own)})" if len(set(totals)) == 1 else f"Ragged({len(own)},{':'.join(map(str, totals))})"
        src, dst = ["R"] * len(kind.dims), ["R"] * len(kind.dims)
        for dim, text in enumerate(kind.dims):
            if text == "own":
                src[dim] = dst[dim] = f"S({own.index(dim)})"
            elif text == "gather":
                src[dim] = sharded
            elif text:
                src[dim], dst[dim] = text, sharded if dim == kind.shard_mesh_dim else "R"
        shape = [*(kind.mesh.shape[dim] for dim in own), sum(totals)]
        self.src, self.dst = (Layout(kind.mesh, shape, placements, dtype) for placements in (src, dst))
        self._dtype, self._local_shape = dtype, (*[1] * len(own), -1)
        self._total = self._totals[kind.coordinate(dist.get_rank())]  # of this rank's part

    @property
    def received_bytes(self) -> int:
        """Bytes of the receive buffer, on the rank with the largest one."""
        return self._copy_dtype.itemsize * (sum(self._totals) if self.gathers else max(self._totals))

    @property
    def sent_bytes(self) -> int:
        """Bytes of the send buffer, on the rank with the largest one."""
        return self._copy_dtype.itemsize * (max(self._totals) if self.gathers else sum(self._totals))

    def start(
        self, moves: Moves, sources: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], memory: torch.Tensor
    ) -> SharedWork:
        """Copies the sources to a buffer, and starts to move it into `memory`. `wait` then copies to the outputs."""
        num_sent, num_received = (self._total, sum(self._totals))[:: 1 if self.gathers else -1]
        sent = torch.empty(num_sent, dtype=self._copy_dtype, device=sources[0].device)
        received = memory[: num_received * self._copy_dtype.itemsize].view(self._copy_dtype)
        self._copy(sent, sources, not self.gathers, False)
        local, out = (each.view(self._dtype).view(self._local_shape) for each in (sent, received))
        work = executables.start_into(moves.executable(self.src, self.dst), local, out)
        return SharedWork(work, lambda: self._copy(received, outputs, self.gathers, True), sent)

    @torch.no_grad()
    def _copy(self, buffer: torch.Tensor, tensors: Sequence[torch.Tensor], are_full: bool, from_buffer: bool) -> None:
        """Copies parts of tensors to the buffer; with `from_buffer`, back to the tensors.

        `are_full`: the tensors are those on the full side, with the parts of all coordinates.
        """
        if self._converts:
            tensors = [self._as_copy_dtype(tensor, from_buffer) for tensor in tensors]
        if not are_full:
            of_buffer = buffer.split([tensor.numel() for tensor in tensors])
            of_tensors = [tensor.view(-1) if from_buffer else tensor.reshape(-1) for tensor in tensors]
        elif self._is_even and all(tensor.is_contiguous() for tensor in tensors):
            # Rows of the views are coordinates: each row of the buffer has one part of every tensor.
            count = len(self._totals)
            of_buffer = buffer.view(count, -1).split([numels[0] for numels in self._numels], 1)
            of_tensors = [tensor.view(count, -1) for tensor in tensors]
        else:
            by_item = zip(self.items, tensors, strict=True)
            of_tensors = [part for parts in zip(*(item.parts(tensor) for item, tensor in by_item)) for part in parts]
            pieces = buffer.split([part.numel() for part in of_tensors])
            of_buffer = tuple(piece.view(part.shape) for piece, part in zip(pieces, of_tensors))
        torch._foreach_copy_(*(of_tensors, of_buffer) if from_buffer else (of_buffer, of_tensors))

    def _as_copy_dtype(self, tensor: torch.Tensor, from_buffer: bool) -> torch.Tensor:
        """Returns a view of a tensor, or of a contiguous copy, in the dtype of copies."""
        if tensor.dtype == self._copy_dtype:
            return tensor
        tensor = tensor if from_buffer else tensor.contiguous()
        return (tensor if tensor.dim() > 0 else tensor.view(1)).view(self._copy_dtype)


class SharedWork:
    """A message in progress, which several moves wait for. The first `wait` copies the results to the outputs."""

    def __init__(self, work: dist.Work | None, copy_out: Callable[[], None], sent: torch.Tensor) -> None:
        self._work = work
        self._copy_out: Callable[[], None] | None = copy_out  # None after the first `wait`
        self._sent: torch.Tensor | None = sent  # kept until the message has ended

    def wait(self) -> None:
        """Waits for the message, and copies the results once."""
        if self._copy_out is not None:
            if self._work is not None:
                self._work.wait()
            self._copy_out()
            self._work = self._copy_out = self._sent = None

    def is_completed(self) -> bool:
        """Returns true once the transfer has ended, although the results may not be copied yet."""
        return self._work is None or self._work.is_completed()


def messages_of(device_type: str, pairs: Sequence[Pair]) -> list[Message]:
    """Returns the messages that moves between these layouts on one DeviceMesh share. Other moves have their own."""
    return _messages_of(device_type, COPIED_BYTES_PER_US.get(device_type, COPIED_BYTES_PER_US["cuda"]), *pairs)


@executables.cached
def _messages_of(device_type: str, copied_bytes_per_us: float, *pairs: Pair) -> list[Message]:
    """Returns the messages that moves share (`messages_of`). The speed of copies is a part of the cache key."""
    of_kind: dict[_Kind, list[_Item]] = {}
    for index, (src, dst) in enumerate(pairs):
        kind = _kind_of(src, dst)
        item = None if kind is None else _item_of(index, kind, src, dst)
        if kind is not None and item is not None:
            of_kind.setdefault(kind, []).append(item)
    small = (
        (kind, _items_worth_packing(kind, items, device_type, copied_bytes_per_us)) for kind, items in of_kind.items()
    )
    return [Message(kind, items) for kind, items in small if len(items) > 1]


def _items_worth_packing(kind: _Kind, items: list[_Item], device_type: str, copied_bytes_per_us: float) -> list[_Item]:
    """Returns the items whose copies take less time than a message of one element for each rank."""
    smallest = Message(kind, [items[0]._replace(numels=[1] * len(items[0].numels))])
    message_us = executables.make_plan(smallest.src, smallest.dst, device_type).predicted_us
    max_bytes = message_us * copied_bytes_per_us
    return [item for item in items if sum(item.numels) * item.dtype.itemsize <= max_bytes]


def _unshared(messages: Sequence[Message], count: int) -> list[int]:
    """Returns the indices of the moves that share none of the messages. `count`: number of all moves."""
    return sorted({*range(count)} - {item.move for message in messages for item in message.items})


class _DeferredMove(NamedTuple):
    """A move that `MoveBatch.start` will start."""

    moves: Moves
    src: _planner.Layout
    dst: _planner.Layout
    tensor: torch.Tensor
    out: torch.Tensor
    deferred: DeferredWork


class DeferredWork:
    """The Work of a move that `MoveBatch.start` will start."""

    def __init__(self) -> None:
        self.work: dist.Work | SharedWork | None = None  # None before the start, and if the move is done

    def wait(self) -> None:
        """Waits for the move."""
        if self.work is not None:
            self.work.wait()

    def is_completed(self) -> bool:
        """Returns true once the transfer has ended."""
        return self.work is None or self.work.is_completed()

    @property
    def is_shared(self) -> bool:
        """True if the tensor was copied to a message that other moves share."""
        return isinstance(self.work, SharedWork)


class MoveBatch:
    """Moves of several weights that start together, with as few messages as `messages_of` allows."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[_DeferredMove]] = {}  # by DeviceMesh

    def adder(
        self, moves: Moves
    ) -> Callable[[_planner.Layout, _planner.Layout, torch.Tensor, torch.Tensor], DeferredWork]:
        """Returns a function that adds a move of one weight. It takes the arguments of `Moves`."""

        def add(src: _planner.Layout, dst: _planner.Layout, tensor: torch.Tensor, out: torch.Tensor) -> DeferredWork:
            call = _DeferredMove(moves, src, dst, tensor, out, DeferredWork())
            self._calls.setdefault(moves.key, []).append(call)
            return call.deferred

        return add

    def start(self, memory: torch.Tensor | None = None) -> None:
        """Starts all moves. Messages are received in `memory` (bytes) while it suffices, then in new memory."""
        for calls in self._calls.values():
            messages = messages_of(calls[0].moves.device_type, [(call.src, call.dst) for call in calls])
            for message in messages:
                sharing = [calls[item.move] for item in message.items]
                buffer, memory = _take_buffer(memory, message.received_bytes, sharing[0].out.device)
                work = message.start(sharing[0].moves, [c.tensor for c in sharing], [c.out for c in sharing], buffer)
                for call in sharing:
                    call.deferred.work = work
            for call in (calls[index] for index in _unshared(messages, len(calls))):
                call.deferred.work = call.moves(call.src, call.dst, call.tensor, call.out)


def _take_buffer(
    memory: torch.Tensor | None, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the first `size` bytes of `memory`, and the rest of it. If it is too small, a new buffer and `memory`."""
    if memory is None or memory.numel() < size:
        return empty_bytes(size, device), memory
    return memory[:size], memory[aligned(size) :]


class Cost(NamedTuple):
    """The predicted cost of moves that start together, and of their buffers."""

    ps: int  # time in picoseconds
    received_bytes: int  # receive buffers of shared messages
    sent_bytes: int  # send buffers of shared messages


def cost_of(pairs: Sequence[tuple[Moves, Pair]]) -> Cost:
    """Returns the cost of moves that start together."""
    on_mesh: dict[Hashable, list[tuple[Moves, Pair]]] = {}
    for moves, pair in pairs:
        on_mesh.setdefault(moves.key, []).append((moves, pair))
    ps = received = sent = 0
    for group in on_mesh.values():
        moves = group[0][0]
        messages = messages_of(moves.device_type, [pair for _, pair in group])
        ps += sum(moves.predicted_ps(message.src, message.dst) for message in messages)
        ps += sum(moves.predicted_ps(*group[index][1]) for index in _unshared(messages, len(group)))
        received += sum(aligned(message.received_bytes) for message in messages)
        sent += sum(aligned(message.sent_bytes) for message in messages)
    return Cost(ps, received, sent)
