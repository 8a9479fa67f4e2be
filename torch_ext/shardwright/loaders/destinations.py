"""Finds the destinations of a transfer by recording what a server's loader writes: `recorded_destination`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from .._native import _planner
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..placements import Pieces
from ..rules import patterns
from .recording import Intervals, Load, Weights, Write, num_written, record

Region = tuple[Intervals, ...]  # intervals along each dim

_MAX_SHOWN = 8


def recorded_destination(
    load: Load,
    weights: Weights,
    ranks: Sequence[int],
    *,
    parameters: Iterable[tuple[str, torch.Tensor]] = (),
    unused: Sequence[str] = (),
    unwritten: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> dict[str, tuple[torch.Tensor, _planner.Layout]]:
    """Finds the part of each weight that a loader writes on each rank, for the argument `to` of `transfer`.

    The loader runs once, with weights that have no memory (meta tensors); its copies to parameters are recorded and not
    executed. A transfer then writes to the same elements. So the server's own code determines how weights are fused,
    stacked and sharded. All ranks of the server must call.

    The loader may take views of weights and copy them: slices, transposes, casts. On each rank, what it writes of a
    weight must be a box, or intervals along its dims, and must be one strided part of a parameter. Anything else is an
    error, for example a loader that computes with weights or quantizes them.

    Args:
        load: a function of an iterable of (name, tensor), such as the ``load_weights`` of a model.
        weights: shape and dtype of each weight that the trainer sends, by name.
        ranks: for each rank of `group`, its rank in the group of the transfer, as `Connection.ranks` returns them.
        parameters: names and tensors of the server, such as ``model.named_parameters()``, all elements of which must be
            written.
        unused: patterns of names in `weights` that the loader may skip; pass them to `transfer` too.
        unwritten: patterns of names in `parameters` of which the loader may skip elements, such as padding.
        group: the process group of the server's ranks; default, the default group.

    Returns:
        This rank's part of each weight that its loader writes, as a view of a parameter, and its layout.

    Raises:
        ValueError: raised on all ranks, with the problems of all of them: no rank writes to a weight or to some of its
            elements, elements of a parameter are not written, or the loader does something other than described above.
    """
    problems: list[str] = []
    writes: dict[str, Write] = {}
    if len(ranks) != dist.get_world_size(group):
        allowed = f"one rank for each of the {dist.get_world_size(group)} ranks of group"
        raise argument_error("ranks", allowed, f"{len(ranks)}")
    unused = argument_values.items(unused, "unused", "a list of patterns of names")
    unwritten = argument_values.items(unwritten, "unwritten", "a list of patterns of names")
    try:
        writes = record(load, weights)
        problems += _not_written(writes.values(), parameters, unwritten)
    except Exception as error:  # any error: the other ranks must raise too
        problems.append(f"{type(error).__name__}: {error}")
    regions = {name: write.region for name, write in writes.items()}
    gathered: list[tuple[list[str], dict[str, Region], dict[str, str]]] = [([], {}, {})] * len(ranks)
    dtypes = {name: argument_values.dtype_text(write.into.dtype) for name, write in writes.items()}
    dist.all_gather_object(gathered, (problems, regions, dtypes), group=group)
    found = [f"{problem} (on rank {i} of the server)" for i, (some, _, _) in enumerate(gathered) for problem in some]
    layouts: dict[str, _planner.Layout] = {}
    for name, (shape, _) in weights.items() if not found else ():
        by_rank = {ranks[i]: regions[name] for i, (_, regions, _) in enumerate(gathered) if name in regions}
        kinds = {dtypes[name] for _, _, dtypes in gathered if name in dtypes}
        if not by_rank and not patterns.is_listed(name, unused):
            found.append(f"{name}: the loader writes it on no rank; list it in unused= if that is right")
        elif by_rank:
            try:
                layouts[name] = _layout(tuple(shape), kinds, by_rank)
            except ValueError as error:
                found.append(f"{name}: {error}")
    if found:
        found[_MAX_SHOWN:] = [f"and {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
        raise ValueError("recorded_destination: the loader cannot be recorded, because\n  " + "\n  ".join(found))
    return {name: (write.into, layouts[name]) for name, write in writes.items()}


def _not_written(
    writes: Iterable[Write], parameters: Iterable[tuple[str, torch.Tensor]], unwritten: Sequence[str]
) -> list[str]:
    """Returns a problem for each parameter that has elements without a write."""
    parts: dict[int, list[torch.Tensor]] = {}  # the written parts, by storage
    for write in writes:
        parts.setdefault(write.into.untyped_storage()._cdata, []).append(write.into)
    problems = []
    for name, parameter in parameters:
        written = num_written(parameter, parts.get(parameter.untyped_storage()._cdata, ()))
        if written < parameter.numel() and not patterns.is_listed(name, unwritten):
            which = f"{written} of the {parameter.numel()} elements of parameter {name}"
            problems.append(f"the loader writes {which}; list it in unwritten= if that is right")
    return problems


def _layout(shape: tuple[int, ...], dtypes: set[str], regions: Mapping[int, Region]) -> _planner.Layout:
    """Returns the layout in which each rank has its region.

    The mesh has a dim for each tensor dim along which ranks have different intervals, and one for copies of a region.

        {0: (rows 0-4, all), 1: (rows 4-8, all)}    dim0=2 as [Pieces(0, 0-4:4-8)]
    """
    if len(dtypes) > 1:
        raise argument_error("the parameters' dtype", "equal on all ranks", ", ".join(sorted(dtypes)))
    cut = [d for d, size in enumerate(shape) if any(region[d] != ((0, size),) for region in regions.values())]
    values = {d: sorted({region[d] for region in regions.values()}) for d in cut}
    for d in cut:
        covered = _covered(values[d])
        if covered != [(0, shape[d])]:
            raise argument_error(f"the written part of dim {d}", f"[0, {shape[d]})", covered)
    cells: dict[tuple[int, ...], list[int]] = {}
    for rank, region in regions.items():
        cells.setdefault(tuple(values[d].index(region[d]) for d in cut), []).append(rank)
    copies = len(regions) // math.prod(len(values[d]) for d in cut)
    grid = list(itertools.product(*(range(len(values[d])) for d in cut)))
    if any(len(cells.get(cell, ())) != copies for cell in grid):
        allowed = "a grid of parts, each on equally many ranks"
        raise argument_error("the parts that the loader writes", allowed, f"{len(cells)} parts on {len(regions)} ranks")
    mesh = Mesh(
        {**{f"dim{d}": len(values[d]) for d in cut}, "copies": copies}, [rank for cell in grid for rank in cells[cell]]
    )
    return Layout(mesh, shape, [*(Pieces(d, values[d]) for d in cut), "R"], dtypes.pop())


def _covered(lists: Iterable[Intervals]) -> list[tuple[int, int]]:
    """Returns the union of intervals, as intervals in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(interval for intervals in lists for interval in intervals):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(found.pop()[1], end)
        found.append((begin, end))
    return found
