"""A pair block as in AlphaFold, whose pair tensor is sharded along both axes.

    torchrun --nproc-per-node 4 examples/pair_block.py

The pair tensor [batch, i, j, channels] is `[Shard(1), Shard(2)]` on a mesh of two dims. Every layer flattens it, which
moves nothing with ``sw.enable(views=True)``. Only the sums over k of the triangle multiplications need communication:
each operand is gathered along one mesh dim. Prints bytes and collectives of a training step, stock and ours.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import shardwright as sw

PAIR = (Shard(1), Shard(2))  # i over the first mesh dim, j over the second


class TriangleMultiplication(nn.Module):
    """``z[i, j] += gate[i, j] * out(sum over k of a[i, k] * b[j, k])``; incoming: of ``a[k, i] * b[k, j]``."""

    def __init__(self, channels: int, incoming: bool):
        super().__init__()
        self.incoming = incoming
        self.a, self.b, self.gate, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(z, z.shape[-1:])
        a, b = self.a(x), self.b(x)
        if self.incoming:
            a, b = a.transpose(1, 2), b.transpose(1, 2)
        if isinstance(a, DTensor):  # all of k, for this rank's i and j
            a = a.redistribute(placements=[Shard(1), Replicate()])
            b = b.redistribute(placements=[Replicate(), Shard(1)])
        sums = a.permute(0, 3, 1, 2) @ b.permute(0, 3, 2, 1)
        return z + torch.sigmoid(self.gate(x)) * self.out(sums.permute(0, 2, 3, 1))


class PairBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.outgoing = TriangleMultiplication(channels, incoming=False)
        self.ingoing = TriangleMultiplication(channels, incoming=True)
        self.wide, self.narrow = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        z = self.ingoing(self.outgoing(z))
        return z + self.narrow(F.relu(self.wide(F.layer_norm(z, z.shape[-1:]))))


def replicate(block: nn.Module, mesh: DeviceMesh) -> None:
    """Makes every parameter a DTensor that all ranks hold."""
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim)
            module.register_parameter(name, nn.Parameter(full))


def needed_bytes(shape: tuple[int, ...], mesh: tuple[int, int], item: int = 4) -> int:
    """Returns the bytes that the busiest rank must receive in a step: both operands of both multiplications, both ways.

    Forward: `a` is gathered over the second mesh dim. `b` is exchanged, and a rank off the diagonal has none of the
    rows that it needs. Backward: their gradients, of the same sizes, are reduced and scattered.
    """
    batch, n, _, channels = shape
    rows, columns = mesh
    a = batch * channels * n // rows * (n - n // columns)
    b = batch * channels * n // columns * n
    return 2 * 2 * (a + b) * item


def step(block: nn.Module, z: torch.Tensor) -> torch.Tensor:
    result = block(z)
    result.backward(torch.ones_like(result))
    return result


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(0)
    shape = (1, 32, 32, 16)
    block, full = PairBlock(shape[-1]), torch.randn(shape)
    replicate(block, mesh)
    for name, mode in (("stock", contextlib.nullcontext()), ("shardwright", sw.enabled(views=True))):
        z = distribute_tensor(full, mesh, PAIR)
        try:
            with mode, CommDebugMode() as collectives, sw.debug.wire_meter() as wire:
                step(block, z)
            said = f"{collectives.get_total_counts()} collectives, {wire.received_bytes / 1024:.0f} KiB received"
        except RuntimeError as error:
            said = f"raises: {str(error).splitlines()[0][:90]}"
        if dist.get_rank() == 0:
            print(f"{name:12} {said}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
