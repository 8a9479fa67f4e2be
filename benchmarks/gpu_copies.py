"""Measures how fast a redistribute packs: half of the rows of a matrix in one launch, compared with torch's functions.

    make gpu                                              # with everything else that needs a GPU
    python benchmarks/gpu_copies.py --device cpu          # the same tables on CPU; results/copies-cpu.json

Rows are gathered from a tensor twice as large into a packed one, with one box of many rows and with many boxes. GB/s
count bytes read and written; "of copy" is the ratio to the device's own copy of as many bytes in the same run. torch's
functions are `copy_` from a strided view, `index_select` of rows, and `cat` of slices if there are few. Every result is
compared. On a GPU, buffers rotate so that the cache does not help, and events around graph replays measure time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import shardwright as sw  # noqa: F401  (its package must be importable before its module)
from shardwright._native import _runtime

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402
import timing  # noqa: E402

RUN_BYTES = (4, 16, 32, 64, 256, 1024, 16384)
NUM_BOXES = (1, 100, 10_000, 100_000)
MAX_SLICES = 1000  # maximum for which torch.cat is timed
REPEATS = 15
Boxes = list[tuple[int, int, list[int], list[int], list[int]]]


def rows_as_boxes(num_rows: int, run: int, num_boxes: int) -> Boxes:
    """Returns boxes with equal numbers of rows, from every other row of `run` words of the source."""
    boxes, begin = [], 0
    for b in range(num_boxes):
        end = num_rows * (b + 1) // num_boxes
        boxes.append((2 * run * begin, run * begin, [end - begin, run], [2 * run, 1], [run, 1]))
        begin = end
    return boxes


def seconds(call: Callable[[int], object], device: torch.device, num_buffers: int) -> float:
    """Returns the lower quartile of the times of a call, whose argument selects the buffers."""
    for i in range(num_buffers):
        call(i)
    if device.type == "cpu":
        return timing.low([timing.seconds_of(lambda i=i: call(i % num_buffers)) for i in range(REPEATS)])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_buffers):
            call(i)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / num_buffers)
    return timing.low(times)


def measure(device: torch.device, run_bytes: int, num_boxes: int, total_bytes: int, num_buffers: int) -> dict | None:
    """Returns one row of the table, or None if there are fewer rows than boxes."""
    run, num_rows = run_bytes // 4, total_bytes // run_bytes
    if num_boxes > num_rows:
        return None
    sources = [torch.randn(num_rows, 2, run, device=device) for _ in range(num_buffers)]
    packed = [torch.full((num_rows, run), float("nan"), device=device) for _ in range(num_buffers)]
    copy = _runtime.StridedCopy(rows_as_boxes(num_rows, run, num_boxes), 4)
    rows = torch.arange(0, 2 * num_rows, 2, device=device)
    ways: dict[str, Callable[[int], object]] = {
        "ours": lambda i: copy.run(sources[i].view(-1), packed[i].view(-1)),
        "copy_": lambda i: packed[i].copy_(sources[i][:, 0]),
        "index_select": lambda i: torch.index_select(sources[i].view(-1, run), 0, rows, out=packed[i]),
        "device copy": lambda i: packed[i].view(-1).copy_(sources[i].view(-1)[: num_rows * run]),
    }
    if 1 < num_boxes <= MAX_SLICES:
        cuts = [num_rows * b // num_boxes for b in range(num_boxes + 1)]
        ways["cat"] = lambda i: torch.cat([sources[i][a:b, 0] for a, b in zip(cuts, cuts[1:])], out=packed[i])
    row: dict = {"run_bytes": run_bytes, "boxes": num_boxes, "bytes": num_rows * run_bytes}
    for name, call in ways.items():
        for buffer in packed:
            buffer.fill_(float("nan"))
        took = seconds(call, device, num_buffers)
        if name != "device copy":
            assert all(torch.equal(p, s[:, 0]) for s, p in zip(sources, packed)), f"{name}: wrong result"
        row[name] = round(2 * num_rows * run_bytes / took / 1e9, 2)
    row["of_copy"] = round(row["ours"] / row["device copy"], 3)
    row["over_best_of_torch"] = round(
        row["ours"] / max(row[n] for n in ("copy_", "index_select", "cat") if n in row), 3
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mebibytes", type=int, help="packed in a copy; default 256 on a GPU, 32 on CPU")
    parser.add_argument("--json", help="where to write; default results/copies-<device>.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    total = (options.mebibytes or (256 if device.type == "cuda" else 32)) << 20
    num_buffers = 4 if device.type == "cuda" else 2
    head = machine.describe("torch")
    if device.type == "cuda":
        head["machine"]["gpu"] = torch.cuda.get_device_name(device)
    print("GB/s, read and written\n  run bytes   boxes     ours  of copy   copy_  index_select     cat  device copy")
    rows = []
    for run_bytes in RUN_BYTES:
        for num_boxes in NUM_BOXES:
            row = measure(device, run_bytes, num_boxes, total, num_buffers)
            if row is None:
                continue
            rows.append(row)
            print(
                f"{run_bytes:11}{num_boxes:8}{row['ours']:9.1f}{row['of_copy']:9.2f}{row['copy_']:8.1f}"
                f"{row['index_select']:14.1f}{row.get('cat', float('nan')):8.1f}{row['device copy']:13.1f}"
            )
    machine.write(options.json or machine.RESULTS / f"copies-{device.type}.json", {**head, "rows": rows})


if __name__ == "__main__":
    main()
