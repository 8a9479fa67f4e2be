"""Names of the process groups that are made here: the same on all members, different for other owners.

PyTorch's names include the number of groups that the rank has made (2.15) or holds (2.11). Members whose numbers
differ, or threads that make groups at once, would wait for each other under different names, forever.

A rank has only its own groups of a mesh. So a name is made from the groups of one member, whose coordinates are 0 in
all dims in which the members differ. The others find these groups in the store, one dim at a time: rank (1, 1) of a
2 x 2 mesh shares a group with rank (0, 1), which shares one with rank (0, 0).

Two meshes may share their groups along one dim: one that joins the weights' dim of one mesh and the tensor-parallel dim
of another. Rank (0, 0) then shares one group with rank (0, 1) for both meshes, and has a group along the other dim for
each. Each rank lists its groups along the other dim in the order in which it first used the meshes. The ranks of a
group use it in one order, so they use the meshes that share it in one order, and equal places in their lists mean the
same mesh.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._native import _planner

DESCRIPTION = "shardwright"  # of all groups made here
_POLL_SECONDS = 0.002  # interval between two reads of the store

_COUNTS_GROUPS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)  # see `leave_ours_out_of_names`

_announced: set[tuple[str, ...]] = set()  # names of meshes that other ranks can look up
_lists: dict[str, list[str]] = {}  # by store key: groups of this rank, in the order of their first use
_announcing = threading.Lock()


def forget() -> None:
    """Forgets all announcements, which belong to a default group that is gone."""
    _announced.clear()
    _lists.clear()


def announce(names: tuple[str, ...], grid: _planner.Mesh) -> None:
    """Writes the names of this rank's groups along the dims of a mesh into the store, for `of_first` on other ranks."""
    if names in _announced:
        return
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    with _announcing:
        _announced.add(names)
        for dim, other in itertools.permutations([d for d in range(grid.ndim) if grid.shape[d] > 1], 2):
            key = _key(names[dim], grid, rank, other)
            listed = _lists.setdefault(key, [])
            if names[other] not in listed:
                listed.append(names[other])
                store.set(key, "\n".join(listed))


def new_name(names: Sequence[str], ranks: Sequence[int], times: int) -> str:
    """Returns the name of a new group of these ranks.

    Args:
        names: the owner's groups (`of_first`).
        ranks: the members.
        times: how often this group was made, this time included. A group that is made again after it was destroyed
            needs a new name, because the store still has the addresses of the first one.
    """
    return _digest(f"shardwright {' '.join(names)} {'_'.join(map(str, ranks))} {times}")


def of_first(grid: _planner.Mesh, dims: Sequence[int], names: Sequence[str], timeout: timedelta) -> list[str]:
    """Returns the names of the groups along `dims` of the rank with coordinate 0 in them. `names` are this rank's."""
    rank = dist.get_rank()
    found = list(names)
    for i, dim in enumerate(dims):
        own = grid.coordinate(rank)
        assert own is not None
        first = next(member for member in grid.group_ranks(rank, [dim]) if (grid.coordinate(member) or own)[dim] == 0)
        if first == rank:
            continue
        shared = found[i]
        for at, other in enumerate(dims):
            if other != dim:
                place = _read(_key(shared, grid, rank, other), rank, 1, timeout).index(found[at])
                found[at] = _read(_key(shared, grid, first, other), first, place + 1, timeout)[place]
        rank = first
    return found


def leave_ours_out_of_names() -> None:
    """Makes the names of PyTorch's groups independent of the groups made here, on torch before 2.14.

    There the names of `new_group(use_local_synchronization=True)` and `split_group` contain the number of groups that
    the rank holds. Only members hold the groups made here, so ranks of a later group could have different numbers, and
    would wait for each other under different names, forever.
    """
    if _COUNTS_GROUPS:
        distributed_c10d._hash_ranks_to_str = _hash_without_ours


def _hash_without_ours(ranks: Sequence[int]) -> str:
    """PyTorch's function, which counts the groups, without those made here."""
    count = sum(group.group_desc != DESCRIPTION for group in list(distributed_c10d._world.pg_names))
    return _digest("_".join(map(str, [*ranks, count])))


def _key(name: str, grid: _planner.Mesh, rank: int, dim: int) -> str:
    """Returns the store key of a rank's groups along `dim` in all meshes in which `name` is its group along another."""
    return f"shardwright/groups/{name}/{rank}/{_digest(str(grid.group_ranks(rank, [dim])))}"


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read(key: str, rank: int, count: int, timeout: timedelta) -> list[str]:
    """Returns a rank's list once it has `count` names. Polls, because a client that waits blocks other threads."""
    store = distributed_c10d._get_default_store()
    end = time.monotonic() + timeout.total_seconds()
    while True:
        listed = bytes(store.get(key)).decode().split("\n") if store.check([key]) else []
        if len(listed) >= count:
            return listed
        if time.monotonic() > end:
            raise RuntimeError(
                f"group: rank {dist.get_rank()} waited {timeout.total_seconds():g} s for rank {rank} to redistribute "
                "on the same mesh. All ranks along several mesh dims must call a redistribute over these dims"
            )
        time.sleep(_POLL_SECONDS)
