"""Compares the linear layers of shardwright.integrations.linears and their gradients with unsharded ones on 4 ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

import shardwright as sw
from parts import part_of
from pool import Pool
from shardwright.integrations import linears as functions

WORLD = 4
# Shape of x, the sharded dim, out_features. Uneven sizes leave some ranks with less, or with nothing.
CASES = [
    ((8, 12), 0, (8, 4)),
    ((10, 12), 0, (8, 12)),
    ((7, 12), 0, (9, 13)),
    ((5, 10), 0, (5, 8)),
    ((2, 8, 12), 1, (8, 4)),
    ((2, 10, 12), 1, (8, 4)),
    ((7, 2, 13), 0, (9, 5)),
]


def _random(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    layout = sw.Layout(sw.Mesh({"group": WORLD}), tensor.shape, [f"S({dim})"])
    return part_of(tensor.detach(), layout, dist.get_rank()).clone()


def _leaf(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Returns this rank's part, or the full tensor, detached from its graph."""
    tensor = tensor.detach()
    return (tensor.clone() if dim is None else _part(tensor, dim)).requires_grad_()


def _check(
    results: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    whole_results: Sequence[torch.Tensor],
    whole_leaves: Sequence[torch.Tensor],
    result_dim: int,
    leaf_dims: Sequence[int | None],
) -> None:
    """Compares this rank's results and gradients with its parts of the unsharded ones; a dim of None is not cut."""
    for result, full in zip(results, whole_results, strict=True):
        assert_close(result, _part(full, result_dim))
    factors = [_random(full.shape, 10 + j) for j, full in enumerate(whole_results)]
    gradients = torch.autograd.grad(results, leaves, [_part(factor, result_dim) for factor in factors])
    expected = torch.autograd.grad(whole_results, whole_leaves, factors)
    for gradient, full, dim in zip(gradients, expected, leaf_dims, strict=True):
        assert_close(gradient, full if dim is None else _part(full, dim))


def _gathers(shape: tuple[int, ...], dim: int, columns: tuple[int, int]) -> None:
    group = dist.group.WORLD
    assert group is not None
    last = len(shape) - 1
    x, a, b = _random(shape, 1), _random((columns[0], shape[-1]), 2), _random((columns[1], shape[-1]), 3)
    bias = _random(columns[:1], 4)
    for tensor in (x, a, b, bias):
        tensor.requires_grad_()
    my_x, my_a, my_b, my_bias = _leaf(x, dim), _leaf(a, 0), _leaf(b, 0), _leaf(bias, 0)
    # Sizes that are the same on all ranks may be omitted.
    size = None if shape[dim] % WORLD == 0 else shape[dim]
    widths = None if all(n % WORLD == 0 for n in columns) else columns
    width = None if widths is None else widths[0]

    result = functions.all_gather_linear(
        my_x, my_a, my_bias, group, group.group_name, gather_dim=dim, size=size, out_features=width
    )
    _check([result], [my_x, my_a, my_bias], [F.linear(x, a, bias)], [x, a, bias], last, [dim, 0, 0])

    two = functions.all_gather_linear_multi(
        my_x, my_a, my_b, group, group.group_name, gather_dim=dim, size=size, out_features=widths
    )
    _check(two, [my_x, my_a, my_b], [F.linear(x, a), F.linear(x, b)], [x, a, b], last, [dim, 0, 0])

    three = functions.all_gather_linears(
        my_x, [my_a, my_b, my_a], group, gather_dim=dim, size=size, out_features=[*columns, columns[0]]
    )
    expected = [F.linear(x, a), F.linear(x, b), F.linear(x, a)]
    _check(three, [my_x, my_a, my_b], expected, [x, a, b], last, [dim, 0, 0])


def _scatters(shape: tuple[int, ...], dim: int, columns: tuple[int, int]) -> None:
    group = dist.group.WORLD
    assert group is not None
    last = len(shape) - 1
    x, weight, bias = _random(shape, 1), _random((columns[0], shape[-1]), 2), _random(columns[:1], 3)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    my_x, my_weight, my_bias = _leaf(x, last), _leaf(weight, 1), _leaf(bias)
    in_features = None if shape[-1] % WORLD == 0 else shape[-1]

    found = functions.linear_reduce_scatter(
        my_x, my_weight, my_bias, group, group.group_name, scatter_dim=dim, in_features=in_features
    )
    leaves, expected = [my_x, my_weight, my_bias], F.linear(x, weight, bias)
    _check([found], leaves, [expected], [x, weight, bias], dim, [last, 1, None])

    found = functions.linear_reduce_scatter(my_x, my_weight, None, group, scatter_dim=dim, in_features=in_features)
    _check([found], leaves[:2], [F.linear(x, weight)], [x, weight], dim, [last, 1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_gather_linears(pool: Pool, case: tuple[tuple[int, ...], int, tuple[int, int]]) -> None:
    pool.run(_gathers, WORLD, *case)


def _wrong_dims() -> None:
    x, weight, group = torch.ones(4, 6), torch.ones(5, 6), dist.group.WORLD
    for dim in (1, -1, 2, -3):
        allowed = rf"_dim must be a dim of x \(2 dims\) other than the last, got {dim}$"
        with pytest.raises(ValueError, match="gather" + allowed):
            functions.all_gather_linear(x, weight, None, group, gather_dim=dim)
        with pytest.raises(ValueError, match="scatter" + allowed):
            functions.linear_reduce_scatter(x, weight, None, group, scatter_dim=dim)


def test_wrong_dims_are_named(pool: Pool) -> None:
    pool.run(_wrong_dims, WORLD)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_reduce_scatter(pool: Pool, case: tuple[tuple[int, ...], int, tuple[int, int]]) -> None:
    pool.run(_scatters, WORLD, *case)
