"""Compares the bits of the reducing kernel with the CPU's loops: any number of parts, at any offset."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwright._native import _runtime


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_bits_are_those_of_the_cpu(dtype: torch.dtype, op: str) -> None:
    generator = torch.Generator().manual_seed(0)
    # Parts at odd offsets are not aligned. More than 256 parts go to ATen, which adds in its own order.
    for count, size, begin, divisor in itertools.product((1, 2, 3, 8, 64, 256), (1, 7, 70_001), (0, 1), (1, 3)):
        rows = (torch.rand(count, size + begin, generator=generator) + 0.5).to(dtype)
        parts = [row[begin:] for row in rows]
        expected, actual = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype, device="cuda")
        _runtime.reduce_parts(op, parts, divisor, expected)
        on_device = rows.cuda()
        _runtime.reduce_parts(op, [row[begin:] for row in on_device], divisor, actual)
        assert torch.equal(actual.cpu(), expected), f"{count} parts of {size} from {begin} on, divided by {divisor}"
