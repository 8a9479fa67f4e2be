"""Process groups for sets of mesh dims: found where they exist, made where they do not.

A group is looked for among the mesh's own, then among its flattened ones, then the default group, then those made here.
Only its members take part in making it, which is why ranks that run different programs may redistribute on their own
part of a mesh. All members must ask at the same point of their programs; preparation.py moves that point to the start.
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
    """A process group, or None, which stands for the default one, held without keeping the group alive.

    What outlives a call holds groups by these: a group's threads end with its last reference, which should be gone when
    `torch.distributed.destroy_process_group` is done.
    """

    __slots__ = ("_reference", "alive")

    # The group; None for the default one and for one that was destroyed.
    alive: Callable[[], dist.ProcessGroup | None]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._reference = None if group is None else weakref.ref(group)
        self.alive = _nothing if self._reference is None else self._reference

    def get(self) -> dist.ProcessGroup | None:
        """The group; None for the default one. Raises RuntimeError for one that was destroyed."""
        group = self.alive()
        if group is None and self._reference is not None:
            raise RuntimeError("group: the process group was destroyed; allowed is one that is there")
        return group

    def __repr__(self) -> str:  # the same in every process
        group = self.alive()
        return f"WeakGroup({None if group is None else group.group_name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakGroup) and self._reference == other._reference

    def __hash__(self) -> int:
        return hash(self._reference)


DEFAULT = WeakGroup(None)
_made: dict[tuple[int, ...], WeakGroup] = {}
_times_made: dict[tuple[int, ...], int] = {}  # or tried to; the same on all members
_world = DEFAULT


# Called when a default process group is gone: what was kept for it may hold meshes, and these hold process groups.
when_gone: list[Callable[[], None]] = []


def _forget() -> None:
    if _world.alive() is None:  # else all that is kept belongs to the next one by now
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


def existing(mesh: _planner.Mesh, device_mesh: Any | None) -> list[tuple[int, ...]]:
    """The sets of mesh dims whose group for this rank is there: the mesh's own, its flattened ones, and those made."""
    rank = dist.get_rank()
    found = []
    for dims in sets_of_large_dims(mesh):
        wanted = tuple(mesh.group_ranks(rank, dims))
        there = any(tuple(dist.get_process_group_ranks(g)) == wanted for g in _candidates(dims, device_mesh))
        if there or _made_for(wanted) is not None:
            found.append(dims)
    return found


def sets_of_large_dims(mesh: _planner.Mesh) -> list[tuple[int, ...]]:
    """Every set of mesh dims of more than one rank."""
    large = [d for d in range(mesh.ndim) if mesh.shape[d] > 1]
    return [s for n in range(1, len(large) + 1) for s in itertools.combinations(large, n)]


def find_or_make(ranks: Sequence[int], mesh_dims: Iterable[int], device_mesh: Any | None) -> dist.ProcessGroup:
    """The process group of exactly these global ranks, ascending; collective among them if it must be made."""
    wanted = tuple(ranks)
    for group in _candidates(tuple(mesh_dims), device_mesh):
        if tuple(dist.get_process_group_ranks(group)) == wanted:
            return group
    made = _made_for(wanted)
    if made is None:
        made = _make(wanted)
        _made[wanted] = weakly(made)
    return made


def _made_for(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    made = _made.get(ranks)
    group = None if made is None else made.alive()
    return group if group in distributed_c10d._world.pg_group_ranks else None  # else destroyed


def _candidates(mesh_dims: tuple[int, ...], device_mesh: Any | None) -> Iterable[dist.ProcessGroup]:
    if device_mesh is not None:
        if len(mesh_dims) == 1:
            yield from _group_of(device_mesh, mesh_dims[0])
        for flattened in device_mesh._get_root_mesh()._flatten_mapping.values():
            yield from _group_of(flattened, 0)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD


def _group_of(device_mesh: Any, mesh_dim: int) -> Iterable[dist.ProcessGroup]:
    # A mesh may have been made without process groups, and a flattened one without this rank.
    try:
        group = device_mesh.get_group(mesh_dim)
        if group not in distributed_c10d._world.pg_group_ranks:
            # Destroyed. In torch 2.15 a mesh keeps the groups it was made with and hands them out while tracing; caches
            # of PyTorch's hold meshes of an earlier default group, because they equal those of today.
            group = distributed_c10d._resolve_process_group(group.group_name)
    except (RuntimeError, KeyError, ValueError, AssertionError):
        return
    if group in distributed_c10d._world.pg_group_ranks:
        yield group


def _is_capturing() -> bool:
    """Whether a graph is captured on the current stream of the accelerator, if torch has one that is in use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Asking a device that is not in use would take it into use.
    if accelerator is None or not torch.get_device_module(accelerator).is_initialized():
        return False
    return _runtime.is_capturing(str(accelerator))


def _make(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if _is_capturing():
        raise RuntimeError(
            f"group: ranks {ranks} have no process group yet, and none can be made while a CUDA graph is captured; "
            "call shardwright.prepare(mesh) before the capture"
        )
    _runtime.drain()
    with _names_by_ranks_alone(), _not_split_from_the_default_group() as device:
        group = dist.new_group(
            list(ranks),
            timeout=_default_timeout(),
            pg_options=_options(),
            use_local_synchronization=True,
            group_desc="shardwright",
            device_id=device,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def _not_split_from_the_default_group() -> Iterator[torch.device | None]:
    """Groups made meanwhile have communicators of their own. Yields the device that the default group is bound to.

    PyTorch splits the communicator of a default group that is bound to a device (NCCL's always is from torch 2.15 on,
    before that with `device_id=`). All ranks of the default group would have to take part, also with
    `use_local_synchronization`, so members alone would wait forever.
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
    """What groups made here take for options: those of the default group's NCCL, but with streams of high priority.

    Messages run on a stream of the group's own. At normal priority they would stand behind the blocks of a product
    that they are to run beside. None where the default group is not NCCL's.
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
            return None  # PyTorch gives one object to the backends of all devices, and this one is not known to take it
    if found is None:
        return None
    options = copy.deepcopy(found)
    options.is_high_priority_stream = True
    options.split_from = None
    if hasattr(options, "enable_reconfigure"):  # such a group waits for a call of its own before it communicates
        options.enable_reconfigure = False
    return options


def _default_backends() -> Iterator[Any]:
    world = dist.group.WORLD
    assert world is not None
    for device in world._device_types:
        yield world._get_backend(device)


@contextlib.contextmanager
def _names_by_ranks_alone() -> Iterator[None]:
    """Names groups made meanwhile by their ranks and by how often these made one, and leaves the count of groups alone.

    PyTorch mixes into the name how many groups this rank has made (2.15) or holds (2.11). Members of one group that
    have made different groups before would then wait for each other under different names, forever; and so would the
    next group that all ranks make together. A group that is made again, after it was destroyed, needs another name: the
    store still has the addresses of the first one.
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


def _default_timeout() -> timedelta | None:
    # new_group falls back to the backend's 30 minutes, not to what init_process_group was given.
    for backend in _default_backends():
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None
