"""Small random models of transformers, and one training step of them, for tests that run inside a worker."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 8}
MODELS: dict[str, tuple[type[torch.nn.Module], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True)),
    "tied llama": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, **EXPERTS)),
    "qwen3 moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, moe_intermediate_size=32)),
}


def unsharded(name: str, folder: pathlib.Path) -> Any:
    """Returns the model, the same on every rank, after saving it to the folder."""
    make, config = MODELS[name]
    torch.manual_seed(1)
    model = make(config)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)  # type: ignore[operator]
    dist.barrier()
    return model


def sharded(name: str, folder: pathlib.Path, **options: Any) -> Any:
    """Returns the model that was saved to the folder, sharded by a `DistributedConfig` of these options."""
    make: Any = MODELS[name][0]
    return make.from_pretrained(folder, distributed_config=DistributedConfig(**options))


def batch(index: int, length: int = 10) -> torch.Tensor:
    """Returns two sequences of random tokens. The length does not divide by four."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def mean_gradients(model: Any, batches: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the mean of an unsharded model's losses over batches, and the gradients of that mean by name."""
    model.zero_grad()
    mean = torch.stack([loss_of(model, ids) for ids in batches]).mean()
    mean.backward()
    return mean.item(), {name: weight.grad for name, weight in model.named_parameters()}


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
