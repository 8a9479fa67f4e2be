"""A small Llama (RMSNorm, rotary attention, SwiGLU), its tensor- and sequence-parallel plan, and its training text."""

import importlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

ALPHABET = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
"""Newline, printable ASCII, and one character for all others: 97 characters."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `hidden` is Llama's own rule, two thirds of 4 * dim, without rounding to a multiple."""

    dim: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_characters: int = len(ALPHABET)

    @property
    def hidden(self) -> int:
        """Width of the feed-forward block: 682 for dim 256, which two ranks divide and four do not."""
        return int(2 * 4 * self.dim / 3)


def read_text() -> str:
    """Returns the Python language reference and license that ship with the running Python."""
    parts = []
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if licence.is_file():
        parts.append(licence.read_text(encoding="utf-8", errors="replace"))
    try:
        parts += importlib.import_module("pydoc_data.topics").topics.values()
    except ImportError:  # some distributions leave the reference out; docstrings are always there
        names = ("argparse", "builtins", "collections", "decimal", "difflib", "random", "statistics", "typing")
        for name in names:
            members = vars(importlib.import_module(name)).values()
            parts += [text for member in members if isinstance(text := getattr(member, "__doc__", None), str)]
    return "\n\n".join(parts)


def encode(text: str) -> torch.Tensor:
    """Returns the text as indices into ALPHABET: int64, one per character."""
    index_of = {character: index for index, character in enumerate(ALPHABET)}
    return torch.tensor([index_of.get(character, len(ALPHABET) - 1) for character in text])


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Under tensor parallelism each rank computes its own heads."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (sequence, batch, dim) to the same shape; q, k and v are plain tensors of this rank's heads."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for w in (self.wq, self.wk, self.wv))
        heads = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.wo(heads.permute(2, 0, 1, 3).flatten(2))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, sequence, head_dim)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sequence, batch, dim) to the same."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One Llama block."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sequence, batch, dim) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """A language model over ALPHABET."""

    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(config.num_characters, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.num_characters, bias=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """int64 (sequence, batch) to logits (sequence, batch, characters)."""
        x = self.embedding(characters)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: Llama, tp_mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism with PyTorch's own styles.

    Between the matrices, activations are DTensors sharded along the sequence, evenly or not. The sequence is
    tensor dim 0, as in Megatron: nn.Linear of torch 2.11 does not accept the result of an uneven gather along dim 1.
    """
    cut_sequence = Shard(0)
    gather_sequence = PrepareModuleInput(
        input_layouts=(cut_sequence,), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    scatter_sequence = RowwiseParallel(output_layouts=cut_sequence, use_local_output=False)
    styles = {
        "embedding": ColwiseParallel(output_layouts=cut_sequence, use_local_output=False),
        "norm": SequenceParallel(sequence_dim=0),
        "head": ColwiseParallel(input_layouts=cut_sequence, output_layouts=Replicate()),
    }
    block_styles = {
        "attention_norm": SequenceParallel(sequence_dim=0),
        "attention": gather_sequence,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": scatter_sequence,
        "feed_forward_norm": SequenceParallel(sequence_dim=0),
        "feed_forward": gather_sequence,
        "feed_forward.w1": ColwiseParallel(use_local_output=False),
        "feed_forward.w3": ColwiseParallel(use_local_output=False),
        "feed_forward.w2": scatter_sequence,
    }
    for layer in range(len(model.blocks)):
        styles |= {f"blocks.{layer}.{name}": style for name, style in block_styles.items()}
    parallelize_module(model, tp_mesh, styles)
