"""torchtitan's feed-forward and attention on four CPU ranks, with its fused linear layers from shardwright.

    pip install torchtitan==0.3.0
    python examples/torchtitan_linear.py

Only two of torchtitan's dependencies are imported here, spmd_types==0.2.3 and tyro. With these installed, pip can
install torchtitan with --no-deps.

torchtitan hides the communication of tensor parallelism behind products (`tp_gemm_backend="dist_gemm"`) with three
autograd functions. They run only on GPUs, and only for lengths that the number of ranks divides. Here its modules run

1. unchanged, with the three functions replaced by those of shardwright.integrations.linears;
2. with forwards that take any sequence length and hidden size, and leave (batch, sequence, dim) in that order.

Results and all gradients are compared with those of the same torchtitan modules, unsharded.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

try:
    from torchtitan.distributed.linear import AllGatherLinear
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.models.common import dist_gemm
    from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear, ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.feed_forward import FeedForward, compute_ffn_hidden_dim
    from torchtitan.models.common.rope import ComplexRoPE
except ImportError as error:
    sys.exit(f"The example needs torchtitan: pip install torchtitan==0.3.0\n{error}")

from ranks import launch, over_ranks
from report import WIDTH, say, say_text
from shardwright.integrations.linears import (
    REPLACEMENTS,
    all_gather_linear,
    all_gather_linear_multi,
    all_gather_linears,
    linear_reduce_scatter,
)

NUM_RANKS = 4
BATCH = 2
DIM = 64
NUM_HEADS = 16
NUM_KV_HEADS = 8
HIDDEN = compute_ffn_hidden_dim(DIM, multiple_of=8)
UNEVEN_HIDDEN = compute_ffn_hidden_dim(DIM)
"""Llama's own rule, two thirds of 4 * dim, which four ranks do not divide: 170."""
ROW_PARALLEL = ("w2", "wo")
"""Layers whose weights are sharded in in_features. All others are sharded in out_features."""


@dataclass(frozen=True)
class Block:
    """A module of torchtitan that takes and returns (batch, sequence, dim)."""

    name: str
    config: Callable[[str], Any]
    """Returns the module's config for a `tp_gemm_backend`."""
    more_arguments: tuple[Any, ...] = ()
    """The arguments of its forward after x."""
    has_dist_gemm: bool = True
    """Whether part 1 can run it."""


def main() -> None:
    """Runs all cases."""
    start = time.perf_counter()
    launch(NUM_RANKS, on_four_ranks)
    say(f"\nThe example took {time.perf_counter() - start:.0f} seconds.")


def on_four_ranks() -> None:
    """Runs part 1 and part 2."""
    say(f"torchtitan {version('torchtitan')} on torch {torch.__version__}: {NUM_RANKS} Gloo ranks on CPU")
    say(f"\nIts own AllGatherLinear cannot run there:\n  {error_of_torchtitan()}")
    say_heading("1. torchtitan's modules for dist_gemm as they are, its three functions replaced")
    with functions_replaced():
        for block in blocks():
            if block.has_dist_gemm:
                compare(block, 8, sharded_as_torchtitan)
    say_heading("2. torchtitan's modules with forwards for any length")
    for block in blocks():
        for length in (8, 10, 7, 5):
            compare(block, length, sharded_for_any_length)
    say()
    say_text(
        "Largest absolute differences from the modules in one piece, over all ranks; torch.testing finds all results "
        "and gradients close. Lengths: of the sequence, and what each rank has of it."
    )


# ---------------------------------------------------------------------------------------- torchtitan, as it is


def blocks() -> list[Block]:
    """Returns the blocks that are compared."""
    return [
        Block(f"feed-forward, hidden {HIDDEN}", functools.partial(feed_forward_config, HIDDEN)),
        Block(
            f"feed-forward, hidden {UNEVEN_HIDDEN} (uneven)",
            functools.partial(feed_forward_config, UNEVEN_HIDDEN),
            has_dist_gemm=False,
        ),
        Block("attention, wqkv fused", functools.partial(attention_config, True, False), (None,)),
        Block("attention, wqkv fused, biases", functools.partial(attention_config, True, True), (None,)),
        Block("attention, wq wk wv", functools.partial(attention_config, False, False), (None,), has_dist_gemm=False),
    ]


def feed_forward_config(hidden: int, tp_gemm_backend: str) -> Any:
    """SwiGLU: w1, w3 and w2."""
    return make_ffn_config(
        dim=DIM, hidden_dim=hidden, w1_param_init={}, w2w3_param_init={}, tp_gemm_backend=tp_gemm_backend
    )


def attention_config(fuse_qkv: bool, bias: bool, tp_gemm_backend: str) -> Any:
    """Causal grouped-query attention with rotary positions; `bias` on wqkv and wo."""
    config = make_gqa_config(
        dim=DIM,
        n_heads=NUM_HEADS,
        n_kv_heads=NUM_KV_HEADS,
        wqkv_param_init={},
        wo_param_init={},
        inner_attention=ScaledDotProductAttention.Config(),
        rope=ComplexRoPE.Config(dim=DIM // NUM_HEADS, max_seq_len=64),
        fuse_qkv=fuse_qkv,
        tp_gemm_backend=tp_gemm_backend,
    )
    config.wo.bias = bias
    if fuse_qkv:
        config.qkv_linear.wqkv.bias = bias
    return config


def error_of_torchtitan() -> str:
    """Returns the error of its own AllGatherLinear for tensors on the CPU, raised before it communicates."""
    group = all_ranks()
    x, weight = torch.ones(2, DIM), torch.ones(2, DIM)
    try:
        AllGatherLinear.apply(x, weight, None, group, group.group_name)
    except (RuntimeError, ValueError) as error:
        return str(error).split(". ")[0]
    return "It runs."


# ------------------------------------------------------------------------------------------------ 1. functions replaced


@contextlib.contextmanager
def functions_replaced() -> Iterator[None]:
    """In the block, torchtitan's modules for dist_gemm call shardwright, on a mesh of one dim, "tp"."""
    own = {name: getattr(dist_gemm, name) for name in REPLACEMENTS}
    for name, function in REPLACEMENTS.items():
        setattr(dist_gemm, name, SimpleNamespace(apply=function))
    try:
        with set_current_spmd_mesh(init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))):
            yield
    finally:
        for name, function in own.items():
            setattr(dist_gemm, name, function)


def sharded_as_torchtitan(block: Block, unsharded: nn.Module, length: int) -> nn.Module:
    """Uses torchtitan's forwards for dist_gemm; they find the length by themselves, if it is even."""
    module = block.config("dist_gemm").build()
    take_parts(module, unsharded)
    return module


# --------------------------------------------------------------------------------------------- 2. any length


def sharded_for_any_length(block: Block, unsharded: nn.Module, length: int) -> nn.Module:
    """Uses the forwards below, for sequences of total length `length`."""
    module = block.config("default").build()
    take_parts(module, unsharded)
    for name, child in module.named_modules():
        if isinstance(child, FeedForward):
            child.forward = functools.partial(feed_forward, child, length)
        elif isinstance(child, FusedQKVLinear):
            child.forward = functools.partial(fused_qkv, child, length)
        elif isinstance(child, QKVLinear):
            child.forward = functools.partial(separate_qkv, child, length)
        elif name == "wo":
            child.forward = functools.partial(row_parallel, child)
    return module


def feed_forward(module: Any, length: int, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU of (batch, part of the sequence, dim)."""
    widths = [module.w1.out_features, module.w3.out_features]
    w1, w3 = module.w1.weight, module.w3.weight
    h1, h3 = all_gather_linear_multi(x, w1, w3, all_ranks(), gather_dim=1, size=length, out_features=widths)
    return row_parallel(module.w2, F.silu(h1) * h3)


def fused_qkv(module: Any, length: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of this rank's heads, (batch, sequence, heads, head_dim), from one weight."""
    qkv = all_gather_linear(x, module.wqkv.weight, module.wqkv.bias, all_ranks(), gather_dim=1, size=length)
    groups = qkv.unflatten(-1, (-1, module.r_dim, module.head_dim))
    return tuple(heads.flatten(2, 3) for heads in groups.split([module.heads_per_kv, 1, 1], dim=-2))


def separate_qkv(module: Any, length: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same with three weights, which share one gather."""
    weights = [module.wq.weight, module.wk.weight, module.wv.weight]
    outputs = all_gather_linears(x, weights, all_ranks(), gather_dim=1, size=length)
    return tuple(y.unflatten(-1, (-1, module.head_dim)) for y in outputs)


def row_parallel(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Maps the whole sequence with a part of the features to a part of the sequence."""
    return linear_reduce_scatter(
        x, module.weight, module.bias, all_ranks(), scatter_dim=1, in_features=module.in_features
    )


# ------------------------------------------------------------------------------------------------ parts and comparison


def all_ranks() -> dist.ProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def part_of(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Returns this rank's part by torch.chunk, which may make fewer parts than ranks; the whole if `dim` is None."""
    if dim is None:
        return tensor.clone()
    parts = tensor.chunk(NUM_RANKS, dim)
    rank = dist.get_rank()
    return (parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)).clone()


def cut_of(name: str) -> int | None:
    """Returns the dim in which a parameter is cut, by its name, such as "qkv_linear.wqkv.weight"."""
    *_, layer, kind = name.split(".")
    if layer in ROW_PARALLEL:
        return 1 if kind == "weight" else None
    return 0


def take_parts(module: nn.Module, unsharded: nn.Module) -> None:
    """Gives `module` this rank's parts of the parameters of `unsharded`."""
    for name, parameter in unsharded.named_parameters():
        path, _, kind = name.rpartition(".")
        setattr(module.get_submodule(path), kind, nn.Parameter(part_of(parameter.detach(), cut_of(name))))


def compare(block: Block, length: int, shard: Callable[[Block, nn.Module, int], nn.Module]) -> None:
    """Prints one line of the table; raises AssertionError on ranks where a result or a gradient differs."""
    torch.manual_seed(0)
    unsharded = block.config("default").build()
    x, factors = torch.randn(2, BATCH, length, DIM)
    sharded = shard(block, unsharded, length)
    expected = outcomes_of(unsharded, x, factors, block)
    found = outcomes_of(sharded, part_of(x, 1), part_of(factors, 1), block)

    differences = {"output": 0.0, "input": 0.0, "weights": 0.0}
    for name, complete in expected.items():
        actual, right = found[name], part_of(complete, 1 if name in differences else cut_of(name))
        assert_close(actual, right, msg=lambda text, name=name: f"{block.name}, length {length}, {name}: {text}")
        column = name if name in differences else "weights"
        largest = (actual - right).abs().max().item() if actual.numel() else 0.0
        differences[column] = max(differences[column], largest)
    say_row(block.name, length, over_ranks(list(differences.values()), dist.ReduceOp.MAX))


def outcomes_of(module: nn.Module, x: torch.Tensor, factors: torch.Tensor, block: Block) -> dict[str, torch.Tensor]:
    """Returns the output, and gradients by parameter name or "input"; `factors` is the gradient of the output."""
    leaves = {"input": x.detach().requires_grad_(), **dict(module.named_parameters())}
    output = module(leaves["input"], *block.more_arguments)
    gradients = torch.autograd.grad(output, list(leaves.values()), factors)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def say_heading(text: str) -> None:
    """Prints the head of a table."""
    say(f"\n{text}\n{'-' * WIDTH}")
    say(f"{'':36}{'length':>8}{'by rank':>12}{'':10}{'output':>11}{'dx':>11}{'dw':>11}")


def say_row(name: str, length: int, differences: list[float]) -> None:
    """Prints one case."""
    counts = [len(part) for part in torch.arange(length).chunk(NUM_RANKS)]
    counts += [0] * (NUM_RANKS - len(counts))
    evenness = "even" if len(set(counts)) == 1 else "uneven"
    cells = "".join(f"{value:11.1e}" for value in differences)
    say(f"{name:36}{length:>8}{' '.join(map(str, counts)):>12}   {evenness:7}{cells}")


if __name__ == "__main__":
    main()
