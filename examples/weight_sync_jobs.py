"""Syncs weights from a trainer with FSDP2 to a tensor-parallel server, which are separate jobs.

    python examples/weight_sync_jobs.py                                          # both jobs, on this machine
    python examples/weight_sync_jobs.py --role trainer --store HOST:PORT         # one job; the store is the trainer's
    python examples/weight_sync_jobs.py --role server --store HOST:PORT

Each job has two ranks and a process group of its own; the two may have different versions of torch. The server fuses
queries, keys and values, and gate and up, and stacks experts, in bfloat16. Its loader of checkpoints is run once to
record what it writes. From then on, each training step is followed by a sync that sends only what changed. No weight
is gathered, except for the check: after each sync the server loads the trainer's whole weights in the usual way, and
compares all bits.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwright as sw
from shardwright.loaders import in_connection, recorded_destination

RANKS = 2  # of each job
HIDDEN, HEADS, KV_HEADS, HEAD, FFN, EXPERTS, VOCAB = 24, 6, 2, 4, 20, 5, 30
DTYPE = torch.bfloat16  # of the server
SYNCS = 4


class Layer(nn.Module):
    """The trainer's layer: attention weights, a dense product, and experts. Its forward is only an example."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(inputs, outputs, bias=False)
            for inputs, outputs in (
                (HIDDEN, HEADS * HEAD),
                (HIDDEN, KV_HEADS * HEAD),
                (HIDDEN, KV_HEADS * HEAD),
                (HEADS * HEAD, HIDDEN),
                (HIDDEN, FFN),
                (HIDDEN, FFN),
                (FFN, HIDDEN),
            )
        )
        self.norm = nn.RMSNorm(HIDDEN)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = (self.k_proj(x) * self.v_proj(x)).repeat_interleave(HEADS // KV_HEADS, -1)
        x = x + self.o_proj(self.q_proj(x) * values)
        x = self.norm(x)
        x = x + self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))
        for expert in self.experts[:-1]:  # the last one gets no tokens, so that its weights do not change
            x = x + expert(x)
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.sigmoid(self.w1(x)) * self.w3(x))


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Served(nn.Module):
    """One rank of the server: its parameters, and a loader of the trainer's checkpoints."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        heads, kv_heads, ffn = HEADS // RANKS, KV_HEADS // RANKS, FFN // RANKS
        shapes = {"embed": (VOCAB // RANKS, HIDDEN)}
        for i in range(2):
            shapes[f"layers.{i}.qkv"] = ((heads + 2 * kv_heads) * HEAD, HIDDEN)
            shapes[f"layers.{i}.o"] = (HIDDEN, heads * HEAD)
            shapes[f"layers.{i}.gate_up"] = (2 * ffn, HIDDEN)
            shapes[f"layers.{i}.down"] = (HIDDEN, ffn)
            shapes[f"layers.{i}.norm"] = (HIDDEN,)
            shapes[f"layers.{i}.w13"] = (EXPERTS, 2 * ffn, HIDDEN)
            shapes[f"layers.{i}.w2"] = (EXPERTS, HIDDEN, ffn)
        self.weights = {name: nn.Parameter(torch.zeros(shape, dtype=DTYPE)) for name, shape in shapes.items()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies this rank's part of each weight to its place, as loaders of servers do."""
        for name, weight in weights:
            into, weight = self._place(name, weight)
            into.data.copy_(weight)

    def _place(self, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the part of a parameter that a weight goes to, and this rank's part of the weight."""
        if name == "embed.weight":
            return self.weights["embed"], weight.chunk(RANKS)[self.rank]
        _, index, module, *rest = name.split(".")
        layer = f"layers.{index}."
        if module in ("q_proj", "k_proj", "v_proj"):
            q, kv = HEADS // RANKS * HEAD, KV_HEADS // RANKS * HEAD
            begin, length = {"q_proj": (0, q), "k_proj": (q, kv), "v_proj": (q + kv, kv)}[module]
            return self.weights[layer + "qkv"].narrow(0, begin, length), weight.chunk(RANKS)[self.rank]
        if module in ("gate_proj", "up_proj"):
            half = self.weights[layer + "gate_up"].chunk(2)[module == "up_proj"]
            return half, weight.chunk(RANKS)[self.rank]
        if module in ("o_proj", "down_proj"):
            return self.weights[layer + module.removesuffix("_proj")], weight.chunk(RANKS, 1)[self.rank]
        if module == "norm":
            return self.weights[layer + "norm"], weight
        expert, matrix = int(rest[0]), rest[1]
        if matrix == "w2":
            return self.weights[layer + "w2"][expert], weight.chunk(RANKS, 1)[self.rank]
        half = self.weights[layer + "w13"][expert].chunk(2)[matrix == "w3"]
        return half, weight.chunk(RANKS)[self.rank]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trainer's whole weights, for the check."""
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


def train(link: sw.Connection) -> None:
    """The trainer: steps on random tokens, with a sync after each."""
    torch.manual_seed(0)
    model = Trained()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_force_sum_reduction_for_comms(True)  # Gloo has no averages
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    # The server's loader must know names, shapes and dtypes. Rank 0 of the trainer tells it.
    weights = {name: (tuple(x.shape), x.dtype) for name, x in model.state_dict().items()}
    tell(link, weights)
    t = sw.transfer(
        lambda: in_connection(model.state_dict(), link.ranks("trainer")),
        None,
        map=sw.rules.cast(DTYPE),
        only_changed=True,
        group=link.group,
    )
    for step in range(SYNCS):
        loss = model(torch.randint(VOCAB // 2, (4, 8))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle = t.start()
        handle.source_free.wait()  # the next step may change the weights
        handle.wait()
        if dist.get_rank() == 0:
            report = handle.report
            of_all = f"of {report.full_sent_bytes:,} bytes ({report.reason or 'only what changed'})"
            print(f"sync {step}: loss {loss.item():.4f}, rank 0 sent {report.sent_bytes:,} {of_all}", flush=True)
        tell(link, whole(model))


def serve(link: sw.Connection) -> None:
    """The server: receives, and compares its parameters with those of its loader."""
    rank = dist.get_rank()
    server, checked = Served(rank), Served(rank)
    weights = tell(link, None)
    to = recorded_destination(server.load_weights, weights, link.ranks("server"), parameters=server.weights.items())
    t = sw.transfer(None, to, map=sw.rules.cast(DTYPE), only_changed=True, group=link.group)
    for step in range(SYNCS):
        t.start().wait()
        checked.load_weights(tell(link, None).items())
        for name, weight in server.weights.items():
            assert torch.equal(weight.view(torch.int16), checked.weights[name].view(torch.int16)), (step, name)
        if rank == 0:
            print(f"sync {step}: the {len(server.weights)} parameters of the server are right", flush=True)


def tell(link: sw.Connection, value: object) -> object:
    """Returns the value that rank 0 of the trainer passes, on all ranks of both jobs."""
    box = [value]
    dist.broadcast_object_list(box, group_src=link.ranks("trainer")[0], group=link.group)
    return box[0]


def run_rank(rank: int, role: str, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, role), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    host, _, port = address.rpartition(":")
    is_master = role == "trainer" and rank == 0
    shared = dist.TCPStore(host, int(port), is_master=is_master, wait_for_workers=False)
    link = sw.connect(shared, role, 2 * RANKS, timeout_seconds=120)
    (train if role == "trainer" else serve)(link)
    dist.barrier(link.group)  # the store must outlive the other job
    link.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--role", choices=("trainer", "server", "both"), default="both")
    parser.add_argument("--store", help="HOST:PORT of the store that both jobs reach (default: a free port)")
    options = parser.parse_args()
    if options.store is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options.store = f"127.0.0.1:{free.getsockname()[1]}"
    if options.role == "both":
        command = [sys.executable, __file__, "--store", options.store, "--role"]
        jobs = [subprocess.Popen([*command, role]) for role in ("trainer", "server")]
        sys.exit(max(abs(job.wait()) for job in jobs))
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (options.role, options.store, folder), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()
