"""From a pair of layouts to an executable bound to process groups, kept for the next call."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from . import _planner, _runtime, checking, counters, groups, planning, tables, watching
from ._planner import PlanningTables
from .topology import tables_now

# Executables kept, the oldest dropped first. A job has some hundreds of pairs of layouts.
MAX_EXECUTABLES = 8192

# Pins and measurements change once or twice in a job, and sometimes back.
MAX_EARLIER_TABLES = 3

tables.when_changed.append(_runtime.note_changed_tables)

# How long asynchronous redistributes that nobody waited for may take to end when the process does.
EXIT_SECONDS = 5.0
atexit.register(_runtime.finish_programs, EXIT_SECONDS)


# The fake backend, of dry runs, moves nothing: what lies in the parts of other ranks is up to PyTorch's own path, which
# DTensor redistributes take there. Benchmarks that time ours without data set this.
runs_on_fake_groups = False


class Refusal(NamedTuple):
    """Why there is no executable for a pair of layouts."""

    reason: str  # the same for all of one cause
    example: str = ""  # the whole of this case, where there is more to say


T = TypeVar("T")


class Kept(Generic[T]):
    """What was made for a default process group and by the tables of a moment (`tables.current`).

    Values are found again under the tables that they were made by, and under no others: a change of pins, topologies
    or measurements shows at the next call, and with the old tables what was made by them is back. Bounded; the oldest
    goes first. Keys and values must not keep process groups alive (`groups.weakly`).
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, T] = {}
        self._tables = tables.current
        self._by_earlier_tables: dict[PlanningTables, dict[Hashable, T]] = {}
        self._world_alive = groups.DEFAULT.alive
        groups.when_gone.append(self.clear)

    def get(self, key: Hashable) -> T | None:
        if self._tables is not tables.current or self._world_alive() is not dist.group.WORLD:
            self._turn()
        return self._entries.get(key)

    def put(self, key: Hashable, value: T) -> None:
        """Keeps what was made since the last `get`, unless the tables have changed since."""
        if self._tables is tables.current:
            _put(self._entries, key, value)

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under `key`, else what `make` makes."""
        value = self.get(key)
        if value is None:
            made_by = self._tables
            value = make()
            if made_by is self._tables and made_by is tables.current:
                _put(self._entries, key, value)
        return value

    def clear(self) -> None:
        self._entries = {}
        self._by_earlier_tables.clear()

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._by_earlier_tables.values()))

    def _turn(self) -> None:
        """To the tables and the default group of now."""
        world = dist.group.WORLD
        if self._world_alive() is not world:
            self.clear()
            self._world_alive = groups.weakly(world).alive
        if self._tables is not tables.current:
            self._by_earlier_tables[self._tables] = self._entries
            self._tables = tables.current
            self._entries = self._by_earlier_tables.pop(self._tables, {})
            while len(self._by_earlier_tables) > MAX_EARLIER_TABLES:
                del self._by_earlier_tables[next(iter(self._by_earlier_tables))]


def _put(entries: dict[Hashable, T], key: Hashable, value: T) -> None:
    while len(entries) >= MAX_EXECUTABLES:
        del entries[next(iter(entries))]
    entries[key] = value


def kept(function: Callable[..., T]) -> Callable[..., T]:
    """The function, whose results are kept by its positional arguments. For what depends on meshes or plans."""
    results: Kept[T] = Kept()

    @functools.wraps(function)
    def call(*args: Hashable) -> T:
        return results.get_or_make(args, lambda: function(*args))

    return call


_kept: Kept[_runtime.Executable | Refusal] = Kept()


def lookup(key: Hashable, build: Callable[[], _runtime.Executable | Refusal]) -> _runtime.Executable | Refusal:
    """What is kept under `key`, else what `build` makes."""
    kept = _kept.get(key)
    if kept is not None:
        counters.counts.cache_hits += 1
        return kept
    tables_now()  # else what is made by a change of the environment would not be kept
    return _kept.get_or_make(key, build)


def make_plan(
    src: _planner.Layout,
    dst: _planner.Layout,
    device_type: str,
    group: dist.ProcessGroup | None = None,
    existing_groups_of: Any | None = None,
) -> _planner.Plan:
    """The plan with the lowering for the backend that carries tensors of this kind of device.

    With a DeviceMesh as `existing_groups_of`, moves keep to process groups that are there.
    """
    backend = lowering_on(src.mesh, device_type, group)
    kept = planning.pinned(src, dst, backend)
    if kept is not None:
        return kept
    allowed = None if existing_groups_of is None else groups.existing(src.mesh, existing_groups_of)
    plan = planning.plan(src, dst, backend=backend, groups=allowed)
    counters.counts.plans += 1
    note_default_topology(plan)
    return plan


def note_default_topology(plan: _planner.Plan) -> None:
    """Says once where nobody has given or measured what joins the ranks that a plan sends data between."""
    if plan.messages_max == 0:
        return
    given = plan.src.mesh.topology or plan.dst.mesh.topology or tables.current.environment
    if given is None and tables.measured_topology(plan.backend) is None:
        tables.note_default(plan.topology, is_first_rank)


def is_first_rank() -> bool:
    return dist.get_rank() == 0


def why_not_over_groups(device_type: str) -> str | None:
    """Why DTensor's redistributes of tensors on such devices are left to PyTorch, whatever their layouts."""
    name = _backend_name(device_type, None)
    if name is None:
        return f"process group without a backend object for {device_type}"
    if name == "fake" and not runs_on_fake_groups:
        return "fake backend, which moves no data"
    return None


def bind(
    plan: _planner.Plan, *, device_mesh: Any | None = None, group: dist.ProcessGroup | None = None
) -> _runtime.Executable:
    """Compiles for this rank and binds. Collective among the ranks of any group that must be made.

    Ranks of the plan's mesh are global ranks, or ranks of `group` if one is given.
    """
    program = _runtime.CompiledProgram(plan.to_bytes(), dist.get_rank(group))
    return program.bind(names_of(program.groups, device_mesh=device_mesh, group=group))


def names_of(
    members: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    device_mesh: Any | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """The names of the process groups for (mesh dims, ranks) of each, in this order. Makes those that are missing."""
    names = []
    for mesh_dims, ranks in members:
        if group is not None:
            ranks = [dist.get_global_rank(group, rank) for rank in ranks]
        if group is not None and dist.get_process_group_ranks(group) == ranks:
            names.append(group.group_name)
        else:
            names.append(groups.find_or_make(ranks, mesh_dims, device_mesh).group_name)
    return names


def run(executable: _runtime.Executable, local: torch.Tensor, async_op: bool) -> torch.Tensor:
    """Runs; with async_op, a result that is still under way is an AsyncCollectiveTensor."""
    if checking.is_on():
        checking.compare(executable, local, async_op)
    counters.counts.calls += 1
    if watching.num_modes():
        return watching.run(executable, [local], lambda: _run(executable, local, async_op))
    return _run(executable, local, async_op)


def run_again(executable: _runtime.Executable, local: torch.Tensor, async_op: bool) -> torch.Tensor:
    """`run`, for an executable that the caller has kept."""
    counts = counters.counts
    counts.cache_hits += 1
    if async_op or checking.is_on() or watching.num_modes():
        return run(executable, local, async_op)
    counts.calls += 1
    try:
        return executable.run(local)
    except ValueError:  # as _run says
        return _run(executable, local, async_op)


def _run(executable: _runtime.Executable, local: torch.Tensor, async_op: bool) -> torch.Tensor:
    try:
        return _start(executable, local) if async_op else executable.run(local)
    except ValueError:  # before anything was sent
        fitted = _fitted(executable, local)
        if fitted is None:
            raise
        if executable.is_identity:
            return local
        return _start(executable, fitted) if async_op else executable.run(fitted)


def _start(executable: _runtime.Executable, local: torch.Tensor) -> torch.Tensor:
    output, pending = executable.start(local)
    if not pending:
        return output
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(output)


def _fitted(executable: _runtime.Executable, local: torch.Tensor) -> torch.Tensor | None:
    """A local tensor cut or filled up with zeros to the shape that its layout has on this rank; None if it has it.

    A DTensor may hold another shape than its spec says, perhaps on some ranks only: PyTorch makes such tensors itself,
    in the backward of a maximum over all elements. Whoever raised then would leave the others waiting, because nobody
    knows what a peer holds. So every rank goes on with the part that the layout speaks of, as PyTorch's own gathers do,
    and says so.
    """
    shape = executable.input_shape
    if local.dim() != len(shape) or list(local.shape) == shape:
        return None
    counters.count_misfit(
        f"the local tensor has shape {tuple(local.shape)} where the layout has {tuple(shape)} on this rank"
    )
    fitted = local.new_zeros(shape)
    common = tuple(slice(min(have, want)) for have, want in zip(local.shape, shape, strict=True))
    fitted[common] = local[common]
    return fitted


def lowering_on(mesh: _planner.Mesh, device_type: str, group: dist.ProcessGroup | None) -> str:
    """`lowering` of a group that has all ranks of a mesh. Raises ValueError where it has not."""
    groups.check_initialised()
    world_size = dist.get_world_size(group)
    last_rank = max(mesh.ranks)
    if last_rank >= world_size:
        raise ValueError(
            f"mesh: {mesh} holds rank {last_rank}, but the process group has {world_size} ranks, 0 to {world_size - 1}"
        )
    return lowering(device_type, group)


def lowering(device_type: str, group: dist.ProcessGroup | None) -> str:
    """The lowering for the backend that carries tensors of this kind of device, by its name."""
    name = _backend_name(device_type, group)
    if name is None:
        raise RuntimeError(
            f"group: {group if group is not None else dist.group.WORLD} has no backend object for {device_type}, as "
            "process groups written in Python have none; allowed are groups with a backend such as gloo or nccl"
        )
    return _planner.lowering_of_backend(name, device_type)


def _backend_name(device_type: str, group: dist.ProcessGroup | None) -> str | None:
    """None for a group without a backend object, whose ranks may be threads that share all that is kept here."""
    groups.check_initialised()
    carrier = group if group is not None else dist.group.WORLD
    assert carrier is not None
    try:
        return carrier._get_backend(torch.device(device_type)).name().lower()
    except RuntimeError:
        return None
