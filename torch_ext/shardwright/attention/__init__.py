"""Attention over a sequence that is sharded over ranks; docs/attention.md describes it."""

from __future__ import annotations

from .context import context_parallel, context_parallel_unshard, redistribute_sequence
from .functions import Mask, explain, scaled_dot_product_attention

__all__ = [
    "Mask",
    "context_parallel",
    "context_parallel_unshard",
    "explain",
    "redistribute_sequence",
    "scaled_dot_product_attention",
]
