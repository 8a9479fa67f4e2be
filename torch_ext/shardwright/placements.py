"""Placements that torch has no class for. Each cuts one tensor dim, or the flattened leading dims, along one mesh dim.

`Layout` accepts them next to strings and torch's placements. Several placements may cut the same tensor dim.

All but `Owned` take a `unit`: cuts are then at multiples of it, relative to the part that earlier cuts leave, so that
blocks which share a scale are not split.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, repr=False)
class _Cut:
    """Base class. Checks that fields of type int are integers, and that `block` is a multiple of `unit`."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for field in dataclasses.fields(self):
            if field.type == "int":
                value = getattr(self, field.name)
                object.__setattr__(self, field.name, _integer(value, f"{field.name} of {kind}"))
        unit, block = getattr(self, "unit", 1), getattr(self, "block", 0)
        if unit < 1:
            raise ValueError(f"unit of {kind} must be at least 1, got {unit}")
        if block % unit:
            raise ValueError(f"block of {kind} must be a multiple of unit={unit}, got {block}")

    def __str__(self) -> str:
        """Returns the text that `Layout` accepts, such as ``Blocks(0,128)``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        left_out = {"unit": 1, "sizes": None, "dims": None, "units": None}
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        shown = (f"{name}={value!r}" for name, value in fields if name not in left_out or value != left_out[name])
        return f"{type(self).__name__}({', '.join(shown)})"

    def text(self, length: int) -> str:
        """Returns the text for a tensor dim of this length that no other placement cuts."""
        return str(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Shard(_Cut):
    """DTensor's ``Shard`` in whole units. It is the same as ``Blocks`` with blocks of `unit` elements.

    Args:
        dim: the tensor dim.
        unit: number of elements that stay together. Example: a weight has one scale per 128 elements. With ``unit=128``
            it is cut where ``Shard(dim)`` cuts the scales.
    """

    dim: int
    unit: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.unit == 1 else f"Blocks({self.dim},{self.unit})"


@dataclasses.dataclass(frozen=True, repr=False)
class Ragged(_Cut):
    """Uneven parts: coordinate c of the mesh dim holds the next ``sizes[c]`` elements, or its share by `units`.

    Args:
        dim: the tensor dim. Leave it out if `dims` is given.
        sizes: number of elements per coordinate, possibly 0. Their sum is the length of the part that earlier cuts
            leave.
        unit: sizes are multiples of it, except that the last elements of the dim may be fewer.
        dims: ``(0, 1, ...)``: leading tensor dims to flatten into one, so that cuts may fall within a row. The local
            tensor has one dim in their place. This is RaggedShard of veScale and flex_shard.
        units: relative sizes instead of absolute ones: ``(1, 2, 1)`` of 24 elements are 6, 12 and 6. After other cuts
            of the same dim they apply to the parts that these leave, which must have equal lengths. The resulting sizes
            must be integers.
    """

    dim: int = 0
    sizes: Sequence[int] | None = None
    unit: int = 1
    dims: Sequence[int] | None = dataclasses.field(default=None, kw_only=True)
    units: Sequence[int] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sizes is None) == (self.units is None):
            raise ValueError(f"one of sizes and units must be given, got {self.sizes!r} and {self.units!r}")
        name = "sizes" if self.units is None else "units"
        given = _sizes(getattr(self, name), name)
        object.__setattr__(self, name, given)
        if name == "sizes":
            _check_multiples("Ragged", itertools.accumulate(given), sum(given), self.unit)
        if self.dims is not None:
            dims = _sizes(self.dims, "dims")
            if dims != tuple(range(len(dims))):
                raise ValueError(f"dims must be the leading tensor dims, such as (0,) or (0, 1), got {dims}")
            object.__setattr__(self, "dims", dims)
            if self.dim != 0:
                raise ValueError(f"dim must be left out if dims is given, got {self.dim}")

    def text(self, length: int) -> str:
        return str(self.of_length(self.dim, length))

    def of_length(self, dim: int, length: int) -> Ragged:
        """Returns the placement with `sizes` instead of `units`, for parts of this length along tensor dim `dim`."""
        if self.units is None:
            return self
        total = sum(self.units)
        if min(self.units) < 0 or total == 0 or any(count * length % total for count in self.units):
            raise ValueError(
                f"units must be at least 0 and divide the {length} elements into integer sizes, got {self.units}, "
                f"whose sum is {total}"
            )
        return Ragged(dim, [count * length // total for count in self.units], self.unit)

    def __str__(self) -> str:
        if self.sizes is None:
            return f"Ragged({self.dim},units {_joined(self.units or ())})"
        return f"Ragged({self.dim},{_joined(self.sizes)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Blocks(_Cut):
    """``Shard`` in whole blocks: ``torch.chunk`` of the list of blocks. The last block may be short.

    Args:
        dim: the tensor dim.
        block: number of elements per block, e.g. per scale.
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
        block: number of elements per block; the last block may be short.
        unit: the block is a multiple of it.
    """

    dim: int
    block: int
    unit: int = 1

    def __str__(self) -> str:
        return f"Cyclic({self.dim},{self.block})"


@dataclasses.dataclass(frozen=True, repr=False)
class Owned(_Cut):
    """One coordinate of the mesh dim holds all elements, the others none. Nothing is cut, so there is no `unit`.

    Args:
        coordinate: the coordinate that holds the elements.
        dim: the tensor dim in which the parts of the other coordinates have size 0.
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
        sizes: lengths of the components. Their sum is the length of the part that earlier cuts leave.
        unit: each component is cut in whole units; all sizes but the last are multiples of it.
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

    Invariants: every element is held by at least one coordinate, and at most once by each. The order within a list is
    the order in the local tensor; it may differ from the global order.

    Ascending, disjoint lists are handled like any other cut. Other lists are moved by one exchange between all ranks,
    after reductions; docs/architecture/exchange.md, "Rearrangements", describes in which respects it is optimal.

    Args:
        dim: the tensor dim.
        lists: for each coordinate a list of ``(begin, end)``, possibly empty.
        unit: interval ends are multiples of it, except the end of the tensor dim.
    """

    dim: int
    lists: Sequence[Sequence[tuple[int, int]]]
    unit: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = _intervals(self.lists)
        object.__setattr__(self, "lists", lists)
        ends = sorted(end for intervals in lists for interval in intervals for end in interval)
        _check_multiples("Pieces", ends, ends[-1] if ends else 0, self.unit)

    @classmethod
    def zigzag(cls, dim: int, size: int, count: int) -> Pieces:
        """Balances causal attention: coordinate c of `count` holds chunks c and 2 count - 1 - c of the sequence.

        The chunks are those of ``torch.chunk`` into ``2 * count``; trailing ones may be short or empty.
        """
        size, count = _at_least(size, "size", 0), _at_least(count, "count", 1)
        if count > 1 << 20:
            raise ValueError(f"count must be at most 2^20, the maximum number of ranks, got {count}")
        chunk = -(-size // (2 * count))
        chunks = [(min(c * chunk, size), min((c + 1) * chunk, size)) for c in range(2 * count)]
        return cls(dim, [[chunks[c], chunks[2 * count - 1 - c]] for c in range(count)])

    @classmethod
    def items(cls, dim: int, lists: Sequence[Sequence[int]], size: int = 1) -> Pieces:
        """Places items such as experts: coordinate c holds items ``lists[c]``, each of `size` elements."""
        size = _at_least(size, "size", 1)
        try:
            numbers = [[operator.index(item) for item in numbers_of_list] for numbers_of_list in lists]
        except TypeError:
            raise ValueError(f"lists must be a list of item numbers for each coordinate, got {lists!r}") from None
        return cls(dim, [[(item * size, (item + 1) * size) for item in list_numbers] for list_numbers in numbers], size)

    def __str__(self) -> str:
        lists = ("+".join(f"{begin}-{end}" for begin, end in intervals) for intervals in self.lists)
        return f"Pieces({self.dim},{':'.join(lists)})"


def of_others(placement: object) -> object:
    """Converts placements of other libraries, recognized by class name and attributes. Returns others unchanged.

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
    """True for RaggedShard and ``_StridedRaggedShard`` of other libraries."""
    return type(placement).__name__ in ("RaggedShard", "_StridedRaggedShard")


def of_partition(parameter: Any, count: int) -> str | _Cut:
    """Returns the placement of a Megatron parameter over its tensor-parallel ranks, from attributes that Megatron sets.

    Args:
        parameter: has ``tensor_model_parallel``, ``partition_dim``, ``partition_stride`` and, for a fused dim,
            optionally ``partition_sizes``: the sizes of one rank's shards of the components.
        count: the number of tensor-parallel ranks. Their shards of a component have equal sizes.

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
    """True for placements of this module."""
    return isinstance(placement, _Cut)


def text_of(placement: object) -> str | None:
    """Returns the text that `Layout` accepts; None for placements that are not of this module."""
    if isinstance(placement, Ragged) and placement.units is not None:
        raise ValueError(f"placements must have sizes instead of units if there is no shape, got {placement!r}")
    return str(placement) if isinstance(placement, _Cut) else None


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    """Returns a nonempty list of integers as a tuple. Raises ValueError for anything else."""
    try:
        sizes = tuple(operator.index(size) for size in value)
    except TypeError:
        raise ValueError(f"{name} must be a list of integers, got {value!r}") from None
    if not sizes:
        raise ValueError(f"{name} must be a list of at least one integer, got none")
    return sizes


def _intervals(value: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns the lists of `Pieces` as tuples. Raises ValueError for anything else."""
    try:
        return tuple(tuple((operator.index(begin), operator.index(end)) for begin, end in cuts) for cuts in value)
    except (TypeError, ValueError):
        raise ValueError(f"lists must be a list of (begin, end) for each coordinate, got {value!r}") from None


def _at_least(given: Any, name: str, least: int) -> int:
    """Returns an int. Raises ValueError if it is below `least`."""
    try:
        value = operator.index(given)
    except TypeError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {given!r}")
    return value


def _integer(given: Any, what: str) -> int:
    """Returns a value as an int. Raises ValueError, which names the value as `what`."""
    try:
        return operator.index(given)
    except TypeError:
        raise ValueError(f"{what} must be an integer, got {given!r}") from None


def _check_multiples(name: str, cuts: Iterable[int], last: int, unit: int) -> None:
    """Raises ValueError if a cut is neither at a multiple of `unit` nor at `last`."""
    for cut in cuts:
        if cut % unit and cut != last:
            raise ValueError(f"cuts of {name} must be at multiples of unit={unit} or at {last}, got {cut}")


def _joined(sizes: Sequence[int]) -> str:
    """Returns a text such as "3:1:4"."""
    return ":".join(map(str, sizes))
