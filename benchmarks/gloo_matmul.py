"""Times overlapping and serial products on four Gloo ranks: stock DTensor and shardwright.

    make bench-matmul                                     # about two minutes; results/gloo_matmul-torch<version>.json
    make bench-matmul ARGS="--seconds 1 --out /tmp/matmul.json"

On CPU, transfers and products share the cores, so only waiting can be hidden. Every variant is checked against the
global product. Then they alternate in batches. The time of a batch is that of its slowest rank, and the lower quartile
of the batches is reported. The exit status is 1 if a variant returned a wrong result.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from cases import HOST_PRODUCTS  # noqa: E402
from ranks import launch, over_ranks  # noqa: E402
from report import say  # noqa: E402

RANKS = 4
KINDS = ("all-gather-matmul", "matmul-reduce-scatter", "matmul-all-reduce")
MIN_BATCHES = 5


def ways(kind: str, x: torch.Tensor, weight: torch.Tensor, mesh: DeviceMesh) -> dict[str, Callable[[], DTensor]]:
    """Returns the timed functions by name. `weight` has shape (columns, k)."""
    if kind == "all-gather-matmul":
        placed = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Shard(0)])
        before, after = [Replicate()], [Shard(1)]
    else:
        placed = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(1)])
        before, after = [Shard(1)], [Shard(0)] if kind == "matmul-reduce-scatter" else [Replicate()]

    def one_after_the_other() -> DTensor:
        product = torch.nn.functional.linear(placed[0].redistribute(placements=before), placed[1])
        return product.redistribute(placements=after)

    def with_engine() -> DTensor:
        with sw.enabled(strict=True):
            return one_after_the_other()

    def ours(method: str | None, chunks: int | None) -> Callable[[], DTensor]:
        return lambda: sw.linear(*placed, placements=after, method=method, chunks=chunks)

    found: dict[str, Callable[[], DTensor]] = {
        "stock": one_after_the_other,
        "stock with our redistribute": with_engine,
        "serial": ours("serial", 1),
        "chosen": ours(None, None),
    }
    for chunks in (2, RANKS):
        found[f"collective {chunks}"] = ours("collective", chunks)
        if kind != "matmul-all-reduce":
            found[f"ring {chunks}"] = ours("ring", chunks)
    return found


def measure(kind: str, shape: tuple[int, int, int], mesh: DeviceMesh, seconds: float) -> dict:
    """Returns one row: the time of each way as a ratio to stock's, and whether its result was right."""
    rows, k, columns = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-3, 4, (rows, k), generator=generator).float()
    weight = torch.randint(-3, 4, (columns, k), generator=generator).float()
    calls = ways(kind, x, weight, mesh)
    expected = x @ weight.t()
    right = {name: float(torch.equal(call().full_tensor(), expected)) for name, call in calls.items()}
    all_right = dict(zip(right, over_ranks(list(right.values()), dist.ReduceOp.MIN), strict=True))
    calls = {name: lambda call=call: call().to_local() for name, call in calls.items()}
    times = timing.among_ranks(calls).of_length(seconds, rounds=(MIN_BATCHES, 1000))
    return {
        "kind": kind,
        "rows_k_columns": shape,
        "batches": times.rounds,
        "stock_over": {name: round(times.low["stock"] / low, 3) for name, low in times.low.items()},
        "right": {name: bool(value) for name, value in all_right.items()},
    }


def run_rank(seconds: float, out: str, head: dict) -> None:
    """Runs everything on one rank; rank 0 prints and writes."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    found = []
    for kind in KINDS:
        say(f"\n{kind}: stock's time over")
        for shape in HOST_PRODUCTS:
            row = measure(kind, shape, mesh, seconds)
            found.append(row)
            figures = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["stock_over"].items() if name != "stock")
            say(f"  {'x'.join(map(str, shape)):>15}  {figures}")
    summary = {}
    for kind in KINDS:
        of_kind = [row["stock_over"] for row in found if row["kind"] == kind]
        summary[kind] = {name: _mean([ratios[name] for ratios in of_kind]) for name in of_kind[0]}
        say(f"\n{kind}, geometric means: {summary[kind]}")
    if dist.get_rank() == 0:
        machine.write(out, {**head, "ranks": RANKS, "summary": summary, "rows": found})
    if not all(value for row in found for value in row["right"].values()):
        raise SystemExit("a way returned a wrong result")


def _mean(values: list[float]) -> float:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="per row")
    torch_version = torch.__version__.split("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"gloo_matmul-torch{torch_version}.json"))
    options = parser.parse_args()
    launch(RANKS, run_rank, options.seconds, options.out, machine.describe("torch", "shardwright"))


if __name__ == "__main__":
    main()
