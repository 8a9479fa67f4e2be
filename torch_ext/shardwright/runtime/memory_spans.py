"""Finds tensors that have bytes in common, from their addresses, sizes and strides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch


class _Span(NamedTuple):
    """A tensor and the range of addresses that its elements are in."""

    device: str
    begin: int  # address of the first byte
    end: int  # address after the last byte
    name: str  # the name under which the caller passed the tensor
    tensor: torch.Tensor
    is_written: bool  # False if the caller only reads the tensor


def shared_memory(
    read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor], among_written: bool = False
) -> list[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Returns all pairs of a read and a written tensor that have a byte in common.

    Views that interleave, such as columns of one tensor, have no byte in common.

    Args:
        read: tensors that are only read, by name.
        written: tensors that are written, by name.
        among_written: True to return also pairs of two written tensors.

    Returns:
        For each pair, the two names and the two tensors. The read tensor comes first.
    """
    spans = [_span(name, tensor, False) for name, tensor in read.items()]
    spans += [_span(name, tensor, True) for name, tensor in written.items()]
    spans.sort(key=lambda span: span[:3])
    pairs = []
    open_spans: list[_Span] = []  # spans that have begun before `span` and not ended
    for span in spans:
        open_spans = [other for other in open_spans if other.device == span.device and other.end > span.begin]
        for other in open_spans:
            is_conflict = other.is_written != span.is_written or (among_written and span.is_written)
            if is_conflict and _share_bytes(other, span):
                first, second = (span, other) if other.is_written else (other, span)
                pairs.append((first.name, second.name, first.tensor, second.tensor))
        if span.end > span.begin:
            open_spans.append(span)
    return pairs


def _span(name: str, tensor: torch.Tensor, is_written: bool) -> _Span:
    """Returns the span of a tensor, which is empty if the tensor has no elements."""
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = begin + (last + 1) * tensor.itemsize if tensor.numel() else begin
    return _Span(str(tensor.device), begin, end, name, tensor, is_written)


def _share_bytes(a: _Span, b: _Span) -> bool:
    """Returns True if two tensors whose spans overlap have a byte in common. `a` begins first."""
    if all(span.tensor.numel() * span.tensor.itemsize == span.end - span.begin for span in (a, b)):
        return True  # neither has gaps
    overlap = _coordinates_overlap(a, b)
    return _marked_bytes_overlap(a, b) if overlap is None else overlap


def _coordinates_overlap(a: _Span, b: _Span) -> bool | None:
    """Returns True if two tensors have a byte in common, False if not, None if strides alone do not tell.

    An address is a sum of coordinates times strides, over the strides of both tensors. If the smaller strides together
    never reach the next larger stride, each address has only one such sum. Then each tensor is a box of coordinates,
    and two boxes overlap if their ranges overlap in every coordinate.

    Example: columns 0 to 3 and columns 4 to 7 of a float32 tensor with 5 rows of 32 bytes. The strides are 1 and 32. In
    coordinates (row, byte in the row), the tensors are [0, 5) x [0, 16) and [0, 5) x [16, 32). The ranges of bytes do
    not overlap, so no byte is in both.
    """
    sizes_a, sizes_b = _sizes_by_stride(a.tensor), _sizes_by_stride(b.tensor)
    if sizes_a is None or sizes_b is None:
        return None
    strides = sorted({*sizes_a, *sizes_b})
    for base in (min(a.begin, b.begin), a.tensor.untyped_storage().data_ptr()):
        ranges = [_ranges(a.begin - base, strides, sizes_a), _ranges(b.begin - base, strides, sizes_b)]
        reach = 0  # the largest sum of coordinates times strides, over the strides so far
        for stride, (_, end_a), (_, end_b) in zip(strides, *ranges, strict=True):
            if reach >= stride:
                break
            reach += (max(end_a, end_b) - 1) * stride
        else:
            return all(max(x, y) < min(end_x, end_y) for (x, end_x), (y, end_y) in zip(*ranges, strict=True))
    return None


def _sizes_by_stride(tensor: torch.Tensor) -> dict[int, int] | None:
    """Returns the size of the dim with each stride in bytes, or None if two dims have the same stride.

    The bytes of an element are a dim of stride 1. Dims of size 1 and of stride 0 are left out.
    """
    sizes: dict[int, int] = {}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        step = stride * tensor.itemsize
        if size < 2 or step == 0:
            continue
        if step in sizes:
            return None
        sizes[step] = size
    sizes.setdefault(1, tensor.itemsize)  # a dim of the tensor has a stride of 1 byte only if itemsize is 1
    return sizes


def _ranges(offset: int, strides: list[int], sizes: dict[int, int]) -> list[tuple[int, int]]:
    """Returns a tensor's range of coordinates for each stride. The tensor begins `offset` bytes after the base address.

    `strides` are ascending. `sizes` has the tensor's size for each of its strides; it has one coordinate for all
    others.
    """
    ranges = []
    for stride in reversed(strides):
        first, offset = divmod(offset, stride)
        ranges.append((first, first + sizes.get(stride, 1)))
    return ranges[::-1]


def _marked_bytes_overlap(a: _Span, b: _Span) -> bool:
    """Returns True if two tensors have a byte in common: marks all bytes of `a`, and looks for marks in `b`."""
    unit = math.gcd(a.tensor.itemsize, b.tensor.itemsize, b.begin - a.begin)  # bytes per mark
    marks = torch.zeros((max(a.end, b.end) - a.begin) // unit, dtype=torch.bool)

    def marks_of(span: _Span) -> torch.Tensor:
        """Returns the marks of a tensor's bytes, as a view of `marks`."""
        units = span.tensor.itemsize // unit
        strides = [stride * units for stride in span.tensor.stride()]
        return marks.as_strided((*span.tensor.shape, units), (*strides, 1), (span.begin - a.begin) // unit)

    marks_of(a).fill_(True)
    return bool(marks_of(b).any())
