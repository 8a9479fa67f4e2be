"""Times gathers and ring products over NCCL and through peer arenas, and products that wait for flags, on all GPUs.

    make gpu                                              # with everything else that needs a GPU

Needs two GPUs that can access each other's memory; otherwise it prints a message and measures nothing. E is the hidden
share of the shorter of product and transfer: (g + c - T) / min(g, c).
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.runtime import preparation

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402

MIB = 1 << 20
PART_MIB = (1, 4, 16, 64)
ROWS, COLUMNS, INNER = 8192, 8192, 8192
ARENA_BYTES = 256 * MIB
REPEATS, CALLS = 7, 5


def milliseconds(call: Callable[[], Any]) -> float:
    """Returns the lower quartile of batches, with the time of the slowest rank for each batch."""
    call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) / CALLS, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return round(sorted(times)[len(times) // 4], 4)


def gathers(ways: dict[str, dist.ProcessGroup], world: int) -> list[dict[str, Any]]:
    rows = []
    mesh = sw.Mesh({"tp": world})
    for part in PART_MIB:
        shape = [world * part * MIB // 2]
        layouts = [sw.Layout(mesh, shape, [placement], dtype="bfloat16") for placement in ("S(0)", "R")]
        local = torch.randn(shape[0] // world, device="cuda").bfloat16()
        row: dict[str, Any] = {"part_mib": part}
        for name, group in ways.items():
            row[f"{name}_ms"] = milliseconds(functools.partial(sw.redistribute_local, local, *layouts, group=group))
        rows.append(row)
    return rows


def products(ways: dict[str, dist.ProcessGroup], world: int) -> list[dict[str, Any]]:
    x = torch.randn(ROWS // world, INNER, device="cuda").bfloat16()
    weight = torch.randn(INNER, COLUMNS // world, device="cuda").bfloat16()
    full, mesh = x.repeat(world, 1), sw.Mesh({"tp": world})
    layouts = [sw.Layout(mesh, [ROWS, INNER], [placement], dtype="bfloat16") for placement in ("S(0)", "R")]
    product = milliseconds(functools.partial(torch.mm, full, weight))
    rows = []
    for name, group in ways.items():
        transfer = milliseconds(functools.partial(sw.redistribute_local, x, *layouts, group=group))
        row: dict[str, Any] = {"way": name, "product_ms": product, "transfer_ms": transfer}
        for method in ("serial", "ring"):
            call = functools.partial(
                sw.all_gather_matmul, x, weight, size=ROWS, columns=COLUMNS, group=group, method=method
            )
            row[f"{method}_ms"] = milliseconds(call)
        row["E"] = round((product + transfer - row["ring_ms"]) / min(product, transfer), 3)
        if name == "peers" and torch.cuda.get_device_capability() == (9, 0):
            for chunks in (1, 2, 4):
                call = functools.partial(
                    sw.all_gather_matmul,
                    x,
                    weight,
                    size=ROWS,
                    columns=COLUMNS,
                    group=group,
                    method="flags",
                    chunks=chunks,
                )
                row[f"flags_{chunks}_ms"] = milliseconds(call)
            fastest = min(row[f"flags_{chunks}_ms"] for chunks in (1, 2, 4))
            row["E_flags"] = round((product + transfer - fastest) / min(product, transfer), 3)
        rows.append(row)
    return rows


def measure(rank: int, world: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29537")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    everybody = list(range(world))
    ways = {name: dist.new_group(everybody, pg_options=options) for name in ("nccl", "peers")}
    assert isinstance(ways["peers"], dist.ProcessGroup)
    preparation._make_arenas([ways["peers"].group_name], "cuda", ARENA_BYTES, MIB)
    results = {"gathers": gathers(ways, world), "products": products(ways, world)}
    assert sw.stats()["peer_bytes"] > 0
    if rank == 0:
        for row in [*results["gathers"], *results["products"]]:
            print(row)
        head = machine.describe("torch")
        head["machine"] |= {"gpu": torch.cuda.get_device_name(), "gpus": world}
        machine.write(path, {**head, **results})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=str(machine.RESULTS / "gpu_peers.json"))
    options = parser.parse_args()
    world = torch.cuda.device_count()
    seen = all(torch.cuda.can_device_access_peer(a, b) for a in range(world) for b in range(world) if a != b)
    if world < 2 or not seen:
        print(f"gpu_peers needs two GPUs that see each other's memory; there are {world}. Nothing was measured.")
        return
    torch.multiprocessing.spawn(measure, (world, options.json), nprocs=world)


if __name__ == "__main__":
    main()
