"""How long matrix products take here: measured by one rank, the same table for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from . import _arguments, _runtime
from ._planner import GemmModel

_REPEATS = 7
_LARGE = {"cpu": 1024, "cuda": 8192}
_SMALL = 16
# Rows and columns, of kernels for 16-bit operands.
_TILES = ((64, 64), (64, 128), (128, 128), (128, 192), (128, 256), (256, 256))


def calibrate_gemm(
    device: torch.device | str = "cpu", *, dtype: torch.dtype = torch.bfloat16, group: dist.ProcessGroup | None = None
) -> GemmModel:
    """Measures products on the first rank and gives all ranks of the group its table, to be used as ``gemm_model``.

    Measured are the rate of a large product, the time of a tiny one, and how fast memory is copied. On CUDA, tiles are
    as large as cuBLASLt says that it takes them. All else is as in the named model of the device.

    Args:
        device: the first rank's.
        dtype: floating, of the products that the table is for.
        group: default: the default group. Without torch.distributed, this process alone.

    Returns:
        The same `GemmModel` on every rank.

    Raises:
        ValueError: a dtype that is not floating, or of 8 bits; arguments of another type.
        RuntimeError: the first rank failed, on all ranks.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise ValueError(f"dtype: {dtype}; allowed are floating dtypes of 16 bits and more")
    device = _arguments.device_of("device", device)
    _arguments.check_group(group)
    is_distributed = dist.is_available() and dist.is_initialized()
    if is_distributed and dist.get_rank(group) != 0:
        said: list[GemmModelFields | str | None] = [None]
    else:
        try:
            said = [_measure(torch.device(device), dtype)]
        except Exception as error:  # which the others are not to wait for
            said = [f"{type(error).__name__}: {error}"]
    if is_distributed:
        dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    if isinstance(said[0], str):
        raise RuntimeError(f"calibrate_gemm: rank 0 could not measure on {device}: {said[0]}")
    assert said[0] is not None
    name, *figures = said[0]
    fields = ("num_processors", "tile_rows", "tile_columns", "flops_per_us", "launch_ps", "memory_ps_per_kib")
    return GemmModel(name=name, **dict(zip(fields, figures[:-1], strict=True)), contention_percent=figures[-1])


GemmModelFields = tuple[str, int, int, int, int, int, int, int]


def _measure(device: torch.device, dtype: torch.dtype) -> GemmModelFields:
    base = GemmModel.named("cpu" if device.type == "cpu" else "h100")
    processors = base.num_processors
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    n = _LARGE.get(device.type, 1024)
    large = torch.randn(n, n, device=device).to(dtype)
    small = torch.randn(_SMALL, _SMALL, device=device).to(dtype)
    out = torch.empty_like(large)
    small_out = torch.empty_like(small)
    large_s = _seconds(lambda: torch.mm(large, large, out=out), device)
    small_s = _seconds(lambda: torch.mm(small, small, out=small_out), device)
    copy_s = _seconds(lambda: out.copy_(large), device)
    gemm = _runtime.Gemm((n, n, n), (0, n, 1), (0, n, 1), (0, n, 1))
    times_full = gemm.waves(large[:0], out[:0])
    tile_rows, tile_columns = base.tile_rows, base.tile_columns
    if times_full:
        tile_rows, tile_columns = tile_of(n, times_full, processors)
    # The table speaks of operands of 16 bits, of whole waves of tiles.
    tiles = -(-n // tile_rows) * -(-n // tile_columns)
    waves = -(-tiles // processors)
    flops = 2 * tile_rows * tile_columns * n * waves
    rate = flops / (max(large_s - small_s, 1e-9) * 1e6) * dtype.itemsize / 2
    return (
        f"measured on {device.type}",
        processors,
        tile_rows,
        tile_columns,
        max(int(rate), 1),
        int(small_s * 1e12),
        max(int(copy_s * 1e12 * 1024 / (2 * large.nbytes)), 0),
        base.contention_percent,
    )


def tile_of(n: int, waves: float, processors: int) -> tuple[int, int]:
    """Rows and columns of the tiles of an n x n product that fills all processors so many times."""
    elements = n * n / (waves * processors)
    return min(_TILES, key=lambda tile: abs(math.log(tile[0] * tile[1] / elements)))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of some, after one that is not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[_REPEATS // 2]
