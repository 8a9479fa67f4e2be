"""Names of the process groups that shardwright makes: equal on all members, and different for different owners.

PyTorch's names include the number of groups that the rank has made (torch 2.15) or holds (2.11). Members with different
numbers, or threads that make groups at the same time, would wait for each other under different names, forever.

The name of a new group is a digest of names of existing groups of its mesh. A rank knows only the groups that it is in.
So all members use the groups of the first member, whose coordinates are 0 in all dims in which the members differ. They
look them up in the store, one dim at a time.

Example: rank 3 = (1, 1) of a 2 x 2 mesh with ranks [[0, 1], [2, 3]] makes a group of all four. Its groups are a1 of
ranks 1, 3 along dim 0, and b1 of ranks 2, 3 along dim 1. Ranks 0 and 1 have the groups a0 of 0, 2 and b0 of 0, 1.

    1. Along dim 0, the first rank of a1 is rank 1. The store says that the members of a1 have along dim 1: rank 3 b1,
       and rank 1 b0. The names are now (a1, b0), those of rank 1.
    2. Along dim 1, the first rank of b0 is rank 0. The store says that the members of b0 have along dim 0: rank 1 a1,
       and rank 0 a0. The names are now (a0, b0), those of rank 0.

Two meshes may share a group. Let a second mesh have the groups a0, a1 along dim 0, but c0, c1 along dim 1. The store
then has a list for each rank: b1, c1 for rank 3, and b0, c0 for rank 1. A list is in the order in which the rank first
used the meshes. All members of a1 use it in the same order, and so also the meshes that share it. Hence equal indices
in the two lists belong to the same mesh: c1 has index 1, so its counterpart is c0.
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

DESCRIPTION = "shardwright"  # the description (group_desc) of all groups that shardwright makes
_POLL_SECONDS = 0.002  # interval between two reads of the store

# True if PyTorch's names of groups contain the number of groups that the rank holds (`exclude_own_groups_from_names`).
_NAMES_COUNT_GROUPS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)

# The meshes that are in the store, each as the names of this rank's groups along its dims.
_announced_meshes: set[tuple[str, ...]] = set()
_published_names: dict[str, list[str]] = {}  # this rank's lists in the store, by store key
_lock = threading.Lock()


def clear() -> None:
    """Clears the record of announcements, after the default group with their store is gone."""
    _announced_meshes.clear()
    _published_names.clear()


def announce(names: tuple[str, ...], grid: _planner.Mesh) -> None:
    """Writes the names of this rank's groups along the dims of a mesh into the store.

    `first_member_names` reads them on other ranks.
    """
    if names in _announced_meshes:
        return
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    with _lock:
        _announced_meshes.add(names)
        for dim, other in itertools.permutations([d for d in range(grid.ndim) if grid.shape[d] > 1], 2):
            key = _store_key(names[dim], grid, rank, other)
            listed = _published_names.setdefault(key, [])
            if names[other] not in listed:
                listed.append(names[other])
                store.set(key, "\n".join(listed))


def new_name(names: Sequence[str], ranks: Sequence[int], attempts: int) -> str:
    """Returns the name of a new group of these ranks.

    Args:
        names: names of the owner's groups (`first_member_names`).
        ranks: the members' global ranks, ascending.
        attempts: the number of attempts to make this group, including this one. A group that is made again needs a new
            name, because the store still has the addresses of its predecessor.
    """
    return _digest(f"shardwright {' '.join(names)} {'_'.join(map(str, ranks))} {attempts}")


def first_member_names(grid: _planner.Mesh, dims: Sequence[int], names: Sequence[str], timeout: timedelta) -> list[str]:
    """Returns the names of the first member's groups along `dims`. The module docstring has an example.

    Args:
        grid: the ranks of the mesh.
        dims: the mesh dims in which the members of the new group differ. The first member has coordinate 0 in them.
        names: the names of this rank's groups along `dims`.
        timeout: the time to wait for a rank that has not yet announced its groups.

    Raises:
        RuntimeError: a rank has not announced its groups within the timeout.
    """
    rank = dist.get_rank()  # the rank whose groups `found` names
    found = list(names)
    for i, dim in enumerate(dims):
        own = grid.coordinate(rank)
        assert own is not None
        first = next(member for member in grid.group_ranks(rank, [dim]) if (grid.coordinate(member) or own)[dim] == 0)
        if first == rank:
            continue
        shared = found[i]  # the group of both `rank` and `first`
        for j, other in enumerate(dims):
            if other != dim:
                index = _wait_for_list(_store_key(shared, grid, rank, other), rank, 1, timeout).index(found[j])
                found[j] = _wait_for_list(_store_key(shared, grid, first, other), first, index + 1, timeout)[index]
        rank = first
    return found


def exclude_own_groups_from_names() -> None:
    """Makes the names of PyTorch's groups independent of shardwright's groups, on torch before 2.14.

    There the names of `new_group(use_local_synchronization=True)` and `split_group` contain the number of groups that
    the rank holds. Only members hold shardwright's groups. So the members of a later group could have different
    numbers, and would wait for each other under different names, forever.
    """
    if _NAMES_COUNT_GROUPS:
        distributed_c10d._hash_ranks_to_str = _hash_without_own_groups


def _hash_without_own_groups(ranks: Sequence[int]) -> str:
    """Replaces PyTorch's `_hash_ranks_to_str`, which counts all groups. Does not count shardwright's."""
    count = sum(group.group_desc != DESCRIPTION for group in list(distributed_c10d._world.pg_names))
    return _digest("_".join(map(str, [*ranks, count])))


def _store_key(name: str, grid: _planner.Mesh, rank: int, dim: int) -> str:
    """Returns the store key for a list of a rank's groups.

    The list has the group along `dim` for each mesh that has the group `name` along another dim.
    """
    return f"shardwright/groups/{name}/{rank}/{_digest(str(grid.group_ranks(rank, [dim])))}"


def _digest(text: str) -> str:
    """Returns the SHA-1 digest of a text in hexadecimal."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _wait_for_list(key: str, rank: int, count: int, timeout: timedelta) -> list[str]:
    """Waits until the list at a store key has at least `count` names, and returns it.

    Polls, because a store client that waits blocks all threads that use it.

    Args:
        key: the store key (`_store_key`).
        rank: the rank that writes the list, for the error.
        count: the number of names, at least 1.
        timeout: the time to wait.

    Raises:
        RuntimeError: the list has fewer names after the timeout.
    """
    store = distributed_c10d._get_default_store()
    end = time.monotonic() + timeout.total_seconds()
    while True:
        names = bytes(store.get(key)).decode().split("\n") if store.check([key]) else []
        if len(names) >= count:
            return names
        if time.monotonic() > end:
            raise RuntimeError(
                f"group: rank {dist.get_rank()} waited {timeout.total_seconds():g} s for rank {rank} to redistribute "
                "on the same mesh. All ranks along several mesh dims must call a redistribute over these dims"
            )
        time.sleep(_POLL_SECONDS)
