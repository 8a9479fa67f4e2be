"""Products on local buffers with any strides, batches, accumulation and biases, compared with products in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright._native import _runtime

Place = tuple[int, int, int]
# Storage of a matrix in its buffer. "slice" and "column slice" are parts of a larger row-major or column-major matrix;
# "apart" has no stride of 1; "between" interleaves the matrices of a batch by rows.
KINDS = ["rows", "columns", "slice", "column slice", "apart", "between"]
SIZES = [(5, 7, 4), (1, 6, 3), (6, 1, 3), (4, 5, 1), (1, 1, 1)]


def _place(kind: str, rows: int, columns: int, count: int) -> tuple[Place, int, int]:
    """Returns the place of a matrix, its batch stride, and the number of elements of a large enough buffer."""
    offset, row, column, batch = {
        "rows": (0, columns, 1, rows * columns),
        "columns": (1, 1, rows, rows * columns),
        "slice": (3, columns + 5, 1, rows * (columns + 5)),
        "column slice": (2, 1, rows + 3, columns * (rows + 3)),
        "apart": (1, 2 * columns + 1, 2, rows * (2 * columns + 1)),
        "between": (0, count * columns, 1, columns),
    }[kind]
    return (offset, row, column), batch, offset + count * batch + rows * row + columns * column


def _view(buffer: torch.Tensor, place: Place, batch: int, count: int, rows: int, columns: int) -> torch.Tensor:
    return buffer.as_strided((count, rows, columns), (batch, place[1], place[2]), place[0])


def _integers(count: int, dtype: torch.dtype, low: int = -2, high: int = 3) -> torch.Tensor:
    """Returns integers that are small enough for exact sums of products."""
    return torch.randint(low, high, (count,), dtype=torch.float64).to(dtype)


class Case:
    """A product, its buffers, and the expected contents of all of dst, computed in float64."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        kinds: tuple[str, str, str],
        count: int = 1,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        accumulates: bool = False,
        bias: Place | None = None,
        shared_rhs: bool = False,
        low: int = -2,
    ) -> None:
        m, n, k = sizes
        lhs, lhs_batch, lhs_elements = _place(kinds[0], m, k, count)
        rhs, rhs_batch, rhs_elements = _place(kinds[1], k, n, count)
        dst, dst_batch, dst_elements = _place(kinds[2], m, n, count)
        if shared_rhs:
            rhs_batch = 0
        self.lhs = _integers(lhs_elements, dtypes[0], low)
        self.rhs = _integers(rhs_elements, dtypes[0], low)
        self.dst = _integers(dst_elements, dtypes[1])
        self.bias = None if bias is None else _integers(bias[0] + m * bias[1] + n * bias[2] + 1, dtypes[0])
        self.expected = self.dst.double()
        product = _view(self.lhs.double(), lhs, lhs_batch, count, m, k) @ _view(
            self.rhs.double(), rhs, rhs_batch, count, k, n
        )
        result = _view(self.expected, dst, dst_batch, count, m, n)
        if accumulates:
            product += result
        if bias is not None and self.bias is not None:
            product += self.bias.double().as_strided((m, n), bias[1:], bias[0])
        result.copy_(product)
        strides = (lhs_batch, rhs_batch, dst_batch)
        self.gemm = _runtime.Gemm(sizes, lhs, rhs, dst, count, strides, accumulates, bias)

    def check(self) -> None:
        self.gemm.multiply(self.lhs, self.rhs, self.dst, self.bias)
        assert torch.equal(self.dst.double(), self.expected)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("to", KINDS)
def test_all_strides(to: str, count: int) -> None:
    torch.manual_seed(0)
    for sizes, lhs, rhs, accumulates in itertools.product(SIZES, KINDS, KINDS, (False, True)):
        Case(sizes, (lhs, rhs, to), count, accumulates=accumulates).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_all_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    results = [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]
    for result, count, accumulates in itertools.product(results, (1, 2), (False, True)):
        for lhs, rhs, to in itertools.product(("rows", "columns"), ("rows", "columns"), ("rows", "columns", "slice")):
            Case((9, 8, 7), (lhs, rhs, to), count, (dtype, result), accumulates).check()


@pytest.mark.parametrize("place", [(1, 0, 1), (0, 1, 0), (2, 0, 0), (1, 7, 1), (0, 0, 2)], ids=str)
def test_biases(place: Place) -> None:
    """Biases along columns, along rows, of one element, of a full matrix, and of every other element."""
    torch.manual_seed(2)
    for to, count in itertools.product(KINDS, (1, 3)):
        Case((5, 7, 4), ("rows", "columns", to), count, bias=place).check()
        Case((5, 7, 4), ("rows", "columns", to), count, (torch.bfloat16, torch.float32), bias=place).check()


def test_one_rhs_for_a_batch() -> None:
    torch.manual_seed(3)
    for rhs, to in itertools.product(KINDS, KINDS):
        Case((5, 7, 4), ("rows", rhs, to), 3, shared_rhs=True).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_are_not_rounded_in_between(dtype: torch.dtype) -> None:
    """float16 does not have every integer above 2048, bfloat16 not every integer above 256."""
    torch.manual_seed(4)
    case = Case((6, 5, 3000), ("rows", "columns", "slice"), 2, (dtype, torch.float32), accumulates=True, low=0)
    assert (case.expected.to(dtype).double() != case.expected).any()
    case.check()


@pytest.mark.parametrize("sizes", [(0, 7, 4), (5, 0, 4), (5, 7, 0), (0, 0, 0)], ids=str)
def test_empty_matrices(sizes: tuple[int, int, int]) -> None:
    """If k is 0, the result is 0, the bias, or the previous contents."""
    torch.manual_seed(5)
    for to, count in itertools.product(KINDS, (1, 3)):
        for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
            Case(sizes, ("rows", "columns", to), count, dtypes).check()
            Case(sizes, ("rows", "columns", to), count, dtypes, accumulates=True).check()
            Case(sizes, ("rows", "columns", to), count, dtypes, bias=(0, 0, 1)).check()


def test_strides_of_single_rows_and_columns_do_not_matter() -> None:
    lhs, rhs = _integers(20, torch.float32), _integers(20, torch.float32)
    dst = torch.zeros(8)
    _runtime.Gemm((1, 4, 5), (0, 0, 1), (0, 4, 1), (2, 0, 1)).multiply(lhs, rhs, dst)
    assert torch.equal(dst, torch.cat([torch.zeros(2), lhs[:5] @ rhs.view(5, 4), torch.zeros(2)]))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("by_row", [False, True], ids=["by tensor", "by row"])
@pytest.mark.parametrize("operands", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32], ids=str)
def test_scaled_products(result: torch.dtype, operands: tuple[torch.dtype, torch.dtype], by_row: bool) -> None:
    """Scales are powers of two, so that sums are exact."""
    torch.manual_seed(10)
    m, n, k, count = 5, 7, 4, 1 if by_row else 3
    for kinds, accumulates in itertools.product(itertools.product(KINDS, KINDS, KINDS), (False, True)):
        case = Case((m, n, k), kinds, count, (operands[0], result), accumulates)
        rhs = case.rhs.float().to(operands[1])
        scales = [2.0 ** torch.randint(-2, 3, (size,) if by_row else ()) for size in (m, n)]
        (lhs_at, lhs_batch, _), (rhs_at, rhs_batch, _), (dst_at, dst_batch, _) = (
            _place(kind, rows, columns, count) for kind, rows, columns in zip(kinds, (m, k, m), (k, n, n), strict=True)
        )
        expected = case.dst.double()
        product = _view(case.lhs.double(), lhs_at, lhs_batch, count, m, k) @ _view(
            rhs.double(), rhs_at, rhs_batch, count, k, n
        )
        product *= scales[0].double().reshape(-1, 1) * scales[1].double().reshape(1, -1)
        view = _view(expected, dst_at, dst_batch, count, m, n)
        view.copy_(product + view if accumulates else product)
        case.gemm.multiply_scaled(case.lhs, rhs, *scales, case.dst)
        assert torch.equal(case.dst, expected.to(result)), (kinds, accumulates)


def test_row_scales_with_a_stride() -> None:
    """Row scales with a stride, and one scale for all columns."""
    lhs, rhs = _integers(6, torch.float32).to(E4M3), _integers(8, torch.float32).to(E4M3)
    row_scales = torch.tensor([2.0, 9.0, 0.5, 9.0, 4.0, 9.0])[::2]
    dst = torch.zeros(12)
    _runtime.Gemm((3, 4, 2), (0, 2, 1), (0, 4, 1), (0, 4, 1)).multiply_scaled(lhs, rhs, row_scales, torch.ones(()), dst)
    assert torch.equal(dst.view(3, 4), lhs.float().view(3, 2) @ rhs.float().view(2, 4) * row_scales[:, None])


def _operands(dtypes: tuple[torch.dtype, ...] = (E4M3, E5M2, torch.bfloat16)) -> list[torch.Tensor]:
    return [torch.zeros(8192).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize(
    ("dtypes", "scale", "said"),
    [
        (
            (E5M2, E5M2, torch.bfloat16),
            torch.float32,
            "lhs and rhs must not both be Float8_e5m2, got Float8_e5m2 for both",
        ),
        ((E4M3, torch.bfloat16, torch.bfloat16), torch.float32, "lhs and rhs must be .*, got .* and BFloat16"),
        ((E4M3, E4M3, torch.float16), torch.float32, "dst must be BFloat16 or Float, got Half"),
        ((E4M3, E4M3, torch.float32), torch.float64, "lhs_scale and rhs_scale must be Float, got Double and Double"),
    ],
    ids=str,
)
def test_scaled_products_reject_dtypes(dtypes: tuple[torch.dtype, ...], scale: torch.dtype, said: str) -> None:
    lhs, rhs, dst = _operands(dtypes)
    gemm = _runtime.Gemm((32, 48, 64), (0, 64, 1), (0, 1, 64), (0, 48, 1))
    with pytest.raises(ValueError, match=said):
        gemm.multiply_scaled(lhs, rhs, torch.ones(1, dtype=scale), torch.ones(1, dtype=scale), dst)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"dst": (0, 1, 32)}, None),
        ({"lhs": (16, 80, 1)}, None),
        ({"k": 24}, "lhs has lines or line strides that are not multiples of 16 elements"),
        ({"lhs": (0, 1, 32)}, "operands are not dense along k"),
        ({"rhs": (0, 48, 1)}, "operands are not dense along k"),
        ({"lhs": (0, 72, 1)}, "lhs has lines or line strides"),
        ({"rhs": (0, 1, 0)}, "rhs has lines that overlap"),
        ({"rhs": (8, 1, 64)}, "rhs does not begin at a multiple of 16 bytes"),
        ({"dst": (0, 96, 2)}, "the result has no stride of 1"),
        ({"dst": (0, 52, 1)}, "the result has lines or line strides"),
        ({"dst": (4, 48, 1)}, "the result does not begin at a multiple"),
    ],
    ids=str,
)
def test_why_not_scaled_gives_the_reason(given: dict[str, Any], said: str | None) -> None:
    """Shapes and strides that units for 8-bit floats do not support; operands are cast instead."""
    how: dict[str, Any] = {"lhs": (0, 64, 1), "rhs": (0, 1, 64), "dst": (0, 48, 1), "k": 64, **given}
    lhs, rhs, dst = _operands()
    gemm = _runtime.Gemm((32, 48, how["k"]), how["lhs"], how["rhs"], how["dst"])
    why = gemm.why_not_scaled(lhs, rhs, dst)
    assert why is None if said is None else why is not None and said in why


def test_waves_are_none_on_cpu() -> None:
    gemm = _runtime.Gemm((64, 64, 64), (0, 64, 1), (0, 64, 1), (0, 64, 1))
    assert gemm.waves(torch.empty(0), torch.empty(0)) is None


def test_fast_accumulation_is_off_by_default() -> None:
    """CPU ignores fast accumulation, set for the process or for one product."""
    lhs, rhs = (torch.randint(-2, 3, (16 * 32,)).to(torch.float8_e4m3fn) for _ in range(2))
    gemm = _runtime.Gemm((16, 16, 32), (0, 32, 1), (0, 1, 32), (0, 16, 1))
    one = torch.ones(())
    results = []
    assert sw.runtime.set_fast_accumulation(True) is False
    try:
        for by_product in (False, True):
            results.append(torch.zeros(16 * 16))
            gemm.multiply_scaled(lhs, rhs, one, one, results[-1], fast_accumulation=by_product)
    finally:
        assert sw.runtime.set_fast_accumulation(False) is True
    expected = lhs.float().view(16, 32) @ rhs.float().view(16, 32).t()
    assert all(torch.equal(result.view(16, 16), expected) for result in results)
