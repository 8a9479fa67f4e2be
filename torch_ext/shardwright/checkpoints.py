"""Readers of torch.distributed.checkpoint files that read only the slices that a rank needs.

PyTorch's planner requests slices of saved tensors, but its `FileSystemReader` reads each of these tensors from
beginning to end. `CheckpointReader` reads only the slices, and `load_checkpoint` plans reads for any layout.
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

from ._native import _planner
from .layouts import argument_values
from .layouts.errors import argument_error
from .progress_bar import Bar
from .runtime import memory_spans
from .transfers.declared import PassedTensor, Reader

_MAX_GAP_BYTES = 4096  # default of `max_gap_bytes`: a page
_MAX_SPAN_BYTES = 8 << 20  # maximum bytes of one read call along a dim

# A span is a range of a file that is read with one call; gaps in it are discarded. An item is a box of a saved tensor.
#
# A run (begin, end, to) of one dim: indices [begin, end) of the stored tensor are copied to the target from index `to`
# on. The runs of a dim are contiguous in the target; in the stored tensor they may be in any order. Example: the runs
# (6, 8, 0) and (0, 3, 2) copy stored indices 6, 7, 0, 1, 2 to the target's 0 to 4.
_Run = tuple[int, int, int]


class _StoredTensor(NamedTuple):
    """Location and format of a saved tensor in its file."""

    offset: int  # byte offset of the first element in the file
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


class _NeededBox(NamedTuple):
    """A box of elements of a tensor that a rank needs: the product of the runs of its dims."""

    runs: list[torch.Tensor]  # for each dim a matrix with one `_Run` per row
    view: torch.Tensor  # the part of the local tensor that the runs fill


class CheckpointReader(dcp.FileSystemReader):
    """A storage reader for ``torch.distributed.checkpoint.load`` that reads slices of saved tensors.

    Args:
        path: the folder of the checkpoint.
        max_gap_bytes: gaps of at most this size between the runs of a slice are read too, and discarded. The default is
            a page, the smallest read of a file system; more may be faster on file systems with high latency.

    ``bytes_read``: number of bytes of tensors read so far, including gaps.
    """

    def __init__(self, path: str | os.PathLike[str], max_gap_bytes: int = _MAX_GAP_BYTES) -> None:
        super().__init__(path)
        self.bytes_read = 0
        self._max_gap_bytes = argument_values.integer(max_gap_bytes, "max_gap_bytes")
        if self._max_gap_bytes < 0:
            raise argument_error("max_gap_bytes", "at least 0", max_gap_bytes)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads slices of tensors. Leaves pickles and compressed or encrypted tensors to PyTorch's reader."""
        left_to_torch = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or stored.transform_descriptors:
                left_to_torch.append(item)  # pickles, and compressed or encrypted tensors
            else:
                by_file.setdefault(stored.relative_path, []).append(item)
        for relative_path, items in by_file.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with open(self.fs.concat_path(self.path, relative_path), "rb") as file:
                self._read_items(file, items, planner)
        return super().read_data(LoadPlan(left_to_torch), planner)

    def _read_items(self, file: Any, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Reads the items of one file, in the order of their offsets, into the planner's tensors."""
        # Several slices of a saved tensor may be requested; its location in the file is looked up once.
        for index, group in itertools.groupby(items, key=lambda item: item.storage_index):
            saved = self.storage_data[index]
            stored = _locate(self._slice_file(file, saved), saved.offset)
            for item in group:
                for runs, target in _targets(planner, item):
                    direct = _can_be_read_into(target, stored)
                    piece = target if direct else torch.empty(target.shape, dtype=stored.dtype)
                    self._read(file, stored, item.storage_offsets, runs, piece)
                    if direct:
                        torch.autograd.graph.increment_version(target)  # the read bypassed autograd
                    else:
                        piece = piece.conj() if stored.is_conj else piece
                        target.copy_(torch._neg_view(piece) if stored.is_neg else piece)

    def _read(
        self, file: Any, stored: _StoredTensor, offsets: Sequence[int], runs: Sequence[list[_Run]], piece: torch.Tensor
    ) -> None:
        """Reads the product of `runs` of a stored tensor into `piece`. Run indices are relative to `offsets`.

        The innermost dims are read with one call per span, including gaps; the outer dims are iterated.
        """
        if piece.numel() == 0:
            return
        inner_bytes = itemsize = stored.dtype.itemsize
        at = stored.offset + itemsize * sum(o * s for o, s in zip(offsets, stored.strides))
        # Dims from the widest stride to the narrowest.
        order = sorted(range(piece.ndim), key=lambda dim: -stored.strides[dim])
        view, ordered_runs = piece.permute(order), [runs[dim] for dim in order]
        strides = [stored.strides[dim] * itemsize for dim in order]
        if not order:
            view, ordered_runs, strides = piece.unsqueeze(0), [[(0, 1, 0)]], [itemsize]
        outer = len(ordered_runs)
        spans: list[list[_Run]] = []
        groups: list[list[_Run]] = []  # the runs of the first span of each inner dim
        while outer and len(spans) < 2:
            outer -= 1
            spans = list(_spans(ordered_runs[outer], strides[outer], inner_bytes, self._max_gap_bytes))
            inner_bytes += (spans[0][-1][1] - spans[0][0][0] - 1) * strides[outer]
            groups = [spans[0], *groups]
        for position in itertools.product(*map(_positions, ordered_runs[:outer])):
            target = view[tuple(to for _, to in position)]
            begin = at + sum(index * stride for (index, _), stride in zip(position, strides))
            for group in spans:
                part = target.narrow(0, group[0][2], _length(group))
                self._read_span(file, begin, part, [group, *groups[1:]], strides[outer:])

    def _read_span(
        self, file: Any, at: int, view: torch.Tensor, groups: Sequence[list[_Run]], strides: Sequence[int]
    ) -> None:
        """Reads one span, from the first index of every dim to the last, and copies the runs in it to `view`."""
        item_bytes = view.dtype.itemsize
        at += sum(group[0][0] * stride for group, stride in zip(groups, strides))
        sizes = [group[-1][1] - group[0][0] for group in groups]
        steps = [stride // item_bytes for stride in strides]
        elements = 1 + sum((size - 1) * step for size, step in zip(sizes, steps))
        is_run = view.is_contiguous() and elements == view.numel()
        span = view if is_run else torch.empty(elements, dtype=view.dtype)
        _read_into(file, at, span)
        self.bytes_read += elements * item_bytes
        if not is_run:
            box = span.as_strided(sizes, steps)
            for dim, group in enumerate(groups):
                if len(group) > 1:
                    box = box.index_select(dim, _indices(group))
            view.copy_(box)


def _targets(planner: LoadPlanner, item: ReadItem) -> Iterator[tuple[Sequence[list[_Run]], torch.Tensor]]:
    """Yields (runs per dim, target): the runs of an item to read, and the tensor that they fill."""
    if isinstance(planner, _Planner):
        yield from planner.targets(item)
        return
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise AssertionError(f"{item.storage_index}: the planner gave shape {tuple(target.shape)} for {item.lengths}")
    yield [[(0, length, 0)] for length in item.lengths], target
    planner.commit_tensor(item, target)


def _spans(runs: Sequence[_Run], stride: int, inner_bytes: int, max_gap_bytes: int) -> Iterator[list[_Run]]:
    """Groups the runs of a dim into spans that are each read with one call. Long runs are split.

    Example: with 4 bytes per index and gaps of at most 8 bytes, runs of indices [0, 3), [5, 6) and [20, 22) give the
    spans [0, 6), whose gap of 2 indices has 8 bytes, and [20, 22).

    Args:
        stride: bytes between two indices.
        inner_bytes: bytes to read at each index, from the first to the last that is needed there.
    """
    max_indices = 1 if stride - inner_bytes > max_gap_bytes else max(1, _MAX_SPAN_BYTES // max(stride, 1))
    group: list[_Run] = []
    for begin, end, to in runs:
        while begin < end:
            if group:
                first, last = group[0][0], group[-1][1]
                gap = (begin - last + 1) * stride - inner_bytes
                if begin < last or gap > max_gap_bytes or begin - first >= max_indices:
                    yield group
                    group = []
            stop = min(end, (group[0][0] if group else begin) + max_indices)
            group.append((begin, stop, to))
            begin, to = stop, to + stop - begin
    yield group


def _positions(runs: Sequence[_Run]) -> list[tuple[int, int]]:
    """Returns (stored index, target index) for each index of the runs."""
    return [(begin + i, to + i) for begin, end, to in runs for i in range(end - begin)]


def _indices(runs: Sequence[_Run]) -> torch.Tensor:
    """Returns the stored indices of the runs, relative to the first one."""
    begins, ends, to = torch.tensor(runs).unbind(1)
    lengths = ends - begins
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(begins - begins[0] - to + to[0], lengths)


def _can_be_read_into(target: torch.Tensor, stored: _StoredTensor) -> bool:
    """Returns True if bytes of the file can be read into the target without a conversion."""
    has_same_format = target.dtype == stored.dtype and not stored.is_conj and not stored.is_neg
    return target.device.type == "cpu" and has_same_format and not target.is_conj() and not target.is_neg()


def _locate(file_slice: Any, offset: int) -> _StoredTensor:
    """Returns the location of a tensor that torch.save wrote to `file_slice`. Reads only its headers."""
    tensor = torch.load(file_slice, map_location="meta", weights_only=True)
    storage_begin: int = tensor.untyped_storage()._checkpoint_offset
    begin = offset + storage_begin + tensor.storage_offset() * tensor.dtype.itemsize
    return _StoredTensor(begin, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _read_into(file: Any, at: int, tensor: torch.Tensor) -> None:
    """Fills a contiguous tensor with the bytes of a file from offset `at` on."""
    left = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
    while left:
        count = os.preadv(file.fileno(), [left], at)
        if count == 0:
            raise EOFError(f"{file.name} ends at byte {at}, within a tensor")
        left = left[count:]
        at += count


def load_checkpoint(
    path: str | os.PathLike[str],
    to: Any,
    *,
    max_gap_bytes: int = _MAX_GAP_BYTES,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> int:
    """Fills tensors of any layouts from a checkpoint of ``torch.distributed.checkpoint`` saved with any other layouts.

    Each rank reads only the bytes of its own parts. All ranks of the group call; ranks without tensors pass None.

    Args:
        path: the folder of the checkpoint.
        to: tensors by name, filled in place: DTensors, pairs of a local tensor and its `Layout`, or plain tensors,
            which get all elements. Names are those of the checkpoint; names of nested dicts are joined by dots. If
            dtypes differ, elements are cast as by ``x.to``.
        max_gap_bytes: as in `CheckpointReader`.
        group: the process group whose ranks take part; default, the default group.
        progress: True for a bar on rank 0 if stderr is a terminal, with tqdm if it is installed.

    Returns:
        The number of bytes of tensors that this rank read.

    Raises:
        torch.distributed.checkpoint.CheckpointException: raised on all ranks, with the errors of each: names or
            elements that the checkpoint lacks, different shapes, local tensors that do not match their layout.
    """
    reader = CheckpointReader(path, max_gap_bytes)
    planner = _Planner(to, group, progress)
    try:
        dcp.load({"": to}, storage_reader=reader, planner=planner, process_group=group)
    finally:
        if planner.bar is not None:
            planner.bar.close()
    # The reader incremented the versions of local tensors. A DTensor has a version counter of its own.
    torch.autograd.graph.increment_version([x.value for x in planner.given.values() if x.value is not None])
    return reader.bytes_read


class _Planner(LoadPlanner):
    """A load planner for tensors of any layouts."""

    def __init__(self, to: Any, group: dist.ProcessGroup | None, progress: bool = False) -> None:
        self._to = to
        self._group = group
        self._progress = progress
        self.bar: Bar | None = None  # counts bytes of local tensors
        self.given: dict[str, PassedTensor] = {}  # this rank's tensors by name
        self._metadata: Metadata | None = None
        self._parts: dict[tuple[str, int | None], _NeededBox] = {}  # by name and index of the part

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Returns the items that this rank reads. Raises ValueError with all problems of its arguments."""
        reader = Reader(self._group)
        given = self.given = reader.destination(self._to)
        items: list[ReadItem] = []
        written = {name: x.local for name, x in given.items() if name not in reader.invalid and x.local is not None}
        problems = reader.problems + [
            f"{written_name}: its memory must not be shared, got memory shared with {other} (on rank {reader.rank})"
            for other, written_name, _, _ in memory_spans.shared_memory({}, written, among_written=True)
        ]
        for name, tensor in given.items():
            try:
                if name not in reader.invalid:
                    items += self._items(name, tensor, reader.rank)
            except ValueError as error:
                problems.append(f"{name}: {error} (on rank {reader.rank})")
        if problems:
            raise ValueError(
                "load_checkpoint: nothing was read, because\n" + "\n".join(f"  {text}" for text in problems)
            )
        if self._progress and reader.rank == 0:
            total = sum(x.local.nbytes for x in given.values() if x.local is not None)
            self.bar = Bar("load_checkpoint", total, "B")
        return LoadPlan(items)

    def _items(self, name: str, tensor: PassedTensor, rank: int) -> list[ReadItem]:
        """Returns the items to read for this rank's part of a tensor.

        Raises ValueError if the checkpoint lacks some.
        """
        assert self._metadata is not None
        saved = self._metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError("is not in the checkpoint" if saved is None else "is not a tensor in the checkpoint")
        if tensor.local is None:
            if tensor.layout is None or tensor.layout.mesh.coordinate(rank) is not None:
                raise argument_error("the local tensor to fill", "given", "none")
            return []
        layout = tensor.layout
        shape = tuple(tensor.local.shape) if layout is None else tuple(layout.shape)
        if tuple(saved.size) != shape:
            raise argument_error("shape", f"{tuple(saved.size)}, as in the checkpoint", shape)
        if layout is not None and layout.mesh.coordinate(rank) is None:
            return []
        chunks = []
        for index, part in enumerate(_parts(tensor.local.detach(), layout, rank)):
            begins = torch.Size(int(runs[:, 0].min()) for runs in part.runs)
            sizes = torch.Size(int(runs[:, 1].max()) - begin for runs, begin in zip(part.runs, begins))
            chunks.append(ChunkStorageMetadata(begins, sizes))
            self._parts[name, index] = part
        items = create_read_items_for_chunk_list(name, saved, chunks)
        counts = [math.prod(int((runs[:, 1] - runs[:, 0]).sum()) for runs in self._runs(item)) for item in items]
        if sum(counts) != tensor.local.numel():
            raise ValueError(f"this rank needs {tensor.local.numel()} elements, but the checkpoint has {sum(counts)}")
        return [item for item, count in zip(items, counts) if count]

    def _runs(self, item: ReadItem) -> list[torch.Tensor]:
        """Returns for each dim the runs within an item, relative to the item's beginning."""
        clipped = []
        target = item.dest_index
        for dim, runs in enumerate(self._parts[target.fqn, target.index].runs):
            first = target.offset[dim] + item.dest_offsets[dim]
            begins, ends = (runs[:, side].clamp(first, first + item.lengths[dim]) for side in (0, 1))
            inside = torch.stack((begins - first, ends - first, runs[:, 2] + begins - runs[:, 0]), 1)
            clipped.append(inside[begins < ends])
        return clipped

    def targets(self, item: ReadItem) -> Iterator[tuple[Sequence[list[_Run]], torch.Tensor]]:
        """Yields (runs per dim, view that they fill) for the elements of an item that this rank needs."""
        for runs in itertools.product(*(_consecutive(runs.tolist()) for runs in self._runs(item))):
            target = self._parts[item.dest_index.fqn, item.dest_index.index].view
            for dim, group in enumerate(runs):
                target = target.narrow(dim, group[0][2], _length(group))
            yield [[(begin, end, to - group[0][2]) for begin, end, to in group] for group in runs], target
            if self.bar is not None:
                self.bar.advance(target.nbytes, item.dest_index.fqn)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("load_bytes was called, but the plan reads no bytes")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns a temporary tensor, into which PyTorch's reader reads compressed tensors."""
        view = self._parts[read_item.dest_index.fqn, read_item.dest_index.index].view
        return torch.empty(read_item.lengths, dtype=view.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copies what this rank needs of an item, which PyTorch's reader read in full, into its local tensor."""
        for runs, target in self.targets(read_item):
            needed = tensor
            for dim, group in enumerate(runs):
                needed = needed.index_select(dim, torch.tensor([index for index, _ in _positions(group)]))
            target.copy_(needed)


def _parts(local: torch.Tensor, layout: _planner.Layout | None, rank: int) -> Iterator[_NeededBox]:
    """Yields the parts of a tensor that a rank needs: one, or several boxes if the layout flattens dims."""
    if local.numel() == 0:
        return
    region = [[(0, size)] for size in local.shape] if layout is None else layout.region(rank)
    if layout is None or layout.flattened < 2:
        yield _NeededBox([_in_order(intervals) for intervals in region], local)
        return
    at = 0
    for begin, end in region[0]:
        for dims in _boxes_of_run(begin, end, tuple(layout.shape)[: layout.flattened]):
            sizes = [end - begin for begin, end in dims]
            runs = [_in_order(intervals) for intervals in (*([interval] for interval in dims), *region[1:])]
            yield _NeededBox(runs, local.narrow(0, at, math.prod(sizes)).unflatten(0, sizes))
            at += math.prod(sizes)


def _in_order(intervals: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns the `_Run` rows of intervals that fill a dim one after the other."""
    begins, ends = torch.tensor(intervals).unbind(1)
    lengths = ends - begins
    return torch.stack((begins, ends, lengths.cumsum(0) - lengths), 1)


def _length(runs: Sequence[_Run]) -> int:
    """Returns the number of indices in the runs."""
    return sum(end - begin for begin, end, _ in runs)


def _consecutive(runs: Sequence[_Run]) -> list[list[_Run]]:
    """Splits the runs of a dim into groups that are contiguous in the target."""
    groups: list[list[_Run]] = []
    expected = None
    for run in runs:
        begin, end, to = run
        if to != expected:
            groups.append([])
        groups[-1].append(run)
        expected = to + end - begin
    return groups


def _boxes_of_run(begin: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields, in order, the boxes that make up elements [begin, end) of a row-major tensor of these sizes.

    Example: elements [2, 9) of 3 x 4 are [0:1, 2:4], [1:2, 0:4] and [2:3, 0:1].
    """
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
