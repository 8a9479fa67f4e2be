"""Checkpoints of torch.distributed.checkpoint, read by exactly the parts that a rank needs.

PyTorch's planner asks for slices of saved tensors, but its `FileSystemReader` reads each such tensor from beginning to
end. `CheckpointReader` reads the slices alone, and `load_checkpoint` plans for any layout.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from .. import _planner, argument_values, memory_spans
from .declared import Given, Reader

_MAX_GAP_BYTES = 4096
_MAX_SPAN_BYTES = 8 << 20


class _Stored(NamedTuple):
    """A saved tensor in its file."""

    offset: int  # of its first element, in bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool


class CheckpointReader(dcp.FileSystemReader):
    """A storage reader for ``torch.distributed.checkpoint.load`` that reads slices of saved tensors.

    Args:
        path: the folder of the checkpoint.
        max_gap_bytes: shorter gaps between the runs of a slice are read along with them. The default is a page, the
            least that a file system reads; file systems with long latencies may want more.

    ``bytes_read``: how many bytes of tensors were read so far, gaps included.
    """

    def __init__(self, path: str | os.PathLike[str], max_gap_bytes: int = _MAX_GAP_BYTES) -> None:
        super().__init__(path)
        self.bytes_read = 0
        self._max_gap_bytes = argument_values.integer(max_gap_bytes, "max_gap_bytes")
        if self._max_gap_bytes < 0:
            raise ValueError(f"max_gap_bytes: got {max_gap_bytes}; allowed are 0 and more")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        whole = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or stored.transform_descriptors:
                whole.append(item)  # pickles, and what was compressed or encrypted
            else:
                by_file.setdefault(stored.relative_path, []).append(item)
        for relative_path, items in by_file.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with open(self.fs.concat_path(self.path, relative_path), "rb") as file:
                self._read_items(file, items, planner)
        return super().read_data(LoadPlan(whole), planner)

    def _read_items(self, file: Any, items: list[ReadItem], planner: LoadPlanner) -> None:
        # A saved tensor may be asked for in many slices; its place in the file is looked up once.
        for index, some in itertools.groupby(items, key=lambda item: item.storage_index):
            saved = self.storage_data[index]
            stored = _locate(self._slice_file(file, saved), saved.offset)
            for item in some:
                target = planner.resolve_tensor(item).detach()
                if tuple(target.shape) != tuple(item.lengths):
                    raise AssertionError(f"{index}: {tuple(target.shape)} was asked for, and {item.lengths} is read")
                piece = target if _can_be_read_into(target, stored) else torch.empty(target.shape, dtype=stored.dtype)
                self._read(file, stored, item.storage_offsets, piece)
                if piece is not target:
                    target.copy_(piece.conj() if stored.is_conj else piece)
                planner.commit_tensor(item, target)

    def _read(self, file: Any, stored: _Stored, offsets: Sequence[int], piece: torch.Tensor) -> None:
        """Reads the box of the piece's shape that begins at these offsets."""
        if piece.numel() == 0:
            return
        item_bytes = stored.dtype.itemsize
        begin = stored.offset + item_bytes * sum(o * s for o, s in zip(offsets, stored.strides))
        # Dims from the widest stride to the narrowest: the last ones that follow each other in the file are one run.
        order = sorted(range(piece.ndim), key=lambda dim: -stored.strides[dim])
        sizes = [piece.shape[dim] for dim in order]
        strides = [stored.strides[dim] * item_bytes for dim in order]
        view = piece.permute(order)
        split = _first_of_span(sizes, strides, item_bytes, self._max_gap_bytes)
        for where in itertools.product(*map(range, sizes[:split])):
            at = begin + sum(i * s for i, s in zip(where, strides))
            self._read_span(file, at, view[where], [stride // item_bytes for stride in strides[split:]])

    def _read_span(self, file: Any, at: int, view: torch.Tensor, strides: Sequence[int]) -> None:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, strides))
        is_run = view.is_contiguous() and elements == view.numel()
        span = view if is_run else torch.empty(elements, dtype=view.dtype)
        _read_into(file, at, span)
        self.bytes_read += elements * view.dtype.itemsize
        if not is_run:
            view.copy_(span.as_strided(view.shape, tuple(strides)))


def _first_of_span(sizes: Sequence[int], strides: Sequence[int], item_bytes: int, max_gap_bytes: int) -> int:
    """Returns the first dim, of dims by descending stride, from which on a slice is read in one go, gaps included."""
    span = item_bytes
    for dim in reversed(range(len(sizes))):
        if sizes[dim] > 1:
            wider = (sizes[dim] - 1) * strides[dim] + span
            if strides[dim] - span > max_gap_bytes or (wider > _MAX_SPAN_BYTES and strides[dim] > span):
                return dim + 1
            span = wider
    return 0


def _can_be_read_into(target: torch.Tensor, stored: _Stored) -> bool:
    is_alike = target.dtype == stored.dtype and not stored.is_conj
    return target.device.type == "cpu" and is_alike and not target.is_conj() and not target.is_neg()


def _locate(file_slice: Any, offset: int) -> _Stored:
    """Finds a tensor that torch.save wrote to this part of a file, from its headers alone."""
    tensor = torch.load(file_slice, map_location="meta", weights_only=True)
    storage_begin: int = tensor.untyped_storage()._checkpoint_offset
    begin = offset + storage_begin + tensor.storage_offset() * tensor.dtype.itemsize
    return _Stored(begin, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj())


def _read_into(file: Any, at: int, tensor: torch.Tensor) -> None:
    """Fills a contiguous tensor with bytes of a file."""
    left = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
    while left:
        count = os.preadv(file.fileno(), [left], at)
        if count == 0:
            raise EOFError(f"{file.name}: ends at byte {at}, within a tensor")
        left = left[count:]
        at += count


def load_checkpoint(
    path: str | os.PathLike[str],
    to: Any,
    *,
    max_gap_bytes: int = _MAX_GAP_BYTES,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Fills tensors of any layouts from a checkpoint of ``torch.distributed.checkpoint`` that was saved from others.

    Each rank reads only the bytes of its own parts. All ranks of the group call; those without tensors pass None.

    Args:
        path: the folder of the checkpoint.
        to: tensors by name, filled in place: DTensors, pairs of a local tensor and its `Layout`, or tensors that this
            rank needs whole. The names are those of the checkpoint; dicts within it have their names joined by dots.
            Where dtypes differ, elements are cast as by ``x.to``.
        max_gap_bytes: as in `CheckpointReader`.
        group: the process group whose ranks take part; default, the default group.

    Returns:
        The number of bytes of tensors that this rank read.

    Raises:
        torch.distributed.checkpoint.CheckpointException: on all ranks, with the errors of each: names that the
            checkpoint lacks, other shapes, elements that it does not hold, local tensors that contradict their layout.
    """
    reader = CheckpointReader(path, max_gap_bytes)
    dcp.load({"": to}, storage_reader=reader, planner=_Planner(to, group), process_group=group)
    return reader.bytes_read


class _Planner(LoadPlanner):
    """Plans the reads of parts of any layouts."""

    def __init__(self, to: Any, group: dist.ProcessGroup | None) -> None:
        self._to = to
        self._group = group
        self._given: dict[str, Given] = {}
        self._metadata: Metadata | None = None
        # By name and number of the box: a view of the local tensor.
        self._views: dict[tuple[str, int | None], torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        reader = Reader(self._group)
        given = reader.destination(self._to)
        items: list[ReadItem] = []
        written = {name: one.local for name, one in given.items() if name not in reader.wrong and one.local is not None}
        problems = reader.problems + [
            f"{one}: shares memory with {other}; allowed is memory of its own (on rank {reader.rank})"
            for other, one, _, _ in memory_spans.shared_memory({}, written, among_written=True)
        ]
        for name, one in given.items():
            try:
                if name not in reader.wrong:
                    items += self._items(name, one, reader.rank)
            except ValueError as error:
                problems.append(f"{name}: {error} (on rank {reader.rank})")
        if problems:
            raise ValueError("load_checkpoint: nothing was read, because\n" + "\n".join(f"  {one}" for one in problems))
        return LoadPlan(items)

    def _items(self, name: str, given: Given, rank: int) -> list[ReadItem]:
        assert self._metadata is not None
        saved = self._metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError("the checkpoint has no such tensor" if saved is None else "the checkpoint has no tensor")
        if given.local is None:
            if given.layout is None or given.layout.mesh.coordinate(rank) is not None:
                raise ValueError("got no tensor; allowed is one that is filled in place")
            return []
        layout = given.layout
        shape = tuple(given.local.shape) if layout is None else tuple(layout.shape)
        if tuple(saved.size) != shape:
            raise ValueError(f"has shape {shape}, and in the checkpoint {tuple(saved.size)}")
        if layout is not None and layout.mesh.coordinate(rank) is None:
            return []
        chunks = []
        for number, (box, view) in enumerate(_boxes(given.local, layout, rank)):
            chunks.append(ChunkStorageMetadata(torch.Size(b for b, _ in box), torch.Size(e - b for b, e in box)))
            self._views[name, number] = view
        items = create_read_items_for_chunk_list(name, saved, chunks)
        found = sum(math.prod(item.lengths) for item in items)
        if found != given.local.numel():
            raise ValueError(f"this rank needs {given.local.numel()} elements, and the checkpoint gives {found}")
        return list(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("no bytes were asked for")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._views[read_item.dest_index.fqn, read_item.dest_index.index]
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            view = view.narrow(dim, begin, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _boxes(
    local: torch.Tensor, layout: _planner.Layout | None, rank: int
) -> Iterator[tuple[tuple[tuple[int, int], ...], torch.Tensor]]:
    """Yields the boxes of the global tensor that a rank holds, and the views of its local tensor that hold them."""
    if layout is None:
        yield tuple((0, size) for size in local.shape), local
        return
    region = layout.region(rank)
    begins = [list(itertools.accumulate((end - begin for begin, end in list_), initial=0)) for list_ in region]
    flattened = tuple(layout.shape)[: layout.flattened]
    for numbers in itertools.product(*(range(len(list_)) for list_ in region)):
        box = tuple(list_[i] for list_, i in zip(region, numbers))
        view = local
        for dim, (i, (begin, end)) in enumerate(zip(numbers, box)):
            view = view.narrow(dim, begins[dim][i], end - begin)
        if len(flattened) < 2:
            yield box, view
            continue
        at = 0
        for dims in _boxes_of_run(*box[0], flattened):
            sizes = [end - begin for begin, end in dims]
            length = math.prod(sizes)
            yield (*dims, *box[1:]), view.narrow(0, at, length).unflatten(0, sizes)
            at += length


def _boxes_of_run(begin: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields, in order, the boxes of a tensor of these sizes that are its elements [begin, end) in row-major order."""
    if len(sizes) == 1:
        yield ((begin, end),)
        return
    row = math.prod(sizes[1:])
    while begin < end:
        index, first = divmod(begin, row)
        if first == 0 and end - begin >= row:  # whole rows
            rows = (end - begin) // row
            yield ((index, index + rows), *((0, size) for size in sizes[1:]))
            begin += rows * row
            continue
        last = min(row, first + end - begin)
        for inner in _boxes_of_run(first, last, sizes[1:]):
            yield ((index, index + 1), *inner)
        begin += last - first
