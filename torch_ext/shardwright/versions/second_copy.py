"""A second copy of a destination. Both copies are exchanged by swapping the memory of their storages.

The parameters of a module share storages with the detached tensors and views in its state dict. If a storage gets other
memory, all of its tensors change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from .._native import _runtime
from .locations import locations_of, storage_of

# Maximum number of runs of bytes outside the destinations that are copied one by one. More are copied with a mask.
_MAX_RUNS = 64


def problems(read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yields a problem for each destination whose memory cannot be exchanged."""
    own = {id(tensor) for tensor in written.values()}
    sources = {storage_of(tensor): name for name, tensor in read.items() if tensor.numel() and id(tensor) not in own}
    for name, tensor in written.items():
        if tensor.numel() == 0:
            continue
        if (source := sources.get(storage_of(tensor))) is not None:
            yield (
                f"destination {name}: its storage must contain no source with staging='double', which exchanges whole "
                f"storages, got source {source}"
            )
        if tensor.device.type == "cpu" and tensor.untyped_storage().is_shared():
            yield (
                f"destination {name}: its memory must be private with staging='double', which exchanges it in this "
                "process only, got memory that processes share"
            )


class _Memory(NamedTuple):
    """The bytes of a storage, a second buffer of the same size, and the bytes that an exchange keeps."""

    front: torch.Tensor
    back: torch.Tensor
    unchanged: list[tuple[torch.Tensor, torch.Tensor]]  # (front, back) of each run of bytes outside the destinations
    mask: torch.Tensor | None  # marks these bytes instead if they have many runs


class SecondCopy:
    """Tensors with the sizes and strides of a destination's tensors, in new storages of the same sizes."""

    def __init__(self, front: Sequence[torch.Tensor]) -> None:
        self._front = front
        indices: dict[int, list[int]] = {}  # indices of the tensors, by storage
        for index, tensor in enumerate(front):
            if tensor.numel():
                indices.setdefault(storage_of(tensor), []).append(index)
        self.tensors = [torch.empty_like(tensor) if tensor.numel() == 0 else tensor for tensor in front]
        self._memories = []
        for some in indices.values():
            memory = _memory([front[index] for index in some])
            for index in some:
                self.tensors[index] = _placed_like(front[index], memory.back)
            self._memories.append(memory)

        self.locations = locations_of(front)  # of the destination's tensors when the copy was made

    @property
    def num_tensors(self) -> dict[int, int]:
        """The number of tensors of this object that use a storage of the destination, by storage."""
        return {storage_of(memory.front): 1 + len(memory.unchanged) for memory in self._memories}

    def exchange(self) -> None:
        """Exchanges the two copies. Bytes outside the destinations keep their values."""
        for memory in self._memories:
            for front, back in memory.unchanged:
                back.copy_(front)
            if memory.mask is not None:
                front, back = (tensor.view(len(memory.mask), -1) for tensor in memory[:2])
                torch.where(memory.mask, front, back, out=back)
            _runtime.exchange_memory(memory.front, memory.back)


def _placed_like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the storage of `memory`, with offset, shape and strides of `tensor`."""
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _memory(destinations: Sequence[torch.Tensor]) -> _Memory:
    """Allocates a second buffer for the storage of these destinations."""
    first = destinations[0]
    front = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    is_pinned = first.device.type == "cpu" and first.is_pinned()  # as the first buffer
    back = torch.empty(front.shape, dtype=torch.uint8, device=first.device, pin_memory=is_pinned)
    if sum(tensor.nbytes for tensor in destinations) == front.nbytes:
        return _Memory(front, back, [], None)
    left, unit = _left_over(destinations, front.nbytes)
    edges = torch.nn.functional.pad(left, (1, 1)).diff().nonzero().view(-1, 2) * unit
    if len(edges) > _MAX_RUNS:
        return _Memory(front, back, [], left.unsqueeze(1).to(first.device))
    runs = [(front[begin:end], back[begin:end]) for begin, end in edges.tolist()]
    return _Memory(front, back, runs, None)


def _left_over(destinations: Sequence[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, int]:
    """Returns a mask of a storage that marks the units outside the destinations, and the size of a unit in bytes.

    Units are as large as possible.
    """
    boxes: list[tuple[list[int], list[int], int]] = []  # sizes, strides and offset, in bytes
    for tensor in destinations:
        sizes, strides = ([], []) if tensor.is_contiguous() else (list(tensor.shape), list(tensor.stride()))
        run = tensor.nbytes if tensor.is_contiguous() else tensor.itemsize
        offset = tensor.storage_offset() * tensor.itemsize
        boxes.append(([*sizes, run], [stride * tensor.itemsize for stride in strides], offset))
    unit = math.gcd(size_bytes, *(n for sizes, strides, offset in boxes for n in (sizes[-1], *strides, offset)))
    left = torch.ones(size_bytes // unit, dtype=torch.bool)
    for sizes, strides, offset in boxes:
        sizes[-1] //= unit
        left.as_strided(sizes, [*(stride // unit for stride in strides), 1], offset // unit).fill_(False)
    return left, unit
