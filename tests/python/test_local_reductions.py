"""Local reductions take parts in order, and round sums once, in our loops and with ATen's operators."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwright._native import _runtime

COMBINE = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _parts(count: int, size: int, dtype: torch.dtype, arrangement: str) -> list[torch.Tensor]:
    """Makes parts of multiples of 1/8, which float32 sums exactly: rows of a tensor, in order, reversed, or copied."""
    generator = torch.Generator().manual_seed(count * 1000 + size)
    rows = (torch.randint(-99, 100, (count, size), generator=generator) / 8).to(dtype)
    if arrangement == "apart":
        return [row.clone() for row in rows]
    order = range(count) if arrangement == "rows" else reversed(range(count))
    return [rows.view(-1)[m * size : (m + 1) * size] for m in order]


@pytest.mark.parametrize("with_aten", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_rounded_once(dtype: torch.dtype, with_aten: bool) -> None:
    for count, size, arrangement, divisor in itertools.product(
        (1, 2, 3, 8), (1, 7, 1000), ("rows", "turned", "apart"), (1, 4)
    ):
        parts = _parts(count, size, dtype, arrangement)
        wide = torch.stack(parts).double().sum(0) / divisor
        actual = torch.empty(size, dtype=dtype)
        _runtime.reduce_parts("sum", parts, divisor, actual, with_aten)
        assert torch.equal(actual, wide.to(dtype)), f"{count} parts of {size}, {arrangement}, divided by {divisor}"


@pytest.mark.parametrize("with_aten", [False, True])
@pytest.mark.parametrize("op", list(COMBINE))
def test_parts_are_reduced_in_order(op: str, with_aten: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    for count, size in itertools.product((1, 2, 3, 8), (1, 7, 5000)):
        parts = [torch.randn(size, generator=generator) for _ in range(count)]
        parts[-1][0] = float("nan")
        expected = parts[0]
        for part in parts[1:]:
            expected = COMBINE[op](expected, part)
        found = torch.empty(size)
        _runtime.reduce_parts(op, parts, 1, found, with_aten)
        assert torch.equal(found.nan_to_num(99), expected.nan_to_num(99)), f"{op} of {count} parts of {size}"


@pytest.mark.parametrize("with_aten", [False, True])
def test_integer_reductions(with_aten: bool) -> None:
    parts = [torch.tensor([1, 6, 3]), torch.tensor([2, 3, 3]), torch.tensor([4, 2, 1])]
    for op, expected in (("sum", [7, 11, 7]), ("band", [0, 2, 1]), ("bor", [7, 7, 3]), ("bxor", [7, 7, 1])):
        found = torch.empty(3, dtype=torch.int64)
        _runtime.reduce_parts(op, parts, 1, found, with_aten)
        assert found.tolist() == expected, op
