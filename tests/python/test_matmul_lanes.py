"""Transfers and products run at the same time, in the expected memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from allocations import allocated_peak
from pool import Pool
from shardwright.calibration.products import tile_of

WORLD = 4
ROWS, K, COLUMNS = 512, 256, 384


# Global sizes.
SIZES = {"size": WORLD * ROWS, "columns": WORLD * COLUMNS}


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, K), torch.randn(K, COLUMNS)


def _traced_ring() -> list[tuple[str, int, float, float]]:
    x, weight = _operands()
    sw.all_gather_matmul(x, weight, method="ring", chunks=WORLD, **SIZES)
    dist.barrier()
    with sw.debug.trace() as events:
        sw.all_gather_matmul(x, weight, method="ring", chunks=WORLD, **SIZES)
    assert {event["cat"] for event in json.loads(events.to_chrome())["traceEvents"]} == {"compute", "communication"}
    return [(event.lane, event.chunk, event.start, event.end) for event in events]


def test_next_chunk_is_received_during_a_product(pool: Pool) -> None:
    for events in pool.run(_traced_ring, WORLD):
        received = {chunk: (start, end) for lane, chunk, start, end in events if lane == "communication"}
        multiplied = {chunk: (start, end) for lane, chunk, start, end in events if lane == "compute"}
        assert sorted(multiplied) == list(range(WORLD)) and sorted(received) == list(range(1, WORLD))
        for chunk in range(WORLD - 1):
            begin, end = multiplied[chunk]
            next_begin, next_end = received[chunk + 1]
            assert next_begin <= begin and next_end >= end, f"chunk {chunk + 1} was not under way during {chunk}"
            assert multiplied[chunk + 1][0] >= next_end


def _trace_is_exclusive() -> None:
    with sw.debug.trace(), pytest.raises(RuntimeError, match="another trace"), sw.debug.trace():
        pass
    with sw.debug.trace() as events:
        pass
    assert events == []


def test_one_trace_at_a_time(pool: Pool) -> None:
    pool.run(_trace_is_exclusive, 1)


def _peak(method: str, save: str, depth: int = 1) -> int:
    """Returns the peak of the bytes that a call allocates."""
    x, weight = torch.randn(2048, 512), torch.randn(512, 8)
    x.requires_grad_(save == "gathered")
    arguments: dict[str, Any] = {"method": method, "chunks": 1 if method == "serial" else WORLD, "depth": depth}
    arguments |= {"size": WORLD * 2048, "columns": WORLD * 8, "save": save}
    sw.all_gather_matmul(x, weight, **arguments)
    sw.runtime.release_staging()
    return int(allocated_peak(sw.all_gather_matmul, x, weight, **arguments)[1])


def test_gathered_operand_is_not_allocated(pool: Pool) -> None:
    shard = 2048 * 512 * 4
    result = WORLD * 2048 * 8 * 4
    room = 1 << 20
    for serial, ring, deeper, kept in zip(
        pool.run(_peak, WORLD, "serial", "shard"),
        pool.run(_peak, WORLD, "ring", "shard"),
        pool.run(_peak, WORLD, "ring", "shard", 2),
        pool.run(_peak, WORLD, "ring", "gathered"),
        strict=True,
    ):
        assert serial >= WORLD * shard + result
        assert ring <= 2 * shard + result + room
        assert 3 * shard + result <= deeper <= 3 * shard + result + room
        assert WORLD * shard + result <= kept <= (WORLD + 1) * shard + result + room


def _explained() -> tuple[str, dict[str, float]]:
    x, weight = _operands()
    found = sw.explain(sw.all_gather_matmul, x, weight, method="ring", chunks=WORLD, depth=2, **SIZES)
    (overlap,) = found
    assert (overlap.method, overlap.chunks, overlap.depth, overlap.sms_left, overlap.why_only_serial) == (
        "ring",
        WORLD,
        2,
        0,
        None,
    )
    assert f"ring in {WORLD} chunks, depth 2\n" in str(found)
    assert {method for method, *_ in overlap.predictions} == {"serial", "ring", "collective"}
    kinds = {event["pid"] for event in json.loads(found.to_chrome())["traceEvents"]}
    assert kinds == {"0: predicted", "0: measured"}
    for events in (overlap.predicted, overlap.measured):
        assert [event.chunk for event in events if event.lane == "compute"] == list(range(WORLD))

    def two_products() -> None:
        first = weight[:, : 1 if dist.get_rank() == 0 else 0]  # other ranks have no column
        sw.all_gather_matmul(x, first, size=SIZES["size"], columns=1)
        sw.all_gather_matmul(x, weight, **SIZES)

    ran = [any(event.instruction.startswith("gemm") for event in entry.measured) for entry in sw.explain(two_products)]
    assert ran == [dist.get_rank() == 0, True]
    return str(found), {f"{method} {chunks}": us for method, chunks, *_, us in overlap.predictions}


def test_explain_shows_predicted_and_measured_lanes(pool: Pool) -> None:
    for text, predictions in pool.run(_explained, WORLD):
        assert text.count("communication |") == 2 and "in all" in text
        assert predictions["serial 1"] > 0
        assert all(f"{us:.1f} us" in text for us in predictions.values())


def _carves_out() -> None:
    """Products leave multiprocessors to concurrent transfers; the last product, which has none, uses all."""
    x, weight = _operands()
    sw.runtime.set_sm_carveout(16)
    try:
        with sw.debug.trace() as events:
            sw.all_gather_matmul(x, weight, method="ring", chunks=WORLD, **SIZES)
    finally:
        sw.runtime.set_sm_carveout(0)
    leaves = [event.instruction.endswith(", 16 SMs left to transfers") for event in events if event.lane == "compute"]
    assert leaves == [True] * (WORLD - 1) + [False]
    with pytest.raises(ValueError, match="sms must be at least 0, got -1"):
        sw.runtime.set_sm_carveout(-1)


def test_products_leave_multiprocessors_to_transfers(pool: Pool) -> None:
    pool.run(_carves_out, WORLD)


def test_tile_sizes_follow_from_waves() -> None:
    for rows, columns in ((64, 64), (128, 128), (128, 256)):
        waves = 8192 * 8192 / (rows * columns) / 132
        assert tile_of(8192, waves, 132) == (rows, columns)


def _calibrated() -> tuple[int, ...]:
    model = sw.calibration.calibrate_gemm("cpu", dtype=torch.float32)
    assert model.picoseconds(512, 512, 512, 1, 4) > model.picoseconds(64, 64, 64, 1, 4) > 0
    x, weight = _operands()
    sw.all_gather_matmul(x, weight, gemm_model=model, **SIZES)
    with pytest.raises(ValueError, match="at least 16 bits"):
        sw.calibration.calibrate_gemm("cpu", dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="device must be .*, got 'nowhere'"):
        sw.calibration.calibrate_gemm("nowhere")
    with pytest.raises(RuntimeError, match="rank 0 could not measure on cuda:63"):
        sw.calibration.calibrate_gemm("cuda:63")
    return model.flops_per_us, model.launch_ps, model.memory_ps_per_kib


def test_all_ranks_have_the_model_of_rank_0(pool: Pool) -> None:
    assert len(set(pool.run(_calibrated, WORLD))) == 1
