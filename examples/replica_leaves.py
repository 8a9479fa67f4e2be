"""Trains replicas of a sharded model, one of which leaves; the others train on, without a restart.

    torchrun --nproc-per-node 6 examples/replica_leaves.py

Three replicas of two ranks each shard their weights with `sw.fully_shard`. A hook averages gradients over the replicas,
in a group that the program can change between steps. After step 2 the last replica leaves, as a job that is preempted
does. All replicas hold the same weights and optimizer states, so nothing needs to be moved: the others make a group
without it and divide the batch among themselves. Losses and weights are those of the whole model on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwright as sw

SHARDS, REPLICAS = 2, 3
WIDTH, LAYERS, ROWS, STEPS = 16, 2, 24, 6  # rows of the global batch
LEAVES = {2: 2}  # replica -> its last step


class Replicas:
    """The replicas that train: averages gradients over them, and forms a new group when some leave."""

    def __init__(self) -> None:
        self.index, self.shard = divmod(dist.get_rank(), SHARDS)
        self.present = list(range(REPLICAS))
        self._join()

    def _join(self) -> None:
        """Makes the group of the ranks that hold this shard in the present replicas. Only they take part."""
        ranks = [replica * SHARDS + self.shard for replica in self.present]
        self.group = dist.new_group(ranks, use_local_synchronization=True)

    def average(self, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient, group=self.group)
        gradient.div_(len(self.present))

    def after_step(self, leaves: bool) -> bool:
        """Learns which replicas leave, and makes a group of the others. Returns True if this one trains on."""
        staying = torch.zeros(REPLICAS)
        staying[self.index] = not leaves
        dist.all_reduce(staying, group=self.group)
        present = [replica for replica in self.present if staying[replica]]
        if not leaves and present != self.present:
            self.present = present
            self._join()
        return not leaves

    def part_of(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this rank. The batch is divided evenly, whatever the number of replicas."""
        part = self.present.index(self.index) * SHARDS + self.shard
        return batch.chunk(len(self.present) * SHARDS)[part]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def train() -> None:
    replicas = Replicas()
    ranks = [replicas.index * SHARDS + shard for shard in range(SHARDS)]
    group = dist.new_group(ranks, use_local_synchronization=True)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    whole, model = make_model(), make_model()
    for module in [*model, model]:
        sw.fully_shard(module, mesh=mesh)
    for layer in model:
        layer.set_all_reduce_hook(replicas.average)
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (model, whole)]
    for step in range(STEPS):
        inputs, targets = torch.randn(2, ROWS, WIDTH)  # the same on all ranks
        loss = F.mse_loss(model(replicas.part_of(inputs)), replicas.part_of(targets))
        loss.backward()
        expected = F.mse_loss(whole(inputs), targets)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        replicas.average(mean)  # of the ranks that hold this shard
        dist.all_reduce(mean, group=group)
        if dist.get_rank() == 0:
            print(
                f"step {step}, {len(replicas.present)} replicas: loss {mean.item() / SHARDS:.6f}, "
                f"on one rank {expected.item():.6f}"
            )
        if not replicas.after_step(LEAVES.get(replicas.index) == step):
            return
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs)
    if dist.get_rank() == 0:
        print("the weights are those of the whole model")


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_world_size() != REPLICAS * SHARDS:
        raise SystemExit(f"this program needs {REPLICAS * SHARDS} ranks, got {dist.get_world_size()}")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
