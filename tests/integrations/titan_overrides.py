"""Overrides of torchtitan's configurations for the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts


@override(target=FlexAttention.Config)
def attention(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """Attention that has a backward on CPU."""
    return derive(config, ScaledDotProductAttention.Config)


class DenseAttention(FlexAttention):
    """FlexAttention by matrix products, with the same mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        **options: Any,
    ) -> torch.Tensor:
        rows, queries, keys = len(q_BLNH), q_BLNH.shape[1], k_BLNH.shape[1]  # more keys with context parallelism
        mask = create_mask(attention_masks.mask_mod, rows, 1, queries, keys, device=q_BLNH.device.type)
        heads_first = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=mask, **options).transpose(1, 2)


@override(target=FlexAttention.Config)
def dense_attention(config: FlexAttention.Config) -> DenseAttention.Config:
    """FlexAttention's mask of documents, with a backward on CPU."""
    return derive(config, DenseAttention.Config)


@override(target=GroupedExperts.Config)
def narrow_experts(config: GroupedExperts.Config) -> GroupedExperts.Config:
    """Experts with few hidden features."""
    return derive(config, type(config), hidden_dim=64)
