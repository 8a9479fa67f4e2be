"""Turns a pair of layouts into an executable, and caches it for the next call.

An executable is a plan's program for this rank, bound to process groups (csrc/runtime/executable.h). A lowering is the
way in which a plan's steps are carried out, by collectives as on NCCL or by messages as on Gloo (csrc/cost/lowering.h).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .. import planning
from .._native import _planner, _runtime
from .._planner import PlanningTables
from ..layouts import pickling, tables
from ..layouts.errors import argument_error
from ..layouts.topology import tables_now
from . import checking, counters, groups, layout_stats, plan_log, watching

# The number of executables cached; the oldest is dropped first. A job has some hundreds of pairs of layouts.
MAX_EXECUTABLES = 8192

# Caches of earlier tables are kept because pins and measurements change once or twice in a job, and sometimes back.
MAX_EARLIER_TABLES = 3

tables.change_hooks.append(_runtime.invalidate_sized_plans)
groups.default_group_gone_hooks.append(_runtime.invalidate_sized_plans)
groups.group_gone_hooks.append(_runtime.invalidate_sized_plans)

# The time in seconds that the end of the process waits for asynchronous redistributes that nobody waited for.
EXIT_SECONDS = 5.0
atexit.register(_runtime.finish_programs, EXIT_SECONDS)


# False: DTensor redistributes over the fake backend of dry runs are left to PyTorch. That backend moves no data, so
# shardwright's results would have other values than PyTorch's. Benchmarks of the host's time set this to True.
runs_on_fake_groups = False


class Refusal(NamedTuple):
    """The reason why a pair of layouts has no executable."""

    reason: str  # a text without values, by which `sw.stats()` counts fallbacks
    example: str = ""  # the full text of this case, if it is longer


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class PlanningCache(Generic[T]):
    """A cache of values that depend on the default process group and on the current tables (`tables.current`).

    A value is only found under the tables with which it was made. So a change of pins, topologies or measurements takes
    effect at the next call, and when the old tables return, so do their values. The cache is bounded and drops the
    oldest entry first. Keys and values must not keep process groups alive (`groups.weakly`). A key holds the process
    groups to which its value is bound (`groups.key_of_mesh`): meshes that compare equal may have different groups.

    `is_local` means that a rank can make the values again without other ranks. Such values are dropped when any process
    group is gone to which a cached value was bound, because a new group may get the name of the old one.
    """

    def __init__(self, is_local: bool = False) -> None:
        # The tables and the values made with them. They are one tuple, so that threads always read a matching pair.
        self._current: tuple[PlanningTables, dict[Hashable, T]] = (tables.current, {})
        self._by_earlier_tables: dict[PlanningTables, dict[Hashable, T]] = {}
        self._switch_lock = threading.Lock()
        groups.default_group_gone_hooks.append(self.clear)
        if is_local:
            groups.group_gone_hooks.append(self.clear)

    def get(self, key: Hashable) -> T | None:
        """Returns the value stored under the current tables and default group, or None."""
        made_with, entries = self._current
        if made_with is not tables.current or groups.cached_default_group.alive() is not dist.group.WORLD:
            entries = self._switch_tables()
        return entries.get(key)

    def put(self, key: Hashable, value: T) -> None:
        """Stores a value that was made after the last `get`, unless the tables have changed since then."""
        made_with, entries = self._current
        if made_with is tables.current:
            put_bounded(entries, key, value, MAX_EXECUTABLES)

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the cached value for `key`, or makes and stores it."""
        value = self.get(key)
        if value is None:
            before = self._current
            value = make()
            if before is self._current and before[0] is tables.current:
                put_bounded(before[1], key, value, MAX_EXECUTABLES)
        return value

    def clear(self) -> None:
        """Drops all values."""
        self._current = self._current[0], {}
        self._by_earlier_tables.clear()

    def __len__(self) -> int:
        return len(self._current[1]) + sum(map(len, self._by_earlier_tables.values()))

    def _switch_tables(self) -> dict[Hashable, T]:
        """Makes the values of the current tables and of the current default group the current ones. Returns them."""
        groups.note_world()
        with self._switch_lock:
            made_with, entries = self._current
            if made_with is not tables.current:
                self._by_earlier_tables[made_with] = entries
                now = tables.current
                entries = self._by_earlier_tables.pop(now, {})
                self._current = now, entries
                while len(self._by_earlier_tables) > MAX_EARLIER_TABLES:
                    del self._by_earlier_tables[next(iter(self._by_earlier_tables))]
            return entries


def put_bounded(entries: dict[K, T], key: K, value: T, max_entries: int) -> None:
    """Adds a value to a cache of at most `max_entries` entries. Drops the oldest entries to make room."""
    while len(entries) >= max_entries:
        with contextlib.suppress(KeyError, RuntimeError):  # another thread has dropped or added an entry
            del entries[next(iter(entries))]
    entries[key] = value


def cached(function: Callable[..., T]) -> Callable[..., T]:
    """Decorates a function whose results depend on meshes or plans: caches them by its positional arguments."""
    results: PlanningCache[T] = PlanningCache()

    @functools.wraps(function)
    def call(*args: Hashable) -> T:
        return results.get_or_make(args, lambda: function(*args))

    return call


# The results of `lookup`.
_executables: PlanningCache[_runtime.Executable | Refusal] = PlanningCache(is_local=True)


def lookup(key: Hashable, build: Callable[[], _runtime.Executable | Refusal]) -> _runtime.Executable | Refusal:
    """Returns the cached executable or refusal for `key`, or makes and stores it with `build`."""
    cached = _executables.get(key)
    if cached is not None:
        counters.counts.cache_hits += 1
        return cached
    tables_now()  # applies changes of the environment now, because values made while tables change are not cached
    return _executables.get_or_make(key, build)


def make_plan(
    src: _planner.Layout,
    dst: _planner.Layout,
    device_type: str,
    group: dist.ProcessGroup | None = None,
    existing_groups_of: Any | None = None,
) -> _planner.Plan:
    """Returns the plan from `src` to `dst` for the backend of the group for this type of device.

    If `existing_groups_of` is a DeviceMesh, moves use only process groups that exist. Between two meshes, ranks cannot
    look up the groups of the other mesh; see `plan_over_own_dims`.
    """
    backend = lowering_for_mesh(src.mesh, device_type, group).name
    if dst.mesh is not src.mesh:
        lowering_for_mesh(dst.mesh, device_type, group)  # checks its ranks
    usable_dims = None if existing_groups_of is None else usable_mesh_dims(src, dst, existing_groups_of)
    return plan_for_backend(src, dst, backend, usable_dims)


def usable_mesh_dims(src: _planner.Layout, dst: _planner.Layout, device_mesh: Any) -> list[tuple[int, ...]]:
    """Returns the sets of mesh dims that already have a process group; an empty list for moves between meshes."""
    return groups.dims_with_groups(src.mesh, device_mesh) if src.mesh.has_same_ranks(dst.mesh) else []


def plan_for_backend(
    src: _planner.Layout, dst: _planner.Layout, backend: str, usable_dims: list[tuple[int, ...]] | None
) -> _planner.Plan:
    """Returns the plan for a backend: the pinned one if there is one, else the cheapest.

    If `usable_dims` is given, moves on one mesh use only the groups over these sets of mesh dims, and moves between
    meshes need no new groups (`plan_over_own_dims`).
    """
    cached = planning.pinned(src, dst, backend)
    if cached is not None:
        plan_log.note(cached, "pinned")
        return cached
    if usable_dims is not None and not src.mesh.has_same_ranks(dst.mesh):
        plan, usable_dims = plan_over_own_dims(src, dst, backend), None
        why = "chosen because it needs no new groups of mesh dims"
    else:
        plan = planning.plan(src, dst, backend=backend, groups=usable_dims)
        why = plan_log.why_chosen(plan, usable_dims)
    counters.counts.plans += 1
    plan_log.note(plan, why)
    log_default_topology(plan, usable_dims)
    return plan


def plan_over_own_dims(src: _planner.Layout, dst: _planner.Layout, backend: str) -> _planner.Plan:
    """Returns a plan from one mesh to another that needs no new process group, except the group of both meshes.

    The plan reduces pending values over one mesh dim at a time, because every DeviceMesh has these groups. The next
    step moves the tensor to the other mesh.
    """
    through = []  # the layouts after each reduction
    if src.has_pending:
        own = [(dim,) for dim in range(src.mesh.ndim) if src.mesh.shape[dim] > 1]
        reduced = planning.plan(src, src.without_pending(), backend=backend, groups=own)
        through = [step.after for step in reduced.steps]
    return planning.plan(src, dst, backend=backend, through=through)


def log_default_topology(plan: _planner.Plan, usable_dims: Sequence[Sequence[int]] | None = None) -> None:
    """Logs a hint to measure, once, if this plan uses a default topology and would differ under another topology.

    `usable_dims` are the sets of mesh dims whose groups the plan may use; None allows all.
    """
    if plan.messages_max == 0 or not (tables.notes_default() and _is_first_rank()):
        return
    topology = plan.src.mesh.topology or plan.dst.mesh.topology or tables.current.environment
    if topology is not None or tables.measured_topology(plan.backend) is not None:
        return
    ends = plan.src, plan.dst
    plans = [planning.plan(*ends, backend=plan.backend, groups=usable_dims, topology=extreme) for extreme in _EXTREMES]
    if len({tuple((step.op, step.mesh_dims, step.after) for step in p.steps) for p in (plan, *plans)}) > 1:
        tables.note_default(plan.topology)


# Two topologies: in the first only the number of messages costs time, in the second only their bytes. Predicted times
# are weighted sums of both, so a plan that is cheapest in both is cheapest with any link.
_EXTREMES = (
    _planner.Topology("latency", 0, 10**9, 1, _planner.Link(10**9, 1), _planner.Link(10**9, 1)),
    _planner.Topology("bandwidth", 0, 1, 1, _planner.Link(1, 10**9), _planner.Link(1, 10**9)),
)


def log_default_model(model: _planner.GemmModel, device_type: str) -> None:
    """Logs once that products are planned with default times, if this is the default model."""
    if model == tables.default_gemm_model(device_type) and _is_first_rank():
        tables.note_default(model.name)


def _is_first_rank() -> bool:
    """Returns True on global rank 0, or without torch.distributed."""
    return not dist.is_initialized() or dist.get_rank() == 0


def why_left_to_torch(device_type: str) -> str | None:
    """Returns the reason to leave all DTensor redistributes on this type of device to PyTorch, or None."""
    name = backend_name(device_type, None)
    if name is None:
        return f"process group without a backend object for {device_type}"
    if name == groups.DRY_RUN_BACKEND and not runs_on_fake_groups:
        return "fake backend, which moves no data"
    return None


def bind(
    plan: _planner.Plan,
    *,
    device_mesh: Any | None = None,
    group: dist.ProcessGroup | None = None,
    make_groups: bool = True,
) -> _runtime.Executable:
    """Returns a plan's program for this rank, bound to its groups. Collective among the ranks of each missing group.

    Args:
        plan: the plan. Ranks of its meshes are global ranks, or ranks of `group` if one is given.
        device_mesh: a DeviceMesh whose groups are used.
        group: the process group whose ranks the plan has.
        make_groups: False to raise RuntimeError instead of making a missing group.
    """
    program = _runtime.CompiledProgram(plan.to_bytes(), dist.get_rank(group))
    names = group_names_of(program.groups, device_mesh=device_mesh, group=group, make_groups=make_groups)
    executable = program.bind(names)
    checking.note_group(executable, group)
    return executable


def group_names_of(
    members: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    device_mesh: Any | None = None,
    group: dist.ProcessGroup | None = None,
    make_groups: bool = True,
    are_global: bool = False,
) -> list[str]:
    """Returns the names of the process groups of a program, in the order of `members`. Makes missing groups.

    Args:
        members: for each group, its mesh dims and its ranks.
        device_mesh: a DeviceMesh whose groups are used.
        group: a process group. The ranks in `members` are ranks in this group, unless they `are_global`.
        make_groups: False to raise RuntimeError instead of making a missing group.
        are_global: the ranks are global ranks. Not possible for a group of separate jobs, which has none.
    """
    names = []
    maker = None if group is None else groups.makers.get(group)
    owner = groups.owner_of(device_mesh, group)
    for _, ranks in members:
        if maker is not None:
            names.append(maker(tuple(ranks), make_groups).group_name)
            continue
        if group is not None and not are_global:
            ranks = [dist.get_global_rank(group, rank) for rank in ranks]
        if group is not None and dist.get_process_group_ranks(group) == ranks:
            names.append(group.group_name)
        else:
            names.append(groups.find_or_make(ranks, owner, make_groups).group_name)
    return names


def operator_group_names(text: str, rank: int, **where: Any) -> list[str]:
    """Returns the names of the process groups that an operator's program needs. Caches the compiled program.

    `text` is the operator's plan, product or attention as text. `where` has keyword arguments of `group_names_of`.
    """
    return group_names_of(_runtime.compiled(text, rank).groups, **where)


def bind_batch(batch: _planner.Batch, device_type: str, group: dist.ProcessGroup | None) -> _runtime.BoundBatch:
    """Plans a batch and returns this rank's program, bound to `group`. The batch's meshes have ranks of that group."""
    name = groups.default_if_none(group).group_name
    sent_from = wire(torch.device(device_type), group)
    return _runtime.BoundBatch(batch.to_bytes(), dist.get_rank(group), name, sent_from.type)


def run(
    executable: _runtime.Executable, local: torch.Tensor, async_op: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Runs an executable on a local tensor and returns the result.

    With `async_op`, a result whose transfers are in flight is an AsyncCollectiveTensor. With `out`, the result is
    written there and `out` is returned; async_op must be False. Without `out`, a local tensor whose shape is not the
    layout's is cut or padded (`_cut_or_padded`).
    """
    if layout_stats.on:
        return layout_stats.measure(executable, lambda: _run_watched(executable, local, async_op, out))
    return _run_watched(executable, local, async_op, out)


def _run_watched(
    executable: _runtime.Executable, local: torch.Tensor, async_op: bool, out: torch.Tensor | None
) -> torch.Tensor:
    """Does the work of `run`, and shows it to dispatch modes. If the debug mode is on, compares ranks first."""
    if checking.is_on():
        checking.compare(executable, local, async_op, out)
    counters.counts.calls += 1
    if watching.num_modes():
        return watching.run(executable, [local], lambda: _run(executable, local, async_op, out))
    return _run(executable, local, async_op, out)


def start_into(executable: _runtime.Executable, local: torch.Tensor, out: torch.Tensor) -> dist.Work | None:
    """Like `run` with `out`, but returns while transfers are in flight.

    Returns the work to wait for, or None if the result is complete. Until then, the caller must not use either tensor.
    """
    if layout_stats.on:
        return layout_stats.measure(executable, lambda: _start_watched(executable, local, out))
    return _start_watched(executable, local, out)


def _start_watched(executable: _runtime.Executable, local: torch.Tensor, out: torch.Tensor) -> dist.Work | None:
    """Does the work of `start_into`, and shows it to dispatch modes. If the debug mode is on, compares ranks first."""
    if checking.is_on():
        checking.compare(executable, local, True, out)
    counters.counts.calls += 1
    if watching.num_modes():
        work: list[dist.Work | None] = []

        def start() -> torch.Tensor:
            work.append(executable.start_into(local, out))
            return out

        watching.run(executable, [local], start)
        return work[0]
    return executable.start_into(local, out)


def run_cached(executable: _runtime.Executable, local: torch.Tensor, async_op: bool) -> torch.Tensor:
    """Like `run`, for an executable from the caller's cache. Counts a cache hit. Faster if no mode or counter is on."""
    counts = counters.counts
    counts.cache_hits += 1
    if async_op or layout_stats.on or checking.is_on() or watching.num_modes():
        return run(executable, local, async_op)
    counts.calls += 1
    try:
        return executable.run(local)
    except ValueError:  # the tensor may have another shape than the layout, which `_run` handles
        return _run(executable, local, async_op)


def _run(
    executable: _runtime.Executable, local: torch.Tensor, async_op: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Does the work of `run` itself: fits the local tensor to the layout if needed, without debug or dispatch modes."""
    if out is not None:
        executable.run_into(local, out)
        return out
    try:
        return _start(executable, local) if async_op else executable.run(local)
    except ValueError:  # the executable raises it before it sends anything
        squeezed = checking.differs_in_unit_dims_only(local, executable.input_shape)
        fitted = local.reshape(executable.input_shape) if squeezed else _cut_or_padded(executable, local)
        if fitted is None:
            raise
        if executable.is_identity:
            return local
        result = _start(executable, fitted) if async_op else executable.run(fitted)
        return result.view(local.shape) if squeezed and result.shape == fitted.shape else result


def _start(executable: _runtime.Executable, local: torch.Tensor) -> torch.Tensor:
    """Starts an executable. Returns its result, as an AsyncCollectiveTensor if transfers are in flight."""
    output, pending = executable.start(local)
    if not pending:
        return output
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    pickling.wait_before(AsyncCollectiveTensor)
    return AsyncCollectiveTensor(output)


def _cut_or_padded(executable: _runtime.Executable, local: torch.Tensor) -> torch.Tensor | None:
    """Returns a local tensor cut, or padded with zeros, to the shape of its layout on this rank; None if it fits.

    A DTensor's part may have another shape than its spec, perhaps on some ranks only; PyTorch makes such tensors itself
    in the backward of a maximum over all elements. A rank that raised would leave the others waiting, because no rank
    can see the shapes of its peers. So every rank continues with the part that the layout describes, as PyTorch's own
    gathers do, and logs it.
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


@torch._disable_dynamo  # Dynamo treats process groups as objects without methods
def lowering_for_mesh(mesh: _planner.Mesh, device_type: str, group: dist.ProcessGroup | None) -> _planner.Lowering:
    """Returns `lowering` of a group. Raises ValueError if the mesh has ranks that are not in the group."""
    groups.check_initialized()
    world_size = dist.get_world_size(group)
    last_rank = max(mesh.ranks)
    if last_rank >= world_size:
        allowed = f"of ranks in [0, {world_size - 1}], as the process group"
        raise argument_error("mesh", allowed, f"rank {last_rank} in {mesh}")
    return lowering(device_type, group)


def lowering(device_type: str, group: dist.ProcessGroup | None) -> _planner.Lowering:
    """Returns the lowering for the group's backend for this type of device."""
    name = backend_name(device_type, group)
    if name is None:
        raise RuntimeError(
            f"group must have a backend such as gloo or nccl for {device_type}, got "
            f"{groups.default_if_none(group)} without one, such as a group written in Python"
        )
    return _planner.Lowering.of_backend(name, device_type)


def wire(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device from whose memory the group sends tensors of `device`: the same, or the host."""
    return device if lowering(device.type, group).is_on_device else torch.device("cpu")


def communicates_on(device_type: str, group: dist.ProcessGroup | None) -> bool:
    """Returns True if the group has a backend for this type of device."""
    return backend_name(device_type, group) is not None


def backend_name(device_type: str, group: dist.ProcessGroup | None) -> str | None:
    """Returns the name of the group's backend for this type of device, or None if it has no backend object.

    The ranks of a group without a backend object may be threads of one process, which share this module's caches.
    """
    groups.check_initialized()
    try:
        return groups.default_if_none(group)._get_backend(torch.device(device_type)).name().lower()
    except RuntimeError:
        return None
