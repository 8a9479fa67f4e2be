"""Times FSDP2's communication on Gloo ranks of this machine: with its own collectives, and with shardwright's.

    make bench-fsdp                                       # results/fsdp_comm-torch<version>.json
    make bench-fsdp ARGS="--quick --out /tmp/quick.json"

    all_gather        of flat parameters, in place, as FSDP2 calls it
    reduce_scatter    of flat gradients, the sum and the average
    step, width N     forward and backward of two linear layers of N x N under stock FSDP2, with either

Stock and ours alternate batch by batch; README.md describes the statistics of batches. The exit status is 1 if a result
is wrong, or if ours receives more bytes than stock by the wire meter. The meter counts the necessary bytes; Gloo's own
reduce-scatter actually sends twice as many.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from ranks import launch, over_ranks  # noqa: E402
from report import say  # noqa: E402

RANKS = (2, 4)
PART_KIB = (4, 64, 1024, 8192)  # size on one rank
WIDTHS, DEPTH, TOKENS = (512, 2048), 2, 64
MAX_CALLS_PER_BATCH = 50

Calls = dict[str, Callable[[], torch.Tensor]]


def gathers(numel: int) -> Calls:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    outs = {name: torch.full((numel * world,), float(rank)) for name in ("stock", "ours")}
    gather = sw.fsdp.AllGather()

    def part(out: torch.Tensor) -> torch.Tensor:
        return out[rank * numel : (rank + 1) * numel]

    def stock() -> torch.Tensor:
        dist.all_gather_into_tensor(outs["stock"], part(outs["stock"]), group=group)
        return outs["stock"]

    def ours() -> torch.Tensor:
        gather(outs["ours"], part(outs["ours"]), group)
        return outs["ours"]

    return {"stock": stock, "ours": ours}


def sums(numel: int, op: dist.ReduceOp.RedOpType) -> Calls:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    given, out = torch.arange(numel * world, dtype=torch.float32) % 97 + rank, torch.empty(numel)
    scatter = sw.fsdp.ReduceScatter()

    def stock() -> torch.Tensor:
        dist.reduce_scatter_tensor(out, given, op, group=group)
        return out.clone()

    def ours() -> torch.Tensor:
        scatter(out, given, group, op)
        return out.clone()

    return {"stock": stock, "ours": ours}


def steps(width: int) -> Calls:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.ones(TOKENS, width)

    def model(is_ours: bool) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(*(nn.Linear(width, width) for _ in range(DEPTH)))
        for module in [*made, made]:
            fully_shard(module, mesh=mesh)
            if is_ours:
                module.set_custom_all_gather(sw.fsdp.AllGather())
                module.set_custom_reduce_scatter(sw.fsdp.ReduceScatter())
        return made

    def step(trained: nn.Module) -> torch.Tensor:
        trained.zero_grad()
        trained(x).square().mean().backward()
        return trained[0].weight.grad.to_local().clone()

    models = {"stock": model(False), "ours": model(True)}
    return {name: lambda trained=trained: step(trained) for name, trained in models.items()}


def measure(what: str, kib: int, calls: Calls, seconds: float) -> dict:
    """Compares stock with ours. Returns one row of results, the same on every rank."""
    results, received = {}, {}
    for name, call in calls.items():
        with sw.debug.wire_meter() as meter:
            results[name] = call()
        received[name] = int(over_ranks([float(meter.received_bytes)], dist.ReduceOp.SUM)[0])
    is_right = torch.allclose(results["stock"], results["ours"], rtol=1e-5, atol=1e-7)
    times = timing.among_ranks(calls).of_length(seconds, 0.01, (5, 40), MAX_CALLS_PER_BATCH)
    us = times.us()
    return {
        "what": what,
        "ranks": dist.get_world_size(),
        "part_kib": kib,
        "right": bool(over_ranks([float(is_right)], dist.ReduceOp.MIN)[0]),
        "received_bytes_all_ranks": received,
        "us": us,
        "stock_over_ours": round(us["stock"] / us["ours"], 3),
        "rounds": times.rounds,
    }


def run_rank(quick: bool, seconds: float, out: str) -> None:
    """Runs everything on one rank; rank 0 prints, and adds its rows to the file."""
    rows = []
    cases: list[tuple[str, int, Calls]] = []
    for kib in PART_KIB:
        cases.append(("all_gather", kib, gathers(kib * 256)))
        cases.append(("reduce_scatter sum", kib, sums(kib * 256, dist.ReduceOp.SUM)))
        cases.append(("reduce_scatter avg", kib, sums(kib * 256, dist.ReduceOp.AVG)))
    for width in WIDTHS:
        cases.append((f"step, width {width}", width * (width + 1) // 256 // dist.get_world_size(), steps(width)))
    say(f"{dist.get_world_size()} ranks\n{'':<20}{'part KiB':>9}{'stock us':>10}{'ours us':>10}{'stock / ours':>14}")
    for what, kib, calls in cases:
        row = measure(what, kib, calls, 0.3 if quick else seconds / len(cases))
        rows.append(row)
        say(f"{what:<20}{kib:>9}{row['us']['stock']:>10.0f}{row['us']['ours']:>10.0f}{row['stock_over_ours']:>13.2f}x")
    if dist.get_rank() == 0:
        machine.write(out, {**machine.describe("torch"), "rows": rows})
    moved = [row["received_bytes_all_ranks"] for row in rows]
    if not all(row["right"] for row in rows) or any(m["ours"] > m["stock"] for m in moved):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a third of a second for each row")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each number of ranks (default: %(default)s)")
    default = HERE / "results" / f"fsdp_comm-torch{torch.__version__.partition('+')[0]}.json"
    parser.add_argument("--out", default=str(default), help="where the results go, one file for each number of ranks")
    arguments = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    for world in RANKS:
        out = Path(arguments.out)
        launch(world, run_rank, arguments.quick, arguments.seconds, str(out.with_stem(f"{out.stem}-{world}ranks")))


if __name__ == "__main__":
    main()
