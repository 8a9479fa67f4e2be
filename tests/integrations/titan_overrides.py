"""Overrides of torchtitan's configurations for the tests."""

from __future__ import annotations

from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts


@override(target=FlexAttention.Config)
def attention(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """Attention that has a backward on CPU."""
    return derive(config, ScaledDotProductAttention.Config)


@override(target=GroupedExperts.Config)
def narrow_experts(config: GroupedExperts.Config) -> GroupedExperts.Config:
    """Experts with few hidden features."""
    return derive(config, type(config), hidden_dim=64)
