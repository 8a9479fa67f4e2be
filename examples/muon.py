"""Trains a sharded model with Muon, whose updates need whole matrices, and compares three ways to get them.

    python examples/muon.py [--ranks 4] [--width 512] [--layers 4]
    torchrun --nproc-per-node 4 examples/muon.py

- torch.optim.Muon multiplies DTensors, and DTensor moves the operands of every product;
- every rank gathers every matrix with `full_tensor()` and computes all updates;
- `sw.fsdp.owners` gives each matrix to one rank, which computes its update and sends it back to the shards.

The trained weights are compared with those of torch.optim.Muon on the unsharded model.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import shardwright as sw
from ranks import launch, over_ranks
from report import in_mebibytes, say

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, as in torch.optim.Muon."""
ITERATIONS = 5
EPS = 1e-7
NUM_STEPS = 6
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Returns an approximation of U V^T, where U S V^T is the matrix, in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


Updates = Callable[[list[DTensor]], Iterable[tuple[int, DTensor]]]
"""Yields (i, sharded orthogonalized direction) for a list of sharded directions."""


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for parameters that are sharded DTensors.

    `updates_of` makes the function that orthogonalizes the directions of the given parameters.
    """

    def __init__(self, params: Iterable[DTensor], updates_of: Callable[[list[DTensor]], Updates], **settings: float):
        super().__init__(params, {**SETTINGS, **settings})
        (self._group,) = self.param_groups
        self._updates = updates_of(self._group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates all parameters by their gradients."""
        params, momentum = self._group["params"], self._group["momentum"]
        directions = []
        for param in params:
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
            state["momentum_buffer"].lerp_(param.grad, 1 - momentum)
            directions.append(param.grad.lerp(state["momentum_buffer"], momentum))
        for i, update in self._updates(directions):
            rows, columns = params[i].shape
            params[i].mul_(1 - self._group["lr"] * self._group["weight_decay"])
            params[i].add_(update, alpha=-self._group["lr"] * math.sqrt(max(1, rows / columns)))


def by_owners(params: list[DTensor], **options: int) -> Updates:
    """One rank orthogonalizes each matrix, while other matrices move."""
    owners = sw.fsdp.owners(params, **options)
    return lambda directions: owners.map(lambda i, whole: orthogonalize(whole), directions, dtype=torch.bfloat16)


def on_every_rank(params: list[DTensor]) -> Updates:
    """Every rank gathers and orthogonalizes every matrix."""

    def updates(directions: list[DTensor]) -> Iterator[tuple[int, DTensor]]:
        for i, direction in enumerate(directions):
            update = orthogonalize(direction.full_tensor())
            whole = DTensor.from_local(update, direction.device_mesh, [Replicate()], run_check=False)
            yield i, whole.redistribute(placements=direction.placements)  # moves nothing

    return updates


class Block(nn.Module):
    """A residual block. No rank count but 1 divides its inner width evenly."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1, bias=False)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model_of(width: int, layers: int) -> nn.Module:
    """Returns the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def split(model: nn.Module) -> tuple[list, list]:
    """Returns the matrices, for Muon, and all other parameters, for AdamW."""
    params = list(model.parameters())
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], width: int) -> tuple[float, float]:
    """Trains on equal batches on all ranks. Returns the median ms and the received bytes of a step of the first one."""
    seconds, received = [], 0
    for step in range(NUM_STEPS):
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        with sw.debug.wire_meter() as meter:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            optimizers[0].step()
            seconds.append(time.perf_counter() - start)
        received = meter.received_bytes
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    slowest = over_ranks(seconds[1:], dist.ReduceOp.MAX)
    return 1000 * statistics.median(slowest), over_ranks([received], dist.ReduceOp.SUM)[0]


OPTIMIZERS: dict[str, Callable[[list[DTensor]], torch.optim.Optimizer]] = {
    "torch.optim.Muon": lambda params: torch.optim.Muon(params, **SETTINGS),
    "gather on every rank": lambda params: Muon(params, on_every_rank),
    "owners": lambda params: Muon(params, by_owners),
}


def run(width: int, layers: int) -> None:
    """Prints the comparison, on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    plain = model_of(width, layers)
    matrices, others = split(plain)
    train(plain, [torch.optim.Muon(matrices, **SETTINGS), torch.optim.AdamW(others)], width)
    say(f"{len(matrices)} matrices, {in_mebibytes(4 * sum(p.numel() for p in matrices))} MiB, on {mesh.size()} ranks")
    say(f"  {'a step of':24}{'ms':>10}{'MiB received':>16}{'largest error of a weight':>28}")
    for name, optimizer_of in OPTIMIZERS.items():
        model = model_of(width, layers)
        for block in model:
            sw.fully_shard(block, mesh=mesh)
        sw.fully_shard(model, mesh=mesh)
        sharded, rest = split(model)
        milliseconds, received = train(model, [optimizer_of(sharded), torch.optim.AdamW(rest)], width)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        error = max((a.full_tensor() - b).abs().max().item() for a, b in pairs)
        say(f"  {name:24}{milliseconds:>10.1f}{in_mebibytes(received):>16}{error:>28.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_torchrun = int(os.environ.get("WORLD_SIZE", "4"))
    parser.add_argument("--ranks", type=int, default=by_torchrun, help="default: as torchrun says, or 4")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    launch(arguments.ranks, run, arguments.width, arguments.layers)


if __name__ == "__main__":
    main()
