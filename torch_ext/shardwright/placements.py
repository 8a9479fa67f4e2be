"""Placements that torch has no class for. Each is one mesh dim that cuts one tensor dim.

They stand wherever `Layout` takes a placement, next to texts and torch's own objects, and nest with all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class _Cut:
    def __str__(self) -> str:
        """The placement as `Layout` spells it."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Ragged(_Cut):
    """Coordinate c of the mesh dim holds the next ``sizes[c]`` elements.

    Args:
        dim: the tensor dim.
        sizes: one per coordinate, 0 allowed. They sum to the length of what they cut.
    """

    dim: int
    sizes: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _sizes(self.sizes))

    def __str__(self) -> str:
        return f"Ragged({self.dim},{_joined(self.sizes)})"


@dataclasses.dataclass(frozen=True)
class Blocks(_Cut):
    """``Shard`` in whole blocks: the list of blocks is cut as ``torch.chunk`` does, and the last one may be short.

    Args:
        dim: the tensor dim.
        block: elements of a block, e.g. those that share a scale.
    """

    dim: int
    block: int

    def __str__(self) -> str:
        return f"Blocks({self.dim},{self.block})"


@dataclasses.dataclass(frozen=True)
class Cyclic(_Cut):
    """Block-cyclic: of k coordinates, coordinate c holds blocks c, c + k, c + 2k, ...

    Args:
        dim: the tensor dim.
        block: elements of a block; the last one may be short.
    """

    dim: int
    block: int

    def __str__(self) -> str:
        return f"Cyclic({self.dim},{self.block})"


@dataclasses.dataclass(frozen=True)
class Owned(_Cut):
    """One coordinate of the mesh dim holds everything, the others hold nothing.

    Args:
        coordinate: the one that holds it.
        dim: the tensor dim along which the others' parts are empty.
    """

    coordinate: int
    dim: int = 0

    def __str__(self) -> str:
        return f"Owned({self.dim},{self.coordinate})"


@dataclasses.dataclass(frozen=True)
class Packed(_Cut):
    """A fused tensor, such as QKV or gate and up: each component is cut by itself, as ``Shard`` cuts a tensor.

    Args:
        dim: the tensor dim along which the components are concatenated.
        sizes: of the components. They sum to the length of what they cut.
    """

    dim: int
    sizes: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _sizes(self.sizes))

    def __str__(self) -> str:
        return f"Packed({self.dim},{_joined(self.sizes)})"


def text_of(placement: object) -> str | None:
    """How `Layout` spells it; None for what is not of this module."""
    return str(placement) if isinstance(placement, _Cut) else None


def _sizes(given: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(given)
    except TypeError:
        raise ValueError(f"sizes: got {given!r}; allowed is a list of integers") from None


def _joined(sizes: Sequence[int]) -> str:
    return ":".join(map(str, sizes))
