"""Random redistributes, drawn from a seed, run on every rank of a world and checked with the oracle."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute

import dtensors
import meshes
import oracle
import pool_worker
from meshes import NAMES, coordinates, get_mesh, slice_index, subsets

BACKWARD_KNOWS_STRIDED = hasattr(_redistribute, "_is_shard_like")

DEFAULT_SEED = 20261

MESH_SHAPES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (1, 1)],
    2: [(2,), (2, 1)],
    3: [(3,)],
    4: [(4,), (2, 2), (1, 4)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
DIFFERENTIABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)

# Reductions that PyTorch's Gloo backend defines, by dtype.
_FLOAT_OPS = ("P(sum)", "P(sum)", "P(avg)", "P(min)", "P(max)", "P(product)", "P(norm 2)", "P(norm 3)")
_INTEGER_OPS = ("P(sum)", "P(min)", "P(max)", "P(product)", "P(band)", "P(bor)", "P(bxor)")
_BOOL_OPS = ("P(sum)", "P(min)", "P(max)", "P(band)", "P(bor)", "P(bxor)")
REDUCTIONS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: _FLOAT_OPS,
    torch.bfloat16: _FLOAT_OPS,
    torch.float16: _FLOAT_OPS,
    torch.float64: _FLOAT_OPS,
    torch.int64: _INTEGER_OPS,
    torch.bool: _BOOL_OPS,
    torch.complex64: ("P(sum)", "P(avg)"),
    torch.float8_e4m3fn: (),
}
# Reductions for which a replica can be split into contributions. For integers a sum would turn into floats.
SPLITTABLE = ("P(sum)", "P(avg)", "P(min)", "P(max)", "P(norm 2)", "P(norm 3)")

_EXTENTS = (0, 1, 2, 3, 4, 5, 5, 6, 7, 7, 8, 8, 9, 11, 12, 16, 17)


def seed_from_environment() -> int:
    return int(os.environ.get("SHARDWRIGHT_FUZZ_SEED", DEFAULT_SEED))


@dataclasses.dataclass(frozen=True)
class Case:
    """One redistribute. Its repr can be pasted into run_cases([Case(...)], engine) to reproduce it."""

    seed: int
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    src: tuple[str, ...]
    dst: tuple[str, ...]
    flatten: tuple[tuple[str, ...], ...] = ()
    keep: tuple[str, ...] | None = None
    # Explicit shard orders, the meaning of split factors, the strides of the local tensor, the function that is called
    # (DTensor.redistribute or the one below it), and whether there is a backward.
    src_order: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    dst_order: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    strided: str = "order"
    memory: str = "contiguous"
    entry: str = "dtensor"
    backward: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return tuple(size for name, size in zip(NAMES, self.mesh) if self.keep is None or name in self.keep)

    @property
    def rounded(self) -> bool:
        return oracle.is_rounded(self.src, [p for s, p in zip(self.src, self.dst) if s != p], self.torch_dtype)


def make_cases(seed: int, world_size: int, count: int) -> list[Case]:
    """Returns the cases of a seed, the same on every rank and every machine."""
    chance = random.Random(f"{seed} {world_size}")
    return [_make_case(chance, world_size) for _ in range(count)]


def _make_case(chance: random.Random, world_size: int) -> Case:
    mesh = chance.choice(MESH_SHAPES[world_size])
    names = NAMES[: len(mesh)]
    keep = None
    if len(mesh) > 1 and chance.random() < 0.15:
        keep = tuple(sorted(chance.sample(names, chance.randint(1, len(mesh) - 1))))
    kept = keep or names
    sizes = tuple(size for name, size in zip(names, mesh) if name in kept)
    candidates = subsets(kept)
    flatten = chance.choice([(), tuple(candidates), tuple(candidates[:1])])
    dtype = chance.choice(DTYPES)
    shape = tuple(chance.choice(_EXTENTS) for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3))))
    reductions = REDUCTIONS[dtype]
    op = chance.choice(reductions) if reductions and chance.random() < 0.5 else None
    strided = chance.random() < 0.25
    src = dst = _random_placements(chance, sizes, len(shape), op, dtype, strided)
    for _ in range(3):
        if dst == src:
            drawn = _random_placements(chance, sizes, len(shape), op, dtype, strided)
            dst = tuple(_destination(source, target, dtype) for source, target in zip(src, drawn))
    reaches_partial = any(oracle.reduce_op(p) for p in dst)
    any_strided = any(map(oracle.is_strided, src + dst))
    entry = "internal" if reaches_partial or chance.random() < 0.3 else "dtensor"
    orders: list[Any] = [None, None]
    if entry == "internal" and not any_strided and chance.random() < 0.6:
        orders = [_random_order(chance, placements) for placements in (src, dst)]
    return Case(
        seed=chance.randrange(2**31),
        mesh=mesh,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        src=src,
        dst=dst,
        flatten=flatten,
        keep=keep,
        src_order=orders[0],
        dst_order=orders[1],
        strided=chance.choice(("order", "literal")) if entry == "internal" and any_strided else "order",
        memory=chance.choice(("contiguous", "contiguous", "transposed", "strided", "offset")),
        entry=entry,
        backward=_has_backward(src, dst, entry, dtype) and chance.random() < 0.5,
    )


def _has_backward(src: Sequence[str], dst: Sequence[str], entry: str, dtype: torch.dtype) -> bool:
    # PyTorch's backward rule requires plain Shard here, so a pending source with strided destinations has no backward.
    undefined = any(oracle.is_strided(t) and oracle.reduce_op(s) for s, t in zip(src, dst))
    return entry == "dtensor" and dtype in DIFFERENTIABLE and (BACKWARD_KNOWS_STRIDED or not undefined)


def _random_placements(
    chance: random.Random, sizes: Sequence[int], ndim: int, op: str | None, dtype: torch.dtype, strided: bool
) -> tuple[str, ...]:
    placements = []
    # Shard orders, and split factors that encode one, need several mesh dims that cut the same tensor dim.
    dims = [chance.randrange(ndim)] if ndim and (strided or chance.random() < 0.3) else range(ndim)
    for _ in sizes:
        kind = chance.random()
        if op is not None and kind < (0.2 if strided else 0.4):
            mixed = op in ("P(sum)", "P(avg)") and "P(avg)" in REDUCTIONS[dtype] and chance.random() < 0.15
            placements.append({"P(sum)": "P(avg)", "P(avg)": "P(sum)"}[op] if mixed else op)
        elif ndim == 0 or kind > (0.9 if strided else 0.8):
            placements.append("R")
        else:
            placements.append(f"S({chance.choice(dims)})")
    if strided:
        _make_strided(chance, placements, sizes)
    return tuple(placements)


def _make_strided(chance: random.Random, placements: list[str], sizes: Sequence[int]) -> None:
    """Makes some shards strided: mostly with split factors that encode a shard order, else with any split factor."""
    encode = len(sizes) > 1 and chance.random() < 0.7
    order = dict(_random_order(chance, placements)) if encode else {}
    for mesh_dim, placement in enumerate(placements):
        dim = oracle.shard_dim(placement)
        if dim is None:
            continue
        if encode:
            cutters = order[dim]
            earlier = cutters[: cutters.index(mesh_dim)]
            factor = math.prod(sizes[other] for other in earlier if other > mesh_dim)
        else:
            factor = chance.choice((1, 2, 2, 3, 4))
        if factor > 1:
            placements[mesh_dim] = f"SS({dim},{factor})"


def _destination(source: str, target: str, dtype: torch.dtype) -> str:
    """Returns `target`, or a replica if PyTorch defines no conversion of `source` to a pending `target`."""
    if oracle.reduce_op(target) is None or source == target:
        return target
    if oracle.shard_dim(source) is not None:
        plain = not oracle.is_strided(source) and target == "P(sum)" and dtype is not torch.bool
        return target if plain and dtensors.SHARD_TO_PARTIAL_IS_DEFINED else "R"
    is_float = dtype.is_floating_point or dtype.is_complex
    splittable = target in SPLITTABLE and (is_float or target in ("P(min)", "P(max)"))
    return target if source == "R" and splittable else "R"


def _random_order(chance: random.Random, placements: Sequence[str]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    cutters: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        dim = oracle.shard_dim(placement)
        if dim is not None:
            cutters.setdefault(dim, []).append(mesh_dim)
    for group in cutters.values():
        chance.shuffle(group)
    return tuple((dim, tuple(group)) for dim, group in sorted(cutters.items()))


def lay_out(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """Returns the same elements with other strides."""
    if memory == "transposed":
        backwards = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(backwards).contiguous().permute(backwards)
    if memory == "strided" and tensor.ndim > 0:
        room = tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2]
        return room.copy_(tensor)
    if memory == "offset":
        return tensor.new_empty(tensor.numel() + 3)[3:].view(tensor.shape).copy_(tensor)
    return tensor


@dataclasses.dataclass
class Report:
    """Findings of one rank. judge_contributions checks the contributions of all ranks to pending destinations."""

    wrong: list[tuple[int, str]]
    contributions: dict[int, torch.Tensor]
    stats: dict[str, Any]


def run_cases(cases: Sequence[Case], engine: str = "shardwright") -> Report:
    """Runs cases on this rank. engine: "shardwright", where every fallback raises, or "stock"."""
    if engine == "stock":
        return _run(cases)
    import shardwright as sw

    sw.reset_stats()
    with sw.enabled(strict=True):
        report = _run(cases)
    report.stats = dict(sw.stats())
    return report


def _run(cases: Sequence[Case]) -> Report:
    report = Report([], {}, {})
    for index, case in enumerate(cases):
        pool_worker.note(f"case {index}: {case}")
        try:
            wrong, contribution = _run_case(case)
        except Exception as error:
            raise AssertionError(f"case {index}: {case}") from error
        if wrong is not None:
            report.wrong.append((index, wrong))
        if contribution is not None:
            report.contributions[index] = contribution
    return report


def _global_tensor(case: Case, rank: int) -> torch.Tensor:
    """Returns a rank's global tensor. Each of the parallel submeshes of a sliced mesh has its own."""
    part = slice_index(case.mesh, case.keep or NAMES, rank)
    reducible = any(oracle.reduce_op(p) for p in case.src + case.dst)
    return oracle.global_tensor(case.shape, case.torch_dtype, case.seed + part, reducible)


def _run_case(case: Case) -> tuple[str | None, torch.Tensor | None]:
    mesh = get_mesh(case.mesh, flatten=case.flatten, keep=case.keep)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    tensor = _global_tensor(case, dist.get_rank())
    src_order = dict(case.src_order) if case.src_order is not None else None
    dst_order = dict(case.dst_order) if case.dst_order is not None else None
    sizes = case.kept_shape
    local_tensor = oracle.local(tensor, sizes, case.src, coordinate, src_order, case.strided).to(meshes.device)
    laid_out = lay_out(local_tensor, case.memory)
    if case.entry == "internal":
        actual = _redistribute.redistribute_local_tensor(
            laid_out,
            dtensors.make_spec(mesh, case.shape, case.src, case.torch_dtype, src_order, case.strided),
            dtensors.make_spec(mesh, case.shape, case.dst, case.torch_dtype, dst_order, case.strided),
        )
    else:
        laid_out.requires_grad_(case.backward)
        source = dtensors.wrap(laid_out, mesh, case.shape, case.src)
        actual = source.redistribute(mesh, dtensors.to_placements(case.dst)).to_local()
        if not case.backward:  # the second call uses the shortcut of repeated calls
            again = source.redistribute(mesh, dtensors.to_placements(case.dst)).to_local()
            if (changed := oracle.difference(again, actual)) is not None:
                return f"the second call returned something else than the first: {changed}", None
    if (changed := oracle.difference(laid_out.detach(), local_tensor)) is not None:
        return f"the input was written to: {changed}", None
    if any(oracle.reduce_op(p) for p in case.dst):
        return None, actual.detach().contiguous().cpu()
    expected = oracle.local(tensor, sizes, case.dst, coordinate, dst_order, case.strided)
    wrong = oracle.difference(actual.detach(), expected, case.rounded)
    if wrong is None and case.backward:
        wrong = _run_backward(case, laid_out, actual, coordinate)
    return wrong, None


def _run_backward(case: Case, given: torch.Tensor, actual: torch.Tensor, coordinate: Sequence[int]) -> str | None:
    """Checks that the gradient has the source's placements, with replicas in place of pending reductions."""
    part = slice_index(case.mesh, case.keep or NAMES, dist.get_rank())
    gradient = oracle.global_tensor(case.shape, case.torch_dtype, case.seed + 1000 + part)
    actual.backward(oracle.local(gradient, case.kept_shape, case.dst, coordinate).to(meshes.device))
    assert given.grad is not None
    back = tuple("R" if oracle.reduce_op(p) else p for p in case.src)
    wrong = oracle.difference(given.grad, oracle.local(gradient, case.kept_shape, back, coordinate))
    return f"gradient: {wrong}" if wrong else None


def judge_contributions(cases: Sequence[Case], reports: Sequence[Report]) -> list[tuple[int, str]]:
    """Reduces the ranks' contributions to each pending destination and compares the result with the global tensor."""
    wrong = []
    for index in reports[0].contributions:
        case, groups = cases[index], {}
        pending = [d for d, p in enumerate(case.dst) if oracle.reduce_op(p)]
        for rank in range(len(reports)):
            where = [
                c for name, c in zip(NAMES, coordinates(case.mesh, rank)) if case.keep is None or name in case.keep
            ]
            others = tuple(c for d, c in enumerate(where) if d not in pending)
            groups.setdefault((slice_index(case.mesh, case.keep or NAMES, rank), others), []).append((rank, where))
        for members in groups.values():
            held = [reports[rank].contributions[index] for rank, _ in members]
            ops = [case.dst[d] for d in pending]
            total = oracle.reduce_all(held, ops, [case.kept_shape[d] for d in pending])
            rest = tuple("R" if oracle.reduce_op(p) else p for p in case.dst)
            order = dict(case.dst_order) if case.dst_order is not None else None
            rank, where = members[0]
            tensor = _global_tensor(case, rank)
            expected = oracle.local(tensor, case.kept_shape, rest, where, order, case.strided)
            difference = oracle.difference(total, expected.to(total.dtype), rounded=False)
            if difference is not None and case.rounded:
                difference = oracle.difference(total, expected, rounded=True)
            if difference is not None:
                wrong.append((index, f"ranks {[r for r, _ in members]} together: {difference}"))
    return wrong
