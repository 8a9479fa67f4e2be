"""torchtitan's Llama on four CPU ranks, sharded by sw.fully_shard in place of PyTorch's FSDP2.

    pip install torchtitan==0.3.0
    python examples/torchtitan_fully_shard.py

Only two of torchtitan's dependencies are imported here, spmd_types==0.2.3 and tyro. With these installed, pip can
install torchtitan with --no-deps.

torchtitan's own `apply_fsdp_to_decoder` shards the model, once with the `fully_shard` that it imports from PyTorch and
once with ours under the same name. Both train for a few steps, and so does the unsharded model. The losses of each
step are compared: without and with tied embeddings, with 16-bit messages, and on top of tensor parallelism with the
styles of shardwright.parallel. The vocabulary and the sequence have lengths that the ranks do not divide.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

try:
    from torchtitan.distributed import fsdp
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, compute_ffn_hidden_dim
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
except ImportError as error:
    sys.exit(f"The example needs torchtitan: pip install torchtitan==0.3.0\n{error}")

import shardwright as sw
from ranks import launch
from report import WIDTH, say, say_text
from shardwright.parallel import ColwiseParallel, RowwiseParallel

NUM_RANKS = 4
NUM_STEPS = 5
BATCH = 4
DIM = 64
NUM_HEADS = 4
NUM_LAYERS = 3
HIDDEN = compute_ffn_hidden_dim(DIM)
"""Llama's own rule: 170, which four ranks do not divide."""
VOCABULARY = 1021
LENGTH = 37
STYLES = {
    "attention.qkv_linear.wq": ColwiseParallel,
    "attention.qkv_linear.wk": ColwiseParallel,
    "attention.qkv_linear.wv": ColwiseParallel,
    "attention.wo": RowwiseParallel,
    "feed_forward.w1": ColwiseParallel,
    "feed_forward.w3": ColwiseParallel,
    "feed_forward.w2": RowwiseParallel,
}


@dataclass(frozen=True)
class Case:
    """One way to train the model."""

    name: str
    is_tied: bool = False
    dtype: torch.dtype = torch.float32
    """In which weights are used and gathered; gradients are reduced in float32."""
    tensor_parallel: int = 1
    tolerance: float = 1e-5
    """Of losses, relative to those of the model in one piece."""


CASES = [
    Case("four data-parallel ranks"),
    Case("embeddings tied", is_tied=True),
    Case("weights and messages in bfloat16", dtype=torch.bfloat16, tolerance=1e-2),
    Case("two data-parallel x two tensor-parallel", tensor_parallel=2),
]


def main() -> None:
    """Runs all cases."""
    start = time.perf_counter()
    launch(NUM_RANKS, on_four_ranks)
    say(f"\nThe example took {time.perf_counter() - start:.0f} seconds.")


def on_four_ranks() -> None:
    """Trains each case three times, and prints its losses."""
    say(f"torchtitan {version('torchtitan')} on torch {torch.__version__}: {NUM_RANKS} Gloo ranks on CPU")
    say(f"\n{'losses':56}" + "".join(f"{f'step {i}':>9}" for i in range(1, NUM_STEPS + 1)))
    say("-" * WIDTH)
    for case in CASES:
        unsharded = losses(make_model(case), None, case)
        stock = losses(*sharded(case, fsdp.fully_shard), case)
        ours = losses(*sharded(case, sw.fully_shard), case)
        for name, losses_of_form in (
            (f"{case.name}: in one piece", unsharded),
            ("  FSDP2", stock),
            ("  sw.fully_shard", ours),
        ):
            say(f"{name:56}" + "".join(f"{loss:9.5f}" for loss in losses_of_form))
        torch.testing.assert_close(ours, unsharded, rtol=case.tolerance, atol=0)
        torch.testing.assert_close(ours, stock, rtol=case.tolerance, atol=0)
    say()
    say_text("All losses agree, within 1e-5 of their value in float32 and within 1% with weights in bfloat16.")


# ------------------------------------------------------------------------------------------------ the model


def make_model(case: Case) -> nn.Module:
    """Returns torchtitan's Llama with grouped queries, the same on all ranks."""
    norm = RMSNorm.Config(normalized_shape=DIM, param_init={})
    attention = make_gqa_config(
        dim=DIM,
        n_heads=NUM_HEADS,
        n_kv_heads=NUM_HEADS // 2,
        wqkv_param_init={},
        wo_param_init={},
        inner_attention=ScaledDotProductAttention.Config(),
        rope=ComplexRoPE.Config(dim=DIM // NUM_HEADS, max_seq_len=LENGTH),
    )
    feed_forward = make_ffn_config(dim=DIM, hidden_dim=HIDDEN, w1_param_init={}, w2w3_param_init={})
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm, ffn_norm=norm, attention=attention, feed_forward=feed_forward
    )
    config = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        enable_weight_tying=case.is_tied,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM, param_init={}),
        norm=norm,
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init={}),
        layers=[layer] * NUM_LAYERS,
    )
    torch.manual_seed(0)
    model = config.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def sharded(case: Case, fully_shard: Callable[..., Any]) -> tuple[nn.Module, DeviceMesh]:
    """Returns the model, sharded by torchtitan with this function, and its data-parallel mesh."""
    model = make_model(case)
    sizes = (NUM_RANKS // case.tensor_parallel, case.tensor_parallel)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))
    if case.tensor_parallel > 1:
        for layer in model.layers.values():
            parallelize_module(layer, mesh["tp"], {name: style() for name, style in STYLES.items()})
    with replaced(fully_shard):
        fsdp.apply_fsdp_to_decoder(model, mesh["fsdp"], case.dtype, torch.float32, pp_enabled=False)
    return model, mesh["fsdp"]


@contextlib.contextmanager
def replaced(fully_shard: Callable[..., Any]) -> Iterator[None]:
    """In the block, torchtitan calls this function, and gradients are averaged.

    By default it requires sums and divides losses by the number of tokens, which FSDP2 cannot do on Gloo.
    """
    own = fsdp.fully_shard, fsdp.disable_fsdp_gradient_division
    fsdp.fully_shard, fsdp.disable_fsdp_gradient_division = fully_shard, lambda model: None
    try:
        yield
    finally:
        fsdp.fully_shard, fsdp.disable_fsdp_gradient_division = own


# ------------------------------------------------------------------------------------------------ training


def losses(model: nn.Module, mesh: DeviceMesh | None, case: Case) -> list[float]:
    """Trains on one batch, and returns the mean loss before each step. `mesh` is None for the unsharded model."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    if mesh is not None:
        tokens = tokens.chunk(mesh.size())[mesh.get_local_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(NUM_STEPS):
        with torch.autocast("cpu", case.dtype, enabled=mesh is None and case.dtype != torch.float32):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    return found


if __name__ == "__main__":
    main()
