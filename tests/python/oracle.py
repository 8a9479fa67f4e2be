"""Computes the local tensor of every rank from the global tensor, without DTensor, shardwright or communication.

Placements are strings, one per mesh dim: "R", "S(0)", "SS(0,2)" (strided: tensor dim 0, split factor 2), "P(sum)",
"P(avg)", "P(min)", "P(max)", "P(product)", "P(band)", "P(bor)", "P(bxor)", "P(norm 2)". A rank is its coordinate in
the mesh. A tensor dim cut by several mesh dims is cut by them from left to right, unless a shard order says otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch

ShardOrder = Mapping[int, Sequence[int]]

_STRIDED = re.compile(r"SS\((\d+),(\d+)\)$")
_SHARD = re.compile(r"S\((\d+)\)$")
_PARTIAL = re.compile(r"P\(([a-z]+)(?: ([0-9.]+))?\)$")

# Allowed error of a sum of a few terms, in units in the last place of its largest term.
_ROUNDINGS = 8


def shard_dim(placement: str) -> int | None:
    """Returns the tensor dim that a placement cuts, or None."""
    match = _SHARD.match(placement) or _STRIDED.match(placement)
    return int(match.group(1)) if match else None


def split_factor(placement: str) -> int:
    """Returns the split factor of a placement, 1 for a plain shard."""
    match = _STRIDED.match(placement)
    return int(match.group(2)) if match else 1


def is_strided(placement: str) -> bool:
    return _STRIDED.match(placement) is not None


def reduce_op(placement: str) -> str | None:
    """Returns the name of the pending reduction ("norm" for all norms), or None."""
    match = _PARTIAL.match(placement)
    return match.group(1) if match else None


def norm_type(placement: str) -> float:
    match = _PARTIAL.match(placement)
    if match is None or match.group(2) is None:
        raise ValueError(f"{placement!r} is not a norm")
    return float(match.group(2))


def chunk(indices: Sequence[int], count: int, which: int) -> list[int]:
    """Returns the part that torch.chunk gives: parts have length ceil(n / count), the last may be shorter or empty."""
    length = math.ceil(len(indices) / count)
    return list(indices[length * which : length * (which + 1)])


def strided_chunk(indices: Sequence[int], factor: int, count: int, which: int) -> list[int]:
    """Returns part `which` of `count` of a strided shard: that part of each of `factor` chunks, one after the other."""
    return [index for piece in range(factor) for index in chunk(chunk(indices, factor, piece), count, which)]


def decode_shard_order(placements: Sequence[str], mesh_shape: Sequence[int]) -> dict[int, list[int]] | None:
    """Returns the shard order that split factors encode, or None if they encode none.

    A split factor is the number of parts into which mesh dims further right have cut the tensor dim before this one
    cuts it. From right to left, each mesh dim gets the earliest position in the order with this many parts before it.

    On a (2, 3) mesh ["SS(0,3)", "S(0)"] is {0: [1, 0]}: mesh dim 1 cuts first, in 3. ["SS(0,2)", "S(0)"] is None.
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(placements))):
        dim = shard_dim(placements[mesh_dim])
        if dim is None:
            continue
        cutters = order.setdefault(dim, [])
        factor = split_factor(placements[mesh_dim])
        places = [at for at in range(len(cutters) + 1) if math.prod(mesh_shape[d] for d in cutters[:at]) == factor]
        if not places:
            return None
        cutters.insert(places[0], mesh_dim)
    return order


def local_indices(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[str],
    coordinate: Sequence[int],
    shard_order: ShardOrder | None = None,
    strided: str = "order",
) -> list[list[int]]:
    """Returns, per tensor dim, the global indices that a rank holds, in local order.

    strided: meaning of split factors. "order": the shard order that they encode, or "literal" if they encode none.
    "literal": mesh dims cut from left to right, and a strided one cuts by strided_chunk.
    """
    indices = [list(range(extent)) for extent in shape]
    order = {dim: list(cutters) for dim, cutters in (shard_order or {}).items()}
    decoded = None
    if strided == "order" and any(map(is_strided, placements)):
        decoded = decode_shard_order(placements, mesh_shape)
        order = decoded or order
    for dim in range(len(shape)):
        for mesh_dim in order.get(dim, [d for d, placement in enumerate(placements) if shard_dim(placement) == dim]):
            count, which = mesh_shape[mesh_dim], coordinate[mesh_dim]
            if is_strided(placements[mesh_dim]) and decoded is None:
                indices[dim] = strided_chunk(indices[dim], split_factor(placements[mesh_dim]), count, which)
            else:
                indices[dim] = chunk(indices[dim], count, which)
    return indices


def take(tensor: torch.Tensor, indices: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns the elements at a product of index lists as a new contiguous tensor. Works on bytes, so for any dtype."""
    plain = tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor
    for dim, chosen in enumerate(indices):
        plain = plain.index_select(dim, torch.tensor(chosen, dtype=torch.int64))
    return plain.clone().view(tensor.dtype)


def local(
    tensor: torch.Tensor,
    mesh_shape: Sequence[int],
    placements: Sequence[str],
    coordinate: Sequence[int],
    shard_order: ShardOrder | None = None,
    strided: str = "order",
) -> torch.Tensor:
    """Returns the local tensor of a rank; with pending reductions, the part of its contribution()."""
    summand = contribution(tensor, mesh_shape, placements, coordinate)
    return take(summand, local_indices(tensor.shape, mesh_shape, placements, coordinate, shard_order, strided))


def _random_integers(shape: Sequence[int], low: int, high: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, tuple(shape), generator=generator, dtype=torch.int64)


def global_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int, reducible: bool = False) -> torch.Tensor:
    """Returns a tensor whose elements are as different as the dtype allows.

    reducible: elements are integers between 1 and 8 (all bit patterns for int64), so that the contributions below
    and every order of reducing them are exact in all dtypes.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return _random_integers(shape, 0, 1, seed).bool()
    if reducible and dtype is not torch.int64:
        values = _random_integers(shape, 1, 8, seed)
        return torch.complex(values.float(), (9 - values).float()) if dtype.is_complex else values.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _random_integers(shape, -(2**40), 2**40, seed).to(dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)


def contribution(
    tensor: torch.Tensor, mesh_shape: Sequence[int], placements: Sequence[str], coordinate: Sequence[int]
) -> torch.Tensor:
    """Returns the contribution of the rank at `coordinate`, in global shape. Reducing over pending dims gives `tensor`.

    The contributions differ from rank to rank and none is neutral everywhere, so the result is wrong if a reduction
    omits a rank, counts one twice or uses the wrong op. "sum" and "avg" may be pending together.
    """
    pending = [d for d, placement in enumerate(placements) if reduce_op(placement) is not None]
    if not pending:
        return tensor
    op = reduce_op(placements[pending[0]])
    count = math.prod(mesh_shape[d] for d in pending)
    which = 0
    for d in pending:
        which = which * mesh_shape[d] + coordinate[d]
    if op in ("sum", "avg"):
        averaged = math.prod(mesh_shape[d] for d in pending if reduce_op(placements[d]) == "avg")
        return _additive(tensor, averaged, count, which)
    if op == "norm":
        share = 2 * (which + 1) / (count * (count + 1))
        return (tensor.double() * share ** (1 / norm_type(placements[pending[0]]))).to(tensor.dtype)
    return _selective(tensor, op or "", count, which)


def _additive(tensor: torch.Tensor, factor: int, count: int, which: int) -> torch.Tensor:
    """Returns a contribution to a sum of factor * tensor: small integers, and the remainder at rank 0."""
    if tensor.dtype is torch.bool:
        return _selective(tensor, "bor", count, which)
    others = [_random_integers(tensor.shape, -3, 3, 7919 * rank + 1) for rank in range(1, count)]
    if which > 0:
        return others[which - 1].to(tensor.dtype)
    total = sum(others, torch.zeros(tensor.shape, dtype=torch.int64))
    wide = tensor * factor if tensor.dtype is torch.int64 else tensor.to(_wide(tensor.dtype)) * factor
    return (wide - total).to(tensor.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _selective(tensor: torch.Tensor, op: str, count: int, which: int) -> torch.Tensor:
    """Returns a contribution to a min, max, product or bitwise reduction."""
    if count == 1:
        return tensor
    holder = _random_integers(tensor.shape, 0, count - 1, 31) == which
    if op in ("min", "max"):
        if tensor.dtype is torch.bool:
            return _selective(tensor, "band" if op == "min" else "bor", count, which)
        distance = _random_integers(tensor.shape, 1, 3, 37 + which).to(tensor.dtype)
        return torch.where(holder, tensor, tensor + distance if op == "min" else tensor - distance)
    if op == "product":
        # The first two ranks also multiply by factors whose product is 1: 2 and 1/2, or -1 and -1.
        pair = torch.where(_random_integers(tensor.shape, 0, 1, 41).bool(), 2.0, -1.0).double()
        if not tensor.dtype.is_floating_point:
            pair = torch.full_like(pair, -1.0)
        factor = pair if which == 0 else 1 / pair if which == 1 else torch.ones_like(pair)
        return torch.where(holder, tensor, 1) * factor.to(tensor.dtype)
    top = 1 if tensor.dtype is torch.bool else 2**40
    masks = [_random_integers(tensor.shape, -top, top, 43 + rank).to(tensor.dtype) for rank in range(count)]
    if tensor.dtype is torch.bool:
        masks = [_random_integers(tensor.shape, 0, 1, 43 + rank).bool() for rank in range(count)]
    masks[1] = ~masks[0]
    if op == "band":
        return tensor | masks[which]
    if op == "bor":
        return tensor & masks[which]
    if op == "bxor":
        if which > 0:
            return masks[which]
        result = tensor.clone()
        for mask in masks[1:]:
            result ^= mask
        return result
    raise ValueError(f"unknown reduce op {op!r}")


def reduce_all(contributions: Sequence[torch.Tensor], ops: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
    """Reduces contributions in row-major order of the pending mesh dims. `ops` and `sizes` have an item per dim."""
    if not ops:
        return contributions[0]
    step = len(contributions) // sizes[0]
    parts = [reduce_all(contributions[i * step : (i + 1) * step], ops[1:], sizes[1:]) for i in range(sizes[0])]
    op = reduce_op(ops[0])
    if parts[0].is_floating_point() or parts[0].is_complex():
        parts = [part.to(_wide(part.dtype)) for part in parts]
    result = parts[0] ** norm_type(ops[0]) if op == "norm" else parts[0]
    for part in parts[1:]:
        if op in ("sum", "avg"):
            result = result + part
        elif op == "norm":
            result = result + part ** norm_type(ops[0])
        elif op in ("min", "max"):
            result = torch.where((part < result) if op == "min" else (part > result), part, result)
        elif op == "product":
            result = result * part
        else:
            result = result & part if op == "band" else result | part if op == "bor" else result ^ part
    if op == "avg":
        result = result / sizes[0]
    return result ** (1 / norm_type(ops[0])) if op == "norm" else result


def is_rounded(placements: Sequence[str], other: Sequence[str], dtype: torch.dtype) -> bool:
    """True if a move from `placements` to `other` rounds even for global_tensor(reducible=True).

    Averages and norms divide or take roots, and a sum made from a replica divides by the number of ranks.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    ops = [reduce_op(p) for p in (*placements, *other)]
    return "avg" in ops or "norm" in ops or any(reduce_op(p) for p in other)


def difference(actual: torch.Tensor, expected: torch.Tensor, rounded: bool = False) -> str | None:
    """Returns None if equal, else a description. With `rounded`, allows the rounding of a few additions.

    Bits are not compared: -0.0 equals 0.0, as it may in a sum. NaNs equal each other.
    """
    actual, expected = actual.cpu(), expected.cpu()
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not rounded and actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    wide = torch.int64 if expected.dtype is torch.int64 and not rounded else _wide(expected.dtype)
    a, e = actual.to(wide), expected.to(wide)
    if rounded:
        scale = max(1.0, float(e.abs().max()) if e.numel() else 1.0)
        good = (a - e).abs() <= _ROUNDINGS * scale * torch.finfo(expected.dtype).eps
    else:
        good = (a == e) | ((a != a) & (e != e))
    if bool(good.all()):
        return None
    worst = tuple((~good).nonzero()[0].tolist())
    count = f"{int((~good).sum())} of {good.numel()} elements wrong"
    return f"{count}, first at {worst}: {actual[worst]}, expected {expected[worst]}"
