"""Measures matrix products on all ranks at once, and makes one table of their times (`GemmModel`) for all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from .._native import _runtime
from .._planner import GemmModel
from ..layouts import tables
from ..runtime import argument_checks
from .job import Ranks, seconds_of

_REPEATS, _REPEATS_QUICK = 9, 3
_LOW_QUANTILE = 0.25
_MAX_SECONDS = 0.25  # maximum for a large product on CPU; if it takes longer, a smaller one is used
_TRAFFIC_RATIO = 1.5  # duration of messages, relative to the products that run at the same time
_LARGE = {"cpu": 1024, "cuda": 8192}
_SMALL = 16
_LARGE_CALLS = 3  # per round, so that ranks overlap even if they leave the barrier at different times
_SHORT_CALLS = 10  # per round; the fastest counts
_CHUNKS = (2, 8)  # the two numbers of chunks that are compared
_CHUNKS_RATIO = 2.0  # duration of all messages, relative to the large product; long enough to see the cost per chunk
# Rows and columns of the tiles of kernels for 16-bit operands.
_TILES = ((64, 64), (64, 128), (128, 128), (128, 192), (128, 256), (256, 256))

# Starts messages that take the given seconds, equal on all ranks. Returns a function that waits for their end.
Traffic = Callable[[float], Callable[[], None]]


def calibrate_gemm(
    device: torch.device | str = "cpu", *, dtype: torch.dtype = torch.bfloat16, group: dist.ProcessGroup | None = None
) -> GemmModel:
    """Measures products on all ranks of the group at once, and returns one table for use as ``gemm_model``.

    `calibrate` does this too, and makes later products use the table. It measures the rate of a large product, the time
    of a tiny one, and the rate of memory copies, each on the slowest rank. On CUDA, the tile size is derived from what
    cuBLASLt reports. Everything else is taken from the built-in model of the device.

    Args:
        device: this rank's device.
        dtype: the floating dtype of the products that the table is for.
        group: the group that measures; default, the default group. Without torch.distributed, this process alone.

    Returns:
        The same `GemmModel` on every rank.

    Raises:
        ValueError: the dtype is not floating, or has 8 bits; an argument has the wrong type.
        RuntimeError: a rank failed; raised on all ranks.
    """
    check_dtype("dtype", dtype)
    device = argument_checks.device_of("device", device)
    argument_checks.check_group(group)
    return measure_products(Ranks(group), device, dtype)


def num_product_rounds(quick: bool, with_traffic: bool) -> int:
    """Returns the number of rounds of `measure_products` for one dtype."""
    return (_REPEATS_QUICK if quick else _REPEATS) * (3 if with_traffic else 1)


def check_dtype(argument: str, dtype: object) -> None:
    """Raises ValueError unless `dtype` is a floating-point torch.dtype of at least 16 bits."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise ValueError(f"{argument} must be a floating-point torch.dtype of at least 16 bits, got {dtype}")


def measure_products(
    ranks: Ranks, device: torch.device, dtype: torch.dtype, traffic: Traffic | None = None, quick: bool = False
) -> GemmModel:
    """Like `calibrate_gemm`; with `traffic`, also measures how much longer products take while it runs."""
    error, work = None, None
    try:
        work = _Products(device, dtype, quick)
    except Exception as raised:  # reported below, so that the other ranks do not wait
        error = f"{type(raised).__name__}: {raised}"
    errors = ranks.from_all(error)
    failed = [rank for rank, each in enumerate(errors) if each is not None]
    if failed:
        raise RuntimeError(f"calibrate_gemm: rank {failed[0]} could not measure on {device}: {errors[failed[0]]}")
    assert work is not None
    work.processors = min(ranks.from_all(work.processors))  # all ranks must get the same table
    if any(ranks.from_all(work.is_slow)):
        work.make(work.n // 2)
    repeats = num_product_rounds(quick, with_traffic=False)
    large, small, copy = ranks.slowest([work.times_alone(ranks) for _ in ranks.rounds(repeats)], _LOW_QUANTILE)
    slowdown, chunk = None, 0.0
    if traffic is not None:
        traffic_seconds = _TRAFFIC_RATIO * _LARGE_CALLS * large
        times_by_round = [work.times_during(ranks, traffic, traffic_seconds) for _ in ranks.rounds(repeats)]
        alone, during = ranks.slowest(times_by_round, _LOW_QUANTILE)
        slowdown = max(during / alone - 1, 0.0)
        traffic_seconds = _CHUNKS_RATIO * large
        times_by_round = [work.times_in_chunks(ranks, traffic, traffic_seconds) for _ in ranks.rounds(repeats)]
        times = ranks.slowest(times_by_round, _LOW_QUANTILE)
        chunk = delay_per_chunk(times, large, slowdown)
    return work.model(large, small, copy, slowdown, chunk, ranks.from_all(work.tiles)[0])


def delay_per_chunk(times: list[float], product: float, slowdown: float) -> float:
    """Returns the seconds that each chunk takes beyond the predicted timeline (csrc/products/timeline.h).

    Messages and products in n chunks take the time of the timeline, plus a delay per chunk, plus a constant. The
    difference between two values of n gives the delay per chunk.

    Args:
        times: the seconds that `_Products.times_in_chunks` measured.
        product: the seconds of the large product alone.
        slowdown: the share by which products take longer during transfers.
    """
    late = []
    for chunks, messages, together in zip(_CHUNKS, times[::2], times[1::2], strict=True):
        message, slice_of_product = messages / chunks, product / chunks
        arrives, ends = message, 0.0
        for chunk in range(chunks):
            begins = max(arrives, ends)
            under_way = message if chunk + 1 < chunks else 0.0  # the next message, which begins now
            ends = begins + slice_of_product + slowdown * min(under_way, slice_of_product)
            arrives = begins + message
        late.append(together - ends)
    few, many = _CHUNKS
    return max((late[1] - late[0]) / (many - few), 0.0)


class _Products:
    """A large product, a tiny one and a copy, for timing."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quick: bool) -> None:
        self.device, self.dtype = device, dtype
        self.base = tables.default_gemm_model(device.type)
        self.make(_LARGE.get(device.type, 1024))
        self.is_slow = device.type == "cpu" and (quick or seconds_of(device, self.product) > _MAX_SECONDS)
        self.processors = self.base.num_processors
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        gemm = _runtime.Gemm((self.n, self.n, self.n), (0, self.n, 1), (0, self.n, 1), (0, self.n, 1))
        waves = gemm.waves(self.large[:0], self.out[:0])
        self.tiles = (self.base.tile_rows, self.base.tile_columns)
        if waves:
            self.tiles = tile_of(self.n, waves, self.processors)

    def make(self, n: int) -> None:
        """Makes operands of n x n. n must be equal on all ranks."""
        self.n = n
        self.large = torch.randn(n, n, device=self.device).to(self.dtype)
        self.small = torch.randn(_SMALL, _SMALL, device=self.device).to(self.dtype)
        self.out, self.small_out = torch.empty_like(self.large), torch.empty_like(self.small)
        self.product()

    def product(self) -> None:
        torch.mm(self.large, self.large, out=self.out)

    def times_alone(self, ranks: Ranks) -> list[float]:
        """Times the large product, the tiny one and the copy, each on all ranks at the same time."""
        ranks.wait()
        times = [seconds_of(self.device, self.product, _LARGE_CALLS)]
        for call in (lambda: torch.mm(self.small, self.small, out=self.small_out), lambda: self.out.copy_(self.large)):
            ranks.wait()
            times.append(min(seconds_of(self.device, call) for _ in range(_SHORT_CALLS)))
        return times

    def times_during(self, ranks: Ranks, traffic: Traffic, traffic_seconds: float) -> list[float]:
        """Times the large product alone, and during transfers."""
        ranks.wait()
        alone = seconds_of(self.device, self.product, _LARGE_CALLS)
        ranks.wait()
        finish = traffic(traffic_seconds)
        during = seconds_of(self.device, self.product, _LARGE_CALLS)
        finish()
        return [alone, during]

    def times_in_chunks(self, ranks: Ranks, traffic: Traffic, traffic_seconds: float) -> list[float]:
        """Times messages in few and in many chunks: alone, then with a slice of the large product after each chunk."""
        times = []
        for chunks in _CHUNKS:
            for slices in ([], list(zip(self.large.chunk(chunks), self.out.chunk(chunks), strict=True))):
                ranks.wait()
                call = functools.partial(self._in_chunks, traffic, traffic_seconds, chunks, slices)
                times.append(seconds_of(self.device, call))
        return times

    def _in_chunks(
        self, traffic: Traffic, traffic_seconds: float, chunks: int, slices: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Exchanges messages in chunks. After each chunk, starts the next one and multiplies one slice, if any."""
        finish = traffic(traffic_seconds / chunks)
        for chunk in range(chunks):
            finish()
            if chunk + 1 < chunks:
                finish = traffic(traffic_seconds / chunks)
            if slices:
                rows, out = slices[chunk]
                torch.mm(rows, self.large, out=out)

    def model(
        self, large: float, small: float, copy: float, slowdown: float | None, chunk: float, tiles: tuple[int, int]
    ) -> GemmModel:
        """Makes the table. Its rate is for 16-bit operands and whole waves of tiles."""
        rows, columns = tiles
        waves = -(-(-(-self.n // rows) * -(-self.n // columns)) // self.processors)
        rate = 2 * rows * columns * self.n * waves / (max(large - small, 1e-9) * 1e6) * self.dtype.itemsize / 2
        return GemmModel(
            name=f"measured on {self.device.type}",
            num_processors=self.processors,
            tile_rows=rows,
            tile_columns=columns,
            flops_per_us=max(int(rate), 1),
            launch_ps=int(small * 1e12),
            memory_ps_per_kib=max(int(copy * 1e12 * 1024 / (2 * self.large.nbytes)), 0),
            contention_percent=self.base.contention_percent if slowdown is None else round(100 * slowdown),
            chunk_ps=int(chunk * 1e12),
        )


def tile_of(n: int, waves: float, processors: int) -> tuple[int, int]:
    """Guesses the rows and columns of the tiles of an n x n product that takes this many waves."""
    elements = n * n / (waves * processors)
    return min(_TILES, key=lambda tile: abs(math.log(tile[0] * tile[1] / elements)))


def report_of(dtype: torch.dtype, model: GemmModel) -> str:
    """Returns a line of text with the measurements."""
    rate = 1e-3 * model.num_processors * model.flops_per_us * 2 / dtype.itemsize
    return (
        f"  products of {dtype}: {rate:.1f} GFlop/s, {model.launch_ps * 1e-6:.1f} us each, "
        f"{model.contention_percent}% longer during transfers, {model.chunk_ps * 1e-6:.0f} us more for each chunk"
    )
