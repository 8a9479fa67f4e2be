"""What a redistribute costs on CUDA beside the data it moves: one rank over NCCL, tiny tensors.

    make gpu                                              # with everything else that needs a GPU

Host time of a call without waiting for the device, and device time of its graph replayed. On one rank every group has
one member, so collectives are NCCL's shortest; packing, launches and our own time are as on many. Layouts are made on a
mesh of one rank per dim; cases that pack are made by cutting beforehand.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwright as sw
from shardwright import _runtime

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402

CALLS, REPEATS = 200, 15
CASES = [((Shard(0),), (Replicate(),)), ((Shard(0),), (Shard(1),)), ((Partial(),), (Replicate(),))]


def host_us(call: Callable[[], object]) -> float:
    """Of a call, by the host's clock; the device is waited for outside of it."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return round(1e6 * statistics.median(times[1:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=str(machine.RESULTS / "gpu_calls.json"))
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("a",))
    rows = []
    for src, dst in CASES:
        x = DTensor.from_local(torch.randn(64, 64, device="cuda"), mesh, src, run_check=False)
        row: dict = {"pair": f"{src[0]} -> {dst[0]}"}
        row["stock_us"] = host_us(lambda x=x, dst=dst: x.redistribute(placements=dst))
        with sw.enabled(strict=True):
            row["ours_us"] = host_us(lambda x=x, dst=dst: x.redistribute(placements=dst))
        rows.append(row)
        print(row)
    packing = []
    for num_boxes in (1, 16, 17, 1000):
        boxes = [(128 * b, 64 * b, [4, 16], [32, 1], [16, 1]) for b in range(num_boxes)]
        source, packed = torch.randn(128 * num_boxes, device="cuda"), torch.empty(64 * num_boxes, device="cuda")
        copy = _runtime.StridedCopy(boxes, 4)
        packing.append({"boxes": num_boxes, "host_us": host_us(lambda c=copy, s=source, p=packed: c.run(s, p))})
        print(packing[-1])
    head = machine.describe("torch")
    head["machine"]["gpu"] = torch.cuda.get_device_name()
    machine.write(options.json, {**head, "redistribute": rows, "packing": packing})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
