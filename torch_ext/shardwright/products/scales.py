"""Scales of operands of 8-bit floats: what a caller gives, checked, and this rank's part of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from .. import _planner

_OPERANDS = (torch.float8_e4m3fn, torch.float8_e5m2)
_RESULTS = (torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """That operands are of 8-bit floats, by what, and what comes of them."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    by_row: bool
    out_dtype: torch.dtype

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.x, *self.weights)


def scaled(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    x_scale: torch.Tensor | None,
    weight_scales: torch.Tensor | Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    k_dim: int,
    names: tuple[str, str, str] = ("weight", "weight_scale", "bias"),
) -> Scaled | None:
    """What a caller said about scales, checked; None where nothing was said.

    `k_dim` is that of weights; `names` are those of the caller's arguments, for messages.
    """
    if x_scale is None and weight_scales is None:
        if out_dtype is not None:
            raise ValueError(
                f"out_dtype: {out_dtype} without scales, where the result has the dtype of x; leave it out"
            )
        if x.dtype in _OPERANDS:
            raise ValueError(f"x_scale: has to be given for x of {x.dtype}, and {names[1]} too")
        return None
    weight_names, scale_names, bias_names = (
        [f"{name}[{j}]" if name in ("weights", "weight_scales", "biases") else name for j in range(len(weights))]
        for name in names
    )
    if x_scale is None or weight_scales is None:
        missing, given = ("x_scale", names[1]) if x_scale is None else (names[1], "x_scale")
        raise ValueError(f"{missing}: has to be given where {given} is; operands are all scaled, or none")
    listed = list(weight_scales) if isinstance(weight_scales, (list, tuple)) else [weight_scales]
    if len(listed) != len(weights):
        raise ValueError(f"weight_scales: got {len(listed)} for {len(weights)} weights; allowed is one per weight")
    result = out_dtype or torch.bfloat16
    if result not in _RESULTS:
        raise ValueError(f"out_dtype: {result}; allowed with scales are {', '.join(map(str, _RESULTS))}")
    if x.ndim < 1:
        raise ValueError("x: has no dims; allowed is one or more")
    for name, weight in zip(weight_names, weights, strict=True):
        if weight.ndim != 2:
            raise ValueError(f"{name}: has shape {tuple(weight.shape)}; allowed are two dims")
    for name, tensor in (("x", x), *zip(weight_names, weights, strict=True)):
        if tensor.dtype not in _OPERANDS:
            raise ValueError(f"{name}: is {tensor.dtype}; allowed with scales are {', '.join(map(str, _OPERANDS))}")
        if x.dtype == tensor.dtype == torch.float8_e5m2 and tensor is not x:
            raise ValueError(f"{name}: is {tensor.dtype}, as x is; allowed is that for one of them")
    for name, bias in zip(bias_names, biases, strict=True):
        if bias is not None and bias.dtype != result:
            raise ValueError(f"{name}: is {bias.dtype}; allowed is what the result is, {result}")
    for name, scale in zip(("x_scale", *scale_names), (x_scale, *listed), strict=True):
        if not isinstance(scale, torch.Tensor):
            raise ValueError(f"{name}: is {scale!r}; allowed is a tensor")
    differentiable = [t for t in (x, x_scale, *weights, *listed, *biases) if t is not None and t.requires_grad]
    if differentiable and torch.is_grad_enabled():
        raise ValueError(
            f"x, {names[0]}, {names[2]} and scales: one requires a gradient; products of 8-bit floats have none"
        )
    is_of_rows = [_is_of_rows("x_scale", x_scale, x, x.ndim - 1)]
    for name, scale, weight in zip(scale_names, listed, weights, strict=True):
        is_of_rows.append(_is_of_rows(name, scale, weight, k_dim))
    return Scaled(x_scale, tuple(listed), any(is_of_rows), result)


def _is_of_rows(name: str, scale: torch.Tensor, operand: torch.Tensor, k_dim: int) -> bool:
    """Told by the number of dims, not of elements: ranks hold different numbers of rows."""
    rows = list(operand.shape)
    rows[k_dim] = 1
    if scale.dtype != torch.float32 or scale.device != operand.device:
        raise ValueError(f"{name}: is {scale.dtype} on {scale.device}; allowed is torch.float32 on {operand.device}")
    if isinstance(scale, DTensor):
        if not isinstance(operand, DTensor) or scale.device_mesh != operand.device_mesh:
            raise ValueError(f"{name}: lies on {scale.device_mesh}; allowed is where its operand lies")
        if any(placement.is_partial() or placement.is_shard(k_dim) for placement in scale.placements):
            raise ValueError(
                f"{name}: has placements {scale.placements}; allowed are Replicate() and Shard of dims but {k_dim}"
            )
    if operand.ndim > 1 and list(scale.shape) == rows and scale.ndim > 1:
        if isinstance(operand, DTensor) and not isinstance(scale, DTensor):
            raise ValueError(f"{name}: is a plain tensor of {scale.numel()} rows; allowed is a DTensor, as its operand")
        return True
    if list(scale.shape) not in ([], [1]):
        raise ValueError(
            f"{name}: has shape {tuple(scale.shape)}; allowed are (), for all of the operand, and {tuple(rows)}"
        )
    if isinstance(scale, DTensor) and any(not placement.is_replicate() for placement in scale.placements):
        raise ValueError(f"{name}: is one number with placements {scale.placements}; allowed is Replicate()")
    return False


def part_of_scale(local: torch.Tensor, layout: _planner.Layout, rank: int) -> torch.Tensor:
    """As plans take it: without dims, or one number for each row of this rank."""
    shape = tuple(layout.local_shape(rank))
    is_one = local.numel() == 1 and math.prod(shape) != 1
    return local.reshape(()).expand(shape).contiguous() if is_one else local.reshape(shape)
