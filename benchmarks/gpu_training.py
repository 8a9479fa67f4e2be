"""Times training steps under sw.fully_shard and FSDP2 on a GPU: one rank, and two that share the GPU.

    make gpu                                              # with everything else that needs a GPU

A Llama of 12 blocks (170 million parameters), weights in bfloat16 and gradients reduced in float32, with AdamW. The
contenders alternate, with compiled blocks and without. One rank sends nothing: its times show the cost of gathering,
freeing and reducing weights next to the same products. Two ranks share the GPU's processors and communicate through
sockets, so their times say little about two GPUs. Memory is the highest of the allocator during a step, of rank 0.
With two ranks it also times NCCL's collectives for a block's weights, each alone and all in one message.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardwright as sw

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402
import timing  # noqa: E402

DIM, HIDDEN, HEADS, DEPTH, BATCH, LENGTH, VOCABULARY = 1024, 2816, 16, 12, 4, 1024, 8192
STEPS, ROUNDS = 3, 9  # per turn, turns
SHARDERS: dict[str, Callable[..., Any]] = {"fsdp2": fully_shard, "ours": sw.fully_shard}
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, dim) to the same."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_step(name: str, compiles: bool) -> Callable[[], float]:
    """Returns a function that trains for STEPS steps and returns the last loss."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("cuda"):
        model = Model()
    for block in model.blocks:
        if compiles:
            block.compile()
        SHARDERS[name](block, mesh=mesh, mp_policy=POLICY)
    SHARDERS[name](model, mesh=mesh, mp_policy=POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device="cuda", generator=generator)

    def steps() -> float:
        for _ in range(STEPS):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()  # waits for the GPU

    return steps


def memory_of(steps: Callable[[], float]) -> float:
    """Returns the MiB that the steps need beyond the memory in use before the first one."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    steps()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def measure() -> list[dict[str, Any]]:
    rows = []
    for compiles in (False, True):
        row: dict[str, Any] = {"ranks": dist.get_world_size(), "compiled": compiles}
        calls, losses = {}, {}
        for name in SHARDERS:
            calls[name] = make_step(name, compiles)
            losses[name] = [calls[name](), calls[name]()]
            row[f"{name}_mib"] = memory_of(calls[name])
        error = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        assert error < 0.02, f"losses must agree within 0.02, got {losses}"
        times = timing.Turns(calls, barrier=dist.barrier).of_count(ROUNDS)
        row |= {f"{name}_ms": round(1e3 * seconds / STEPS, 2) for name, seconds in times.low.items()}
        row |= {"ratio": round(times.low["ours"] / times.low["fsdp2"], 3), "loss_difference": error}
        rows.append(row)
        del calls
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return rows


def collectives_of_a_block() -> dict[str, float]:
    """Returns milliseconds to gather and to reduce the weights of a block, one by one and in one message."""
    world = dist.get_world_size()
    sizes = [parameter.numel() for parameter in Block().parameters()]

    def milliseconds(collective: Callable[..., Any], sizes: list[int], dtype: torch.dtype, gathers: bool) -> float:
        full = [torch.empty(size, dtype=dtype, device="cuda") for size in sizes]
        parts = [torch.empty(size // world, dtype=dtype, device="cuda") for size in sizes]

        def call() -> None:
            for output, given in zip(*((full, parts) if gathers else (parts, full)), strict=True):
                collective(output, given)
            torch.cuda.synchronize()

        return round(1e3 * timing.Turns({"": call}, barrier=dist.barrier).of_count(ROUNDS, 5).low[""], 2)

    found = {}
    for name, each in (("one by one", sizes), ("in one message", [sum(sizes)])):
        found[f"gather {name}"] = milliseconds(dist.all_gather_into_tensor, each, torch.bfloat16, True)
        found[f"reduce {name}"] = milliseconds(dist.reduce_scatter_tensor, each, torch.float32, False)
    return found


def run_rank(rank: int, world: int, port: int, path: str) -> None:
    if world > 1:  # ranks with different host ids may share a GPU
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_MAX_CTAS="4")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    results = {"steps": measure()}
    if world > 1:
        results["collectives_of_a_block_ms"] = collectives_of_a_block()
    if rank == 0:
        Path(path).write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=str(machine.RESULTS / "gpu_training.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {"steps": []}
    for world in (1, 2):
        with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port, path = probe.getsockname()[1], Path(folder, "rows.json")
            probe.close()
            torch.multiprocessing.spawn(run_rank, (world, port, str(path)), nprocs=world)
            found = json.loads(path.read_text())
            results = {**found, "steps": results["steps"] + found["steps"]}
        print(*found["steps"], sep="\n", flush=True)
    head = machine.describe("torch")
    head["machine"]["gpu"] = torch.cuda.get_device_name()
    machine.write(options.json, {**head, **results})


if __name__ == "__main__":
    main()
