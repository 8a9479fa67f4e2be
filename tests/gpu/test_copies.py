"""Compares the packing kernel with as_strided on CPU: any boxes, any number of them, captured and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from shardwright._native import _runtime

Boxes = list[tuple[int, int, list[int], list[int], list[int]]]
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _boxes(generator: random.Random, count: int) -> tuple[Boxes, int, int]:
    """Returns boxes of a row-major array, packed with gaps, and the number of elements of both sides."""
    shape = [generator.randint(1, 9) for _ in range(generator.randint(0, 5))]
    strides = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = strides[d] * shape[d]
    front, end = generator.randint(0, 3), generator.randint(0, 3)
    boxes = []
    for _ in range(count):
        begins = [generator.randrange(n) for n in shape]
        sizes = [generator.randint(1, n - b) for n, b in zip(shape, begins, strict=True)]
        packed = [1] * len(shape)
        for d in range(len(shape) - 1, 0, -1):
            packed[d - 1] = packed[d] * sizes[d]
        offset = front + sum(b * s for b, s in zip(begins, strides, strict=True))
        boxes.append((offset, end, sizes, strides, packed))
        end += torch.Size(sizes).numel() + generator.randint(0, 2)
    return boxes, front + torch.Size(shape).numel(), end


def _expected(boxes: Boxes, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    src, dst = src.cpu(), dst.cpu().clone()
    for src_offset, dst_offset, sizes, src_strides, dst_strides in boxes:
        view = src.as_strided(sizes, src_strides, src.storage_offset() + src_offset)
        dst.as_strided(sizes, dst_strides, dst_offset).copy_(view)
    return dst


def _source(count: int, item: int, shift: int = 0) -> torch.Tensor:
    made = torch.randint(0, 255, ((count + shift) * item,), dtype=torch.uint8, device="cuda")
    return made.view(DTYPES[item])[shift:]


@pytest.mark.parametrize("item", list(DTYPES))
def test_random_boxes(item: int) -> None:
    generator = random.Random(item)
    for trial in range(200):
        boxes, src_count, dst_count = _boxes(generator, generator.choice([1, 3, 16, 17, 144, 145, 400]))
        src = _source(src_count, item, trial % 3)
        dst = torch.zeros(dst_count * item, dtype=torch.uint8, device="cuda").view(DTYPES[item])
        expected = _expected(boxes, src, dst)
        _runtime.StridedCopy(boxes, item).run(src, dst)
        assert torch.equal(dst.cpu().view(torch.uint8), expected.view(torch.uint8)), f"trial {trial}"


@pytest.mark.parametrize("count", [1, 100, 1000, 100_000])
def test_many_boxes(count: int) -> None:
    boxes = [(16 * b, 8 * b, [8], [1], [1]) for b in range(count)]
    src, dst = torch.randn(16 * count, device="cuda"), torch.zeros(8 * count, device="cuda")
    _runtime.StridedCopy(boxes, 4).run(src, dst)
    assert torch.equal(dst.view(-1, 8), src.view(-1, 16)[:, :8])


def test_table_is_not_in_a_memory_pool(used_bytes_of_pool: Callable[[Callable[[], None]], int]) -> None:
    boxes = [(16 * b, 8 * b, [8], [1], [1]) for b in range(1000)]
    src, dst = torch.randn(16_000, device="cuda"), torch.zeros(8_000, device="cuda")
    copy = _runtime.StridedCopy(boxes, 4)
    assert used_bytes_of_pool(lambda: copy.run(src, dst)) == 0
    assert torch.equal(dst.view(-1, 8), src.view(-1, 16)[:, :8])


def test_copies_of_more_than_2_to_31_words() -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("takes 9 GiB")
    rows, columns = (1 << 20) + 3, 2051
    src = torch.randint(0, 255, (rows, columns), dtype=torch.uint8, device="cuda")
    dst = torch.zeros(rows, columns - 2, dtype=torch.uint8, device="cuda")
    box = (1, 0, [rows, columns - 2], [columns, 1], [columns - 2, 1])
    _runtime.StridedCopy([box], 1).run(src.view(-1), dst.view(-1))
    assert torch.equal(dst, src[:, 1:-1])


@pytest.mark.parametrize("count", [4, 100, 400])
def test_graph_replays_read_new_inputs(count: int) -> None:
    """1,000 replays with changing inputs. Tables of many boxes are uploaded before the capture."""
    boxes = [(16 * b, 8 * b, [2, 4], [8, 1], [4, 1]) for b in range(count)]
    copy = _runtime.StridedCopy(boxes, 4)
    src, dst = torch.zeros(16 * count, device="cuda"), torch.zeros(8 * count, device="cuda")
    copy.run(src, dst)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.run(src, dst)
    for trial in range(1000):
        src.copy_(torch.arange(16 * count, device="cuda") + trial)
        graph.replay()
        assert torch.equal(dst.view(-1, 2, 4), src.view(-1, 2, 8)[:, :, :4]), f"replay {trial}"


@pytest.mark.parametrize("is_first", [True, False])
def test_captured_table_outlives_the_copy(is_first: bool) -> None:
    """The table is uploaded in the capture, or just before it. Freed memory is overwritten between replays."""
    count = 400
    boxes = [(16 * b, 8 * b, [8], [1], [1]) for b in range(count)]
    copy = _runtime.StridedCopy(boxes, 4)
    src, dst = torch.zeros(16 * count, device="cuda"), torch.zeros(8 * count, device="cuda")
    torch.cuda.synchronize()
    if not is_first:
        copy.run(src, dst)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.run(src, dst)
    del copy
    for trial in range(10):
        torch.full((1 << 20,), 0xCB, dtype=torch.uint8, device="cuda")
        src.copy_(torch.arange(16 * count, device="cuda") + trial)
        graph.replay()
        assert torch.equal(dst.view(-1, 8), src.view(-1, 16)[:, :8]), f"replay {trial}"


@pytest.mark.parametrize("count", [1, 100, 400])
def test_no_host_sync(no_host_sync: Callable[[], AbstractContextManager[None]], count: int) -> None:
    boxes = [(16 * b, 8 * b, [8], [1], [1]) for b in range(count)]
    copy = _runtime.StridedCopy(boxes, 4)
    src, dst = torch.ones(16 * count, device="cuda"), torch.zeros(8 * count, device="cuda")
    with no_host_sync():
        for _ in range(3):
            copy.run(src, dst)
