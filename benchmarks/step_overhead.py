"""Measures what a training step costs apart from its products: a model of 148 tiny weights on two Gloo ranks.

    make bench-step-overhead                                          # results/step_overhead-torch<version>.json
    make bench-step-overhead ARGS="--rounds 3 --out /tmp/overhead.json"

A block is eight small layers, and each of the twelve blocks is a unit. The contenders alternate: the model without
sharding, FSDP2, `sw.fully_shard`, and `sw.fully_shard` under `sw.debug.check_ranks()`. Reported are milliseconds per
step: CPU time of the thread that runs the forward and the backward, CPU time of all threads of a rank, and elapsed
time, each of the slower rank. For CPU tensors, the calling thread also runs the backward.
"""

from __future__ import annotations

import argparse
import sys
import time
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

WIDTH, BLOCKS, ROWS = 32, 12, 4
WARM_UP = 5
STEPS = 10  # in a turn
CLOCKS = {"thread_ms": time.thread_time, "process_ms": time.process_time, "elapsed_ms": time.perf_counter}


class Block(nn.Sequential):
    def __init__(self) -> None:
        wide, linear = 4 * WIDTH, nn.Linear
        first = nn.LayerNorm(WIDTH), linear(WIDTH, wide), nn.GELU(), linear(wide, WIDTH), nn.LayerNorm(WIDTH)
        super().__init__(*first, linear(WIDTH, WIDTH), nn.GELU(), linear(WIDTH, WIDTH))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def run_rank(out: str, rounds: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    contenders = {
        "without sharding": None,
        "FSDP2": fully_shard,
        "sw.fully_shard": sw.fully_shard,
        "sw.fully_shard, check_ranks": sw.fully_shard,
    }
    models = {}
    for name, shard in contenders.items():
        model = models[name] = Model()
        if shard is not None:
            for block in model.blocks:
                shard(block, mesh=mesh)
            shard(model, mesh=mesh)
    x = torch.randn(ROWS, WIDTH)
    samples: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in CLOCKS} for name in models}
    for turn in range(-1, rounds):  # turn -1 warms up
        for name in models if turn % 2 else reversed(models):
            sw.debug.check_ranks(name.endswith("check_ranks"))
            dist.barrier()
            begin = {clock: read() for clock, read in CLOCKS.items()}
            for _ in range(STEPS if turn >= 0 else WARM_UP):
                models[name].zero_grad()
                models[name](x).square().mean().backward()
            spent = {clock: 1e3 * (read() - begin[clock]) / STEPS for clock, read in CLOCKS.items()}
            for clock, most in zip(spent, over_ranks(list(spent.values()), dist.ReduceOp.MAX), strict=True):
                if turn >= 0:
                    samples[name][clock].append(most)
    rows = [
        {"name": name, **{clock: round(timing.low(values), 2) for clock, values in clocks.items()}}
        for name, clocks in samples.items()
    ]
    for row in rows:
        say(f"  {row['name']:28}" + "".join(f"  {clock} {row[clock]:7.2f}" for clock in CLOCKS))
    if dist.get_rank() == 0:
        weights = sum(1 for _ in models["FSDP2"].parameters())
        setting = {"weights": weights, "units": BLOCKS + 1, "rows": ROWS, "width": WIDTH, "ranks": 2, "rounds": rounds}
        machine.write(out, {**machine.describe("torch"), "setting": setting, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch_version = torch.__version__.split("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"step_overhead-torch{torch_version}.json"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    launch(2, run_rank, options.out, options.rounds)


if __name__ == "__main__":
    main()
