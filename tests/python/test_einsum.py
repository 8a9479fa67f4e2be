"""`torch.einsum` of DTensors with views=True moves no data that need not move, forward and backward."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.debug import CommDebugMode

import dtensors
import shardwright as sw
from meshes import device, get_mesh
from pool import Pool

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import einsum_table as cases


def _texts(placed: list[Placement]) -> list[str]:
    return [f"S({placement.dim})" if isinstance(placement, Shard) else "R" for placement in placed]


def _check(equation: str, cut: cases.Cut, sizes: tuple[int, ...]) -> None:
    """Compares an einsum and its gradients with those of the global tensors."""
    terms, out = cases.terms_of(equation)
    mesh = get_mesh(sizes)
    numbers = torch.Generator().manual_seed(0)
    wholes = [torch.randn([cases.SIZES[letter] for letter in term], generator=numbers).to(device) for term in terms]
    plain = [full.clone().requires_grad_() for full in wholes]
    expected = torch.einsum(equation, *plain)
    gradient = torch.randn(expected.shape, generator=numbers).to(device)
    expected.backward(gradient)
    operands = [
        dtensors.distribute(full, mesh, _texts(cases.placements(cut, term))).requires_grad_()
        for full, term in zip(wholes, terms, strict=True)
    ]
    there = dtensors.distribute(gradient, mesh, _texts(cases.placements(cut, out)))
    with CommDebugMode() as communication, sw.debug.wire_meter() as wire:
        y = torch.einsum(equation, *operands)
        gradients = torch.autograd.grad(y, operands, there)
    said = f"{equation} cut along {cut}"
    assert communication.get_total_counts() == 0 and wire.received_bytes == 0, said
    assert list(y.placements) == cases.placements_of_result(cut, out), f"{said}: {y.placements}"
    torch.testing.assert_close(y.full_tensor(), expected.detach(), rtol=1e-4, atol=1e-4, msg=said)
    for found, operand in zip(gradients, plain, strict=True):
        assert operand.grad is not None
        torch.testing.assert_close(found.full_tensor(), operand.grad, rtol=1e-4, atol=1e-4, msg=said)


def _check_all(equation: str, sizes: tuple[int, ...]) -> None:
    with sw.enabled(strict=True, views=True):
        for cut in cases.cuts(equation, len(sizes)):
            _check(equation, cut, sizes)


QUICK = ("bikc,bjkc->bijc", "bihn,hnj->bij", "bij,bij->", "bi,bj->bij")


@pytest.mark.parametrize(
    "equation",
    [pytest.param(equation, marks=[] if equation in QUICK else pytest.mark.long) for equation in cases.EQUATIONS],
)
def test_operands_cut_by_one_mesh_dim(pool: Pool, equation: str) -> None:
    pool.run(_check_all, 2, equation, (2,))


@pytest.mark.long
@pytest.mark.parametrize("equation", cases.EQUATIONS)
def test_operands_cut_by_two_mesh_dims(pool: Pool, equation: str) -> None:
    pool.run(_check_all, 4, equation, (2, 2))
