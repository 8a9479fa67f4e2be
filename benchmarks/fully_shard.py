"""Times fully sharded training steps over links of 300 Mbit/s between network namespaces.

    make bench-fully-shard                                            # results/fully_shard-torch<version>.json
    make bench-fully-shard ARGS="--quick --out /tmp/fully_shard.json"

Needs root and iproute2 (tools/testnet). One rank on each of two nodes, with one thread; layers of D x D without bias.
The number of tokens is T*/4, T* and 4 T*; at T* the compute of a step takes as long as its communication. These
contenders alternate:

    compute            the whole model on this rank, without communication
    communication      the gathers and reductions of a step, one after the other
    FSDP2              stock, with default settings
    FSDP2, tuned       stock with asynchronous gathers, explicit prefetching in both directions, and a reduce-scatter
                       that sends each rank its part once
    by hand            a pipeline over two buffers for weights, with gradients written out, on PyTorch's collectives
    by hand, ours      the same pipeline with our transfers
    ours               sw.fully_shard
    ours, no prefetch  the same with prefetch=0

`hidden` is (compute + communication - step) / min(compute, communication). `possible` is that of a step in which
everything except the first gather and the last reduction overlaps. The exit status is 1 if a contender gave wrong
gradients, and 3 if links cannot be made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from networks import Network, run  # noqa: E402
from ranks import over_ranks  # noqa: E402
from report import say  # noqa: E402

NETWORK = Network(2, 1, 0.3)
WIDTH, DEPTH = 1024, 6
ROUNDS, QUICK_ROUNDS = 7, 2
TRIAL_TOKENS = 256
WARM_UP = 3  # steps until schedules are final

Step = Callable[[], list[torch.Tensor]]  # returns this rank's rows of each layer's averaged gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(DEPTH)))


def step_of(model: nn.Sequential, x: torch.Tensor) -> Step:
    def step() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [layer.linear.weight.grad for layer in model]

    return step


# ---- contenders


class AllToAllReduceScatter(sw.fsdp.ReduceScatter):
    """A reduce-scatter by all-to-all: each rank sends each peer its part, and sums. Gloo's own sends twice as much."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def stock(mesh: Any, is_tuned: bool) -> nn.Sequential:
    model = make_model()
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
        if is_tuned:
            module.set_custom_reduce_scatter(AllToAllReduceScatter())
            module._set_unshard_async_op(True)
    if is_tuned:
        for layer, following in zip(model, list(model)[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    return model


def ours(mesh: Any, options: sw.fsdp.Options | None = None) -> nn.Sequential:
    model = make_model()
    for layer in model:
        sw.fully_shard(layer, mesh=mesh)
    return sw.fully_shard(model, mesh=mesh, options=options)


class ByHand:
    """A pipeline written for this model: forward and backward, with two buffers for weights."""

    def __init__(self, x: torch.Tensor, has_our_transfers: bool) -> None:
        self.x = x
        self.has_our_transfers = has_our_transfers
        self.world, rank = dist.get_world_size(), dist.get_rank()
        rows = WIDTH // self.world
        full = [layer.linear.weight.detach() for layer in make_model()]
        self.parts = [weight[rank * rows : (rank + 1) * rows].clone() for weight in full]
        self.buffers = [torch.empty(WIDTH, WIDTH) for _ in range(2)]
        self.received = [torch.empty(WIDTH, WIDTH) for _ in range(2)]
        self.gather_by, self.reduce_by = sw.fsdp.AllGather(), sw.fsdp.ReduceScatter()

    def gather(self, i: int) -> Any:
        if self.has_our_transfers:
            return self.gather_by(self.buffers[i % 2], self.parts[i], dist.group.WORLD, async_op=True)
        return dist.all_gather_into_tensor(self.buffers[i % 2], self.parts[i], async_op=True)

    def __call__(self) -> list[torch.Tensor]:
        activations, work = [self.x], self.gather(0)
        for i in range(DEPTH):
            work.wait()
            if i + 1 < DEPTH:
                work = self.gather(i + 1)
            activations.append(torch.tanh(activations[-1] @ self.buffers[i % 2].T))
        gradients: list[torch.Tensor] = [torch.empty(0)] * DEPTH
        upper = torch.ones_like(activations[-1])
        reduction: tuple[int, torch.Tensor, Any] | None = None
        for i in reversed(range(DEPTH)):
            if i < DEPTH - 2:  # the last two are still gathered
                work.wait()
            if 0 < i < DEPTH - 1:
                work = self.gather(i - 1)
            due = upper * (1 - activations[i + 1] ** 2)
            if i > 0:
                upper = due @ self.buffers[i % 2]
            gradient = due.T @ activations[i]
            if reduction is not None:
                self.finish(reduction, gradients)
            reduction = i, gradient, self.reduce(i, gradient)
        assert reduction is not None
        self.finish(reduction, gradients)
        return gradients

    def reduce(self, i: int, gradient: torch.Tensor) -> Any:
        if not self.has_our_transfers:
            return dist.all_to_all_single(self.received[i % 2], gradient, async_op=True)
        out = self.received[i % 2][: WIDTH // self.world]
        return self.reduce_by(out, gradient, dist.group.WORLD, dist.ReduceOp.AVG, async_op=True)

    def finish(self, reduction: tuple[int, torch.Tensor, Any], gradients: list[torch.Tensor]) -> None:
        i, _, work = reduction
        work.wait()
        if self.has_our_transfers:
            gradients[i] = self.received[i % 2][: WIDTH // self.world].clone()
        else:
            gradients[i] = self.received[i % 2].view(self.world, -1, WIDTH).mean(0)


def communication(num_gathers: int) -> Callable[[], None]:
    """Runs the transfers of a step alone: the gathers and the reduction of each layer."""
    part = torch.ones(WIDTH * WIDTH // dist.get_world_size())
    full = torch.ones(WIDTH * WIDTH)
    gather, scatter, group = sw.fsdp.AllGather(), sw.fsdp.ReduceScatter(), dist.group.WORLD

    def call() -> None:
        for _ in range(num_gathers):
            gather(full, part, group)
        for _ in range(DEPTH):
            scatter(part, full, group, dist.ReduceOp.SUM)
        part.fill_(1.0)

    return call


# ---- on every rank


def expected_gradients(x: torch.Tensor) -> list[torch.Tensor]:
    rows, rank = WIDTH // dist.get_world_size(), dist.get_rank()
    found = []
    for gradient in step_of(make_model(), x)():
        dist.all_reduce(gradient)
        found.append(gradient[rank * rows : (rank + 1) * rows] / dist.get_world_size())
    return found


def ways_of(x: torch.Tensor, mesh: Any) -> tuple[dict[str, Step], nn.Sequential]:
    """Returns the contenders after their warm-up, and our model."""
    model = ours(mesh)
    ways = {
        "FSDP2": step_of(stock(mesh, False), x),
        "FSDP2, tuned": step_of(stock(mesh, True), x),
        "by hand": ByHand(x, False),
        "by hand, ours": ByHand(x, True),
        "ours": step_of(model, x),
        "ours, no prefetch": step_of(ours(mesh, sw.fsdp.Options(prefetch=0)), x),
    }
    for step in ways.values():
        for _ in range(WARM_UP):
            step()
    return ways, model


def is_right(step: Step, expected: list[torch.Tensor]) -> float:
    found = [g.to_local() if hasattr(g, "to_local") else g for g in step()]
    return float(all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected, strict=True)))


def possible_ms(compute_ms: float, gather_ms: float, reduction_ms: float, num_gathers: int) -> float:
    """Returns the time of a step in which everything except the first gather and the last reduction overlaps."""
    forward = max(compute_ms / 3, (DEPTH - 1) * gather_ms)
    in_backward = (num_gathers - DEPTH) * gather_ms + (DEPTH - 1) * reduction_ms
    return gather_ms + forward + max(compute_ms * 2 / 3, in_backward) + reduction_ms


def measure(tokens: int, rounds: int, transfer_ms: tuple[float, float]) -> dict[str, Any]:
    """Returns one row, the same on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(tokens, WIDTH)
    ways, model = ways_of(x, mesh)
    expected = expected_gradients(x)
    right = over_ranks([is_right(step, expected) for step in ways.values()], dist.ReduceOp.MIN)
    (schedule,) = sw.fsdp.schedules(model)
    num_gathers = sum(1 for unit, *_ in schedule.gathers if unit > 0)  # unit 0 is the outermost one, without weights
    calls = {"compute": step_of(make_model(), x), "communication": communication(num_gathers), **ways}
    ms = {name: 1e3 * low for name, low in timing.among_ranks(calls).of_count(rounds).low.items()}
    least = possible_ms(ms["compute"], *transfer_ms, num_gathers)
    serial, shorter = ms["compute"] + ms["communication"], min(ms["compute"], ms["communication"])
    layer = WIDTH * WIDTH * 4
    return {
        "tokens": tokens,
        "gathers": num_gathers,
        "reductions": DEPTH,
        "ms": {name: round(value, 1) for name, value in ms.items()},
        "predicted_ms": None if schedule.lanes is None else round(schedule.lanes["total_ps"] / 1e9, 1),
        "possible_ms": round(least, 1),
        "possible_over": {name: round(least / ms[name], 3) for name in ways},
        "hidden": {name: round((serial - ms[name]) / shorter, 3) for name in ways},
        "hidden_possible": round((serial - least) / shorter, 3),
        "by_hand_over_ours": round(ms["by hand"] / ms["ours"], 3),
        "peak_bytes": {"ours": schedule.peak_bytes, "by hand": 2 * layer + 2 * layer},
        "schedule": str(schedule),
        "right": dict(zip(ways, map(bool, right), strict=True)),
    }


def run_rank(is_quick: bool, out: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    sw.calibrate(dtypes=[torch.float32])
    x = torch.randn(TRIAL_TOKENS, WIDTH)
    part, full = torch.ones(WIDTH * WIDTH // dist.get_world_size()), torch.ones(WIDTH * WIDTH)
    gather, scatter, group = sw.fsdp.AllGather(), sw.fsdp.ReduceScatter(), dist.group.WORLD
    trial = timing.among_ranks(
        {
            "compute": step_of(make_model(), x),
            "gather": lambda: gather(full, part, group),
            "reduction": lambda: scatter(part, full, group, dist.ReduceOp.SUM),
        }
    ).of_count(5)
    times = [trial.low[name] for name in ("compute", "gather", "reduction")]
    compute, gather_s, reduction_s = over_ranks(times, dist.ReduceOp.MAX)
    num_gathers = 2 * DEPTH - 2  # two layers fit into two buffers
    balanced = TRIAL_TOKENS * (num_gathers * gather_s + DEPTH * reduction_s) / compute
    found: dict[str, Any] = {
        "load_before": round(os.getloadavg()[0], 1),
        "balanced_tokens": round(balanced),
        "gather_ms": round(1e3 * gather_s, 2),
        "reduction_ms": round(1e3 * reduction_s, 2),
        "rows": [],
    }
    say(f"{NETWORK}; compute takes as long as communication at {balanced:.0f} tokens")
    for factor in (1,) if is_quick else (0.25, 1, 4):
        row = measure(max(32, round(factor * balanced)), rounds, (1e3 * gather_s, 1e3 * reduction_s))
        found["rows"].append(row)
        say(f"{row['tokens']} tokens, possible {row['possible_ms']:.0f} ms ({row['hidden_possible']:.2f} hidden)")
        for name, ms in row["ms"].items():
            say(f"  {name:<18}{ms:9.1f} ms" + (f"{row['hidden'][name]:8.2f} hidden" if name in row["hidden"] else ""))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="T* tokens alone, two turns")
    torch_version = torch.__version__.split("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"fully_shard-torch{torch_version}.json"))
    parser.add_argument("--on-a-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        run_rank(options.quick, options.on_a_rank[-1])
        return
    found = run(__file__, NETWORK, ["--quick"] * options.quick)
    machine.write(options.out, {**machine.describe("torch"), "network": str(NETWORK), **found})
    if not all(value for row in found["rows"] for value in row["right"].values()):
        sys.exit("a way gave wrong gradients")


if __name__ == "__main__":
    main()
