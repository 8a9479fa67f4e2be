"""Connects separate jobs, such as a trainer and a server, by one process group of all their ranks.

Each job has its own world, made by `torch.distributed.init_process_group`. All jobs reach one store. Every process
writes its identity, its declarations and its planning tables there, and reads those of all others. So all processes
make the same decision: all join the group, or all raise the same error.

A role is the name of a job. A process is identified by its role and its rank in its own job.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import builds
from .._native import _planner
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import layout_text, mesh_text
from ..layouts.topology import ENVIRONMENT_VARIABLE, tables_now
from . import checking, groups
from .agreement import Statement, StoreTexts, error_text

_POLL_SECONDS = 0.02  # interval between two reads of the store

_REMEDY = (
    "All jobs must have the same declarations and planning tables, for example with one file in "
    f"{ENVIRONMENT_VARIABLE} and without sw.calibrate()"
)

# Planning tables that jobs need not share, because only products use them.
_NOT_COMPARED = ("measured products",)


class Connection:
    """The ranks of several jobs as one group. Made by `connect`.

    Attributes:
        group: the process group of all ranks, for the `group` of ``redistribute_local``, ``redistribute_many``,
            ``transfer`` and ``operator``.
        role: the name of this job.
        rank: this process's rank in `group`.
        world_size: the number of ranks in `group`.
    """

    def __init__(self, jobs: _JobExchange, members: dict[tuple[str, int], dict[str, Any]], timeout: timedelta) -> None:
        self._jobs = jobs  # the exchange of texts with all processes
        self._timeout = timeout
        self._members = sorted(members)  # (role, rank in its job) of each rank of `group`
        self._made: dict[tuple[int, ...], groups.WeakGroup] = {}  # groups of a part of the ranks, by these ranks
        self._num_attempts: dict[tuple[int, ...], int] = {}  # number of attempts to make a group, by ranks
        self.role = jobs.role
        self.world_size = len(members)
        self.rank = self._members.index((jobs.role, jobs.rank))
        self.group = self._make(tuple(range(self.world_size)))
        groups.makers[self.group] = _weak_maker(weakref.ref(self))

    def ranks(self, role: str) -> tuple[int, ...]:
        """Returns the ranks of a job in `group`, in the order of its own ranks. Jobs are sorted by name.

        Raises ValueError for a role that is not connected.
        """
        found = tuple(i for i, (name, _) in enumerate(self._members) if name == role)
        if not found:
            known = sorted({name for name, _ in self._members})
            raise argument_error("role", f"one of {', '.join(known)}", repr(role))
        return found

    def compare(self, declared: Mapping[str, Any]) -> None:
        """Raises RuntimeError on all ranks, naming the differences, unless all declare the same. All ranks must call.

        Planning tables are compared too: pinned plans, measurements of `calibrate`, and ``SHARDWRIGHT_TOPOLOGY``. They
        must stay the same in all jobs while tensors move. Only `compare` and `check_ranks` notice a difference.

        Args:
            declared: layouts, meshes, texts, numbers, or lists of these, by name.
        """
        self._jobs.compare(_texts(declared), self._members, self._timeout)

    def close(self) -> None:
        """Destroys the group, and the groups made for some of its ranks. All ranks must call."""
        for group in [self.group, *(known.alive() for known in self._made.values())]:
            if group is not None and group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self._made.clear()

    def _find_or_make(self, ranks: tuple[int, ...], may_make: bool) -> dist.ProcessGroup:
        """Returns the process group of these ranks of `group`. Collective among them if it must be made."""
        if len(ranks) == self.world_size:
            return self.group
        known = self._made.get(ranks)
        group = None if known is None else known.alive()
        if group is None or group not in distributed_c10d._world.pg_map:
            groups.check_may_make(ranks, may_make)
            group = self._make(ranks)
            self._made[ranks] = groups.weakly(group)
        return group

    def _make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Makes a process group of these ranks of the connection. Collective among them."""
        attempts = self._num_attempts[ranks] = self._num_attempts.get(ranks, 0) + 1
        name = f"{self._jobs.prefix}/ranks {'_'.join(map(str, ranks))} {attempts}"
        try:
            index, size, backend = ranks.index(self.rank), len(ranks), self._jobs.backend
            group = groups.make_over_store(name, self._jobs.store, index, size, self._timeout, backend=backend)
        except RuntimeError as error:
            raise RuntimeError(
                f"connect: {self._jobs.me} could not join the group of ranks {ranks}: {error}"
            ) from error
        # PyTorch's table maps ranks of this process's world to ranks of the group. Processes of other jobs have no rank
        # in this world, so their keys are numbers from the size of the world on.
        own = {rank: i for i, rank in enumerate(self.ranks(self.role))}
        key_of = {rank: own.get(rank, len(own) + rank) for rank in ranks}
        distributed_c10d._world.pg_group_ranks[group] = {key_of[rank]: i for i, rank in enumerate(ranks)}
        checking.connection_texts[group] = self._jobs.texts
        return group


def connect(
    store: dist.Store,
    role: str,
    world_size: int,
    *,
    declared: Mapping[str, Any] | None = None,
    name: str = "default",
    backend: str | None = None,
    timeout_seconds: float | None = None,
) -> Connection:
    """Makes one process group of the ranks of several jobs. All ranks of all jobs must call.

    Args:
        store: a store that all jobs reach, such as a ``TCPStore`` of the first one.
        role: the name of this job, different from that of the others.
        world_size: the number of ranks of all jobs together.
        declared: layouts, meshes, texts, numbers, or lists of these, by name; they must be the same in all jobs.
        name: the name of the connection. Connections that share a store at the same time have different names.
        backend: the backend of the new group, as in ``init_process_group``. Default: that of the default group, which
            then must be the same in all jobs.
        timeout_seconds: time to wait for the others, and the timeout of the new group; default: the timeout of the
            default group.

    Returns:
        A `Connection`. Meshes and layouts that are used with ``group=connection.group`` have the ranks of that group.

    Raises:
        RuntimeError: torch.distributed is not initialized; ranks are missing after the timeout; jobs differ in
            `world_size`, backend, `declared`, shardwright's version or planning tables, as in ``Connection.compare``;
            the ranks of a role are not each of 0 to its world's size - 1 once. The message names roles and ranks, and
            all processes that have called raise it.
        ValueError: an argument has the wrong type.
    """
    if not isinstance(store, dist.Store):
        raise argument_error("store", "a torch.distributed.Store", f"a {type(store).__name__}")
    for argument, value in (("role", role), ("name", name)):
        if not isinstance(value, str) or not value:
            raise argument_error(argument, "a nonempty string", repr(value))
    world_size = argument_values.integer(world_size, "world_size")
    if world_size < 2:
        raise argument_error("world_size", "the number of ranks of all jobs, at least 2", world_size)
    texts = _texts({} if declared is None else declared)
    groups.check_initialized()
    timeout = groups.default_timeout() if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    config = dist.get_backend_config() if backend is None else dist.BackendConfig(dist.Backend(backend))
    jobs = _JobExchange(store, role, name, world_size, str(config))
    members = jobs.gather(timeout)
    jobs.compare(texts, sorted(members), timeout)
    return Connection(jobs, members, timeout)


def _weak_maker(connection: weakref.ref[Connection]) -> groups.Maker:
    """Returns the `Maker` of a connection. Holds the connection weakly, because a connection holds its groups."""

    def find_or_make(ranks: tuple[int, ...], may_make: bool) -> dist.ProcessGroup:
        connected = connection()
        if connected is None:
            raise RuntimeError("group: its Connection was deleted; keep it as long as the group is used")
        return connected._find_or_make(ranks, may_make)

    return find_or_make


class _JobExchange:
    """The exchange of texts among the processes of all jobs, through the store."""

    def __init__(self, store: dist.Store, role: str, name: str, world_size: int, backend: str) -> None:
        self.role, self.rank, self.world_size, self.backend = role, dist.get_rank(), world_size, backend
        self.me = f"{role} {self.rank}"  # this process in errors
        self.store = store
        self.everyone = f"shardwright/connect/{name}"  # the key that counts calls with this name; prefix of other keys
        # `call_index` is the index of this call among all calls with this name. `world_size` consecutive calls belong
        # to one connection, which begins at `first_call_index`. A process that calls after another process of its
        # connection has timed out takes a new index, until it gets one of the next connection.
        while True:
            self.call_index = store.add(self.everyone, 1) - 1
            self.first_call_index = self.call_index // world_size * world_size
            if not store.check([self._timeout_key()]):
                break
        self.prefix = f"{self.everyone}/{self.first_call_index}"
        self.texts = StoreTexts(dist.PrefixStore(f"{self.prefix}/compared", store))

    def _timeout_key(self) -> str:
        """Returns the store key that marks this connection as timed out."""
        return f"{self.everyone}/timed out {self.first_call_index} of {self.world_size}"

    def gather(self, timeout: timedelta) -> dict[tuple[str, int], dict[str, Any]]:
        """Returns the description of each process, by role and rank. Raises RuntimeError if descriptions conflict."""
        member = {
            "role": self.role,
            "rank": self.rank,
            "ranks": dist.get_world_size(),
            "world_size": self.world_size,
            "backend": self.backend,
        }
        self.store.set(f"{self.everyone}/member {self.call_index}", json.dumps(member))
        keys = [f"{self.everyone}/member {self.first_call_index + i}" for i in range(self.world_size)]
        by_key: dict[str, Any] = {}
        end = time.monotonic() + timeout.total_seconds()
        while len({member["world_size"] for member in by_key.values()} | {self.world_size}) == 1:
            by_key |= {
                key: json.loads(self.store.get(key)) for key in keys if key not in by_key and self.store.check([key])
            }
            if len(by_key) == len(keys) or time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        called = [by_key[key] for key in keys if key in by_key]
        self._check_equal(called, "world_size", "world_size")
        if len(called) < self.world_size:
            self.store.set(self._timeout_key(), self.me)
            raise RuntimeError(
                f"connect: {self.me} waited {timeout.total_seconds():g} s for {self.world_size} ranks, but only "
                f"{len(called)} called: {_listed(called)}; {_missing(called)}"
            )
        self._check_equal(called, "backend", "backend")
        members = {(member["role"], member["rank"]): member for member in called}
        sizes = {member["role"]: member["ranks"] for member in called}
        if len(members) < len(called) or sum(sizes.values()) != self.world_size or len(sizes) < 2:
            worlds = ", ".join(f"{size} ({role})" for role, size in sorted(sizes.items()))
            raise RuntimeError(
                f"connect: the {self.world_size} (world_size) ranks must be all ranks of two or more jobs with "
                f"different roles, got {_listed(called)}. The jobs have {worlds} ranks"
            )
        return members

    def _check_equal(self, members: Sequence[dict[str, Any]], field: str, what: str) -> None:
        """Raises RuntimeError unless all members have the same value of a field. `what` names it in the error."""
        values = sorted({member[field] for member in members}, key=str)
        if len(values) > 1:
            texts = "; ".join(f"{value} ({_listed([m for m in members if m[field] == value])})" for value in values)
            raise RuntimeError(f"connect: {what} must be the same in all jobs, got {texts}")

    def compare(self, texts: dict[str, str], members: Sequence[tuple[str, int]], timeout: timedelta) -> None:
        """Raises RuntimeError on all members unless all have the same texts and planning tables."""
        tables = {name: value for name, value in tables_now().summary().items() if name not in _NOT_COMPARED}
        declared = {f"declared {name}": text for name, text in texts.items()}
        fields = {**declared, "version of shardwright": builds.version(), **tables}
        mine = Statement("connect", fields, mismatch="differ in declarations or planning tables", remedy=_REMEDY)
        names = tuple(f"{role} {rank}" for role, rank in members)
        if error := error_text(mine, self.texts.exchange("connect", mine.to_json(), names, self.me, timeout), ""):
            raise RuntimeError(error)


def _texts(declared: object) -> dict[str, str]:
    """Returns the declared values as texts, by name. Raises ValueError for other types."""
    if not isinstance(declared, Mapping):
        raise argument_error("declared", "a dict from names to values", f"a {type(declared).__name__}")
    return {str(name): _text(value, str(name)) for name, value in declared.items()}


def _text(value: Any, name: str) -> str:
    """Returns a declared value as text. `name` is for errors."""
    if isinstance(value, _planner.Layout):
        return layout_text(value)
    if isinstance(value, _planner.Mesh):
        return f"{value}, {mesh_text(value)}"
    if value is None or isinstance(value, (str, int, float, bool)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, name) for item in value)}]"
    raise argument_error(f"declared[{name!r}]", "a layout, mesh, text, number or list", f"a {type(value).__name__}")


def _listed(members: Sequence[dict[str, Any]]) -> str:
    """Returns the roles and ranks of processes as a text such as "server 0, 1; trainer 0, 2"."""
    roles = sorted({member["role"] for member in members})
    ranks = {role: sorted(member["rank"] for member in members if member["role"] == role) for role in roles}
    return "; ".join(f"{role} {', '.join(map(str, ranks[role]))}" for role in roles)


def _missing(members: Sequence[dict[str, Any]]) -> str:
    """Returns a text such as "missing ranks: server 1": the ranks of each job that have not called."""
    parts = []
    for role, size in sorted({member["role"]: member["ranks"] for member in members}.items()):
        present = {member["rank"] for member in members if member["role"] == role}
        absent = [str(rank) for rank in range(size) if rank not in present]
        if absent:
            parts.append(f"{role} {', '.join(absent)}")
    return f"missing ranks: {'; '.join(parts)}" if parts else "no rank of another job called"
