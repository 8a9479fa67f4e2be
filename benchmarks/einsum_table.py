#!/usr/bin/env python3
"""What `torch.einsum` of DTensors moves, forward and backward, where nothing has to: stock and ``views=True``.

    python benchmarks/einsum_table.py

Prints Markdown. The cases are all ways in which one or two mesh dims cut letters of these equations, in all operands
that have the letter, so that every rank can compute its part of the result, or its summand, from what it holds. One
process stands for all ranks: it uses torch's fake process group, and counts what collectives would receive.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw

SIZES = {"b": 4, "c": 8, "d": 4, "i": 12, "j": 4, "k": 8, "n": 4, "h": 8}

EQUATIONS = {
    "ij,jk->ik": "a product",
    "bij,bjk->bik": "a batch of products",
    "bicd,bjcd->bcij": "scores of attention",
    "bcij,bjcd->bicd": "what they weigh",
    "bikc,bjkc->bijc": "a triangle multiplication, outgoing",
    "bkic,bkjc->bijc": "the same, incoming",
    "bij,hnj->bihn": "a projection to heads",
    "bihn,hnj->bij": "and from them",
    "bij,bij->": "an inner product",
    "bi,bj->bij": "an outer product",
    "bijc,c->bij": "a product with a vector",
}

Cut = tuple[str | None, ...]


def terms_of(equation: str) -> tuple[list[str], str]:
    terms, out = equation.split("->")
    return terms.split(","), out


def cuts(equation: str, mesh_ndim: int) -> Iterator[Cut]:
    """What each mesh dim cuts: a letter, or nothing."""
    letters = sorted({letter for term in terms_of(equation)[0] for letter in term})
    for chosen in itertools.product([None, *letters], repeat=mesh_ndim):
        if any(letter is not None for letter in chosen):
            yield chosen


def placements(cut: Cut, term: str) -> list[Placement]:
    """How an operand, or the gradient of the result, is placed."""
    return [Shard(term.index(letter)) if letter is not None and letter in term else Replicate() for letter in cut]


def placements_of_result(cut: Cut, out: str) -> list[Placement]:
    sums = [letter is not None and letter not in out for letter in cut]
    return [Partial() if is_sum else one for is_sum, one in zip(sums, placements(cut, out), strict=True)]


# How often a rank receives the other ranks' share of the larger of what goes in and what comes out.
TIMES_RECEIVED = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1, "all_reduce": 2}


class Received(TorchDispatchMode):
    """Counts the bytes that a rank receives in PyTorch's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the parts
        result = func(*args, **(kwargs or {}))
        _, _, name = str(func).partition("_c10d_functional.")
        for collective, times in TIMES_RECEIVED.items():
            if name.startswith(collective):
                ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
                self.bytes += times * max(args[0].nbytes, result.nbytes) * (ranks - 1) // ranks
        return result


def outcome(equation: str, cut: Cut, mesh: DeviceMesh) -> tuple[str, int]:
    terms, out = terms_of(equation)

    def made(term: str, placed: list[Placement]) -> DTensor:
        shape = [SIZES[letter] for letter in term]
        for mesh_dim, placement in enumerate(placed):
            if isinstance(placement, Shard):
                shape[placement.dim] //= mesh.size(mesh_dim)
        return DTensor.from_local(torch.zeros(shape), mesh, placed, run_check=False)

    operands = [made(term, placements(cut, term)).detach().requires_grad_() for term in terms]
    gradient = made(out, placements(cut, out))
    with Received() as received:
        try:
            torch.autograd.grad(torch.einsum(equation, *operands), operands, gradient)
        except (RuntimeError, AssertionError, ValueError, NotImplementedError):
            return "refuses", 0
    return ("moves", received.bytes) if received.bytes else ("free", 0)


def count(equation: str) -> tuple[collections.Counter[str], int]:
    outcomes: collections.Counter[str] = collections.Counter()
    moved = 0
    for sizes in ((2,), (2, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        for cut in cuts(equation, len(sizes)):
            what, received_bytes = outcome(equation, cut, mesh)
            outcomes[what] += 1
            moved += received_bytes
    return outcomes, moved


def shown(found: tuple[collections.Counter[str], int]) -> str:
    outcomes, moved = found
    return f"{outcomes['free']} / {outcomes['moves']} / {outcomes['refuses']} | {moved:,}"


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    print(f"torch {torch.__version__}; free / moves / refuses, and bytes that rank 0 receives\n")
    print("| equation | | cases | stock | bytes | `views=True` | bytes |")
    print("|---|---|--:|---|--:|---|--:|")
    for equation, what in EQUATIONS.items():
        stock = count(equation)
        with sw.enabled(views=True):
            ours = count(equation)
        print(f"| `{equation}` | {what} | {stock[0].total()} | {shown(stock)} | {shown(ours)} |", flush=True)


if __name__ == "__main__":
    main()
