#!/usr/bin/env python3
"""Counts the communication of `torch.einsum` of DTensors in cases that need none: stock and ``views=True``.

    python benchmarks/einsum_table.py                     # results/einsum-torch<version>.json; minutes
    python benchmarks/doc_tables.py                       # writes docs/views.md from it

The cases are all ways in which one or two mesh dims cut letters of these equations, in all operands with the letter,
such that every rank can compute its part of the result, or its summand, from its own parts. Forward and backward are
counted. One process represents all ranks: it uses torch's fake process group, and counts the bytes that collectives
would receive.
"""

from __future__ import annotations

import argparse
import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import machine
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
    """Yields the letter, or None, that each mesh dim cuts."""
    letters = sorted({letter for term in terms_of(equation)[0] for letter in term})
    for chosen in itertools.product([None, *letters], repeat=mesh_ndim):
        if any(letter is not None for letter in chosen):
            yield chosen


def placements(cut: Cut, term: str) -> list[Placement]:
    """Returns the placements of an operand, or of the gradient of the result."""
    return [Shard(term.index(letter)) if letter is not None and letter in term else Replicate() for letter in cut]


def placements_of_result(cut: Cut, out: str) -> list[Placement]:
    sums = [letter is not None and letter not in out for letter in cut]
    return [Partial() if is_sum else placement for is_sum, placement in zip(sums, placements(cut, out), strict=True)]


# Factors of the bytes that a rank receives: the other ranks' share of the larger of input and output.
TIMES_RECEIVED = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1, "all_reduce": 2}


class Received(TorchDispatchMode):
    """Counts the bytes that a rank receives in PyTorch's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is dispatched again with the parts
        result = func(*args, **(kwargs or {}))
        _, _, name = str(func).partition("_c10d_functional.")
        for collective, times in TIMES_RECEIVED.items():
            if name.startswith(collective):
                ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
                self.bytes += times * max(args[0].nbytes, result.nbytes) * (ranks - 1) // ranks
        return result


class Outcome(NamedTuple):
    what: str  # "free", "moves" or "refuses"
    received_bytes: int = 0
    error: str = ""  # first sentence of the error, if it refuses


def outcome(equation: str, cut: Cut, mesh: DeviceMesh) -> Outcome:
    terms, out = terms_of(equation)

    def made(term: str, placed: list[Placement]) -> DTensor:
        shape = [SIZES[letter] for letter in term]
        for mesh_dim, placement in enumerate(placed):
            if isinstance(placement, Shard):
                shape[placement.dim] //= mesh.size(mesh_dim)
        return DTensor.from_local(torch.zeros(shape), mesh, placed, run_check=False)

    operands = [made(term, placements(cut, term)).detach().requires_grad_() for term in terms]
    gradient = made(out, placements(cut, out))
    done = "forward"
    with Received() as received:
        try:
            result = torch.einsum(equation, *operands)
            done = "backward"
            torch.autograd.grad(result, operands, gradient)
        except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
            sentence = str(error).splitlines()[0].partition(". ")[0]
            return Outcome("refuses", error=f"{done}: {type(error).__name__}: {sentence}")
    return Outcome("moves", received.bytes) if received.bytes else Outcome("free")


def count(equation: str) -> dict[str, Any]:
    """Returns the number of cases by outcome, the total bytes that rank 0 receives, and the cuts by error."""
    outcomes: collections.Counter[str] = collections.Counter(free=0, moves=0, refuses=0)
    received_bytes = 0
    errors: dict[str, list[str]] = {}
    for sizes in ((2,), (2, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        for cut in cuts(equation, len(sizes)):
            found = outcome(equation, cut, mesh)
            outcomes[found.what] += 1
            received_bytes += found.received_bytes
            if found.error:
                errors.setdefault(found.error, []).append(", ".join(letter or "nothing" for letter in cut))
    return {**outcomes, "received_bytes": received_bytes, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    version = torch.__version__.partition("+")[0]
    parser.add_argument("--out", default=machine.RESULTS / f"einsum-torch{version}.json")
    options = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    rows = []
    for equation, what in EQUATIONS.items():
        stock = count(equation)
        with sw.enabled(views=True):
            ours = count(equation)
        row = {"equation": equation, "what": what, "cases": stock["free"] + stock["moves"] + stock["refuses"]}
        rows.append({**row, "stock": stock, "views": ours})
        print(rows[-1], flush=True)
    machine.write(options.out, {**machine.describe("torch"), "rows": rows})


if __name__ == "__main__":
    main()
