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
from .current import SideTensors, Tensors
from .declarations import Agreed, Starts
from .declared import PassedTensor, Reader, declare


class Setup(NamedTuple):
    """The tensors that all ranks move, and this rank's parts of them.

    Sources and destinations are given by their index. Layouts have ranks of the group, not global ranks.
    """

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
        return self._local_tensor(self.tensors.source, self.source_names[index], self.sources[index])

    def destination(self, index: int) -> torch.Tensor | None:
        """Returns the tensor that this rank passed for a destination, or None."""
        tensor = self.tensors.destination.given.get(self.names[index])
        if tensor is None or tensor.local is None or not self.has_part(index):
            return None
        return self._local_tensor(self.tensors.destination, self.names[index], self.destinations[index])

    def _local_tensor(self, passed: SideTensors, name: str, layout: _planner.Layout) -> torch.Tensor:
        """Returns this rank's part of a tensor; an empty tensor if this rank has none."""
        tensor = passed.given.get(name)
        if layout.mesh.coordinate(self.rank) is None or tensor is None or tensor.local is None:
            return torch.empty(0, dtype=getattr(torch, layout.dtype), device=self.device)
        # A passed tensor without elements may have another shape than in its layout.
        return tensor.local if tensor.local.numel() else tensor.local.new_empty(layout.local_shape(self.rank))


class Options(NamedTuple):
    """Arguments of `transfer` that must be equal on all ranks."""

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
    """Returns the options. Appends a problem for each invalid one, which becomes None or []."""
    return Options(
        bucket_bytes=read_or_report(lambda: _at_least("bucket_bytes", bucket_bytes, 1), problems, rank),
        buckets=read_or_report(lambda: _at_least("buckets", buckets, 1), problems, rank),
        staging=read_or_report(lambda: _staging(staging), problems, rank),
        only_changed=read_or_report(lambda: _block_bytes(only_changed), problems, rank),
        unused=read_or_report(lambda: _patterns("unused", unused), problems, rank, []),
        ignore=read_or_report(lambda: _patterns("ignore", ignore), problems, rank, []),
    )


def _at_least(argument: str, given: Any, minimum: int) -> int:
    """Returns the argument as an int. Raises ValueError if it is below `minimum`."""
    value = argument_values.integer(given, argument)
    if value < minimum:
        raise argument_error(argument, f"at least {minimum}", value)
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
) -> Setup:
    """Returns the setup of a transfer. All ranks of the group must call.

    Exchanges declarations with the other ranks, applies the rules, and compares both sides. Raises the same ValueError
    on all ranks if any rank has problems: those in `problems`, or problems found here.
    """
    reader = Reader(group)
    reads = [
        lambda: reader.state_dict(_dict_of(state_dict), options.unused),
        lambda: reader.destination(_dict_of(to), options.ignore),
    ]
    source, destination = (read_or_report(read, reader.problems, reader.rank, {}) for read in reads)
    checked_rules = read_or_report(lambda: _rules(rules), problems, reader.rank, [])
    device, device_option = _device(device_argument, source, destination, group, reader)
    mine = declare(source, destination, reader.unread)
    # Names that could not be read are declared too, so that other ranks do not report them as missing.
    options_to_compare = {**options._asdict(), **device_option}
    agreed, found = declarations.agree(mine, options_to_compare, [*problems, *reader.problems], group)
    moving, order, more = _apply_map(agreed, checked_rules, options, reader.rank)
    used = {piece.source for mapped in moving.values() for piece in mapped.pieces} - reader.invalid
    read = {name: x.part for name, x in source.items() if name in used and x.local is not None}
    filled = moving.keys() - reader.invalid
    written = {name: x.part for name, x in destination.items() if name in filled and x.local is not None}
    overlaps = functools.partial(_shared_memory_problems, options.staging == "double", reader.rank)
    more += overlaps(read, written)
    starts = declarations.check_result(declarations.digest((moving, order)), [*found, *more], group)
    source_names, items = items_of(moving, order)
    group_ranks = _GroupRankConverter(group)
    sources = {name: group_ranks.layout(agreed.source[name]) for name in source_names}
    destinations = {name: group_ranks.layout(agreed.destination[name]) for name in order}
    # State dicts of modules and functions are read again at each start.
    read_again = [read if _is_function(argument) else None for read, argument in zip(reads, (state_dict, to))]
    tensors = Tensors(
        SideTensors("source", source, sources, reader, read_again[0], device),
        SideTensors("destination", destination, destinations, reader, read_again[1], device),
        overlaps,
    )
    layouts = list(sources.values()), list(destinations.values())
    return Setup(*layouts, items, source_names, order, tensors, starts, dist.get_rank(group), device)


def _is_function(value: Any) -> bool:
    """Returns True for a module and for a function, whose state dict is read at each start."""
    return callable(value) and not isinstance(value, Mapping)


def _dict_of(value: Any) -> Any:
    """Returns the state dict of a module, or the result of a function; other values unchanged."""
    if isinstance(value, torch.nn.Module):
        return value.state_dict()
    return value() if _is_function(value) else value


def read_or_report(read: Callable[[], Any], problems: list[str], rank: int, default: Any = None) -> Any:
    """Returns the result of `read`. If it raises, appends the error to `problems` and returns `default`."""
    try:
        return read()
    except Exception as error:  # of any type, because the other ranks must raise too
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        problems.append(f"{kind}{error} (on rank {rank})")
        return default


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
    source: dict[str, PassedTensor],
    destination: dict[str, PassedTensor],
    group: dist.ProcessGroup | None,
    reader: Reader,
) -> tuple[torch.device, dict[str, str]]:
    """Returns this rank's device, and its type as an option {"device": type} to compare with the other ranks.

    The option is {} on ranks that pass neither tensors nor a device. Appends problems to those of the reader.
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


def _shared_memory_problems(
    has_second_copy: bool, rank: int, read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]
) -> list[str]:
    """Returns a problem for each destination that shares memory with a source or with another destination.

    With a second copy, a destination may be the same tensor as a source, because nothing is written to it before the
    copies are exchanged. `read` has this rank's sources and `written` its destinations, by name.
    """
    problems = [
        f"destination {to}: its memory must not be shared, got memory shared with source {of}"
        + ("; with staging='double' both may be the same tensor" if source is into else "")
        for of, to, source, into in memory_spans.shared_memory(read, written)
        if not (has_second_copy and source is into)
    ] + [
        f"destination {to}: its memory must not be shared, got memory shared with destination {of}"
        for of, to, _, _ in memory_spans.shared_memory({}, written, among_written=True)
    ]
    if has_second_copy and not problems:
        problems += second_copy.problems(read, written)
    return [f"{problem} (on rank {rank})" for problem in problems]


def _apply_map(
    agreed: Agreed, rules: Iterable[Rule], options: Options, rank: int
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Applies the rules. Returns the mapped tensors that move, their names in order, and problems with both sides."""
    problems: list[str] = []
    tensors = {name: source_tensor(name, layout.shape, layout.dtype) for name, layout in agreed.source.items()}
    try:
        apply_rules(tensors, rules, problems)
    except Exception as error:  # of any type, from a user's function, because the other ranks must raise too
        problems.append(f"map: a function raised {type(error).__name__}: {error} (on rank {rank})")
        return {}, [], problems
    wanted = {name: Wanted(tuple(layout.shape), layout.dtype) for name, layout in agreed.destination.items()}
    unread = renamed(agreed.unread_source, rules)
    missing = tuple(f"no tensor is called {name}" for name in unread)
    problems = [problem for problem in problems if not problem.endswith(missing)]
    names, differences = check(tensors, wanted, options.unused, options.ignore, unread, agreed.unread_destination)
    return {name: tensors[name] for name in names}, names, [*problems, *differences]


class _GroupRankConverter:
    """Converts layouts from global ranks to ranks of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        ranks = groups.ranks_in_meshes(group)
        self._index = None if list(ranks) == list(range(len(ranks))) else {rank: i for i, rank in enumerate(ranks)}
        self._cached: dict[_planner.Layout, Layout] = {}

    def layout(self, layout: _planner.Layout) -> _planner.Layout:
        """Returns the layout with ranks of the group in place of global ranks."""
        if self._index is None:
            return layout
        if layout not in self._cached:
            mesh = layout.mesh
            moved = Mesh(dict(zip(mesh.dim_names, mesh.shape)), [self._index[rank] for rank in mesh.ranks])
            layouts = layout.shape, layout.placements, layout.dtype, layout.shard_order, "literal", layout.flattened
            self._cached[layout] = Layout(moved, *layouts)
        return self._cached[layout]
