"""Matrix products that overlap with communication: linear, all-gather-matmul, matmul-reduce-scatter, matmul-all-reduce.

All of them take DTensors with any placements and return the placements that are asked for; all but `linear` also take
this rank's plain tensors in a process group. Data moves in chunks, and some chunks are multiplied while others are
under way. The schedule is chosen by predicted time, or by the caller. Gradients move in chunks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import groups
from .._planner import GemmModel
from .graphs import goes_into_graphs
from .running import Setting
from .scales import Scaled, scaled
from .tensors import Asked, PlainGroup, autocast, multiply_dtensors

__all__ = ["all_gather_matmul", "linear", "matmul_all_reduce", "matmul_reduce_scatter"]

_SAVES = ("shard", "gathered")
# Method, chunks, depth, what is saved, table of products, as users say them.
How = tuple[str | None, int | Sequence[Sequence[int]] | None, int | None, str, GemmModel | None]
# Letters of the dims of an operand in front of the last, which is k; the weight's own is n.
_ROWS = "abcdefghij"


@goes_into_graphs
def linear(
    x: DTensor,
    weight: DTensor,
    bias: DTensor | None = None,
    *,
    placements: Sequence[Placement] | None = None,
    method: str | None = None,
    chunks: int | Sequence[Sequence[int]] | None = None,
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
        placements: the placements of the result. By default, along each mesh dim: ``Shard(-1)`` if `weight` is cut in
            dim 0; otherwise `x`'s placement if it is cut in a dim other than the last; a pending sum if both are cut
            along in_features; otherwise ``Replicate()``.
        method: ``"ring"``: each part is multiplied as it arrives, this rank's own part first. ``"collective"``: several
            collectives, each of a share of every part. ``"serial"``: communication and product one after the other.
            Default: the method predicted to be fastest.
        chunks: their number; or for a ring the distances of each chunk, in the order in which they are sent, such as
            ``[[1], [3, 2]]`` on four ranks (from the i-th of n ranks, distance d leads to the (i + d)-th, modulo n).
            Default: what is predicted to be fastest.
        depth: how many transfers may be under way during a product, 1 to 4096; as many as there are chunks, or more,
            means all. A gather holds one chunk more than that in memory. Default: what is predicted to be fastest of 1,
            3 and all, the last only if it takes no more memory than ``"serial"``.
        save: what the backward keeps of an `x` that was gathered: ``"shard"``, the part that was given, which is
            gathered again during the product that needs it; or ``"gathered"``, all of it, which takes more memory.
        gemm_model: how long products take, the same on every rank. Default: what `calibrate` measured, else ``"cpu"``
            or ``"h100"``.
        x_scale, weight_scale: float32 factors of operands of float8_e4m3fn or float8_e5m2 (not both e5m2). With shape
            () or (1,), one factor for the whole tensor, the same on all ranks. With shape (..., 1) for `x` and
            (out_features, 1) for `weight`, DTensors with one factor per row, which move with their rows.
        out_dtype: with scales, the dtype of the result and the bias: torch.bfloat16 (default) or torch.float32.

    Returns:
        A DTensor of shape (..., out_features). It is differentiable once; with scales, it is not.

    Raises:
        ValueError: names the argument that does not fit; a `method`, `chunks` or `depth` that is not possible.
        torch.distributed.DistBackendError: a transfer failed or timed out.
    """
    scales = scaled(x, [weight], [bias], x_scale, weight_scale, out_dtype, k_dim=1)
    how = (method, chunks, depth, save, gemm_model)
    return _linear(x, weight, bias, placements, how, scales)[0]


def linear_sharing(
    x: DTensor,
    weight: DTensor,
    bias: DTensor | None = None,
    *,
    placements: Sequence[Placement] | None = None,
    method: str | None = None,
    chunks: int | Sequence[Sequence[int]] | None = None,
    depth: int | None = None,
) -> tuple[DTensor, DTensor | None]:
    """Returns the result of `linear`, and the gathered `x` for other layers of the same input (None if not gathered).

    The gradient of the gathered `x` is scattered together with the gradient of this layer.
    """
    y, *gathered = _linear(x, weight, bias, placements, (method, chunks, depth, "gathered", None), None, shares=True)
    return y, gathered[0] if gathered else None


def _linear(
    x: DTensor,
    weight: DTensor,
    bias: DTensor | None,
    placements: Sequence[Placement] | None,
    how: How,
    scales: Scaled | None,
    shares: bool = False,
) -> list[DTensor]:
    if scales is None:
        x, weight, bias = autocast(x, weight, bias)
    _check_dtensors({"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}, scales)
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight: has shape {tuple(weight.shape)} where x has {tuple(x.shape)}; allowed is (out_features, "
            f"{x.shape[-1] if x.ndim else 'in_features'})"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: has shape {tuple(bias.shape)}; allowed is ({weight.shape[0]},)")
    asked = Asked(_axes(x.ndim, "nk"), _checked(placements, x), None, False, _setting(x, how), shares)
    return multiply_dtensors(asked, x, [weight], [bias], scales)


@goes_into_graphs
def all_gather_matmul(
    x: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    biases: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    gather_dim: int = 0,
    size: int | None = None,
    columns: int | Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    placements: Sequence[Placement] | None = None,
    method: str | None = None,
    chunks: int | Sequence[Sequence[int]] | None = None,
    depth: int | None = None,
    save: str = "shard",
    gemm_model: GemmModel | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scales: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Gathers `x`, and multiplies it by one or several weights meanwhile. The gathered `x` need not exist as a whole.

    Plain tensors belong to a process group: `x` is cut in `gather_dim`, weights and results in their columns, by rank
    as torch.chunk cuts. DTensors bring their placements: `x` is gathered along the mesh dims that cut `x` before its
    last dim and a weight in its columns.

    Args:
        x: shape (..., k). Plain: this rank's part.
        weights: one of shape (k, n), or a list of them, which share the gather; transposed views are not copied. Plain:
            this rank's columns.
        biases: of shape (n,), one per weight, or None; cut like the columns.
        gather_dim: for plain tensors: the dim of `x` that is cut; the last dim is the summed one.
        size: for plain tensors on several ranks: the total length of `gather_dim`. It is required, because a rank
            cannot know what others hold.
        columns: for plain tensors on several ranks: the total number of columns of each weight.
        group: for plain tensors: the process group; default: the default group.
        placements: for DTensors: the placements of the results; default: as in `linear`.
        method, chunks, depth, save, gemm_model: as in `linear`.
        x_scale, weight_scales, out_dtype: as in `linear`, with one scale per weight, by row of shape (1, n). Plain:
            those of this rank's parts; a single scale of `x` must be the same on all ranks.

    Returns:
        The product, or a list of them if a list was given. It is differentiable once; with scales, it is not.

    Raises:
        ValueError: names the argument that does not fit.
    """
    many = not isinstance(weights, torch.Tensor)
    listed = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    if not listed:
        raise ValueError("weights: got none; allowed is one or more")
    added: list[torch.Tensor | None] = [None] * len(listed)
    if biases is not None:
        added = [biases] if isinstance(biases, torch.Tensor) else list(biases)
    if len(added) != len(listed):
        raise ValueError(f"biases: got {len(added)} for {len(listed)} weights; allowed is one per weight")
    scales = scaled(
        x, listed, added, x_scale, weight_scales, out_dtype, k_dim=0, names=("weights", "weight_scales", "biases")
    )
    if scales is None:
        x, *others = autocast(x, *listed, *added)
        listed, added = others[: len(listed)], others[len(listed) :]
    if isinstance(x, DTensor):
        axes = _axes(x.ndim, "kn")
        _check_weights(x, listed, scales)
        setting = _setting(x, (method, chunks, depth, save, gemm_model))
        asked = Asked(axes, _checked(placements, x), None, True, setting)
        _check_dtensors({"x": x, **{f"biases[{j}]": bias for j, bias in enumerate(added) if bias is not None}}, scales)
        outputs: list[Any] = multiply_dtensors(asked, x, listed, added, scales)
        return outputs if many else outputs[0]
    where = PlainGroup(_setting(x, (method, chunks, depth, save, gemm_model), group), x.dtype)
    gather_dim = _dim(gather_dim, x, "gather_dim")
    _check_weights(x, listed, scales, k_is_cut=gather_dim == x.ndim - 1)
    shape = list(x.shape)
    shape[gather_dim] = where.total(size, x.shape[gather_dim], "size", f"the length of dim {gather_dim} of x")
    totals = [columns] * len(listed) if columns is None or isinstance(columns, int) else list(columns)
    if len(totals) != len(listed):
        raise ValueError(f"columns: got {len(totals)} for {len(listed)} weights; allowed is one per weight")
    held, results = [], []
    for weight, said in zip(listed, totals, strict=True):
        total = where.total(said, weight.shape[1], "columns", "the number of columns")
        held.append((weight, where.layout([shape[-1], total], "S(1)", weight.dtype)))
        results.append(where.layout([*shape[:-1], total], f"S({x.ndim - 1})", scales and scales.out_dtype))
    operand = (x, where.layout(shape, f"S({gather_dim})"))
    outputs = where.multiply(_axes(x.ndim, "kn"), operand, held, results, "n", added, "S(0)", scales)
    return outputs if many else outputs[0]


@goes_into_graphs
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scatter_dim: int = 0,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
    placements: Sequence[Placement] | None = None,
    method: str | None = None,
    chunks: int | Sequence[Sequence[int]] | None = None,
    depth: int | None = None,
    gemm_model: GemmModel | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Multiplies operands that are cut along the summed axis, and reduces and scatters the result meanwhile.

    Args:
        x: shape (..., k). Plain: this rank's part, cut in the last dim by rank as torch.chunk cuts.
        weight: shape (k, n). Plain: this rank's rows.
        bias: shape (n,), added once, after the sums. Plain: whole on every rank, and so is its gradient.
        scatter_dim: the dim of the result that is cut.
        size: for plain tensors on several ranks: the total length of k. It is required, because a rank cannot know what
            others hold.
        group: for plain tensors: the process group; default: the default group.
        placements: for DTensors: the placements of the result; default: ``Shard(scatter_dim)`` on the mesh dims that
            cut k in both operands.
        method, chunks, depth, gemm_model: as in `linear`.
        x_scale, weight_scale, out_dtype: as in `linear`, by row of shape (1, n) for `weight`. Plain: those of this
            rank's parts, which may differ from other ranks'. Sums over ranks have dtype `out_dtype`.

    Returns:
        This rank's part of the product of shape (..., n), cut in `scatter_dim`; or a DTensor. It is differentiable
        once; with scales, it is not.

    Raises:
        ValueError: names the argument that does not fit.
    """
    scales = scaled(x, [weight], [bias], x_scale, weight_scale, out_dtype, k_dim=0)
    how = (method, chunks, depth, "shard", gemm_model)
    return _sum_matmul(x, weight, bias, scatter_dim, size, group, placements, how, scales)


@goes_into_graphs
def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
    method: str | None = None,
    chunks: int | Sequence[Sequence[int]] | None = None,
    depth: int | None = None,
    gemm_model: GemmModel | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """`matmul_reduce_scatter` with all of the result on every rank."""
    scales = scaled(x, [weight], [bias], x_scale, weight_scale, out_dtype, k_dim=0)
    return _sum_matmul(x, weight, bias, None, size, group, None, (method, chunks, depth, "shard", gemm_model), scales)


def _sum_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int | None,
    size: int | None,
    group: dist.ProcessGroup | None,
    placements: Sequence[Placement] | None,
    how: How,
    scales: Scaled | None,
) -> Any:
    if scales is None:
        x, weight, bias = autocast(x, weight, bias)
    axes = _axes(x.ndim, "kn")
    if scatter_dim is not None:
        scatter_dim = _dim(scatter_dim, x, "scatter_dim")
    if isinstance(x, DTensor):
        _check_weights(x, [weight], scales)
        sums_to = Replicate() if scatter_dim is None else Shard(scatter_dim)
        setting = _setting(x, how)
        _check_dtensors({"x": x, **({} if bias is None else {"bias": bias})}, scales)
        asked = Asked(axes, _checked(placements, x), sums_to, True, setting)
        return multiply_dtensors(asked, x, [weight], [bias], scales)[0]
    where = PlainGroup(_setting(x, how, group), x.dtype)
    _check_weights(x, [weight], scales)
    k = where.total(size, x.shape[-1], "size", "the length of the last dim of x")
    to = "R" if scatter_dim is None else f"S({scatter_dim})"
    result = where.layout([*x.shape[:-1], weight.shape[1]], to, scales and scales.out_dtype)
    operand = (x, where.layout([*x.shape[:-1], k], f"S({x.ndim - 1})"))
    held = (weight, where.layout([k, weight.shape[1]], "S(0)", weight.dtype))
    return where.multiply(axes, operand, [held], [result], "k", [bias], "R", scales)[0]


def _axes(ndim: int, weight: str) -> str:
    if not 1 <= ndim <= len(_ROWS):
        raise ValueError(f"x: has {ndim} dims; allowed are 1 to {len(_ROWS)}")
    rows = _ROWS[: ndim - 1]
    return f"{rows}k,{weight}->{rows}n"


def _dim(dim: int, x: torch.Tensor, argument: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{argument}: {dim} is no dim of x, which has {x.ndim}; allowed are {-x.ndim} to {x.ndim - 1}")
    return dim % x.ndim


def _check_dtensors(tensors: dict[str, Any], scales: Scaled | None = None) -> None:
    x = tensors["x"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            raise ValueError(f"{name}: got a {type(tensor).__name__}; allowed is a DTensor, as all others")
        if tensor.device_mesh != x.device_mesh:
            raise ValueError(f"{name}: lies on {tensor.device_mesh}, x on {x.device_mesh}; allowed is one mesh")
        if tensor.dtype != x.dtype and scales is None:
            raise ValueError(f"{name}: has dtype {tensor.dtype}, x {x.dtype}; allowed is one dtype")


def _check_weights(
    x: torch.Tensor, weights: Sequence[torch.Tensor], scales: Scaled | None, k_is_cut: bool = False
) -> None:
    if isinstance(x, DTensor):
        _check_dtensors({"x": x, **{f"weights[{j}]": weight for j, weight in enumerate(weights)}}, scales)
    for j, weight in enumerate(weights):
        if isinstance(weight, DTensor) and not isinstance(x, DTensor):
            raise ValueError(f"weights[{j}]: is a DTensor where x is plain; allowed are all of one kind")
        if weight.ndim != 2 or (weight.shape[0] != x.shape[-1] and not k_is_cut):
            raise ValueError(
                f"weights[{j}]: has shape {tuple(weight.shape)} where x has {tuple(x.shape)}; allowed is "
                f"({x.shape[-1]}, n)"
            )
        if (weight.dtype != x.dtype and scales is None) or weight.device != x.device:
            raise ValueError(
                f"weights[{j}]: is {weight.dtype} on {weight.device}, x {x.dtype} on {x.device}; allowed is the same"
            )


def _checked(placements: Sequence[Placement] | None, x: DTensor) -> tuple[Placement, ...] | None:
    if placements is None:
        return None
    if len(placements) != x.device_mesh.ndim:
        raise ValueError(
            f"placements: got {len(placements)} for a mesh of {x.device_mesh.ndim} dims; allowed is one per mesh dim"
        )
    return tuple(Shard(p.dim % x.ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)


def _setting(x: torch.Tensor, how: How, group: dist.ProcessGroup | None = None) -> Setting:
    method, chunks, depth, save, gemm_model = how
    groups.check_initialised()
    if method not in (None, "serial", "ring", "collective"):
        raise ValueError(f"method: {method!r}; allowed are 'serial', 'ring' and 'collective'")
    if isinstance(chunks, int) and not 1 <= chunks <= 4096:
        raise ValueError(f"chunks: {chunks}; allowed are 1 to 4096, or the distances of each chunk of a ring")
    most = 1 if method == "serial" else 4096
    if depth is not None and not (isinstance(depth, int) and 1 <= depth <= most):
        raise ValueError(f"depth: {depth!r} with method {method!r}; allowed are 1 to {most}")
    if save not in _SAVES:
        raise ValueError(f"save: {save!r}; allowed are {', '.join(map(repr, _SAVES))}")
    if not x.dtype.is_floating_point:
        raise ValueError(f"x: has dtype {x.dtype}; allowed are floating dtypes")
    mesh = x.device_mesh if isinstance(x, DTensor) else None
    by_hand = chunks if chunks is None or isinstance(chunks, int) else tuple(tuple(one) for one in chunks)
    return Setting(x.device.type, groups.weakly(group), mesh, method, by_hand, depth, gemm_model, save == "gathered")
