"""Trains a small model over links that lose and delay frames, or fail. Results must be correct, or errors must name
rank, plan, step and group.

    make test-links                                       # about five minutes
    make test-links ARGS="--short --only lossy cut"       # seconds

A model of two layers is trained by tensor parallelism on ranks in network namespaces (tools/testnet; needs root and
iproute2). After every few steps its weights are compared with those of the same training without any parallelism. The
exit status is 1 if a scenario failed, 3 if the machine does not allow links.

    lossy       1% of all frames are lost, and all are delayed by 0.5 to 1.5 ms
    nodes       the same on two nodes of two ranks
    interrupted the link of a node is down for a second, several times, and training continues each time
    cut         the link goes down for good: every rank raises within the timeout of its group, and its error names the
                rank, the plan, the step and the group
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwright as sw

TESTNET = Path(__file__).resolve().parents[2] / "tools" / "testnet"

ROWS, WIDTH, HIDDEN = 24, 20, 52  # multiples of 4
LEARNING_RATE = 0.05
STEPS_BETWEEN_CHECKS = 10
TIMEOUT_SECONDS = 5.0
# Added to the timeout of one transfer: time to detect the failure and unwind on a busy machine.
SLACK_SECONDS = 25.0
DOWN_SECONDS = 1.0


class Scenario(NamedTuple):
    network: list[str]
    steps: int
    short_steps: int
    down_at: tuple[int, ...] = ()  # steps at which a link goes down for a second
    is_cut: bool = False  # at the middle step, permanently


LOSSY = ["100mbit", "1ms", "--jitter", "500us", "--loss", "1%"]
SCENARIOS = {
    "lossy": Scenario(["2", "1", *LOSSY], 1000, 12),
    "nodes": Scenario(["2", "2", *LOSSY], 1000, 10),
    "interrupted": Scenario(["2", "1", "100mbit"], 300, 12, down_at=(5, 120, 220)),
    "cut": Scenario(["2", "2", "100mbit"], 20, 10, is_cut=True),
}


# ---- training


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HIDDEN, WIDTH), (WIDTH, HIDDEN))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5 for shape in shapes]


def reference_step(model: list[torch.Tensor], step: int) -> None:
    x, target = batch(step)
    leaves = [weight.requires_grad_() for weight in model]
    y = torch.relu(x @ leaves[0].t()) @ leaves[1].t()
    gradients = torch.autograd.grad(((y - target) ** 2).mean(), leaves)
    for i, gradient in enumerate(gradients):
        model[i] = (leaves[i] - LEARNING_RATE * gradient).detach()


def parallel_step(model: list[DTensor], mesh: DeviceMesh, step: int) -> float:
    """Activations are sharded by rows between the layers' products, and by columns between the layers."""
    x, target = (distribute_tensor(part, mesh, [Shard(0)], src_data_rank=None) for part in batch(step))
    leaves = [weight.detach().requires_grad_() for weight in model]
    hidden = torch.relu(sw.linear(x, leaves[0], placements=[Shard(1)]))
    y = sw.linear(hidden, leaves[1], placements=[Shard(0)])
    # The sum over this rank's rows; the redistribute adds the sums of all ranks.
    mine = ((y - target).to_local() ** 2).sum() / (ROWS * WIDTH)
    loss = DTensor.from_local(mine, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    gradients = torch.autograd.grad(mine, leaves)
    for i, gradient in enumerate(gradients):
        assert gradient.placements == model[i].placements, (gradient.placements, model[i].placements)
        model[i] = (leaves[i] - LEARNING_RATE * gradient).detach()
    return loss.to_local().item()


def compare(model: list[DTensor], reference: list[torch.Tensor], step: int) -> None:
    for i, (mine, whole) in enumerate(zip(model, reference, strict=True)):
        gathered = mine.redistribute(placements=[Replicate()]).to_local()
        if not torch.allclose(gathered, whole, rtol=1e-9, atol=1e-12):
            off = (gathered - whole).abs().max().item()
            raise SystemExit(f"rank {dist.get_rank()}: weight {i} is off by {off} after step {step}")


def link(state: str) -> None:
    subprocess.run([str(TESTNET), "link", "1", state], check=True)


def interrupt() -> None:
    """Takes the last node's link down and up again, in a thread, while the caller continues."""

    def down_and_up() -> None:
        link("down")
        time.sleep(DOWN_SECONDS)
        link("up")

    threading.Thread(target=down_and_up).start()


def train(scenario: Scenario, steps: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    reference = weights()
    cuts = ([Shard(0)], [Shard(1)])
    model = [distribute_tensor(w, mesh, cut, src_data_rank=None) for w, cut in zip(weights(), cuts, strict=True)]
    for step in range(1, steps + 1):
        if dist.get_rank() == 0 and step in scenario.down_at:
            interrupt()
        if dist.get_rank() == 0 and scenario.is_cut and step == steps // 2:
            link("down")
        parallel_step(model, mesh, step)
        reference_step(reference, step)
        if step % STEPS_BETWEEN_CHECKS == 0 or step == steps:
            compare(model, reference, step)


# ---- on a rank


def check_error(error: Exception, seconds: float) -> None:
    """Raises SystemExit unless the error came in time and names rank, step, group and plan."""
    wanted = {
        "rank": rf"shardwright: rank {dist.get_rank()} failed",
        "step": r"step \d+ of \d+|the products",
        "group": r"group .*\(0, 1, 2, 3\)|ranks \(0, 1, 2, 3\)",
        "plan": r"of plan\n.*->",
    }
    missing = [what for what, pattern in wanted.items() if not re.search(pattern, str(error))]
    if missing:
        raise SystemExit(f"rank {dist.get_rank()}: the error does not name {', '.join(missing)}: {error}")
    if seconds > TIMEOUT_SECONDS + SLACK_SECONDS:
        raise SystemExit(f"rank {dist.get_rank()}: raised after {seconds:.0f} s")


def wait_for_all_ranks() -> dict[str, Any]:
    """Waits until all ranks have started, and returns the arguments for their group. On a busy machine, importing torch
    may take longer than the timeout in the scenario of a cut link."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, size, is_master=rank == 0, timeout=timedelta(seconds=120))
    store.add("arrived", 1)
    while store.add("arrived", 0) < size:
        time.sleep(0.05)
    return {"store": store, "rank": rank, "world_size": size}


def run_rank(scenario: Scenario, steps: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    timeout = TIMEOUT_SECONDS if scenario.is_cut else 120.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **wait_for_all_ranks())
    begin = time.monotonic()
    try:
        with sw.enabled(strict=True):
            train(scenario, steps)
    except dist.DistBackendError as error:
        if not scenario.is_cut:
            raise
        check_error(error, time.monotonic() - begin)
        print(f"rank {dist.get_rank()}: {str(error).splitlines()[0]}", flush=True)
        os._exit(0)  # the groups cannot be destroyed normally any more
    if scenario.is_cut:
        raise SystemExit(f"rank {dist.get_rank()}: nothing was raised")
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{steps} steps in {time.monotonic() - begin:.1f} s, weights as without parallelism", flush=True)
    dist.destroy_process_group()


# ---- all scenarios


def run_scenario(name: str, is_short: bool) -> int:
    scenario = SCENARIOS[name]
    steps = scenario.short_steps if is_short else scenario.steps
    print(f"{name}: {' '.join(scenario.network)}, {steps} steps", flush=True)
    command = [str(TESTNET), *scenario.network, "--", sys.executable, __file__, "--on-a-rank", name, str(steps)]
    return subprocess.run(command, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few steps")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--on-a-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        name, steps = options.on_a_rank
        run_rank(SCENARIOS[name], int(steps))
        return 0
    statuses = {}
    for name in options.only:
        statuses[name] = run_scenario(name, options.short)
        if statuses[name] == 3:
            return 3
    failed = [name for name, status in statuses.items() if status]
    print(f"failed: {', '.join(failed)}" if failed else "all as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
