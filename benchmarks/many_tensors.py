"""Times many tensors on Gloo ranks of this machine: `sw.redistribute_many`, and one `sw.redistribute_local` per tensor.

    make bench-many                                       # results/many_tensors-torch<version>.json
    make bench-many ARGS="--quick --out /tmp/quick.json"
    make bench-many ARGS=--gradients                      # results/many_gradients-torch<version>.json

    many        one call for all tensors
    each        one call of redistribute_local per tensor, one after the other

With --gradients, DTensors on one mesh of all ranks move forward, and given gradients move back: by one
`sw.redistribute_many`, and by one `sw.redistribute` per tensor.

They alternate batch by batch; README.md describes the statistics of batches. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from ranks import launch, over_ranks  # noqa: E402
from report import say  # noqa: E402

NUM_RANKS = 4
MAX_CALLS_PER_BATCH = 20
# Tensors and rows of each; all have 256 columns of bfloat16.
CASES = ((400, 8), (200, 64), (64, 1024), (8, 16384))
MESHES = ("two meshes", "one mesh")
# Placements of the results and of their gradients; the tensors are S(0).
MOVES = {
    "S(0) -> S(1), gradient S(1)": (Shard(1), Shard(1)),
    "S(0) -> R, gradient R": (Replicate(), Replicate()),
    "S(0) -> R, gradient P(sum)": (Replicate(), Partial()),
}


def layouts(where: str, rows: int) -> tuple[sw.Layout, sw.Layout]:
    shape = (rows, 256)
    if where == "one mesh":
        mesh = sw.Mesh({"a": NUM_RANKS})
        return sw.Layout(mesh, shape, ["S(0)"], "bf16"), sw.Layout(mesh, shape, ["S(1)"], "bf16")
    train, serve = sw.Mesh({"a": 2}), sw.Mesh({"b": 2}, [2, 3])
    return sw.Layout(train, shape, ["S(0)"], "bf16"), sw.Layout(serve, shape, ["S(1)"], "bf16")


def measure(where: str, count: int, rows: int, seconds: float) -> dict:
    """Returns one row, the same on every rank."""
    rank = dist.get_rank()
    src, dst = layouts(where, rows)
    full = torch.arange(rows * 256).view(rows, 256).to(torch.bfloat16)

    def part(layout: sw.Layout) -> torch.Tensor | None:
        if layout.mesh.coordinate(rank) is None:
            return None
        (r0, r1), (c0, c1) = (dim[0] for dim in layout.region(rank))
        return full[r0:r1, c0:c1].clone()

    items = [(part(src), src, dst) for _ in range(count)]
    expected = part(dst)
    calls = {
        "many": lambda: sw.redistribute_many(items),
        "each": lambda: [sw.redistribute_local(local, src, dst) for local, src, dst in items],
    }
    right = all(expected is None or torch.equal(result, expected) for call in calls.values() for result in call())
    times = timing.among_ranks(calls).of_length(seconds, 0.02, (3, 20), MAX_CALLS_PER_BATCH)
    us = times.us()
    plan = sw.plan_many([(src, dst)] * count)
    return {
        "meshes": where,
        "tensors": count,
        "shape": [rows, 256],
        "right": bool(over_ranks([float(right)], dist.ReduceOp.MIN)[0]),
        "us": us,
        "each_over_many": round(us["each"] / us["many"], 3),
        "rounds": plan.num_rounds,
        "messages": plan.messages_sum,
        "memory_bytes": plan.memory_bytes,
        "turns": times.rounds,
    }


def measure_gradients(move: str, count: int, rows: int, seconds: float) -> dict:
    """Returns one row, the same on every rank."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    to, gradient_to = MOVES[move]
    shape = (rows, 256)

    def tensor(placement: Shard | Replicate | Partial, value: int) -> DTensor:
        local_shape = [n // NUM_RANKS if placement.is_shard(dim) else n for dim, n in enumerate(shape)]
        local = torch.full(local_shape, value, dtype=torch.bfloat16)
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    xs = [tensor(Shard(0), i % 100).requires_grad_() for i in range(count)]
    gradients = [tensor(gradient_to, i % 10) for i in range(count)]
    ways = {
        "many": lambda: sw.redistribute_many([(x, [to]) for x in xs]),
        "each": lambda: [sw.redistribute(x, [to]) for x in xs],
    }
    calls = {name: lambda way=way: torch.autograd.grad(way(), xs, gradients) for name, way in ways.items()}
    factor = NUM_RANKS if gradient_to.is_partial() else 1
    right = all(
        (y.to_local() == i % 100).all() and (back.to_local() == factor * (i % 10)).all()
        for name in ways
        for i, (y, back) in enumerate(zip(ways[name](), calls[name](), strict=True))
    )
    times = timing.among_ranks(calls).of_length(seconds, 0.02, (3, 20), MAX_CALLS_PER_BATCH)
    us = times.us()
    return {
        "move": move,
        "tensors": count,
        "shape": [*shape],
        "right": bool(over_ranks([float(right)], dist.ReduceOp.MIN)[0]),
        "us": us,
        "each_over_many": round(us["each"] / us["many"], 3),
        "turns": times.rounds,
    }


def run_rank(gradients: bool, quick: bool, seconds: float, out: str, head: dict) -> None:
    """Runs everything on one rank; rank 0 prints and writes."""
    measured = measure_gradients if gradients else measure
    cases = [(kind, *case) for kind in (MOVES if gradients else MESHES) for case in CASES]
    rows = []
    say(f"{'case':<30}{'tensors':>8}{'rows':>7}{'many us':>10}{'each / many':>13}")
    for case in cases:
        row = measured(*case, 1.0 if quick else seconds / len(cases))
        rows.append(row)
        say(
            f"{case[0]:<30}{row['tensors']:>8}{row['shape'][0]:>7}{row['us']['many']:>10.0f}"
            f"{row['each_over_many']:>12.2f}x"
        )
    if dist.get_rank() == 0:
        machine.write(out, {**head, "rows": rows})
    if not all(row["right"] for row in rows):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a second for each row")
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (default: %(default)s)")
    parser.add_argument("--gradients", action="store_true", help="moves of DTensors and of their gradients")
    parser.add_argument("--out", help="where the results go (default: see above)")
    arguments = parser.parse_args()
    name = "many_gradients" if arguments.gradients else "many_tensors"
    out = arguments.out or HERE / "results" / f"{name}-torch{torch.__version__.partition('+')[0]}.json"
    head = {**machine.describe("torch"), "setting": {"ranks": NUM_RANKS, "dtype": "bfloat16"}}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    launch(NUM_RANKS, run_rank, arguments.gradients, arguments.quick, arguments.seconds, str(out), head)


if __name__ == "__main__":
    main()
