"""Compares mapped tensors with a destination, before anything moves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from . import patterns
from .pieces import Mapped, Tensors, box_text, coverage

_MAX_SHOWN = 4  # names or boxes in a text


class Wanted(NamedTuple):
    """A tensor of the destination."""

    shape: tuple[int, ...]
    dtype: str


def check(
    tensors: Tensors,
    wanted: Mapping[str, Wanted],
    unused: Sequence[str] = (),
    ignore: Sequence[str] = (),
    unknown: Collection[str] = (),
    unknown_wanted: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Returns the names of the tensors that move, in the order of the destination, and a sentence for each problem.

    Args:
        tensors: the tensors that the rules produced, by name.
        wanted: the tensors of the destination.
        unused: patterns of names in `tensors` that the destination may lack.
        ignore: patterns of names in `wanted` that keep their values if no tensor has this name.
        unknown, unknown_wanted: names for which an error was already reported, and which are therefore missing from
            `tensors` or `wanted`.
    """
    names, problems = [], []
    for name, mapped in tensors.items():
        if name not in wanted and name not in unknown_wanted and not patterns.is_listed(name, unused):
            problems.append(f"{name}: the map makes it from {_sources(mapped)}, and the destination has no such tensor")
    for name, destination in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            if name not in unknown and not patterns.is_listed(name, ignore):
                problems.append(f"{name}: the destination has it, and no source is mapped to it")
            continue
        wrong = _differences(name, tensor, destination)
        problems += wrong
        if not wrong:
            names.append(name)
    return names, problems


def _differences(name: str, mapped: Mapped, destination: Wanted) -> list[str]:
    """Returns a problem for each difference of a mapped tensor from the destination."""
    differences = []
    if mapped.shape != destination.shape:
        differences.append(
            f"{name}: the map makes {mapped.shape} from {_sources(mapped)}, and the destination has shape "
            f"{destination.shape}{_missing_indices(mapped.shape, destination.shape)}"
        )
    if mapped.dtype != destination.dtype:
        differences.append(
            f"{name}: the map makes {mapped.dtype}, and the destination has {destination.dtype}. "
            f"cast('{destination.dtype}', '{name}') casts it before it moves"
        )
    ndim = len(mapped.shape)
    missing, repeated = coverage(mapped.shape, [piece.box(ndim) for piece in mapped.pieces])
    for box in missing[:_MAX_SHOWN]:
        differences.append(f"{name}: no source gives {box_text(box)} of {mapped.shape}")
    for box, indices in repeated[:_MAX_SHOWN]:
        sources = " and ".join(mapped.pieces[i].source for i in indices)
        differences.append(f"{name}: {box_text(box)} of {mapped.shape} is given {len(indices)} times, by {sources}")
    left = len(missing) + len(repeated) - min(len(missing), _MAX_SHOWN) - min(len(repeated), _MAX_SHOWN)
    if left:
        differences.append(f"{name}: {left} more boxes have no source or several")
    return differences


def _missing_indices(sizes: tuple[int, ...], destination: tuple[int, ...]) -> str:
    """Returns a text with the indices that one of two shapes lacks; empty if they differ in the number of dims."""
    if len(sizes) != len(destination):
        return ""
    texts = []
    for dim, (have, want) in enumerate(zip(sizes, destination)):
        if have != want:
            what = "has no source" if have < want else "is not in the destination"
            texts.append(f"[{min(have, want)}:{max(have, want)}] of dim {dim} {what}")
    return f": {', '.join(texts)}"


def _sources(mapped: Mapped) -> str:
    """Returns the names of a tensor's sources as text, shortened."""
    names = list(dict.fromkeys(piece.source for piece in mapped.pieces))
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (", ".join(names[:_MAX_SHOWN]) or "sources without elements") + more
