"""Matrix products that overlap with communication: linear, all-gather-matmul, matmul-reduce-scatter, matmul-all-reduce.

All of them take DTensors with any placements and return the requested placements; all but `linear` also take this
rank's plain tensors in a process group. Data moves in chunks, and some chunks are multiplied while others are in
flight. The schedule is chosen by predicted time, or by the caller. Gradients move in chunks too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from .._planner import GemmModel
from .graphs import multiply

__all__ = ["all_gather_matmul", "linear", "matmul_all_reduce", "matmul_reduce_scatter"]

Chunks = int | Sequence[Sequence[int]] | None  # see `chunks` of `linear`


def linear(
    x: DTensor,
    weight: DTensor,
    bias: DTensor | None = None,
    *,
    placements: Sequence[Placement] | None = None,
    method: str | None = None,
    chunks: Chunks = None,
    depth: int | None = None,
    save: str = "shard",
    gemm_model: GemmModel | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> DTensor:
    """`torch.nn.functional.linear` of DTensors on one mesh, with communication that overlaps with the product.

    Args:
        x: shape (..., in_features), any placements.
        weight: shape (out_features, in_features), any placements, the dtype of `x`.
        bias: shape (out_features,), any placements.
        placements: the placements of the result. By default, along each mesh dim: ``Shard(-1)`` if `weight` is sharded
            in dim 0; otherwise `x`'s placement if it is sharded in a dim other than the last; a pending sum if both are
            sharded along in_features; otherwise ``Replicate()``.
        method: ``"ring"``: each part is multiplied as it arrives, this rank's own part first. ``"collective"``: several
            collectives, each of a share of every part. ``"serial"``: communication and product one after the other.
            ``"flags"``: one product that waits for the chunks of a gather (docs/gpu.md); never the default.
            Default: the method predicted to be fastest.
        chunks: the number of chunks, 1 to 4096; or for a ring the distances of each chunk, in the order in which they
            are sent, such as ``[[1], [3, 2]]`` on four ranks (distance d leads from rank i of n to rank (i + d) mod n).
            Default: the value predicted to be fastest.
        depth: the number of transfers in flight during a product, 1 to 4096; the number of chunks or more means all. A
            gather holds one chunk more than that in memory; a sum holds as many blocks of the product that wait to be
            sent. Default: the fastest of 1, 3 and all by prediction, where all is considered only if it takes no more
            memory than ``"serial"``.
        save: the form in which the backward keeps a gathered `x`: ``"shard"``, this rank's part, which is gathered
            again during the product that needs it; or ``"gathered"``, all of it, which takes more memory.
        gemm_model: the predicted times of products, the same on every rank. Default: the measurements of `calibrate`,
            else ``"cpu"`` or ``"h100"``.
        x_scale, weight_scale: float32 factors of operands of float8_e4m3fn or float8_e5m2 (not both e5m2). With shape
            () or (1,), one factor for the entire tensor, the same on all ranks. With shape (..., 1) for `x` and
            (out_features, 1) for `weight`, DTensors with one factor per row, which move with their rows.
        out_dtype: with scales, the dtype of the result and the bias: torch.bfloat16 (default) or torch.float32.

    Returns:
        A DTensor of shape (..., out_features). It is differentiable once; with scales, it is not. The gradient of `x`
        has pending sums over the mesh dims on which `x` is replicated, as in PyTorch.

    Raises:
        ValueError: an argument is invalid, or a `method`, `chunks` or `depth` is not possible; names the argument.
        torch.distributed.DistBackendError: a transfer failed or timed out.
    """
    options: dict[str, Any] = {"placements": placements, "method": method, "chunks": chunks, "depth": depth}
    options |= {"save": save, "gemm_model": gemm_model, "out_dtype": out_dtype}
    y: DTensor = multiply("linear", x, [weight], [bias], [x_scale, weight_scale], **options)[0]
    return y


def all_gather_matmul(
    x: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    biases: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    gather_dim: int = 0,
    size: int | Sequence[int] | None = None,
    columns: int | Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    placements: Sequence[Placement] | None = None,
    method: str | None = None,
    chunks: Chunks = None,
    depth: int | None = None,
    save: str = "shard",
    gemm_model: GemmModel | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scales: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Gathers `x`, and multiplies each received chunk by one or several weights. The full `x` need not exist.

    Plain tensors belong to a process group: `x` is sharded in `gather_dim`, weights and results in their columns, as
    torch.chunk cuts them by rank. DTensors have their own placements: `x` is gathered along the mesh dims that cut `x`
    before its last dim and a weight in its columns.

    Args:
        x: shape (..., k). Plain: this rank's part.
        weights: one of shape (k, n), or a list of them, which share the gather; transposed views are not copied. Plain:
            this rank's columns.
        biases: of shape (n,), one per weight, or None; sharded like the columns.
        gather_dim: for plain tensors: the dim of `x` that is sharded; the last dim is the contracted one.
        size: for plain tensors on several ranks: the total length of `gather_dim`, which is sharded as by torch.chunk,
            or the length on each rank. It is required, because a rank cannot see the lengths of others.
        columns: for plain tensors on several ranks: the total number of columns of each weight.
        group: for plain tensors: the process group; default: the default group.
        placements: for DTensors: the placements of the results; default: as in `linear`.
        method, chunks, depth, save, gemm_model: as in `linear`.
        x_scale, weight_scales, out_dtype: as in `linear`, with one scale per weight, of shape (1, n) for a factor per
            column. Plain: the scales of this rank's parts; a single scale of `x` must be the same on all ranks.

    Returns:
        The product, or a list of them if a list was given. It is differentiable once; with scales, it is not.

    Raises:
        ValueError: an argument is invalid; names the argument.
    """
    by_weight = _listed(weights)
    added = [None] * len(by_weight) if biases is None else _listed(biases)
    options = {"method": method, "chunks": chunks, "depth": depth, "save": save, "gemm_model": gemm_model}
    sizes = {"dim": gather_dim, "size": size, "columns": columns, "out_dtype": out_dtype}
    scales = [x_scale, *_listed(weight_scales)]
    results = multiply("gather", x, by_weight, added, scales, placements=placements, group=group, **sizes, **options)
    return results[0] if isinstance(weights, torch.Tensor) else results


def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scatter_dim: int = 0,
    size: int | Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    placements: Sequence[Placement] | None = None,
    method: str | None = None,
    chunks: Chunks = None,
    depth: int | None = None,
    gemm_model: GemmModel | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Multiplies operands that are sharded along the contracted dim, and reduce-scatters the result during the matmul.

    Args:
        x: shape (..., k). Plain: this rank's part, sharded in the last dim.
        weight: shape (k, n). Plain: this rank's rows.
        bias: shape (n,), added once, after the sums. Plain: replicated on every rank, and so is its gradient.
        scatter_dim: the dim of the result that is sharded.
        size: for plain tensors on several ranks: the total length of k, which is sharded as by torch.chunk, or the
            length on each rank. It is required, because a rank cannot see the lengths of others.
        group: for plain tensors: the process group; default: the default group.
        placements: for DTensors: the placements of the result; default: ``Shard(scatter_dim)`` on the mesh dims that
            cut k in both operands.
        method, chunks, depth, gemm_model: as in `linear`.
        x_scale, weight_scale, out_dtype: as in `linear`, with shape (1, n) for a factor per column of `weight`. Plain:
            the scales of this rank's parts, which may differ among ranks. Sums over ranks have dtype `out_dtype`.

    Returns:
        This rank's part of the product of shape (..., n), sharded in `scatter_dim`; or a DTensor. It is differentiable
        once; with scales, it is not.

    Raises:
        ValueError: an argument is invalid; names the argument.
    """
    options = {"method": method, "chunks": chunks, "depth": depth, "gemm_model": gemm_model, "out_dtype": out_dtype}
    where = {"dim": scatter_dim, "size": size, "placements": placements, "group": group}
    return multiply("sum", x, [weight], [bias], [x_scale, weight_scale], **where, **options)[0]


def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    size: int | Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    method: str | None = None,
    chunks: Chunks = None,
    depth: int | None = None,
    gemm_model: GemmModel | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """`matmul_reduce_scatter` with the full result on every rank."""
    options = {"method": method, "chunks": chunks, "depth": depth, "gemm_model": gemm_model, "out_dtype": out_dtype}
    return multiply("sum", x, [weight], [bias], [x_scale, weight_scale], size=size, group=group, **options)[0]


def _listed(value: Any) -> list[Any]:
    """Returns an argument as a list. A tensor or None becomes a list of one item."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, torch.Tensor) else [value]
