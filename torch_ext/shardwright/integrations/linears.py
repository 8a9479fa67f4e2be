"""torchtitan 0.3.0's linear layers with a collective inside, built on shardwright: any device, any length, any dim.

`torchtitan.distributed.linear` holds three autograd functions for sequence and tensor parallelism. The functions here
take the same arguments in the same order, followed by options that the three do not have:

    AllGatherLinear.apply(x, weight, bias, group, group_name)         all_gather_linear
    AllGatherLinearMulti.apply(x, weight, weight, group, group_name)  all_gather_linear_multi, all_gather_linears
    LinearReduceScatter.apply(x, weight, bias, group, group_name)     linear_reduce_scatter

Tensors are plain: this rank's part of a tensor that `torch.chunk` has cut over the ranks of `group`. Weights have the
shape of `torch.nn.Linear`'s, (out_features, in_features). Arguments that do not fit raise ValueError, as in
`shardwright`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..layouts.errors import argument_error
from ..matmul import all_gather_matmul, matmul_reduce_scatter


def all_gather_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Sequence[torch.Tensor | None] | None = None,
    gather_dim: int = 0,
    size: int | None = None,
    out_features: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Gathers `x` once, and applies all weights to it while it arrives.

    Args:
        x: shape (..., in_features), sharded in `gather_dim`.
        weights: of shape (out_features, in_features), sharded in dim 0. Their transposes are used without a copy.
        group: the ranks that hold the parts.
        biases: of shape (out_features,), sharded as the weights are, or None.
        gather_dim: any dim of `x` but the last.
        size: total length of `gather_dim`. All ranks must pass it if their parts differ in length, which the three
            functions do not support. Without it, all parts are assumed to have the length of this rank's part.
        out_features: total of each weight; required if ranks' parts differ.

    Returns:
        One tensor of shape (..., out_features) per weight, whole in `gather_dim` and sharded in the last dim.
    """
    _check_dim("gather_dim", gather_dim, x)
    size = x.shape[gather_dim] * group.size() if size is None else size
    if out_features is None:
        out_features = [weight.shape[0] * group.size() for weight in weights]
    return list(
        all_gather_matmul(
            x,
            [weight.t() for weight in weights],
            biases,
            gather_dim=gather_dim,
            size=size,
            columns=out_features,
            group=group,
        )
    )


def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    group_name: str | None = None,
    *,
    gather_dim: int = 0,
    size: int | None = None,
    out_features: int | None = None,
) -> torch.Tensor:
    """Calls `all_gather_linears` with one weight. `group_name` is not used."""
    columns = None if out_features is None else [out_features]
    (y,) = all_gather_linears(x, [weight], group, biases=[bias], gather_dim=gather_dim, size=size, out_features=columns)
    return y


def all_gather_linear_multi(
    x: torch.Tensor,
    weight_a: torch.Tensor,
    weight_b: torch.Tensor,
    group: dist.ProcessGroup,
    group_name: str | None = None,
    *,
    gather_dim: int = 0,
    size: int | None = None,
    out_features: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls `all_gather_linears` with two weights. `group_name` is not used."""
    weights = [weight_a, weight_b]
    a, b = all_gather_linears(x, weights, group, gather_dim=gather_dim, size=size, out_features=out_features)
    return a, b


def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    group_name: str | None = None,
    *,
    scatter_dim: int = 0,
    in_features: int | None = None,
) -> torch.Tensor:
    """Applies a weight that is sharded along in_features. Meanwhile, reduce-scatters the result along `scatter_dim`.

    Args:
        x: shape (..., in_features), sharded in the last dim.
        weight: shape (out_features, in_features), sharded in dim 1.
        bias: shape (out_features,), whole on every rank; its gradient is summed over the ranks.
        group: the ranks that hold the parts.
        group_name: not used.
        scatter_dim: any dim of `x` but the last; ranks' parts of the result may differ in length.
        in_features: the total; required if ranks' parts differ.

    Returns:
        This rank's part of shape (..., out_features).
    """
    _check_dim("scatter_dim", scatter_dim, x)
    size = x.shape[-1] * group.size() if in_features is None else in_features
    y: torch.Tensor = matmul_reduce_scatter(x, weight.t(), bias, scatter_dim=scatter_dim, size=size, group=group)
    return y


def _check_dim(name: str, dim: int, x: torch.Tensor) -> None:
    """Raises ValueError unless `dim` is a dim of `x` other than the last, which the products contract."""
    if dim % max(x.ndim, 1) == x.ndim - 1 or not -x.ndim <= dim < x.ndim:
        raise argument_error(name, f"a dim of x ({x.ndim} dims) other than the last", dim)


# By the names of torchtitan's autograd functions, whose `apply` they replace.
REPLACEMENTS = {
    "AllGatherLinear": all_gather_linear,
    "AllGatherLinearMulti": all_gather_linear_multi,
    "LinearReduceScatter": linear_reduce_scatter,
}
