"""Messages of changed blocks: `Message`, and the rounds that send them: `Rounds`.

A message is what one rank sends to another: its pieces (pieces.py), each cut into blocks of `block_bytes` in the order
of its elements. The last block of a piece is filled up with zeros. Blocks are numbered through all pieces of a message.
On the wire, each round of a message has its changed blocks, then for each of them its distance from the one before:

    changed blocks 3, 4 and 9    block 3, block 4, block 9, then 3, 0, 4 (the first block is counted from -1)
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .pieces import Piece, Side

WORD_BYTES = 8
MAX_INDEX_BYTES = 8  # of a distance
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes

ReadTensor = Callable[[int], torch.Tensor]  # this rank's part of a source or destination, by index
Key = tuple[int, torch.dtype]  # index of a source, and its dtype on the wire


class Message:
    """The blocks that one rank sends to another.

    Attributes:
        pieces: each piece with its dtype on the wire. `dtypes` has those of all items.
        full_bytes: bytes of all elements.
        num_changed: number of changed blocks.
        index_bytes: bytes of a distance.
    """

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.pieces = [(piece, dtypes[piece.item]) for piece in pieces]
        sizes = [-(-piece.numel // self._per_block(dtype)) for piece, dtype in self.pieces]
        self._begins = [0, *itertools.accumulate(sizes)]  # number of the first block of each piece
        self.full_bytes = sum(piece.numel * dtype.itemsize for piece, dtype in self.pieces)
        self.num_changed, self.index_bytes = 0, 1
        self._changed = torch.empty(0, dtype=torch.int64)  # on the sender: numbers of the changed blocks
        self._last = -1  # number of the last block that was received

    def find_blocks(self, changed: Mapping[Key, torch.Tensor]) -> None:
        """Finds the changed blocks. `changed` has a mask of the changed elements of each source."""
        found = []
        for (piece, dtype), begin in zip(self.pieces, self._begins):
            mask = words_of(piece.taken.read(changed[piece.source, dtype]).reshape(-1), self._per_block(dtype))
            found.append((mask if mask.shape[1] == 1 else mask.any(1)).view(-1).nonzero().view(-1) + begin)
        self._changed = torch.cat(found)
        self.num_changed = len(self._changed)
        largest = int(self._distances(0, self.num_changed).max()) if self.num_changed else 0
        self.index_bytes = max(1, -(-largest.bit_length() // 8))

    def forget_blocks(self) -> None:
        """Releases the numbers of the changed blocks."""
        self._changed, self.num_changed = self._changed[:0].clone(), 0

    def size_bytes(self, begin: int, end: int) -> int:
        """Returns the bytes on the wire of the changed blocks [begin, end), counted among the changed ones."""
        return (min(end, self.num_changed) - min(begin, self.num_changed)) * (self._block_bytes + self.index_bytes)

    def pack(self, begin: int, end: int, source: ReadTensor, into: torch.Tensor) -> None:
        """Writes the changed blocks [begin, end) and their distances to `into`, which has their size in bytes."""
        numbers = self._changed[begin:end]
        blocks, indices = self._parts(into, len(numbers))
        for which, some, own in self._by_piece(numbers):
            piece, dtype = self.pieces[which]
            flat = elements_of(piece.taken, source(piece.source), dtype).reshape(-1)
            rows = words_of(flat, self._block_bytes)
            found = rows.index_select(0, own.to(rows.device)).view(torch.uint8)
            blocks[some] = found.view(len(own), -1).to(blocks.device)
        distances = self._distances(begin, end).contiguous().view(torch.uint8).view(-1, MAX_INDEX_BYTES)
        indices.copy_(distances[:, : self.index_bytes])

    def unpack(self, begin: int, end: int, received: torch.Tensor, destination: ReadTensor) -> None:
        """Writes the changed blocks [begin, end) that were received to the destinations."""
        count = min(end, self.num_changed) - min(begin, self.num_changed)
        if not count:
            return
        blocks, indices = self._parts(received, count)
        distances = torch.zeros(count, MAX_INDEX_BYTES, dtype=torch.uint8)
        distances[:, : self.index_bytes] = indices
        numbers = (distances.view(torch.int64).view(-1) + 1).cumsum(0) + (self._last if begin else -1)
        self._last = int(numbers[-1])
        for which, some, own in self._by_piece(numbers):
            piece, dtype = self.pieces[which]
            values = blocks[some].clone().view(dtype).view(len(own), -1)
            self._write(piece, destination(piece.destination), own, values)

    def _write(self, piece: Piece, local: torch.Tensor, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Writes blocks of a piece, by their numbers in it, to the local tensor of the destination."""
        per_block = values.shape[1]
        blocks, values = blocks.to(local.device), bits_of(values.to(local.device, local.dtype))
        local = bits_of(local)
        old = piece.put.read(local)
        if piece.put.is_view() and old.is_contiguous():  # writes rows of one block each, then the last, shorter block
            flat, num_whole = old.view(-1), piece.numel // per_block
            is_whole = blocks < num_whole
            rows, new = flat[: num_whole * per_block].view(-1, per_block), values[is_whole]
            word = _INTEGERS[math.gcd(per_block * flat.itemsize, WORD_BYTES)]  # larger integers are copied faster
            if flat.storage_offset() % per_block == 0:
                rows, new = rows.view(word), new.view(word)
            rows.index_copy_(0, blocks[is_whole], new)
            if not bool(is_whole[-1]):
                flat[num_whole * per_block :] = values[-1, : len(flat) - num_whole * per_block]
            return
        # Merges old and new elements by a mask, because those of a block are not contiguous in memory.
        size = -(-piece.numel // per_block)
        is_new = torch.zeros(size, 1, dtype=torch.bool, device=local.device)
        is_new[blocks] = True
        new = torch.zeros(size, per_block, dtype=local.dtype, device=local.device)
        new[blocks] = values
        new, is_new = (x.reshape(-1)[: piece.numel].view(old.shape) for x in (new, is_new.expand(-1, per_block)))
        piece.put.write(local, torch.where(is_new, new, old))

    def _parts(self, flat: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the blocks and the distances of a flat buffer, as a row of bytes for each of `count` blocks."""
        edge = count * self._block_bytes
        return flat[:edge].view(count, self._block_bytes), flat[edge:].view(count, self.index_bytes)

    def _distances(self, begin: int, end: int) -> torch.Tensor:
        """Returns the distances of the changed blocks [begin, end), less one."""
        numbers = self._changed[begin:end]
        before = int(self._changed[begin - 1]) if begin else -1
        return numbers.diff(prepend=numbers.new_tensor([before])) - 1

    def _by_piece(self, numbers: torch.Tensor) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yields, for each piece with some of these blocks: its index, the range in `numbers`, its own numbers."""
        edges = torch.searchsorted(numbers, torch.tensor(self._begins, device=numbers.device)).tolist()
        first = bisect.bisect_right(self._begins, int(numbers[0])) - 1
        for which in range(first, len(self.pieces)):
            low, high = edges[which], edges[which + 1]
            if low < high:
                yield which, slice(low, high), numbers[low:high] - self._begins[which]
            elif low == len(numbers):
                return

    def _per_block(self, dtype: torch.dtype) -> int:
        return self._block_bytes // dtype.itemsize


class _Round(NamedTuple):
    """A round in flight: its work, its changed blocks [begin, end) of each message, and its buffers."""

    work: dist.Work
    begin: int
    end: int
    sent: torch.Tensor
    received: list[torch.Tensor]  # the part of each incoming message
    destination: ReadTensor


class Rounds:
    """The rounds of all messages of one rank. The last one may be in flight. Has the methods of `batches.Run`.

    Attributes:
        received_bytes: bytes of this rank's messages from others, with their distances.
        sent_bytes: the same to others.
    """

    def __init__(
        self,
        outgoing: Mapping[int, Message],
        incoming: Mapping[int, Message],
        num_destinations: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        wire: torch.device,
    ) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._num_destinations = num_destinations
        self._group = group
        self._device, self._wire = device, wire  # of tensors and of messages
        self._events: list[torch.Event] = []  # on devices with streams: the ends of `run` and of the last round
        self._in_flight: _Round | None = None
        self._failure: BaseException | None = None  # the error of a wait; destinations may have part of its blocks
        self.received_bytes = self.sent_bytes = 0

    def run(self, num_rounds: int, per_message: int, source: ReadTensor, destination: ReadTensor) -> None:
        """Runs all rounds of `per_message` changed blocks. Returns as soon as the last one has started."""
        for begin in range(0, num_rounds * per_message, per_message):
            self.wait()
            self._start(begin, begin + per_message, source, destination)
        self._events = record_events([self._device])

    def completion_order(self) -> list[int]:
        """Returns the indices of the destinations, which are completed together."""
        return list(range(self._num_destinations))

    def wait_for_sources(self) -> None:
        """Makes the current stream wait until sources are packed. `run` has packed them all."""
        wait_for_events(self._events)

    def wait_for(self, index: int) -> None:
        """Waits until all destinations are complete."""
        self.wait()

    @torch.inference_mode()
    def wait(self) -> None:
        """Waits for the round in flight, and writes its blocks to the destinations. Every wait raises its error."""
        if self._failure is not None:
            raise self._failure
        wait_for_events(self._events)
        if self._in_flight is None:
            return
        work, begin, end, sent, received, destination = self._in_flight
        try:
            self._wait_for(work)
            for buffer in (sent, *received) if self._wire.type != "cpu" else ():
                buffer.record_stream(torch.accelerator.current_stream(buffer.device))  # allocated on that of `start`
            for message, part in zip(_in_order(self._incoming), received):
                message.unpack(begin, end, part, destination)
            self._events += record_events([self._device])
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._in_flight = None

    def _wait_for(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            rank = f"rank {dist.get_rank(self._group)} of the group"
            raise dist.DistBackendError(f"shardwright: {rank} failed in sending changes: {error}") from error

    def is_done(self) -> bool:
        """Returns True if all rounds are complete. Does not wait for other ranks."""
        if self._in_flight is not None and self._in_flight.work.is_completed():
            self.wait()
        return self._in_flight is None and all(event.query() for event in self._events)

    def _start(self, begin: int, end: int, source: ReadTensor, destination: ReadTensor) -> None:
        """Starts to exchange the changed blocks [begin, end) of each message."""
        num_ranks = dist.get_world_size(self._group)
        sizes, buffers, parts = [], [], []
        for messages in (self._outgoing, self._incoming):
            each = [messages[rank].size_bytes(begin, end) if rank in messages else 0 for rank in range(num_ranks)]
            buffer = torch.empty(sum(each), dtype=torch.uint8, device=self._wire)
            sizes.append(each)
            buffers.append(buffer)
            parts.append([part for rank, part in enumerate(buffer.split(each)) if rank in messages])
        for message, part in zip(_in_order(self._outgoing), parts[0]):
            if len(part):
                message.pack(begin, end, source, part)
        sent, received = buffers
        self.sent_bytes += len(sent)
        self.received_bytes += len(received)
        work = dist.all_to_all_single(received, sent, sizes[1], sizes[0], group=self._group, async_op=True)
        self._in_flight = _Round(work, begin, end, sent, parts[1], destination)


def _in_order(messages: Mapping[int, Message]) -> list[Message]:
    """Returns the messages in the order of their ranks."""
    return [messages[rank] for rank in sorted(messages)]


def record_events(devices: Iterable[torch.device]) -> list[torch.Event]:
    """Records an event on the current stream of each of these devices that has streams."""
    return [torch.accelerator.current_stream(x).record_event() for x in set(devices) if x.type != "cpu"]


def wait_for_events(events: Iterable[torch.Event]) -> None:
    """Makes the current stream of each event's device wait for the event."""
    for event in events:
        torch.accelerator.current_stream(event.device).wait_event(event)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as integers of its size, for which PyTorch has all operators; complex128 unchanged."""
    return tensor.view(_INTEGERS[tensor.itemsize]) if tensor.itemsize in _INTEGERS else tensor


def elements_of(side: Side, local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the elements of a piece in a local tensor, cast, with the dims of the piece."""
    return side.read(bits_of(local)).view(local.dtype).to(dtype)


def words_of(flat: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """Returns the bits of a flat tensor, filled up with zeros, as integers: a row for each block."""
    flat, word = flat.contiguous(), min(block_bytes, WORD_BYTES)
    if missing := -flat.nbytes % block_bytes // flat.element_size():
        flat = torch.cat([flat, flat.new_zeros(missing)])
    if flat.storage_offset() * flat.element_size() % word:
        flat = flat.clone()  # a view as larger integers must be aligned
    return flat.view(_INTEGERS[word]).view(-1, block_bytes // word)
