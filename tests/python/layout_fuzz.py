"""Random moves between layouts of all kinds, on one mesh and between two, on real ranks, checked with the oracle.

A mesh has any of the world's ranks in any order, so the two meshes of a move are equal, overlap, or are disjoint.
The expected parts do not depend on the library's geometry: they are computed element by element.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import fuzz
import oracle
import pool_worker
import shardwright as sw
from test_placements import NAMES, _dim, _part, _random_placement

# Reductions that a destination may leave pending.
_LEFT_PENDING = ("P(sum)", "P(avg)", "P(min)", "P(max)")
_SHAPES = {1: [(1,), (1, 1)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2)], 5: [(5,)], 6: [(6,), (2, 3), (3, 2)]}
_SHAPES |= {7: [(7,)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}

# The refusals that a draw may run into: placements of uneven sizes inside another cut, and other pending reductions.
_REFUSALS = re.compile(
    r"placements: (sum of the sizes|largest end) of .* must be \d+, the number of elements to cut, got \d+"
    r"|placements: destination of .* -> P on mesh dim '\w+' must be P\(.*\), got P\("
)


@dataclasses.dataclass(frozen=True)
class End:
    """A mesh and the placements on it. Mesh dims that cut the same tensor dim cut it in `order`."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Any, ...]
    order: tuple[int, ...]

    def layout(self, shape: tuple[int, ...], dtype: str) -> sw.Layout:
        mesh = sw.Mesh(dict(zip(NAMES, self.sizes, strict=False)), self.ranks)
        cuts: dict[int, list[int]] = {}
        for d in self.order:
            if (dim := _dim(self.placements[d])) is not None:
                cuts.setdefault(dim, []).append(d)
        return sw.Layout(mesh, shape, self.placements, dtype, shard_order=cuts, strided="literal")

    @property
    def reductions(self) -> tuple[str, ...]:
        """Returns the placements with R in place of every cut."""
        return tuple(p if isinstance(p, str) and oracle.reduce_op(p) else "R" for p in self.placements)

    def reduced(self) -> End:
        placements = tuple("R" if r != "R" else p for p, r in zip(self.placements, self.reductions, strict=True))
        return dataclasses.replace(self, placements=placements)

    def where(self, rank: int) -> tuple[int, ...]:
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(self.ranks.index(rank)), self.sizes))

    def part(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns a rank's part, which is empty outside the mesh."""
        if rank not in self.ranks:
            return tensor.new_empty(0)
        where = self.where(rank)
        indices = [list(range(extent)) for extent in tensor.shape]
        for d in self.order:
            if (dim := _dim(self.placements[d])) is not None:
                indices[dim] = _part(self.placements[d], indices[dim], self.sizes[d], where[d])
        return oracle.take(oracle.contribution(tensor, self.sizes, self.reductions, where), indices)


@dataclasses.dataclass(frozen=True)
class Case:
    """One move. Its repr can be pasted into run_cases([Case(...)]) on a world of the same size."""

    seed: int
    shape: tuple[int, ...]
    dtype: str
    src: End
    dst: End
    way: str = "plain"  # or "async", "out", "backward"
    memory: str = "contiguous"
    passes_none: bool = False  # None as the local tensor on ranks outside the source mesh

    @property
    def layouts(self) -> tuple[sw.Layout, sw.Layout]:
        return self.src.layout(self.shape, self.dtype), self.dst.layout(self.shape, self.dtype)

    @property
    def is_rounded(self) -> bool:
        pairs = zip(self.src.reductions, self.dst.reductions, strict=False)
        is_one_mesh = (self.src.sizes, self.src.ranks) == (self.dst.sizes, self.dst.ranks)
        changed = [b for a, b in pairs if a != b] if is_one_mesh else self.dst.reductions
        return oracle.is_rounded(self.src.reductions, changed, getattr(torch, self.dtype))


def make_cases(seed: str, world_size: int, count: int) -> list[Case]:
    """Returns the cases of a seed, the same on every rank. Draws again if a layout or plan is refused as expected."""
    chance = random.Random(f"{seed} {world_size}")
    cases: list[Case] = []
    refused: list[str] = []
    while len(cases) < count:
        case = _draw(chance, world_size)
        try:
            sw.plan(*case.layouts, backend="gloo")
        except ValueError as error:
            assert _REFUSALS.match(str(error)), f"{case} is refused: {error}"
            refused.append(str(error))
            assert len(refused) <= 10 + count / 2, "too many cases are refused:\n" + "\n".join(refused)
            continue
        cases.append(case)
    return cases


def _draw(chance: random.Random, world_size: int) -> Case:
    dtype = chance.choice(fuzz.DTYPES)
    shape = tuple(chance.choice((0, 1, 2, 3, 5, 7, 8, 9, 12, 16)) for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3))))
    reductions = fuzz.REDUCTIONS[dtype]
    pending = chance.choice(reductions) if reductions and chance.random() < 0.4 else None
    src = _draw_end(chance, _draw_mesh(chance, world_size), shape, pending)
    mesh = (src.sizes, src.ranks) if chance.random() < 0.3 else _draw_mesh(chance, world_size)
    left = chance.choice(_LEFT_PENDING) if dtype in fuzz.DIFFERENTIABLE and not dtype.is_complex else None
    dst = _draw_end(chance, mesh, shape, left if chance.random() < 0.6 else None)
    has_gradient = dtype in fuzz.DIFFERENTIABLE and set(src.reductions) <= {"R", "P(sum)", "P(avg)"}
    ways = ["plain", "plain", "async", "out"]
    if has_gradient and set(dst.reductions) <= {"R"}:
        ways += ["backward", "backward"]
    return Case(
        seed=chance.randrange(2**31),
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        src=src,
        dst=dst,
        way=chance.choice(ways),
        memory=chance.choice(("contiguous", "contiguous", "transposed", "strided", "offset")),
        passes_none=chance.random() < 0.5,
    )


def _draw_mesh(chance: random.Random, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = chance.randint(chance.choice((1, (world_size + 1) // 2)), world_size)
    ranks = list(range(world_size))
    if chance.random() < 0.5:
        chance.shuffle(ranks)
    first = chance.randint(0, world_size - size)
    return chance.choice(_SHAPES[size]), tuple(ranks[first : first + size])


def _draw_end(
    chance: random.Random,
    mesh: tuple[tuple[int, ...], tuple[int, ...]],
    shape: tuple[int, ...],
    pending: str | None,
) -> End:
    sizes, ranks = mesh
    placements: list[Any] = []
    for size in sizes:
        drawn = "P(sum)" if not shape else _random_placement(chance, shape, size)
        placements.append((pending or "R") if drawn == "P(sum)" else drawn)
    return End(sizes, ranks, tuple(placements), tuple(chance.sample(range(len(sizes)), len(sizes))))


@dataclasses.dataclass
class Report:
    """Findings of one rank. `judge` checks the contributions of all ranks to pending destinations."""

    wrong: list[tuple[int, str]]
    contributions: dict[int, torch.Tensor]


def run_cases(cases: Sequence[Case]) -> Report:
    """Runs cases on this rank. Makes no call for a case whose meshes do not contain the rank."""
    report, rank = Report([], {}), dist.get_rank()
    for index, case in enumerate(cases):
        if rank not in case.src.ranks and rank not in case.dst.ranks:
            continue
        pool_worker.note(f"case {index}: {case}")
        try:
            wrong = _run_case(case, rank, index, report)
        except Exception as error:
            raise AssertionError(f"case {index}: {case}") from error
        if wrong is not None:
            report.wrong.append((index, wrong))
    return report


def _global_tensor(case: Case) -> torch.Tensor:
    reducible = any(p != "R" for p in case.src.reductions + case.dst.reductions)
    return oracle.global_tensor(case.shape, getattr(torch, case.dtype), case.seed, reducible)


def _run_case(case: Case, rank: int, index: int, report: Report) -> str | None:
    src, dst = case.layouts
    tensor = _global_tensor(case)
    local_tensor = case.src.part(tensor, rank)
    laid_out = fuzz.lay_out(local_tensor, case.memory) if rank in case.src.ranks else local_tensor
    expected = case.dst.part(tensor, rank)
    if case.way == "backward":
        return _run_backward(case, laid_out.requires_grad_(), rank)
    passed = None if case.passes_none and rank not in case.src.ranks else laid_out
    if case.way == "out" and case.shape:
        out = torch.empty(expected.shape, dtype=expected.dtype)
        result = sw.redistribute_local(passed, src, dst, out=out)
        assert result is out
    elif case.way == "async":
        result = (
            sw.redistribute_local(passed, src, dst, async_op=True) + 0 if _adds(local_tensor) else _plain(case, passed)
        )
    else:
        result = _plain(case, passed)
    if (changed := oracle.difference(laid_out, local_tensor)) is not None:
        return f"the input was written to: {changed}"
    if set(case.dst.reductions) != {"R"}:
        report.contributions[index] = result.clone()
        return None
    return oracle.difference(result, expected, case.is_rounded)


def _adds(tensor: torch.Tensor) -> bool:
    """True if torch adds this dtype and keeps it. The addition waits for the result of an asynchronous call."""
    return tensor.dtype not in (torch.bool, torch.float8_e4m3fn)


def _plain(case: Case, local: torch.Tensor | None) -> torch.Tensor:
    """Redistributes twice, because the second call uses the cached program, and compares bytes with the plan's."""
    src, dst = case.layouts
    plan = sw.plan(src, dst, backend="gloo")
    sw.redistribute_local(local, src, dst)
    with sw.debug.wire_meter() as meter:
        result = sw.redistribute_local(local, src, dst)
    promised = plan.wire_bytes(dist.get_rank())
    assert meter.received_bytes == promised, f"receives {meter.received_bytes}, the plan says {promised}: {plan}"
    return result


def _run_backward(case: Case, given: torch.Tensor, rank: int) -> str | None:
    result = sw.redistribute_local(given, *case.layouts)
    wrong = oracle.difference(result.detach(), case.dst.part(_global_tensor(case), rank), case.is_rounded)
    if wrong is not None:
        return wrong
    gradient = oracle.global_tensor(case.shape, getattr(torch, case.dtype), case.seed + 1)
    result.backward(case.dst.part(gradient, rank))
    if given.grad is None:
        return "no gradient"
    wrong = oracle.difference(given.grad, case.src.reduced().part(gradient, rank))
    return f"gradient: {wrong}" if wrong else None


def judge(cases: Sequence[Case], reports: Sequence[Report]) -> list[str]:
    """Returns descriptions of all wrong results. Reduces the contributions to pending destinations first."""
    problems = [
        f"{cases[index]}\n    rank {rank}: {text}"
        for rank, report in enumerate(reports)
        for index, text in report.wrong
    ]
    for index, case in enumerate(cases):
        pending = [d for d, p in enumerate(case.dst.reductions) if p != "R"]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in case.dst.ranks if pending else ():
            where = case.dst.where(rank)
            groups.setdefault(tuple(c for d, c in enumerate(where) if d not in pending), []).append(rank)
        for ranks in groups.values():
            if any(index not in reports[rank].contributions for rank in ranks):
                continue  # that rank reported something wrong
            held = [reports[rank].contributions[index] for rank in ranks]
            total = oracle.reduce_all(
                held, [case.dst.placements[d] for d in pending], [case.dst.sizes[d] for d in pending]
            )
            expected = case.dst.reduced().part(_global_tensor(case), ranks[0])
            difference = oracle.difference(total, expected, rounded=True)
            if difference is not None:
                problems.append(f"{case}\n    ranks {ranks} together: {difference}")
    return problems


def relation(case: Case) -> str:
    """Returns the relation of the ranks of the two meshes."""
    src, dst = set(case.src.ranks), set(case.dst.ranks)
    if (case.src.sizes, case.src.ranks) == (case.dst.sizes, case.dst.ranks):
        return "one mesh"
    if src == dst:
        return "the same ranks"
    return "overlapping" if src & dst else "disjoint"


def elements(case: Case) -> int:
    return math.prod(case.shape)
