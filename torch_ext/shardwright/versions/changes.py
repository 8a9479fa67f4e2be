"""Sends the elements of a transfer that changed since its last start: `Changes`.

Each rank keeps, for each source of which it sends elements to others, one state:

    blocks of at most 8 bytes    a copy of its part, as it was sent: exact
    larger blocks                a 64-bit hash for each block of its part

An element may have changed if it differs from the copy, or if its block has another hash.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..layouts.errors import argument_error
from .messages import (
    WORD_BYTES,
    Key,
    Message,
    ReadTensor,
    Rounds,
    bits_of,
    elements_of,
    record_events,
    wait_for_events,
    words_of,
)
from .pieces import Ends

CHECKSUM_BYTES = (512, 64)  # of a destination that one sum of a checksum covers; the larger is faster
CHECKSUM_CHUNK_BYTES = 1 << 22  # of a destination that is read at a time
MAX_EXACT_BYTES = 8  # the largest blocks that are compared bit by bit

# Constants of `_mixed`: the finalizer of splitmix64, as signed numbers.
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFTS = (30, 27, 31)


class Note(NamedTuple):
    """A rank's message to all others before a start, in types that JSON has."""

    reason: str  # why everything must be sent; empty if changes are enough
    changed: list[tuple[int, int, int]]  # of each message: receiver, number of changed blocks, bytes of a distance
    full_bytes: int  # that this rank sends to others if it sends everything


class Report(NamedTuple):
    """Bytes of the messages that this rank sends to others and receives from them in one start.

    Attributes:
        reason: why everything was sent; empty if only changes were sent.
        sent_bytes: bytes sent to other ranks, with the numbers of the blocks.
        received_bytes: the same received.
        full_sent_bytes: bytes that this rank sends if everything is sent.
        full_received_bytes: the same received.
    """

    reason: str
    sent_bytes: int
    received_bytes: int
    full_sent_bytes: int
    full_received_bytes: int


class Changes:
    """One rank's memory of what it sent last, and the messages of changes that follow from it."""

    def __init__(self, ends: Ends, block_bytes: int, group: dist.ProcessGroup | None) -> None:
        self._reason = "it is the first start"  # why this rank needs everything to be sent next
        self._ends = ends
        self._block_bytes = block_bytes
        self._num_ranks = dist.get_world_size(group)
        sent, received = ends.sent(), ends.received()
        self._local = sent.pop(ends.rank, [])
        received.pop(ends.rank, None)
        dtypes = ends.dtypes_of_items()
        self._outgoing, self._incoming = (
            {rank: Message(pieces, dtypes, block_bytes) for rank, pieces in messages.items()}
            for messages in (sent, received)
        )
        self._kept: dict[Key, torch.Tensor] = {}  # the state of each source
        self._keys: dict[torch.device, torch.Tensor] = {}  # random words of hashes and checksums
        self._written: dict[torch.device, torch.Tensor] = {}  # checksums of the destinations, as last written
        self._events: list[torch.Event] = []  # on devices with streams: the last writes to `_kept` and `_written`

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank keeps between starts."""
        return sum(kept.nbytes for kept in self._kept.values())

    @torch.inference_mode()
    def scan(self, source: ReadTensor, destinations: Sequence[torch.Tensor], everything: bool) -> Note:
        """Compares the sources with what was sent last, and keeps their current state. Returns this rank's note.

        Until `note_written`, the next start must send everything.
        """
        wait_for_events(self._events)  # starts and waits may be on different streams
        if everything:
            self._reason = "start() was called with everything=True"
        elif not self._reason and not _are_equal(self._written, self._checksums(destinations)):
            self._reason = "a destination has other values than after the last start"
        reason, self._reason = self._reason, "the last start did not complete"
        changed: dict[Key, torch.Tensor] = {}
        for message in self._outgoing.values():
            for piece, dtype in message.pieces:
                key = piece.source, dtype
                if key not in changed:
                    changed[key] = self._replace(key, source(piece.source))
            if reason:
                message.forget_blocks()
            else:
                message.find_blocks(changed)
        self._events = record_events(kept.device for kept in self._kept.values())
        counts = [(rank, message.num_changed, message.index_bytes) for rank, message in self._outgoing.items()]
        return Note(reason, counts, sum(message.full_bytes for message in self._outgoing.values()))

    def why_everything(self, notes: Sequence[Note]) -> str:
        """Returns why everything must be sent, by the notes of all ranks of the group; empty if changes are enough."""
        reasons = [f"{note.reason} (rank {rank} of the group)" for rank, note in enumerate(notes) if note.reason]
        if reasons:
            return reasons[0]
        full_bytes = sum(note.full_bytes for note in notes)
        each = (count * (self._block_bytes + index_bytes) for note in notes for _, count, index_bytes in note.changed)
        changed_bytes = sum(each)
        is_smaller = changed_bytes < full_bytes or full_bytes == 0
        return "" if is_smaller else f"the changes take {changed_bytes} bytes, and everything {full_bytes}"

    @torch.inference_mode()
    def send(
        self,
        notes: Sequence[Note],
        source: ReadTensor,
        destinations: Sequence[torch.Tensor],
        round_bytes: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        wire: torch.device,
    ) -> Rounds:
        """Sends the changes, and copies this rank's own elements. All ranks must call, with equal notes.

        Args:
            notes: those of all ranks of the group.
            round_bytes: bytes of the messages that a rank sends and receives at a time.
            device: the device of all tensors.
            wire: the device of messages.
        """
        for piece in self._local:
            local = destinations[piece.destination]
            piece.put.write(bits_of(local), bits_of(elements_of(piece.taken, source(piece.source), local.dtype)))
        num_peers = [0] * self._num_ranks  # messages that each rank sends and receives
        most = widest = 0  # changed blocks of a message, and bytes of a distance
        for sender, note in enumerate(notes):
            num_peers[sender] += len(note.changed)
            for receiver, count, index_bytes in note.changed:
                num_peers[receiver] += 1
                most, widest = max(most, count), max(widest, index_bytes)
                if receiver == self._ends.rank:
                    message = self._incoming[sender]
                    message.num_changed, message.index_bytes = count, index_bytes
        per_message = max(1, round_bytes // max(1, *num_peers) // (self._block_bytes + widest))
        rounds = Rounds(self._outgoing, self._incoming, len(destinations), group, device, wire)
        rounds.run(-(-most // per_message), per_message, source, destinations.__getitem__)
        for message in self._outgoing.values():
            message.forget_blocks()
        return rounds

    def report(self, reason: str, rounds: Rounds | None) -> Report:
        """Returns what a start moved. `rounds` is None if it sent everything."""
        full = [sum(message.full_bytes for message in side.values()) for side in (self._outgoing, self._incoming)]
        return Report(reason, *(full if rounds is None else (rounds.sent_bytes, rounds.received_bytes)), *full)

    @torch.inference_mode()
    def note_written(self, destinations: Sequence[torch.Tensor]) -> None:
        """Records that the start is complete: later writes by others make the next one send everything."""
        self._reason = ""
        self._written = self._checksums(destinations)
        self._events += record_events(self._written)

    def _replace(self, key: Key, local: torch.Tensor) -> torch.Tensor:
        """Keeps the current values of a source. Returns a mask of its elements that may have changed since."""
        flat = local.to(key[1]).reshape(-1)
        is_exact = self._block_bytes <= MAX_EXACT_BYTES
        state = flat if is_exact else self._hashes(flat)
        kept = self._kept.get(key)
        if kept is None:
            self._kept[key] = state.clone()
            return torch.ones_like(local, dtype=torch.bool)
        if is_exact:
            size = flat.element_size()
            changed = (words_of(state, size) != words_of(kept, size)).view(-1)
        else:
            per_block = self._block_bytes // flat.element_size()
            changed = (state != kept).unsqueeze(1).expand(-1, per_block).reshape(-1)[: flat.numel()]
        kept.copy_(state)
        if kept.device.type != "cpu":
            kept.record_stream(torch.accelerator.current_stream(kept.device))  # allocated on that of the first start
        return changed.view(local.shape)

    def _hashes(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a hash of each block."""
        keys = self._keys_on(flat.device)[: self._block_bytes // WORD_BYTES]
        return _mixed(words_of(flat, self._block_bytes) ^ keys).sum(1)

    def _checksums(self, tensors: Sequence[torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """Returns a 64-bit checksum of the tensors on each device. Versions of tensors do not show all writes.

        Sums multiples of halves of words by random keys: different halves have equal sums with a probability of at most
        2**-33, because they differ by less than 2**32 (multilinear hashing, Lemire and Kaser 2014).
        """
        sums: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                size = next((size for size in CHECKSUM_BYTES if tensor.nbytes % size == 0), WORD_BYTES)
                halves = words_of(bits_of(tensor).reshape(-1), size).view(torch.int32)
                sums.setdefault(tensor.device, []).extend(_weighted_sums(halves, self._keys_on(tensor.device)))
        # Many tensors are small, so their sums are mixed together.
        mixed = {}
        for device, parts in sums.items():
            joined = torch.cat(parts)
            mixed[device] = _mixed(joined + torch.arange(len(joined), device=device)).sum()
        return mixed

    def _keys_on(self, device: torch.device) -> torch.Tensor:
        """Returns random 64-bit words on a device."""
        if device not in self._keys:
            number = max(self._block_bytes // WORD_BYTES, 2 * CHECKSUM_BYTES[0] // WORD_BYTES)
            keys = [secrets.randbits(64) - (1 << 63) for _ in range(number)]
            self._keys[device] = torch.tensor(keys, device=device)
        return self._keys[device]


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Maps 64-bit words one to one, so that each bit of the result depends on all bits (splitmix64)."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1)):
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * factor
    return words


def _weighted_sums(rows: torch.Tensor, keys: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the 64-bit sums of some rows of 32-bit integers, each element multiplied by the key of its column."""
    num_rows = min(len(rows), max(1, CHECKSUM_CHUNK_BYTES // rows[0].nbytes))
    products = torch.empty(num_rows, rows.shape[1], dtype=keys.dtype, device=rows.device)
    for some in rows.split(num_rows):
        yield products[: len(some)].copy_(some).mul_(keys[: rows.shape[1]]).sum(1)


def _are_equal(a: dict[torch.device, torch.Tensor], b: dict[torch.device, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(checksum, b[device]) for device, checksum in a.items())


def check_changes(ends: Ends, block_bytes: int, staging: str | None) -> None:
    """Raises ValueError if the changes of a transfer cannot be sent."""
    if staging is not None:
        raise argument_error("staging", "None with only_changed", repr(staging))
    for side in (ends.sources, ends.destinations):
        for layout in side:
            if layout.has_pending or layout.flattened != 1:
                allowed = "layouts without pending reductions or flattened dims"
                raise argument_error("only_changed", f"False, or the transfer must have only {allowed}", str(layout))
            itemsize = getattr(torch, layout.dtype).itemsize
            if itemsize > block_bytes:
                raise argument_error("only_changed", f"at least {itemsize} bytes, the size of an element", block_bytes)
