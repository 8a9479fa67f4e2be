"""Measures the overhead of a redistribute on CUDA, without moving much data: one rank over NCCL, tiny tensors.

    make gpu                                              # with everything else that needs a GPU

It times the host during a call, without waiting for the device, and PyTorch's own collectives for comparison.
With one rank every group has one member, so collectives take the minimum time of NCCL; packing, launches and
shardwright's own time are the same as with many ranks. Layouts are on a mesh of one rank per dim; cases with packing
are made by cutting beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright._native import _runtime

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402
import timing  # noqa: E402
from cases import ONE_DIM, as_torch  # noqa: E402

CALLS, REPEATS = 200, 15


def host_us(calls: dict[str, Callable[[], object]], **more: Any) -> dict[str, float]:
    """Times calls alternately by the host's clock; the host waits for the device outside of the timed region."""
    turns = timing.Turns(calls, barrier=torch.cuda.synchronize, settles=True, **more)
    return {name: round(1e6 * seconds, 2) for name, seconds in turns.of_count(REPEATS, CALLS).low.items()}


def ours_or_stock(name: str) -> contextlib.AbstractContextManager:
    return sw.enabled(strict=True) if name == "ours_us" else contextlib.nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=str(machine.RESULTS / "gpu_calls.json"))
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("a",))
    rows = []
    for src, dst in ONE_DIM:
        x = DTensor.from_local(torch.randn(64, 64, device="cuda"), mesh, as_torch(src), run_check=False)
        call = functools.partial(x.redistribute, placements=as_torch(dst))
        rows.append({"pair": f"{src} -> {dst}", **host_us({"stock_us": call, "ours_us": call}, around=ours_or_stock)})
        print(rows[-1])
    x, out = (torch.randn(64, 64, device="cuda") for _ in range(2))
    collectives = host_us(
        {
            "all_gather_us": functools.partial(dist.all_gather_into_tensor, out, x),
            "all_reduce_us": functools.partial(dist.all_reduce, x),
        }
    )
    print(collectives)
    packing = []
    for num_boxes in (1, 16, 17, 1000):
        boxes = [(128 * b, 64 * b, [4, 16], [32, 1], [16, 1]) for b in range(num_boxes)]
        source, packed = torch.randn(128 * num_boxes, device="cuda"), torch.empty(64 * num_boxes, device="cuda")
        copy = _runtime.StridedCopy(boxes, 4)
        packing.append({"boxes": num_boxes, **host_us({"host_us": functools.partial(copy.run, source, packed)})})
        print(packing[-1])
    head = machine.describe("torch")
    head["machine"]["gpu"] = torch.cuda.get_device_name()
    machine.write(options.json, {**head, "redistribute": rows, "collectives": collectives, "packing": packing})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
