"""Compares products of buffers on the GPU with float64: any strides, batches, sums and biases, 8-bit floats."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from shardwright._native import _runtime

Place = tuple[int, int, int]
# Memory formats of a matrix in its buffer. "slice" and "column slice" are parts of larger ones, by rows and by columns;
# "apart" has no stride of 1; "between" interleaves the rows of the matrices of a batch.
KINDS = ["rows", "columns", "slice", "column slice", "apart", "between"]
SIZES = [(33, 40, 24), (64, 128, 96), (1, 40, 24), (33, 1, 24), (5, 7, 1), (1, 1, 1)]
MIXED = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
SAME = [(dtype, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]


def _sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _place(kind: str, rows: int, columns: int, count: int, offset: int) -> tuple[Place, int, int]:
    """Returns a matrix's place, its batch stride, and the elements of its buffer, with some to spare."""
    row, column, batch = {
        "rows": (columns, 1, rows * columns),
        "columns": (1, rows, rows * columns),
        "slice": (columns + 5, 1, rows * (columns + 5)),
        "column slice": (1, rows + 3, columns * (rows + 3)),
        "apart": (2 * columns + 1, 2, rows * (2 * columns + 1)),
        "between": (count * columns, 1, columns),
    }[kind]
    return (offset, row, column), batch, offset + count * batch + rows * row + columns * column


def _view(buffer: torch.Tensor, place: Place, batch: int, count: int, rows: int, columns: int) -> torch.Tensor:
    return buffer.as_strided((count, rows, columns), (batch, place[1], place[2]), place[0])


def _integers(count: int, dtype: torch.dtype, low: int = -2, high: int = 3) -> torch.Tensor:
    """Returns integers small enough that every sum of products is exact, also in TF32."""
    return torch.randint(low, high, (count,), dtype=torch.float64, device="cuda").to(dtype)


class Case:
    """A product with its buffers, and the expected contents of dst, computed in float64."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        kinds: tuple[str, str, str] = ("rows", "rows", "rows"),
        count: int = 1,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.float32),
        accumulates: bool = False,
        bias: Place | None = None,
        offset: int = 0,
        low: int = -2,
    ) -> None:
        m, n, k = sizes
        lhs, lhs_batch, lhs_elements = _place(kinds[0], m, k, count, offset)
        rhs, rhs_batch, rhs_elements = _place(kinds[1], k, n, count, offset)
        dst, dst_batch, dst_elements = _place(kinds[2], m, n, count, offset)
        self.views = (
            partial(_view, place=lhs, batch=lhs_batch, count=count, rows=m, columns=k),
            partial(_view, place=rhs, batch=rhs_batch, count=count, rows=k, columns=n),
            partial(_view, place=dst, batch=dst_batch, count=count, rows=m, columns=n),
        )
        self.lhs = _integers(lhs_elements, dtypes[0], low)
        self.rhs = _integers(rhs_elements, dtypes[0], low)
        self.dst = _integers(dst_elements, dtypes[1])
        self.bias = None if bias is None else _integers(bias[0] + m * bias[1] + n * bias[2] + 1, dtypes[0])
        self.expected = self.dst.double()
        product = self.views[0](self.lhs.double()) @ self.views[1](self.rhs.double())
        result = self.views[2](self.expected)
        if accumulates:
            product += result
        if bias is not None and self.bias is not None:
            product += self.bias.double().as_strided((m, n), bias[1:], bias[0])
        result.copy_(product)
        strides = (lhs_batch, rhs_batch, dst_batch)
        self.gemm = _runtime.Gemm(sizes, lhs, rhs, dst, count, strides, accumulates, bias)

    def run(self, sms_left: int = 0) -> None:
        self.gemm.multiply(self.lhs, self.rhs, self.dst, self.bias, sms_left)

    def run_on_normals(self, sms_left: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the result for normal numbers, and the product in float64."""
        self.lhs.normal_()
        self.rhs.normal_()
        self.run(sms_left)
        lhs, rhs, dst = (view(buffer.double()) for view, buffer in zip(self.views, (self.lhs, self.rhs, self.dst)))
        return dst, lhs @ rhs

    def check(self, sms_left: int = 0) -> None:
        self.run(sms_left)
        assert torch.equal(self.dst.double(), self.expected)


def _kernels(case: Case) -> list[str]:
    """Returns the kernels that a run launches, from the second run on."""
    case.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        case.run()
        torch.cuda.synchronize()
    return [event.name for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("to", KINDS)
def test_products_of_any_strides(to: str, count: int) -> None:
    torch.manual_seed(0)
    for sizes, lhs, rhs, accumulates in itertools.product(SIZES, KINDS, KINDS, (False, True)):
        Case(sizes, (lhs, rhs, to), count, accumulates=accumulates).check()
        Case(sizes, (lhs, rhs, to), count, (torch.float32, torch.float32), accumulates).check()


@pytest.mark.parametrize("dtypes", MIXED + SAME, ids=str)
def test_products_of_all_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(1)
    layouts = itertools.product(("rows", "columns"), ("rows", "columns"), ("rows", "columns", "slice"))
    for kinds, count, accumulates in itertools.product(layouts, (1, 4), (False, True)):
        for sms_left in (0, 16, _sms() - 8):
            Case((72, 80, 40), kinds, count, dtypes, accumulates).check(sms_left)


@pytest.mark.parametrize("offset", range(9))
def test_products_at_any_alignment(offset: int) -> None:
    """The alignment of the matrices decides which algorithms may run for one shape."""
    torch.manual_seed(2)
    for dtypes, kinds in itertools.product(MIXED + SAME, (("rows", "rows", "rows"), ("rows", "columns", "slice"))):
        Case((64, 64, 64), kinds, 2, dtypes, accumulates=True, offset=offset).check()


@pytest.mark.parametrize("place", [(1, 0, 1), (0, 1, 0), (2, 0, 0), (1, 40, 1), (0, 0, 2)], ids=str)
def test_bias_of_any_strides(place: Place) -> None:
    """A bias along columns, along rows, of one element, of a full matrix, and of every other element."""
    torch.manual_seed(3)
    for to, count, dtypes in itertools.product(KINDS, (1, 3), MIXED + SAME):
        for sms_left in (0, 16):
            Case((33, 40, 24), ("rows", "columns", to), count, dtypes, bias=place).check(sms_left)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_are_not_rounded_in_between(dtype: torch.dtype) -> None:
    """Not every integer above 2048 is a float16, nor above 256 a bfloat16. Sums are long enough to be split."""
    torch.manual_seed(4)
    for accumulates, kinds in itertools.product(
        (False, True), (("rows", "columns", "slice"), ("columns", "rows", "rows"))
    ):
        case = Case((64, 64, 8192), kinds, 2, (dtype, torch.float32), accumulates, low=0)
        assert (case.expected.to(dtype).double() != case.expected).any()
        case.check()


@pytest.mark.parametrize("sizes", [(0, 7, 4), (5, 0, 4), (5, 7, 0), (0, 0, 0)], ids=str)
def test_empty_products(sizes: tuple[int, int, int]) -> None:
    """If k is 0, the result is 0, the bias, or the previous contents."""
    torch.manual_seed(5)
    for to, count, dtypes in itertools.product(KINDS, (1, 3), MIXED + SAME):
        Case(sizes, ("rows", "columns", to), count, dtypes).check()
        Case(sizes, ("rows", "columns", to), count, dtypes, accumulates=True).check()
        Case(sizes, ("rows", "columns", to), count, dtypes, bias=(0, 0, 1)).check()


@pytest.mark.parametrize("dtypes", MIXED + SAME, ids=str)
def test_large_products_stay_within_rounding(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Errors are within the rounding of the result and of 2000 summands. A bfloat16 partial sum exceeds it 100-fold."""
    torch.manual_seed(6)
    allowed = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16, torch.float64: 2.0**-44}
    for sms_left in (0, _sms() // 2):
        case = Case((1000, 1500, 2000), ("rows", "columns", "slice"), 2, dtypes)
        actual, expected = case.run_on_normals(sms_left)
        assert (actual - expected).abs().max() <= expected.abs().max() * allowed[dtypes[1]]


@pytest.mark.parametrize("dtypes", [*MIXED, (torch.bfloat16, torch.bfloat16)], ids=str)
def test_batch_is_one_launch(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """One launch, and a reduction if the sum is split."""
    for accumulates, bias in ((False, None), (True, None), (False, (0, 0, 1))):
        case = Case((256, 256, 256), ("rows", "columns", "between"), 16, dtypes, accumulates, bias)
        kernels = [name for name in _kernels(case) if "Memset" not in name]
        # From 16-bit floats into float32, the bias is converted to float32 first.
        assert len(kernels) <= (3 if bias and dtypes[0] != dtypes[1] else 2), kernels


def test_accumulating_in_place_copies_nothing() -> None:
    case = Case((512, 512, 512), ("rows", "columns", "slice"), accumulates=True)
    kernels = [name for name in _kernels(case) if "Memset" not in name]
    assert len(kernels) <= 2 and not any("copy" in name.lower() for name in kernels), kernels


def test_workspace_is_not_in_a_memory_pool(used_bytes_of_pool: Callable[[Callable[[], None]], int]) -> None:
    case = Case((64, 64, 8192))

    def multiply_on_streams() -> None:
        torch.cuda.synchronize()
        for _ in range(8):  # a stream keeps its first workspace, so some streams must be new
            with torch.cuda.stream(torch.cuda.Stream()):
                case.run()
        torch.cuda.synchronize()

    assert used_bytes_of_pool(multiply_on_streams) == 0


def test_streams_do_not_share_a_workspace() -> None:
    """Long sums of small results are split, and their parts are added in a workspace."""
    torch.manual_seed(7)
    streams = [torch.cuda.Stream() for _ in range(4)]
    cases = [Case((64, 64, 65536), ("rows", "columns", "rows"), low=0) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                case.run()
    torch.cuda.synchronize()
    for case in cases:
        assert torch.equal(case.dst.double(), case.expected)


@pytest.mark.parametrize("count", [1, 4])
def test_graph_replays_read_new_inputs(count: int) -> None:
    """Replays with changing inputs, while the stream that captured the graph multiplies too."""
    torch.manual_seed(8)
    sizes = (64, 64, 16384)
    case, other = (Case(sizes, ("rows", "columns", "rows"), count, low=0) for _ in range(2))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        case.run()
    result = case.views[2]
    for step in range(100):
        case.lhs.neg_()
        graph.replay()
        with torch.cuda.stream(stream):
            other.run()
        assert torch.equal(result(case.dst).double(), result(case.expected) * (-1) ** (step + 1)), f"replay {step}"
    torch.cuda.synchronize()
    assert torch.equal(other.dst.double(), other.expected)


@pytest.mark.parametrize("bias", [None, (0, 0, 1)])
def test_no_host_sync(no_host_sync: Callable[[], AbstractContextManager[None]], bias: Place | None) -> None:
    case = Case((64, 64, 64), count=2, bias=bias)
    with no_host_sync():
        for _ in range(3):
            case.run()
            case.run(16)


def test_tf32_follows_the_setting_of_torch() -> None:
    torch.manual_seed(9)
    errors = []
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            case = Case((512, 512, 512), ("rows", "columns", "rows"), 2, (torch.float32, torch.float32))
            actual, expected = case.run_on_normals()
            errors.append((actual - expected).abs().max().item())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert errors[0] < 1e-3 < errors[1] and errors[2] < 1e-3, errors


def test_waves_grow_with_rows_and_reserved_processors() -> None:
    def waves(m: int, count: int = 1, sms_left: int = 0, k: int = 1024) -> float:
        sizes, strides = (m, 4096, k), (m * k, 4096 * k, m * 4096)
        gemm = _runtime.Gemm(sizes, (0, k, 1), (0, 1, k), (0, 4096, 1), count, strides)
        found = gemm.waves(torch.empty(0, dtype=torch.bfloat16), torch.empty(0, device="cuda"), sms_left)
        assert found is not None
        return found

    assert 0 < waves(128) < waves(16384)
    assert waves(4096) == waves(4096, count=8)  # cuBLASLt counts the waves of one matrix
    assert waves(8192, sms_left=_sms() // 2) >= waves(8192)
    gemm = _runtime.Gemm((64, 64, 0), (0, 1, 1), (0, 64, 1), (0, 64, 1))
    assert gemm.waves(torch.empty(0), torch.empty(0, device="cuda")) is None


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("by_row", [False, True], ids=["by tensor", "by row"])
@pytest.mark.parametrize("operands", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32], ids=str)
def test_scaled_products(result: torch.dtype, operands: tuple[torch.dtype, torch.dtype], by_row: bool) -> None:
    """Operands are small integers and scales are powers of two, so that sums are exact."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9) or (by_row and capability != (9, 0)):
        pytest.skip(f"not with compute capability {capability}")
    torch.manual_seed(10)
    m, n = 48, 80
    for k, to, accumulates, sms_left, fast in itertools.product(
        (64, 208), ("rows", "columns"), (False, True), (0, 16), (False, True)
    ):
        lhs, rhs = _integers(m * (k + 16), operands[0]), _integers(n * (k + 16), operands[1])
        dst = _integers((m + 16) * (n + 16), result)
        scales = [2.0 ** torch.randint(-2, 3, (size,) if by_row else (), device="cuda") for size in (m, n)]
        row, column = (n + 16, 1) if to == "rows" else (1, m + 16)
        expected = dst.double()
        product = lhs.double().as_strided((m, k), (k + 16, 1)) @ rhs.double().as_strided((k, n), (1, k + 16))
        product *= scales[0].double().view(-1, 1) * scales[1].double().view(1, -1)
        view = expected.as_strided((m, n), (row, column))
        view.copy_(product + view if accumulates else product)
        gemm = _runtime.Gemm((m, n, k), (0, k + 16, 1), (0, 1, k + 16), (0, row, column), accumulates=accumulates)
        gemm.multiply_scaled(lhs, rhs, *scales, dst, sms_left, fast)
        torch.testing.assert_close(dst, expected.to(result), rtol=2.0**-7 if result == torch.bfloat16 else 0, atol=0)


def test_scaled_products_of_a_batch() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit floats")
    torch.manual_seed(11)
    m, n, k, count = 32, 64, 128, 3
    lhs, rhs = _integers(count * m * k, E4M3), _integers(n * k, E4M3)
    dst = torch.zeros(count * m * n, device="cuda")
    gemm = _runtime.Gemm((m, n, k), (0, k, 1), (0, 1, k), (0, n, 1), count, (m * k, 0, m * n))
    gemm.multiply_scaled(lhs, rhs, torch.full((), 0.5, device="cuda"), torch.full((), 4.0, device="cuda"), dst)
    assert torch.equal(dst.double().view(count, m, n), 2 * lhs.double().view(count, m, k) @ rhs.double().view(n, k).T)


def test_unsupported_scaled_products_fall_back_to_casting() -> None:
    """Operands that hardware for 8-bit floats does not support give correct results too, and are counted."""
    torch.manual_seed(12)
    m, n, k = 32, 48, 24
    lhs, rhs = _integers(m * k, E4M3), _integers(n * k, E4M3)
    dst = torch.zeros(m * n, device="cuda")
    sw.reset_stats()
    gemm = _runtime.Gemm((m, n, k), (0, k, 1), (0, 1, k), (0, n, 1))
    gemm.multiply_scaled(lhs, rhs, torch.full((), 0.5, device="cuda"), torch.ones((), device="cuda"), dst)
    assert torch.equal(dst.double().view(m, n), 0.5 * lhs.double().view(m, k) @ rhs.double().view(n, k).T)
    assert sw.stats()["product_fallbacks"] == 1
    assert "not multiples of 16" in next(iter(sw.stats()["product_fallback_reasons"]))
