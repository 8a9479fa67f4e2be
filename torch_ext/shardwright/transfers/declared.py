"""Reads the arguments of `transfer` on one rank: tensors with their layouts, from state dicts and specs.

A side is "source" or "destination". A plain tensor is one without a layout. A problem is a text for an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .._native import _planner
from ..dtensor.specs import layout_of_spec
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..rules import patterns
from ..runtime import argument_checks, groups, plain_tensors

# A mesh: names of its dims, their sizes, and its ranks.
MeshParts = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
# The description of a tensor that is sent to other ranks. For a plain tensor, whose values are equal on all ranks that
# pass it: (shape, dtype). Otherwise (shape, dtype, index of the mesh, placements, shard order, number of flattened
# dims, kind); the kind is DTENSOR, PAIR, or "" if only a layout was passed.
Description = tuple[Any, ...]

DTENSOR, PAIR = "DTensor", "pair"

_ALLOWED_VALUES = "a DTensor, a tensor that is equal on all ranks that pass it, a pair of a local tensor and a Layout"
_ALLOWED_DESTINATIONS = f"{_ALLOWED_VALUES}, a Layout, or (placements, mesh, shape, dtype)"


class PassedTensor(NamedTuple):
    """A tensor or layout that this rank passes."""

    layout: _planner.Layout | None  # None: a plain tensor, equal on all ranks that pass it
    local: torch.Tensor | None  # None: only a layout was passed
    value: Any  # the tensor that the user passed, if any

    @property
    def part(self) -> torch.Tensor:
        """The local tensor, which must have been passed."""
        assert self.local is not None
        return self.local


class Declaration(NamedTuple):
    """The tensors that a rank passes, in the form that is sent to other ranks. Each mesh is stored once."""

    meshes: list[MeshParts]
    source: dict[str, Description]
    destination: dict[str, Description]
    # Names of values that could not be read. A problem was reported for each.
    unread_source: list[str]
    unread_destination: list[str]


def declare(
    source: dict[str, PassedTensor], destination: dict[str, PassedTensor], unread: Mapping[str, set[str]]
) -> Declaration:
    """Returns this rank's declaration. `unread` has the names of values that could not be read, by side."""
    meshes: dict[MeshParts, int] = {}
    cached: dict[tuple[_planner.Layout, str], Description] = {}  # by layout and kind, which many tensors share

    def description(tensor: PassedTensor) -> Description:
        """Returns the description of a tensor or layout. Adds its mesh to `meshes`."""
        layout = tensor.layout
        if layout is None:
            assert tensor.local is not None
            return tuple(tensor.local.shape), argument_values.dtype_text(tensor.local.dtype)
        kind = "" if tensor.local is None else DTENSOR if isinstance(tensor.value, DTensor) else PAIR
        key = layout, kind
        if key not in cached:
            mesh = layout.mesh
            parts = tuple(mesh.dim_names), tuple(mesh.shape), tuple(mesh.ranks)
            order = tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(layout.shard_order.items()))
            shape_and_dtype = tuple(layout.shape), layout.dtype
            mesh_index = meshes.setdefault(parts, len(meshes))
            cached[key] = *shape_and_dtype, mesh_index, tuple(layout.placements), order, layout.flattened, kind
        return cached[key]

    sides = [{name: description(tensor) for name, tensor in side.items()} for side in (source, destination)]
    return Declaration(list(meshes), sides[0], sides[1], sorted(unread["source"]), sorted(unread["destination"]))


class Layouts:
    """Makes the layouts that a declaration describes. Equal descriptions get the same object.

    `ranks` are the ranks that passed the declaration's plain tensors.
    """

    def __init__(self, declared: Declaration, ranks: Sequence[int]) -> None:
        self._meshes = [Mesh(dict(zip(names, sizes)), own) for names, sizes, own in declared.meshes]
        self._mesh_of_all_ranks = Mesh({"rank": len(ranks)}, ranks)
        self._cached: dict[Description, Layout] = {}

    def of(self, description: Description) -> Layout:
        """Returns the layout of a description. A plain tensor is replicated on all ranks that pass it."""
        found = self._cached.get(description)
        if found is None:
            shape, dtype, *rest = description
            if rest:
                mesh, placements, order, flattened, _ = rest
                found = Layout(self._meshes[mesh], shape, placements, dtype, dict(order), "literal", flattened)
            else:
                found = Layout(self._mesh_of_all_ranks, shape, ["R"], dtype)
            self._cached[description] = found
        return found


class Reader:
    """Reads the tensors of one rank, and collects the problems with them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = groups.rank_in_meshes(group)
        self.problems: list[str] = []
        self.invalid: set[str] = set()  # names of tensors with problems
        self.unread: dict[str, set[str]] = {"source": set(), "destination": set()}  # names of unreadable values
        self._ranks = set(groups.ranks_in_meshes(group))
        self._joins_jobs = groups.joins_jobs(group)
        self._layouts: dict[DTensorSpec, Layout] = {}

    def state_dict(self, given: Any, unused: Sequence[str]) -> dict[str, PassedTensor]:
        """Reads the argument `state_dict`; None is an empty dict. Values that are no tensors must be in `unused`."""
        if given is None:
            return {}
        found: dict[str, PassedTensor] = {}
        for name, value in _flatten("state_dict", given):
            if isinstance(value, torch.Tensor) or _is_pair(value):
                self._add(found, "source", name, value)
            elif not patterns.is_listed(name, unused):
                problem = f"must be {_ALLOWED_VALUES}, or listed in unused=, got a {type(value).__name__}"
                self._report_unreadable("source", name, problem)
        return found

    def destination(self, given: Any, ignore: Sequence[str] | None = None) -> dict[str, PassedTensor]:
        """Reads the argument `to`; None is an empty dict. Values that are no tensors must be in `ignore`."""
        found: dict[str, PassedTensor] = {}
        for name, value in _flatten("to", given) if given is not None else ():
            if isinstance(value, (torch.Tensor, _planner.Layout)) or _is_pair(value) or _is_spec(value):
                self._add(found, "destination", name, value)
            elif not patterns.is_listed(name, ignore or ()):
                listed = ", or listed in ignore=" if ignore is not None else ""
                problem = f"must be {_ALLOWED_DESTINATIONS}{listed}, got a {type(value).__name__}"
                self._report_unreadable("destination", name, problem)
        return found

    def _add(self, found: dict[str, PassedTensor], side: str, name: str, value: Any) -> None:
        """Reads and checks a tensor or layout, and adds it to `found`. Reports its problems."""
        if name in found:
            problem = "the name must be unique after names of nested dicts are joined by dots, got two tensors"
            self.problems.append(self.problem_text(side, name, problem))
            return
        try:
            # An invalid tensor is declared too, so that it is not reported as missing as well.
            found[name] = self.read(value)
            self.check(side, found[name])
        except ValueError as error:
            self._report_unreadable(side, name, str(error))
            self.invalid.add(name)

    def _report_unreadable(self, side: str, name: str, what: str) -> None:
        """Reports a value that cannot be read."""
        self.problems.append(self.problem_text(side, name, what))
        self.unread[side].add(name)

    def problem_text(self, side: str, name: str, what: str) -> str:
        """Returns the text of a problem with the tensor `name`. `what` is the end of a sentence."""
        return f"{side} {name}: {what} (on rank {self.rank})"

    def read(self, value: Any) -> PassedTensor:
        """Reads a DTensor, tensor, Layout, pair or spec. Raises ValueError if it has no valid layout."""
        if isinstance(value, DTensor):
            if self._joins_jobs:
                raise ValueError(
                    "in a group of several jobs, must be a pair of a local tensor and a Layout on ranks of the group, "
                    "got a DTensor, whose mesh has only ranks of one job"
                )
            spec = value._spec
            layout = self._layouts.get(spec)
            if layout is None:
                layout = self._layouts[spec] = layout_of_spec(spec, value.shape, value.dtype)
            return PassedTensor(layout, plain_tensors.waited(value._local_tensor), value)
        if isinstance(value, torch.Tensor):
            return PassedTensor(None, plain_tensors.waited(value), value)
        if isinstance(value, _planner.Layout):
            return PassedTensor(value, None, None)
        if _is_pair(value):
            local, layout = value
            return PassedTensor(layout, None if local is None else plain_tensors.waited(local), local)
        placements, mesh, shape, dtype = value
        return PassedTensor(Layout(mesh, shape, placements, dtype), None, None)

    def check(self, side: str, tensor: PassedTensor) -> None:
        """Raises ValueError if the local tensor contradicts its layout, or the layout is not allowed on this side."""
        layout, local = tensor.layout, tensor.local
        if local is not None:
            argument_checks.check_tensor("the local tensor", local)
            if side == "destination":
                argument_checks.check_writable("the local tensor", local)
        if layout is None:
            return
        outside = [rank for rank in layout.mesh.ranks if rank not in self._ranks]
        if outside:
            raise ValueError(
                f"ranks of the mesh must be in the group of {len(self._ranks)} ranks, got {outside[:8]} in {layout}"
            )
        if side == "destination" and layout.has_pending:
            raise ValueError(f"the layout must have no pending reductions, got {layout}")
        if layout.mesh.coordinate(self.rank) is None:
            return
        if local is None:
            if side == "source":
                raise argument_error("the local tensor", "passed on ranks of the mesh", f"only {layout}")
            return
        expected = tuple(layout.local_shape(self.rank))
        # FSDP2 gives ranks without rows a part of shape (0, 0) where the layout has (4, 0).
        if tuple(local.shape) != expected and (local.numel() > 0 or 0 not in expected):
            raise ValueError(f"the local tensor must have shape {expected}, as {layout}, got {tuple(local.shape)}")
        if argument_values.dtype_text(local.dtype) != layout.dtype:
            raise ValueError(f"the local tensor must have dtype {layout.dtype}, as the layout, got {local.dtype}")


def _is_pair(value: Any) -> bool:
    """Returns True for (local tensor or None, Layout)."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[1], _planner.Layout)
        and (value[0] is None or isinstance(value[0], torch.Tensor))
    )


def _is_spec(value: Any) -> bool:
    """Returns True for (placements, mesh, shape, dtype)."""
    return isinstance(value, (tuple, list)) and len(value) == 4 and isinstance(value[3], (str, torch.dtype))


def _flatten(argument: str, given: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields names and values of a state dict. Names of nested dicts are joined by dots, after `prefix`."""
    if not isinstance(given, Mapping):
        raise argument_error(argument, "a dict from names to tensors", f"a {type(given).__name__}")
    for key, value in given.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(argument, value, f"{name}.")
        else:
            yield name, value
