"""The products of torchtitan's fused linear layers (`tp_gemm_backend="dist_gemm"`), on any device.

The classes have the names and arguments of autograd functions in `torchtitan.distributed.linear`. Tensors are this
rank's parts: `x` is [rows, features], weights are [out_features, in_features].
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...matmul import all_gather_matmul, matmul_reduce_scatter


class AllGatherLinear:
    """A product of rows that are gathered during the product."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, group_name: str
    ) -> torch.Tensor:
        """Returns [all rows, this rank's out_features]."""
        (y,) = _gathered(x, [weight], [bias], group)
        return y


class AllGatherLinearMulti:
    """Two products of the same rows, which are gathered once."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight_a: torch.Tensor, weight_b: torch.Tensor, group: dist.ProcessGroup, group_name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [all rows, this rank's out_features] for each weight."""
        a, b = _gathered(x, [weight_a, weight_b], [None, None], group)
        return a, b


class LinearReduceScatter:
    """A product over features that ranks share, whose rows are summed and scattered during the product."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, group_name: str
    ) -> torch.Tensor:
        """Returns [this rank's rows, out_features]."""
        features = x.shape[1] * group.size()
        y: torch.Tensor = matmul_reduce_scatter(x, weight.t(), bias, scatter_dim=0, size=features, group=group)
        return y


def _gathered(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Returns the product of all ranks' rows with each weight."""
    columns = [weight.shape[0] * group.size() for weight in weights]
    transposed = [weight.t() for weight in weights]
    return list(all_gather_matmul(x, transposed, biases, size=x.shape[0] * group.size(), columns=columns, group=group))
