"""Syncs weights from a trainer with FSDP2 to a running vLLM server, after each training step.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tensor-parallel-size 2 \\
        --weight-transfer-config '{"backend": "shardwright"}' \\
        --worker-extension-cls shardwright.integrations.vllm.worker.WorkerExtension
    torchrun --nproc-per-node 2 examples/vllm_weight_sync.py --model MODEL --server http://localhost:8000 --workers 2

MODEL is a folder of a Llama or another causal model of transformers. Each sync sends only what changed, from the shards
of the trainer's ranks to the parts of vLLM's workers; no weight is gathered. vLLM fuses queries, keys and values, and
packs weights on CPU: the workers' destinations are found by recording vLLM's own loader of checkpoints.

Trains a few steps on random tokens. With --save FOLDER, the trained model is saved at the end.
"""

from __future__ import annotations

import argparse
import socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import shardwright as sw
from shardwright.integrations.vllm import register
from shardwright.integrations.vllm.engines import DTensorSource, TrainerInfo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model, as passed to vllm serve")
    parser.add_argument("--server", required=True, help="URL of the server, such as http://localhost:8000")
    parser.add_argument("--workers", type=int, default=1, help="number of vLLM's workers (default: 1)")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    parser.add_argument("--save", help="folder for the trained model")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_force_sum_reduction_for_comms(True)  # Gloo has no averages
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    register()
    info = TrainerInfo(
        store_host=socket.gethostbyname("localhost"),
        store_port=_free_port(),
        world_size=dist.get_world_size() + options.workers,
        dtype="bfloat16",
        only_changed=True,
        unwritten=["model.embed_tokens.weight", "lm_head.weight"],  # vLLM pads the vocabulary
        rank=rank,
    )
    client = HTTPVLLMWeightSyncClient(options.server)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=DTensorSource(model))
    for step in range(options.steps):
        tokens = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with sw.debug.wire_meter() as meter:
            engine.send_weights()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, rank 0 sent {meter.sent_bytes:,} bytes", flush=True)
    engine.shutdown()
    if options.save:
        weights = {name: x.full_tensor() for name, x in model.state_dict().items()}
        if rank == 0:
            model.save_pretrained(options.save, state_dict={name: x.bfloat16() for name, x in weights.items()})
    dist.destroy_process_group()


def _free_port() -> int:
    """Returns a free port of rank 0's machine, on all ranks."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    return port[0]


if __name__ == "__main__":
    main()
