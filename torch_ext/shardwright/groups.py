"""Finds or makes the process groups for sets of mesh dims.

A group is looked for among the mesh's own groups, then its flattened ones, then the default group, then those made
here. Only its members take part in making it, so ranks that run different programs may redistribute on their own part
of a mesh. All members must ask at the same point of their programs; preparation.py moves that point to the start.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import _planner, _runtime


def _nothing() -> None:
    return None


class WeakGroup:
    """A weak reference to a process group, or to the default group (None).

    Everything that outlives a call refers to groups in this way. A group's threads end with its last reference, which
    should be gone when `torch.distributed.destroy_process_group` returns.
    """

    __slots__ = ("_reference", "alive")

    # Returns the group, or None for the default one and for one that was destroyed.
    alive: Callable[[], dist.ProcessGroup | None]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._reference = None if group is None else weakref.ref(group)
        self.alive = _nothing if self._reference is None else self._reference

    def get(self) -> dist.ProcessGroup | None:
        """Returns the group, or None for the default one. Raises RuntimeError if it was destroyed."""
        group = self.alive()
        if group is None and self._reference is not None:
            raise RuntimeError("group: the process group was destroyed; allowed is one that exists")
        return group

    def __repr__(self) -> str:  # the same in every process
        group = self.alive()
        return f"WeakGroup({None if group is None else group.group_name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakGroup) and self._reference == other._reference

    def __hash__(self) -> int:
        return hash(self._reference)


DEFAULT = WeakGroup(None)

DRY_RUN_BACKEND = "fake"  # torch's name for it; it sends nothing

_made: dict[tuple[int, ...], WeakGroup] = {}
_times_made: dict[tuple[int, ...], int] = {}  # attempts included, so that it is the same on all members
_world = DEFAULT


# Called when a default process group is gone. Values cached for it may hold meshes, which hold process groups.
when_gone: list[Callable[[], None]] = []


def _forget() -> None:
    if _world.alive() is None:  # otherwise the caches already belong to the next default group
        for forget in when_gone:
            forget()


def weakly(group: dist.ProcessGroup | None) -> WeakGroup:
    return DEFAULT if group is None else WeakGroup(group)


def check_initialised() -> None:
    """Raises RuntimeError if there is no default process group; forgets groups of an earlier one."""
    global _world
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    world = dist.group.WORLD
    if world is not _world.alive():
        _made.clear()
        _times_made.clear()
        _world = weakly(world)
        weakref.finalize(world, _forget)


def moves_nothing(group: dist.ProcessGroup | None) -> bool:
    """Returns whether the group's backend is that of dry runs, which sends nothing."""
    return dist.get_backend(group) == DRY_RUN_BACKEND


def existing(mesh: _planner.Mesh, device_mesh: Any | None) -> list[tuple[int, ...]]:
    """Returns the sets of mesh dims whose group for this rank exists: the mesh's, a flattened one, or one made here."""
    rank = dist.get_rank()
    found = []
    for dims in sets_of_large_dims(mesh):
        wanted = tuple(mesh.group_ranks(rank, dims))
        there = any(tuple(dist.get_process_group_ranks(g)) == wanted for g in _candidates(dims, device_mesh))
        if there or _made_for(wanted) is not None:
            found.append(dims)
    return found


def names() -> tuple[str, ...]:
    """Returns the names of all process groups that this rank knows."""
    return tuple(distributed_c10d._world.pg_names.values())


def sets_of_large_dims(mesh: _planner.Mesh) -> list[tuple[int, ...]]:
    """Returns every set of mesh dims that have more than one rank."""
    large = [d for d in range(mesh.ndim) if mesh.shape[d] > 1]
    return [s for n in range(1, len(large) + 1) for s in itertools.combinations(large, n)]


def find_or_make(
    ranks: Sequence[int], mesh_dims: Iterable[int], device_mesh: Any | None, may_make: bool = True
) -> dist.ProcessGroup:
    """Returns the process group of exactly these ascending global ranks. Collective among them if it must be made.

    If it may not be made, raises RuntimeError.
    """
    wanted = tuple(ranks)
    for group in _candidates(tuple(mesh_dims), device_mesh):
        if tuple(dist.get_process_group_ranks(group)) == wanted:
            return group
    made = _made_for(wanted)
    if made is None:
        check_may_make(wanted, may_make)
        made = _make(wanted)
        _made[wanted] = weakly(made)
    return made


def _made_for(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    made = _made.get(ranks)
    group = None if made is None else made.alive()
    return group if group in distributed_c10d._world.pg_group_ranks else None  # if not, it was destroyed


def _candidates(mesh_dims: tuple[int, ...], device_mesh: Any | None) -> Iterable[dist.ProcessGroup]:
    if device_mesh is not None:
        if len(mesh_dims) == 1:
            yield from _group_of(device_mesh, mesh_dims[0])
        for flattened in device_mesh._get_root_mesh()._flatten_mapping.values():
            yield from _group_of(flattened, 0)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD


def _group_of(device_mesh: Any, mesh_dim: int) -> Iterable[dist.ProcessGroup]:
    # A mesh may have been made without process groups, and a flattened one without this rank. A rank outside the mesh
    # has no groups of it, and the mesh dims of the other mesh of a crossing may not exist on this one.
    try:
        group = device_mesh.get_group(mesh_dim)
        if group not in distributed_c10d._world.pg_group_ranks:
            # The group was destroyed. In torch 2.15 a mesh keeps the groups it was made with and returns them while
            # tracing, and PyTorch's caches hold meshes of an earlier default group, because they equal current ones.
            group = distributed_c10d._resolve_process_group(group.group_name)
    except (RuntimeError, LookupError, TypeError, ValueError, AssertionError):
        return
    if group in distributed_c10d._world.pg_group_ranks:
        yield group


def _is_capturing() -> bool:
    """Returns whether a graph is being captured on the current stream of the accelerator, if one is in use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # A query would initialise a device that is not in use.
    if accelerator is None or not torch.get_device_module(accelerator).is_initialized():
        return False
    return _runtime.is_capturing(str(accelerator))


# For groups that span several jobs (connecting.py): what finds or makes groups of some of their ranks, which new_group
# cannot do. Called with the ranks, ascending, and whether a group may be made.
Maker = Callable[[tuple[int, ...], bool], dist.ProcessGroup]
makers: weakref.WeakKeyDictionary[dist.ProcessGroup, Maker] = weakref.WeakKeyDictionary()


def joins_jobs(group: dist.ProcessGroup | None) -> bool:
    """Whether it is the group of a connection, with ranks of several jobs."""
    return group is not None and group in makers


def ranks_in_meshes(group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of a group as meshes have them: global ranks, or those in the group where it joins several jobs."""
    if joins_jobs(group):
        return list(range(dist.get_world_size(group)))
    return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def rank_in_meshes(group: dist.ProcessGroup | None) -> int:
    """This process's rank as meshes have it."""
    return dist.get_rank(group) if joins_jobs(group) else dist.get_rank()


def check_may_make(ranks: tuple[int, ...], may_make: bool) -> None:
    """Raises RuntimeError if a missing process group cannot be made now."""
    if not may_make:
        raise RuntimeError(
            f"group: ranks {ranks} have no process group, and none may be made (make_groups=False); allowed are groups "
            "that exist: shardwright.prepare makes them, for layouts on two meshes with redistributes=[(src, dst)]"
        )
    if _is_capturing():
        raise RuntimeError(
            f"group: ranks {ranks} have no process group yet, and none can be made while a CUDA graph is captured; "
            "call shardwright.prepare(mesh) before the capture; for layouts on two meshes, with "
            "redistributes=[(src, dst)]"
        )


def make_over_store(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Returns a new process group of processes of several jobs that reach the store, with the default group's backend.

    Collective among its members. The caller adds it to PyTorch's table of ranks.
    """
    _runtime.drain()
    with _not_split_from_the_default_group() as device:
        group, _ = distributed_c10d._new_process_group_helper(
            size,
            rank,
            [],  # as for a default group: these are no ranks of the default group
            str(dist.get_backend_config()),
            store,
            group_name=name,
            backend_options=_options(),
            timeout=timeout,
            device_id=device,
            group_desc="shardwright",
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _make(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    _runtime.drain()
    with _names_by_ranks_alone(), _not_split_from_the_default_group() as device:
        group = dist.new_group(
            list(ranks),
            timeout=default_timeout(),
            pg_options=_options(),
            use_local_synchronization=True,
            group_desc="shardwright",
            device_id=device,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def _not_split_from_the_default_group() -> Iterator[torch.device | None]:
    """Gives groups made inside the block new communicators. Yields the device that the default group is bound to.

    If the default group is bound to a device, PyTorch would split its communicator (NCCL's default group always is from
    torch 2.15 on, before that with `device_id=`). All ranks of the default group would have to take part in the split,
    even with `use_local_synchronization`, so the members alone would wait forever.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


def _options() -> Any | None:
    """Returns the options for groups made here: those of the default NCCL group, but with high-priority streams.

    Messages run on the group's own stream. At normal priority they would wait for the blocks of a product with which
    they should overlap. Returns None if the default group is not NCCL's.
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
    world = dist.group.WORLD
    assert world is not None
    for device in world._device_types:
        yield world._get_backend(device)


@contextlib.contextmanager
def _names_by_ranks_alone() -> Iterator[None]:
    """Names groups made inside the block by their ranks and the number of times these ranks made one.

    PyTorch includes in the name how many groups this rank has made (2.15) or holds (2.11). Members of one group that
    have made different groups before would then wait for each other under different names, forever. The block also
    restores PyTorch's count of groups; otherwise the next group that all ranks make together would hang in the same
    way. A group that is made again after it was destroyed needs a new name, because the store still has the addresses
    of the first one.
    """
    count = distributed_c10d._world.group_count
    original = distributed_c10d._hash_ranks_to_str

    def name(ranks: Sequence[int]) -> str:
        times = _times_made[tuple(ranks)] = _times_made.get(tuple(ranks), 0) + 1
        text = f"shardwright {'_'.join(map(str, ranks))} {times}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    distributed_c10d._hash_ranks_to_str = name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original
        distributed_c10d._world.group_count = count


def default_timeout() -> timedelta | None:
    # Without a timeout, new_group uses the backend's 30 minutes, not the timeout given to init_process_group.
    for backend in _default_backends():
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def make_arenas(names: Iterable[str], device_type: str, arena_bytes: int, min_bytes: int) -> None:
    """Memory on the current device that the ranks of each group copy from. Collective among the members of each."""
    _runtime.drain()
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, torch.accelerator.current_device_index())
    for name in names:
        _runtime.use_peer_copies(name, str(device), arena_bytes, min_bytes)
