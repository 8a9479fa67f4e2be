"""Placements that torch has no class for. Each is one mesh dim that cuts one tensor dim, or the leading ones as one.

They stand wherever `Layout` takes a placement, next to texts and torch's own objects, and nest with all of them.

All but `Owned` take a `unit`: cuts are then made at multiples of it only, counted within what earlier cuts leave, so
that blocks with a scale stay whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, repr=False)
class _Cut:
    def __post_init__(self) -> None:
        kind = type(self).__name__
        for field in dataclasses.fields(self):
            if field.type == "int":
                given = getattr(self, field.name)
                object.__setattr__(self, field.name, _integer(given, f"{field.name}: got {given!r} for {kind}"))
        unit, block = getattr(self, "unit", 1), getattr(self, "block", 0)
        if unit < 1:
            raise ValueError(f"unit: got {unit} for {kind}; allowed are 1 and more")
        if block % unit:
            raise ValueError(f"unit: {kind} has blocks of {block}, in units of {unit}; allowed are multiples of it")

    def __str__(self) -> str:
        """Returns the placement as `Layout` spells it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        left_out = {"unit": 1, "sizes": None, "dims": None, "units": None}
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        shown = (f"{name}={value!r}" for name, value in fields if name not in left_out or value != left_out[name])
        return f"{type(self).__name__}({', '.join(shown)})"

    def text(self, length: int) -> str:
        """The same for a tensor dim of this length, which it alone cuts."""
        return str(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Shard(_Cut):
    """``torch.chunk``, as DTensor's ``Shard``, but in whole units: ``Blocks`` with blocks of `unit`.

    Args:
        dim: the tensor dim.
        unit: elements that stay together. A weight with ``unit=128`` next to ``Shard(dim)`` of its scales, one for each
            128 elements, has its cuts where the scales have theirs.
    """

    dim: int
    unit: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.unit == 1 else f"Blocks({self.dim},{self.unit})"


@dataclasses.dataclass(frozen=True, repr=False)
class Ragged(_Cut):
    """Coordinate c of the mesh dim holds the next ``sizes[c]`` elements, or its share by `units`.

    Args:
        dim: the tensor dim. Leave it out if `dims` is given.
        sizes: one per coordinate, 0 allowed. They sum to the length of what they cut.
        unit: sizes are multiples of it; only the last elements of all may be fewer.
        dims: ``(0, 1, ...)``, the leading tensor dims, which are seen as one of all their elements: cuts may fall
            within a row. The local tensor has one dim for them. This is veScale's and flex_shard's RaggedShard.
        units: in place of sizes, the shares of what it cuts: ``(1, 2, 1)`` of 24 elements are 6, 12 and 6. Behind other
            cuts of the same dim, what it cuts are the parts that they leave, which must then have one length. All
            shares must be whole.
    """

    dim: int = 0
    sizes: Sequence[int] | None = None
    unit: int = 1
    dims: Sequence[int] | None = dataclasses.field(default=None, kw_only=True)
    units: Sequence[int] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sizes is None) == (self.units is None):
            raise ValueError(f"sizes, units: got {self.sizes!r} and {self.units!r}; allowed is one of them")
        name = "sizes" if self.units is None else "units"
        given = _sizes(getattr(self, name), name)
        object.__setattr__(self, name, given)
        if name == "sizes":
            _check_multiples("Ragged", itertools.accumulate(given), sum(given), self.unit)
        if self.dims is not None:
            dims = _sizes(self.dims, "dims")
            if dims != tuple(range(len(dims))):
                raise ValueError(f"dims: got {dims}; allowed are the leading tensor dims, as (0,) or (0, 1)")
            object.__setattr__(self, "dims", dims)
            if self.dim != 0:
                raise ValueError(f"dim: got {self.dim} next to dims; allowed is to leave it out")

    def text(self, length: int) -> str:
        return str(self.of_length(self.dim, length))

    def of_length(self, dim: int, length: int) -> Ragged:
        """The same with sizes in place of units, where what it cuts is of this dim and length."""
        if self.units is None:
            return self
        total = sum(self.units)
        if min(self.units) < 0 or total == 0 or any(count * length % total for count in self.units):
            raise ValueError(
                f"units: {self.units} sum to {total}, of {length} elements; allowed are 0 or more that give every "
                "coordinate whole elements of what is cut"
            )
        return Ragged(dim, [count * length // total for count in self.units], self.unit)

    def __str__(self) -> str:
        if self.sizes is None:
            return f"Ragged({self.dim},units {_joined(self.units or ())})"
        return f"Ragged({self.dim},{_joined(self.sizes)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Blocks(_Cut):
    """``Shard`` in whole blocks: the list of blocks is cut as ``torch.chunk`` does, and the last one may be short.

    Args:
        dim: the tensor dim.
        block: elements of a block, e.g. those that share a scale.
        unit: the block is a multiple of it.
    """

    dim: int
    block: int
    unit: int = 1

    def __str__(self) -> str:
        return f"Blocks({self.dim},{self.block})"


@dataclasses.dataclass(frozen=True, repr=False)
class Cyclic(_Cut):
    """Block-cyclic: of k coordinates, coordinate c holds blocks c, c + k, c + 2k, ...

    Args:
        dim: the tensor dim.
        block: elements of a block; the last one may be short.
        unit: the block is a multiple of it.
    """

    dim: int
    block: int
    unit: int = 1

    def __str__(self) -> str:
        return f"Cyclic({self.dim},{self.block})"


@dataclasses.dataclass(frozen=True, repr=False)
class Owned(_Cut):
    """One coordinate of the mesh dim holds everything, the others hold nothing. It cuts nowhere, so it needs no unit.

    Args:
        coordinate: the one that holds it.
        dim: the tensor dim along which the others' parts are empty.
    """

    coordinate: int
    dim: int = 0

    def __str__(self) -> str:
        return f"Owned({self.dim},{self.coordinate})"


@dataclasses.dataclass(frozen=True, repr=False)
class Packed(_Cut):
    """A fused tensor, such as QKV or gate and up: each component is cut by itself, as ``Shard`` cuts a tensor.

    Args:
        dim: the tensor dim along which the components are concatenated.
        sizes: of the components. They sum to the length of what they cut.
        unit: each component is cut in whole units; sizes are multiples of it, except the last.
    """

    dim: int
    sizes: Sequence[int]
    unit: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = _sizes(self.sizes, "sizes")
        object.__setattr__(self, "sizes", sizes)
        _check_multiples("Packed", itertools.accumulate(sizes), sum(sizes), self.unit)

    def __str__(self) -> str:
        unit = f",{self.unit}" if self.unit > 1 else ""
        return f"Packed({self.dim},{_joined(self.sizes)}{unit})"


@dataclasses.dataclass(frozen=True, repr=False)
class Pieces(_Cut):
    """Coordinate c of the mesh dim holds the intervals ``lists[c]``, in this order.

    Invariants: every element is held by some coordinate, and by none of them twice. Several coordinates may hold the
    same elements, and the order within a list is that of the local tensor, whatever their order in the global one.

    Lists that ascend and share nothing are a cut like any other. Others are moved by one direct exchange between all
    ranks, after reductions: see docs/architecture/exchange.md, "Rearrangements", for what is optimal in it.

    Args:
        dim: the tensor dim.
        lists: one per coordinate, of ``(begin, end)``; empty ones are allowed.
        unit: all ends are multiples of it; only the end of the tensor dim need not be.
    """

    dim: int
    lists: Sequence[Sequence[tuple[int, int]]]
    unit: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = _intervals(self.lists)
        object.__setattr__(self, "lists", lists)
        ends = sorted(end for one in lists for interval in one for end in interval)
        _check_multiples("Pieces", ends, ends[-1] if ends else 0, self.unit)

    @classmethod
    def zigzag(cls, dim: int, size: int, count: int) -> Pieces:
        """Balanced causal attention over context: coordinate c of `count` holds chunks c and 2 count - 1 - c.

        The chunks are those of ``torch.chunk`` into ``2 * count``; trailing ones may be short or empty.
        """
        size, count = _at_least(size, "size", 0), _at_least(count, "count", 1)
        if count > 1 << 20:
            raise ValueError(f"count: got {count}; allowed are at most 2^20, as many as a mesh has ranks")
        chunk = -(-size // (2 * count))
        chunks = [(min(c * chunk, size), min((c + 1) * chunk, size)) for c in range(2 * count)]
        return cls(dim, [[chunks[c], chunks[2 * count - 1 - c]] for c in range(count)])

    @classmethod
    def items(cls, dim: int, lists: Sequence[Sequence[int]], size: int = 1) -> Pieces:
        """Items of `size` elements each, such as experts: coordinate c holds items ``lists[c]``, in this order."""
        size = _at_least(size, "size", 1)
        try:
            numbers = [[operator.index(item) for item in one] for one in lists]
        except TypeError:
            raise ValueError(
                f"lists: got {lists!r}; allowed is a list of numbers of items for each coordinate"
            ) from None
        return cls(dim, [[(item * size, (item + 1) * size) for item in one] for one in numbers], size)

    def __str__(self) -> str:
        lists = ("+".join(f"{begin}-{end}" for begin, end in one) for one in self.lists)
        return f"Pieces({self.dim},{':'.join(lists)})"


def of_others(placement: object) -> object:
    """The same placement in our terms for objects of other libraries, by class name and attributes; else as it is.

    - ``RaggedShard(dims, local_units)`` of veScale and flex_shard, and veScale's ``_StridedRaggedShard``
    - ``BlockShard(blocks_per_rank, dim)`` and ``Owned(owner_rank)`` of flex_shard
    """
    kind = type(placement).__name__
    if isinstance(placement, (str, _Cut)):
        return placement
    if is_ragged_shard(placement) and hasattr(placement, "dims") and hasattr(placement, "local_units"):
        return Ragged(dims=placement.dims, units=placement.local_units)
    if kind == "BlockShard" and hasattr(placement, "blocks_per_rank"):
        return Ragged(getattr(placement, "dim", 0), units=placement.blocks_per_rank)
    if kind == "Owned" and hasattr(placement, "owner_rank"):
        return Owned(placement.owner_rank)
    return placement


def is_ragged_shard(placement: object) -> bool:
    """Returns whether it is another library's RaggedShard, in the order of cuts or not (``_StridedRaggedShard``)."""
    return type(placement).__name__ in ("RaggedShard", "_StridedRaggedShard")


def of_partition(parameter: Any, count: int) -> str | _Cut:
    """The placement of a Megatron parameter over its tensor-parallel ranks, by the attributes that Megatron sets.

    Args:
        parameter: with ``tensor_model_parallel``, ``partition_dim``, ``partition_stride`` and perhaps
            ``partition_sizes``, the components of a fused dim as one rank holds them.
        count: the number of tensor-parallel ranks. Each of them holds as much of every component.

    Returns:
        "R", a `Packed`, a strided shard, or `Shard`.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return "R"
    dim = parameter.partition_dim
    sizes = getattr(parameter, "partition_sizes", None)
    if sizes is not None:
        return Packed(dim, [size * count for size in _sizes(sizes, "partition_sizes")])
    stride = getattr(parameter, "partition_stride", 1)
    return f"SS({dim},{stride})" if stride > 1 else Shard(dim)


def is_cut(placement: object) -> bool:
    """Returns whether it is of this module, so that torch has no class for it."""
    return isinstance(placement, _Cut)


def text_of(placement: object) -> str | None:
    """The spelling of `Layout`; None for what is not of this module."""
    if isinstance(placement, Ragged) and placement.units is not None:
        raise ValueError(f"placements: {placement!r} depends on a shape; allowed are sizes")
    return str(placement) if isinstance(placement, _Cut) else None


def _sizes(given: Any, name: str) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in given)
    except TypeError:
        raise ValueError(f"{name}: got {given!r}; allowed is a list of integers") from None
    if not sizes:
        raise ValueError(f"{name}: got none; allowed is one or more")
    return sizes


def _intervals(given: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    try:
        return tuple(tuple((operator.index(begin), operator.index(end)) for begin, end in one) for one in given)
    except (TypeError, ValueError):
        raise ValueError(f"lists: got {given!r}; allowed is a list of (begin, end) for each coordinate") from None


def _at_least(given: Any, name: str, least: int) -> int:
    try:
        value = operator.index(given)
    except TypeError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name}: got {given!r}; allowed are integers of {least} or more")
    return value


def _integer(given: Any, what: str) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise ValueError(f"{what}; allowed are integers") from None


def _check_multiples(name: str, cuts: Iterable[int], last: int, unit: int) -> None:
    for cut in cuts:
        if cut % unit and cut != last:
            raise ValueError(
                f"unit: {name} cuts at {cut}, within a unit of {unit}; allowed are multiples of the unit, and {last}"
            )


def _joined(sizes: Sequence[int]) -> str:
    return ":".join(map(str, sizes))
