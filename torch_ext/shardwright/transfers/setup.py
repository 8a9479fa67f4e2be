"""Turns the arguments of `transfer` on each rank into the tensors, items and order that all ranks use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._native import _planner
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..rules.checking import Wanted, check
from ..rules.items import Item, items_of
from ..rules.kinds import Rule, apply_rules, renamed
from ..rules.pieces import source_tensor
from ..runtime import groups, memory_spans, plain_tensors
from ..versions import second_copy
from ..versions.changes import MAX_EXACT_BYTES
from . import declarations
from .current import Passed, Tensors
from .declarations import Agreed, Starts
from .declared import Given, Reader, declare


class SetUp(NamedTuple):
    """The tensors that all ranks move, and this rank's parts. Layouts have ranks of the group, not global ranks."""

    sources: list[_planner.Layout]
    destinations: list[_planner.Layout]
    items: list[Item]  # boxes of elements to move (rules/items.py)
    source_names: list[str]
    names: list[str]  # names of the destinations
    tensors: Tensors  # this rank's tensors
    starts: Starts  # agreement of the ranks at each start
    rank: int  # rank in the group
    device: torch.device

    def has_part(self, destination: int) -> bool:
        """Returns True if this rank is on the mesh of a destination."""
        return self.destinations[destination].mesh.coordinate(self.rank) is not None

    def source(self, index: int) -> torch.Tensor:
        """Returns this rank's part of a source; an empty tensor if it has none."""
        return self._part(self.tensors.source, self.source_names[index], self.sources[index])

    def destination(self, index: int) -> torch.Tensor | None:
        """Returns this rank's part of a destination; None if it passed none."""
        tensor = self.tensors.destination.given.get(self.names[index])
        if tensor is None or tensor.local is None or not self.has_part(index):
            return None
        return self._part(self.tensors.destination, self.names[index], self.destinations[index])

    def _part(self, passed: Passed, name: str, layout: _planner.Layout) -> torch.Tensor:
        tensor = passed.given.get(name)
        if layout.mesh.coordinate(self.rank) is None or tensor is None or tensor.local is None:
            return torch.empty(0, dtype=getattr(torch, layout.dtype), device=self.device)
        # An empty part may have another shape than in its layout.
        return tensor.local if tensor.local.numel() else tensor.local.new_empty(layout.local_shape(self.rank))


class Options(NamedTuple):
    """Arguments that must be the same on all ranks."""

    bucket_bytes: Any
    buckets: Any
    staging: Any
    only_changed: Any
    unused: list[str]
    ignore: list[str]


def read_options(
    bucket_bytes: Any,
    buckets: Any,
    staging: Any,
    only_changed: Any,
    unused: Any,
    ignore: Any,
    problems: list[str],
    rank: int,
) -> Options:
    """Returns the options of `transfer`. Appends a problem for each invalid one."""
    return Options(
        bucket_bytes=checked(lambda: _at_least("bucket_bytes", bucket_bytes, 1), problems, rank),
        buckets=checked(lambda: _at_least("buckets", buckets, 1), problems, rank),
        staging=checked(lambda: _staging(staging), problems, rank),
        only_changed=checked(lambda: _block_bytes(only_changed), problems, rank),
        unused=checked(lambda: _patterns("unused", unused), problems, rank, []),
        ignore=checked(lambda: _patterns("ignore", ignore), problems, rank, []),
    )


def _at_least(argument: str, given: Any, least: int) -> int:
    """Returns the argument as an int. Raises ValueError if it is below `least`."""
    value = argument_values.integer(given, argument)
    if value < least:
        raise argument_error(argument, f"at least {least}", value)
    return value


def _staging(value: Any) -> str | None:
    """Returns the argument staging. Raises ValueError unless it is None or "double"."""
    if value is not None and value != "double":
        raise argument_error("staging", "None or 'double'", repr(value))
    return None if value is None else "double"


def _block_bytes(only_changed: bool | int) -> int:
    """Returns the argument only_changed as the size of blocks in bytes; 0 if everything is sent."""
    value = MAX_EXACT_BYTES * only_changed if isinstance(only_changed, bool) else only_changed
    value = argument_values.integer(value, "only_changed")
    if value < 0 or value & (value - 1):
        raise argument_error("only_changed", "True, False or a power of two", only_changed)
    return value


def _patterns(argument: str, value: Any) -> list[str]:
    """Returns the argument as a list of patterns of names."""
    return [str(pattern) for pattern in argument_values.items(value, argument, "a list of patterns of names")]


def set_up(
    state_dict: Any,
    to: Any,
    rules: Any,
    options: Options,
    group: dist.ProcessGroup | None,
    device_argument: Any,
    problems: list[str],
) -> SetUp:
    """Agrees with the other ranks of the group, applies the rules, and compares both sides.

    Raises the same ValueError on all ranks if `problems` of any rank are not empty, or more are found.
    """
    reader = Reader(group)
    reads = [
        lambda: reader.state_dict(_dict_of(state_dict), options.unused),
        lambda: reader.destination(_dict_of(to), options.ignore),
    ]
    source, destination = (checked(read, reader.problems, reader.rank, {}) for read in reads)
    checked_rules = checked(lambda: _rules(rules), problems, reader.rank, [])
    device, kind = _device(device_argument, source, destination, group, reader)
    mine = declare(source, destination, reader.unread)
    # Unread names are declared too, so that other ranks do not report them as missing.
    agreed, found = declarations.agree(mine, {**options._asdict(), **kind}, [*problems, *reader.problems], group)
    made, order, more = _map(agreed, checked_rules, options, reader.rank)
    used = {piece.source for mapped in made.values() for piece in mapped.pieces} - reader.wrong
    read = {name: x.plain for name, x in source.items() if name in used and x.local is not None}
    filled = made.keys() - reader.wrong
    written = {name: x.plain for name, x in destination.items() if name in filled and x.local is not None}
    overlaps = functools.partial(_overlaps, options.staging == "double", reader.rank)
    more += overlaps(read, written)
    starts = declarations.check_result(declarations.digest((made, order)), [*found, *more], group)
    source_names, items = items_of(made, order)
    in_group = _GroupRanks(group)
    sources = {name: in_group.layout(agreed.source[name]) for name in source_names}
    destinations = {name: in_group.layout(agreed.destination[name]) for name in order}
    # State dicts of modules and functions are read again at each start.
    again = [read if _is_function(argument) else None for read, argument in zip(reads, (state_dict, to))]
    tensors = Tensors(
        Passed("source", source, sources, reader, again[0], device),
        Passed("destination", destination, destinations, reader, again[1], device),
        overlaps,
    )
    ends = list(sources.values()), list(destinations.values())
    return SetUp(*ends, items, source_names, order, tensors, starts, dist.get_rank(group), device)


def _is_function(value: Any) -> bool:
    """Returns True for a function that returns a state dict, and for a module."""
    return callable(value) and not isinstance(value, Mapping)


def _dict_of(value: Any) -> Any:
    """Returns the state dict of a module, or the result of a function; other values unchanged."""
    if isinstance(value, torch.nn.Module):
        return value.state_dict()
    return value() if _is_function(value) else value


def checked(read: Callable[[], Any], problems: list[str], rank: int, otherwise: Any = None) -> Any:
    """Returns ``read()``. If it raises, appends a problem and returns `otherwise`."""
    try:
        return read()
    except Exception as error:  # any error: the other ranks must raise too
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        problems.append(f"{kind}{error} (on rank {rank})")
        return otherwise


def _rules(value: Any) -> list[Rule]:
    """Returns the argument `map` as a list of rules. Raises ValueError for anything else."""
    rules = [value] if isinstance(value, Rule) else value
    rules = argument_values.items(rules, "map", "a list of rules, such as [fuse('qkv', ['q', 'k', 'v'])]")
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"map must have only rules, such as rename('model.**', '**'), got a {type(rule).__name__}")
    return rules


def _device(
    device_argument: Any,
    source: dict[str, Given],
    destination: dict[str, Given],
    group: dist.ProcessGroup | None,
    reader: Reader,
) -> tuple[torch.device, dict[str, str]]:
    """Returns this rank's device, and the option {"device": type}, which must be equal on all ranks that have it.

    Ranks without tensors have the option only if they pass a device.
    """
    first: dict[torch.device, str] = {}
    for tensors in (source, destination):
        for name, tensor in tensors.items():
            if tensor.local is not None and tensor.local.numel():
                first.setdefault(tensor.local.device, name)
    if len(first) > 1:
        by_device = ", ".join(f"{name} on {device}" for device, name in first.items())
        reader.problems.append(f"all tensors must be on one device, got {by_device} (on rank {reader.rank})")
    try:
        device = plain_tensors.device_among_many(device_argument, next(iter(first), None), group)
    except ValueError as error:
        reader.problems.append(f"{error} (on rank {reader.rank})")
        return torch.device("cpu"), {}
    return device, {"device": device.type} if first or device_argument is not None else {}


def _overlaps(
    stages: bool, rank: int, read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]
) -> list[str]:
    """Returns a problem for each destination that shares memory with a source or with another destination."""
    # With a second copy, a destination may be the same tensor as a source: nothing is written to it before the
    # exchange.
    problems = [
        f"destination {to}: its memory must not be shared, got memory shared with source {of}"
        + ("; with staging='double' both may be the same tensor" if source is into else "")
        for of, to, source, into in memory_spans.shared_memory(read, written)
        if not (stages and source is into)
    ] + [
        f"destination {to}: its memory must not be shared, got memory shared with destination {of}"
        for of, to, _, _ in memory_spans.shared_memory({}, written, among_written=True)
    ]
    if stages and not problems:
        problems += second_copy.problems(read, written)
    return [f"{problem} (on rank {rank})" for problem in problems]


def _map(
    agreed: Agreed, rules: Iterable[Rule], options: Options, rank: int
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Returns the mapped tensors that move, their names in order, and the problems of map and destination."""
    problems: list[str] = []
    tensors = {name: source_tensor(name, layout.shape, layout.dtype) for name, layout in agreed.source.items()}
    try:
        apply_rules(tensors, rules, problems)
    except Exception as error:  # from a user's function; the other ranks must raise too
        problems.append(f"map: a function raised {type(error).__name__}: {error} (on rank {rank})")
        return {}, [], problems
    wanted = {name: Wanted(tuple(layout.shape), layout.dtype) for name, layout in agreed.destination.items()}
    unread = renamed(agreed.unread_source, rules)
    missing = tuple(f"no tensor is called {name}" for name in unread)
    problems = [problem for problem in problems if not problem.endswith(missing)]
    names, differences = check(tensors, wanted, options.unused, options.ignore, unread, agreed.unread_destination)
    return {name: tensors[name] for name in names}, names, [*problems, *differences]


class _GroupRanks:
    """Converts layouts from global ranks to ranks of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        ranks = groups.ranks_in_meshes(group)
        self._number = None if list(ranks) == list(range(len(ranks))) else {rank: i for i, rank in enumerate(ranks)}
        self._known: dict[_planner.Layout, Layout] = {}

    def layout(self, layout: _planner.Layout) -> _planner.Layout:
        """Returns the layout on the same mesh of ranks of the group."""
        if self._number is None:
            return layout
        if layout not in self._known:
            mesh = layout.mesh
            moved = Mesh(dict(zip(mesh.dim_names, mesh.shape)), [self._number[rank] for rank in mesh.ranks])
            ends = layout.shape, layout.placements, layout.dtype, layout.shard_order, "literal", layout.flattened
            self._known[layout] = Layout(moved, *ends)
        return self._known[layout]
