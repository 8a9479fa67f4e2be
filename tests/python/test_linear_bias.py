"""`sw.linear` takes a bias in any placements, pending sums included, and its gradient is placed as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

Placements = tuple[str, ...]
CASES: list[tuple[Placements, Placements, Placements]] = [  # placements of x, weight and bias on 2 x 2 ranks
    (("S(0)", "R"), ("R", "S(0)"), ("P(sum)", "S(0)")),
    (("S(0)", "R"), ("R", "R"), ("P(sum)", "P(sum)")),
    (("S(0)", "S(1)"), ("R", "S(1)"), ("R", "P(sum)")),
    (("S(0)", "R"), ("R", "S(0)"), ("S(0)", "P(avg)")),
    (("R", "R"), ("S(0)", "R"), ("P(avg)", "P(sum)")),
    (("S(0)", "R"), ("R", "S(0)"), ("P(max)", "R")),
]
# Placements of x and of the result. The weight is sharded like x along its columns, so sums are pending.
RESULTS: list[tuple[Placements, Placements]] = [
    (("S(1)", "R"), ("R", "P(avg)")),
    (("S(1)", "R"), ("P(sum)", "P(avg)")),
    (("S(1)", "R"), ("R", "P(max)")),
    (("R", "S(1)"), ("P(min)", "R")),
]


def _bias(mesh, full: torch.Tensor, placements: Placements) -> DTensor:
    """Returns a bias in which each rank has its share of a pending sum, or the value itself for other reductions."""
    share = full.clone()
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement == "P(sum)":
            share = share / size
    local = dtensors.my_local(share, mesh, ["R" if p.startswith("P") else p for p in placements])
    return dtensors.wrap(local.clone(), mesh, full.shape, placements).requires_grad_()


def _linear(x_placements: Placements, weight_placements: Placements, bias_placements: Placements) -> None:
    mesh = get_mesh((2, 2))
    torch.manual_seed(0)
    x, weight, full = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4)
    dx = distribute_tensor(x, mesh, dtensors.to_placements(x_placements))
    dw = distribute_tensor(weight, mesh, dtensors.to_placements(weight_placements))
    bias = _bias(mesh, full, bias_placements)
    y = sw.linear(dx, dw, bias)
    assert oracle.difference(y.full_tensor(), torch.nn.functional.linear(x, weight, full), rounded=True) is None
    y.sum().backward()
    assert bias.grad is not None
    assert not any(placement.is_partial() for placement in bias.grad.placements)
    assert torch.equal(bias.grad.full_tensor(), torch.full((4,), 8.0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bias_with_pending_reductions(pool: Pool, case: tuple) -> None:
    pool.run(_linear, 4, *case)


def _pending_results() -> None:
    mesh = get_mesh((2, 2))
    torch.manual_seed(0)
    x, weight, bias = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4)
    tensors = {}
    for placements, result in RESULTS:
        for name, tensor, at in (("x", x, placements), ("weight", weight, placements), ("bias", bias, ("R", "R"))):
            tensors[name] = distribute_tensor(tensor, mesh, dtensors.to_placements(at))
        y = sw.linear(**tensors, placements=dtensors.to_placements(result))
        assert y.placements == tuple(dtensors.to_placements(result))
        expected = torch.nn.functional.linear(x, weight, bias)
        assert oracle.difference(y.full_tensor(), expected, rounded=True) is None, (placements, result)
    with pytest.raises(ValueError, match=r"placements must be without pending reductions other than sum, avg, min and"):
        sw.linear(**tensors, placements=dtensors.to_placements(("R", "P(product)")))


def test_bias_with_pending_results(pool: Pool) -> None:
    pool.run(_pending_results, 4)
