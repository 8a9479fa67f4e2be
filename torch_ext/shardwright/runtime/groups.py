"""Finds or makes the process groups for sets of ranks.

A group is looked for among the groups of its owner, then among those made here for that owner. An owner is a
DeviceMesh (the groups of its dims, then those of meshes that were flattened from it), a single group, or the default
group for redistributes that name neither. So two meshes of the same ranks with groups of their own share no group.

Only its members take part in making a group, so ranks that run different programs may redistribute on their own part
of a mesh. All members must make a group at the same point of their programs; preparation.py moves that point to the
start. Threads with meshes of their own may make groups at the same time, in any order (group_names.py).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._native import _planner, _runtime
from ..layouts.layout import Mesh
from . import group_names


class WeakGroup:
    """A weak reference to a process group, or to the default group (None).

    Everything that outlives a call refers to groups in this way. A group's threads end with its last reference, which
    should be gone when `torch.distributed.destroy_process_group` returns.
    """

    __slots__ = ("_reference", "alive")

    # Returns the group, or None if it is the default group or was destroyed.
    alive: Callable[[], dist.ProcessGroup | None]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._reference = None if group is None else weakref.ref(group)
        self.alive = (lambda: None) if self._reference is None else self._reference

    def get(self) -> dist.ProcessGroup | None:
        """Returns the group, or None for the default group. Raises RuntimeError if it was destroyed."""
        group = self.alive()
        if group is None and self._reference is not None:
            raise RuntimeError("group must be a process group that exists, got one that was destroyed")
        return group

    def __repr__(self) -> str:  # the same in every process
        group = self.alive()
        return f"WeakGroup({None if group is None else group.group_name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakGroup) and self._reference == other._reference

    def __hash__(self) -> int:
        return hash(self._reference)


DEFAULT = WeakGroup(None)

DRY_RUN_BACKEND = "fake"  # torch's backend for dry runs, which sends nothing


class Owner(NamedTuple):
    """The process groups of a DeviceMesh, or a single group. Groups made for an owner are used for that owner alone."""

    names: tuple[str, ...] = ()  # names of the groups of the mesh's dims, or of the single group; (): default
    flattened: tuple[str, ...] = ()  # names of the groups of meshes flattened from the mesh
    grid: _planner.Mesh | None = None  # the ranks of the mesh; None for a single group


_DEFAULT_OWNER = Owner()

# The key of a group made here: names of the owner's groups along the mesh dims in which its ranks differ, and ranks.
_GroupKey = tuple[tuple[str, ...], tuple[int, ...]]

_made: dict[_GroupKey, WeakGroup] = {}  # the groups made here
_prepared: set[tuple[tuple[str, ...], _planner.Mesh, tuple[int, ...]]] = set()  # see `note_prepared`; by owner's names
_num_attempts: dict[_GroupKey, int] = {}  # attempts to make a group; failed ones count, so that all members agree
_locks: dict[_GroupKey, threading.Lock] = {}  # held by the thread that makes the group
_watched: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups whose end calls `group_gone_hooks`
cached_default_group = DEFAULT  # the default group for which caches hold values
_default_group_lock = threading.Lock()  # guards changes of `cached_default_group`

# Functions called when a default process group is gone, and again before anything is cached for the next one. Values
# cached for a default group may hold meshes, which hold process groups.
default_group_gone_hooks: list[Callable[[], None]] = []

# Functions called when a process group is gone to which a cached value was bound. They may only drop values that a rank
# can make again without the others, because ranks release a group at different times.
group_gone_hooks: list[Callable[[], None]] = []


def _call_all(functions: list[Callable[[], None]]) -> None:
    """Calls all functions, in order."""
    for function in functions:
        function()


def note_world() -> None:
    """Drops all values cached for an earlier default group, if the default group has changed or is gone."""
    global cached_default_group
    with _default_group_lock:
        if (world := dist.group.WORLD) is cached_default_group.alive():
            return
        for table in (_made, _prepared, _num_attempts, _locks):
            table.clear()
        group_names.clear()
        _call_all(default_group_gone_hooks)
        cached_default_group = weakly(world)
        if world is not None:
            # Ranks release a default group at different times. If there is a new one by then, its values stay.
            weakref.finalize(world, lambda: _call_all(default_group_gone_hooks if dist.group.WORLD is None else []))


def _watch(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group. Its end will call `group_gone_hooks`, because a new group may get its name."""
    if group not in _watched:
        _watched.add(group)
        weakref.finalize(group, _call_all, group_gone_hooks)
    return group


def weakly(group: dist.ProcessGroup | None) -> WeakGroup:
    """Returns a weak reference to the group, `DEFAULT` for None."""
    return DEFAULT if group is None else WeakGroup(group)


def default_if_none(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or the default group for None."""
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def check_initialized() -> None:
    """Raises RuntimeError if there is no default process group. Drops all values cached for an earlier one."""
    if not dist.is_available() or not dist.is_initialized():
        text = "group: torch.distributed is not initialized; call torch.distributed.init_process_group first"
        raise RuntimeError(text)
    note_world()


def moves_nothing(group: dist.ProcessGroup | None) -> bool:
    """Returns True if the group has the backend for dry runs, which sends nothing."""
    return dist.get_backend(group) == DRY_RUN_BACKEND


def key_of_mesh(mesh: Any) -> str:
    """Returns the names of a mesh's process groups as a cache key. Equal meshes may have different groups.

    The key is stored on the mesh, because each redistribute needs it.
    """
    try:
        key: str = mesh._shardwright_key
    except AttributeError:
        key = "\n".join(_dim_group_names(mesh))
        with contextlib.suppress(AttributeError):  # a compiler's stand-in for a mesh takes no attributes
            mesh._shardwright_key = key
    return key


def _dim_group_names(mesh: Any) -> tuple[str, ...]:
    """Returns the name of the process group along each dim of a DeviceMesh; () if it has no groups on this rank."""
    return tuple(getattr(mesh, "_dim_group_names", ()))


def flattened_names(mesh: Any) -> tuple[str, ...]:
    """Returns the names of the process groups of all meshes that were flattened from the root of a DeviceMesh."""
    flattened = list(mesh._get_root_mesh()._flatten_mapping.values())
    return tuple(name for submesh in flattened for name in _dim_group_names(submesh)[:1])


def owner_of(device_mesh: Any | None, group: dist.ProcessGroup | None = None) -> Owner:
    """Returns the owner of a redistribute's groups: the mesh if there is one, else the group."""
    if isinstance(device_mesh, Owner):
        return device_mesh
    if device_mesh is not None and (names := _dim_group_names(device_mesh)):
        grid = Mesh(device_mesh)
        _announce(names, grid)
        return Owner(names, flattened_names(device_mesh), grid)
    return _DEFAULT_OWNER if group is None or group is dist.group.WORLD else Owner((group.group_name,))


def owner_of_names(names: Sequence[str], grid: _planner.Mesh) -> Owner:
    """Returns the owner of the groups of an operator in a graph, which has their names but not the mesh.

    `names` are the names of the groups along the mesh's dims, then of the groups of flattened meshes. No names mean the
    default group. If the first names are not the groups along the dims of `grid`, all are names of single groups.
    """
    if not names:
        return _DEFAULT_OWNER
    along = [_ranks_of_name(name) for name in names[: grid.ndim]]
    if along != [tuple(grid.group_ranks(dist.get_rank(), [dim])) for dim in range(grid.ndim)]:
        return Owner(tuple(names))
    owner = Owner(tuple(names[: grid.ndim]), tuple(names[grid.ndim :]), grid)
    _announce(owner.names, grid)
    return owner


def _announce(names: tuple[str, ...], grid: _planner.Mesh) -> None:
    """Writes the names of this rank's groups into the store of the default group, without those of an earlier one."""
    note_world()
    group_names.announce(names, grid)


def note_prepared(owner: Owner, mesh: _planner.Mesh, dims: tuple[int, ...]) -> None:
    """Records that every rank of the mesh has made its group over these mesh dims."""
    _prepared.add((owner.names, mesh, dims))


def dims_with_groups(mesh: _planner.Mesh, device_mesh: Any | None) -> list[tuple[int, ...]]:
    """Returns the sets of mesh dims over which all ranks have a group: of the mesh, of a flattened one, or prepared.

    Plans depend on it, so it leaves out other groups made here: a redistribute on a slice of the mesh makes them on the
    ranks of that slice alone.
    """
    rank, owner = dist.get_rank(), owner_of(device_mesh)
    own = [tuple(dist.get_process_group_ranks(group)) for group in _groups_of(owner)]
    sets = [(dims, tuple(mesh.group_ranks(rank, dims))) for dims in sets_of_large_dims(mesh)]
    return [
        dims
        for dims, ranks in sets
        if ranks in own or ((owner.names, mesh, dims) in _prepared and find(ranks, owner) is not None)
    ]


def state(mesh: Any | None = None) -> tuple[Hashable, ...]:
    """Returns a key for values that depend on existing process groups, and on those of meshes flattened from a mesh."""
    flattened = () if mesh is None else flattened_names(mesh)
    return (*distributed_c10d._world.pg_names.values(), *flattened, len(_prepared))


def sets_of_large_dims(mesh: _planner.Mesh) -> list[tuple[int, ...]]:
    """Returns all nonempty sets of mesh dims, without dims of size 1. Dims are ascending in each set."""
    large = [d for d in range(mesh.ndim) if mesh.shape[d] > 1]
    return [s for n in range(1, len(large) + 1) for s in itertools.combinations(large, n)]


def find(ranks: Sequence[int], owner: Owner = _DEFAULT_OWNER) -> dist.ProcessGroup | None:
    """Returns the process group of exactly these ascending global ranks that belongs to the owner, if there is one."""
    members, owner = tuple(ranks), _owner_on_mesh(owner, ranks)
    for group in _groups_of(owner):
        if tuple(dist.get_process_group_ranks(group)) == members:
            return _watch(group)
    cached = _made.get((_names_along(owner, members), members))
    group = None if cached is None else cached.alive()
    return group if group in distributed_c10d._world.pg_group_ranks else None  # destroyed groups are not in this table


def find_or_make(ranks: Sequence[int], owner: Owner = _DEFAULT_OWNER, may_make: bool = True) -> dist.ProcessGroup:
    """Like `find`, but makes the group if it is missing: collective among its members.

    Raises RuntimeError if the group is missing and cannot be made (`check_may_make`).
    """
    if (found := find(ranks, owner)) is not None:
        return found
    note_world()
    members, owner = tuple(ranks), _owner_on_mesh(owner, ranks)
    check_may_make(members, may_make)
    key = _names_along(owner, members), members
    with _locks.setdefault(key, threading.Lock()):
        if (found := find(ranks, owner)) is None:
            attempts = _num_attempts[key] = _num_attempts.get(key, 0) + 1
            name = group_names.new_name(_names_of_first_member(owner, members), members, attempts)
            found = _watch(_make(members, name))
            _made[key] = weakly(found)
    return found


def _owner_on_mesh(owner: Owner, ranks: Sequence[int]) -> Owner:
    """Returns the owner if all ranks are on its mesh, else the default owner: a crossing has ranks of two meshes."""
    are_on_mesh = owner.grid is None or set(ranks) <= set(owner.grid.ranks)
    return owner if are_on_mesh else _DEFAULT_OWNER


def _ranks_of_name(name: str) -> tuple[int, ...]:
    """Returns the global ranks of the process group with this name, ascending."""
    return tuple(sorted(dist.get_process_group_ranks(distributed_c10d._resolve_process_group(name))))


def _groups_of(owner: Owner) -> Iterator[dist.ProcessGroup]:
    """Yields the owner's groups along mesh dims, then those of flattened meshes, without destroyed groups."""
    if not owner.names:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    for name in (*owner.names, *owner.flattened):
        try:
            group = distributed_c10d._resolve_process_group(name)
        except RuntimeError:  # it was destroyed
            continue
        if group in distributed_c10d._world.pg_group_ranks:
            yield group


def _differing_dims(grid: _planner.Mesh, ranks: Sequence[int]) -> list[int]:
    """Returns the mesh dims in which the ranks differ."""
    coordinates = [coordinate for rank in ranks if (coordinate := grid.coordinate(rank)) is not None]
    return [dim for dim in range(grid.ndim) if len({coordinate[dim] for coordinate in coordinates}) > 1]


def _names_along(owner: Owner, ranks: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of the owner's groups along the mesh dims in which the ranks differ; without a mesh, all."""
    if owner.grid is None:
        return owner.names
    return tuple(owner.names[dim] for dim in _differing_dims(owner.grid, ranks))


def _names_of_first_member(owner: Owner, ranks: tuple[int, ...]) -> Sequence[str]:
    """Returns `_names_along` of the member that `first_member_names` chooses: the same names on all members."""
    names = _names_along(owner, ranks)
    if owner.grid is None or len(names) < 2 or moves_nothing(None):  # a dry run has no other ranks
        return names
    return group_names.first_member_names(owner.grid, _differing_dims(owner.grid, ranks), names, default_timeout())


def _is_capturing() -> bool:
    """Returns True if a graph is being captured on the current stream of a device that is in use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.get_device_module(accelerator).is_initialized():
        return False  # a query would initialize the device
    return _runtime.is_capturing(str(accelerator))


# A function that finds or makes a process group for some ranks of a group that joins several jobs (connecting.py).
# PyTorch's new_group cannot make it. Arguments: the ranks, ascending; True if a group may be made.
Maker = Callable[[tuple[int, ...], bool], dist.ProcessGroup]
makers: weakref.WeakKeyDictionary[dist.ProcessGroup, Maker] = weakref.WeakKeyDictionary()  # by the group of all jobs


def joins_jobs(group: dist.ProcessGroup | None) -> bool:
    """Returns True if the group belongs to a connection, so that it has ranks of several jobs."""
    return group is not None and group in makers


def ranks_in_meshes(group: dist.ProcessGroup | None) -> list[int]:
    """Returns a group's ranks as meshes name them: global ranks, or ranks in the group if it joins several jobs."""
    if joins_jobs(group):
        return list(range(dist.get_world_size(group)))
    return list(dist.get_process_group_ranks(default_if_none(group)))


def rank_in_meshes(group: dist.ProcessGroup | None) -> int:
    """Returns this process's rank as meshes name it: its global rank, or its rank in a group that joins jobs."""
    return dist.get_rank(group) if joins_jobs(group) else dist.get_rank()


def check_may_make(ranks: tuple[int, ...], may_make: bool) -> None:
    """Raises RuntimeError if a missing process group cannot be made now."""
    if not may_make:
        raise RuntimeError(
            f"group: ranks {ranks} have no process group, and none may be made (make_groups=False). Call "
            "shardwright.prepare(mesh) first; for layouts on two meshes, with redistributes=[(src, dst)]"
        )
    if _is_capturing():
        raise RuntimeError(
            f"group: ranks {ranks} have no process group yet, and none can be made while a CUDA graph is captured. "
            "Call shardwright.prepare(mesh) before the capture; for layouts on two meshes, with "
            "redistributes=[(src, dst)]"
        )


def make_over_store(
    name: str, store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = (), backend: str = ""
) -> dist.ProcessGroup:
    """Returns a new process group of `size` processes that reach the store. Collective among them.

    The caller adds the group to PyTorch's table of ranks.

    Args:
        name: the name of the group, the same on all members.
        store: the store through which the members connect.
        rank: this process's rank in the group.
        size: the number of members.
        timeout: the timeout of the group.
        ranks: the members' global ranks; empty for a group of several jobs, whose processes have no common ones.
        backend: the backend; "" means that of the default group.
    """
    with _with_new_communicators() as device:
        group, _ = distributed_c10d._new_process_group_helper(
            size,
            rank,
            list(ranks),
            backend or str(dist.get_backend_config()),
            store,
            group_name=name,
            backend_options=_options(),
            timeout=timeout,
            device_id=device,
            group_desc=group_names.DESCRIPTION,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def client_of(store: dist.Store) -> dist.Store:
    """Returns a new client of the store. A client that waits for other ranks blocks all threads that use it."""
    with contextlib.suppress(NotImplementedError, RuntimeError):  # stores written in Python may lack it
        return store.clone()
    return store


def _make(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    """Returns a new process group of these global ranks. Collective among them."""
    # With one client for all threads, two threads that make groups in different orders on two ranks would deadlock.
    store = client_of(distributed_c10d._get_default_store())
    group_names.exclude_own_groups_from_names()
    group = make_over_store(name, store, ranks.index(dist.get_rank()), len(ranks), default_timeout(), ranks)
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


_binding_lock = threading.Lock()  # guards `_bound_devices` and the device of the default group
_bound_devices: list[torch.device | None] = []  # the default group's device, once per thread in the block below


@contextlib.contextmanager
def _with_new_communicators() -> Iterator[torch.device | None]:
    """Makes PyTorch give groups made inside the block new communicators. Yields the default group's bound device.

    If the default group is bound to a device, PyTorch makes a group by splitting its communicator. NCCL's default group
    is always bound from torch 2.15 on, and before that if `device_id` was given. All ranks of the default group must
    take part in a split, even with `use_local_synchronization`, so the members alone would wait forever. Hence the
    default group is unbound inside the block. Several threads may be inside at once.
    """
    world = dist.group.WORLD
    assert world is not None
    with _binding_lock:
        device = _bound_devices[0] if _bound_devices else world.bound_device_id
        _bound_devices.append(device)
        world.bound_device_id = None
    try:
        yield device
    finally:
        with _binding_lock:
            _bound_devices.pop()
            if not _bound_devices:
                world.bound_device_id = device


def _options() -> Any | None:
    """Returns the backend options for groups made here: the default NCCL group's, but with high-priority streams.

    Messages run on the group's own stream. At normal priority they would wait for the thread blocks of a product with
    which they should overlap. Returns None if the default group is not NCCL's.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    found = None
    for backend in _default_backends():
        while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        options = getattr(backend, "options", None)
        if nccl is not None and isinstance(options, nccl.Options):
            found = options
        elif not isinstance(backend, getattr(dist, "ProcessGroupGloo", ())):
            return None  # PyTorch passes the options to the backends of all devices, and this one may not accept them
    if found is None:
        return None
    options = copy.deepcopy(found)
    options.is_high_priority_stream = True
    options.split_from = None
    if hasattr(options, "enable_reconfigure"):  # such a group would wait for another call before it communicates
        options.enable_reconfigure = False
    return options


def _default_backends() -> Iterator[Any]:
    """Yields the default group's backend for each of its device types."""
    return _backends(default_if_none(None))


def _backends(group: dist.ProcessGroup) -> Iterator[Any]:
    for device in group._device_types:
        yield group._get_backend(device)


def default_timeout() -> timedelta:
    """Returns the default group's timeout, which new_group would not use; 30 minutes (PyTorch's default) if unknown."""
    return _timeout(_default_backends())


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Returns the timeout of a group that joins several jobs; for other groups, that of the default group."""
    return _timeout(_backends(group)) if group is not None and joins_jobs(group) else default_timeout()


def _timeout(backends: Iterator[Any]) -> timedelta:
    for backend in backends:
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)
