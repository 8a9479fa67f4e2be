"""Names of the process groups that are made here: the same on all members, different for other owners.

PyTorch's names include the number of groups that the rank has made (2.15) or holds (2.11). Members whose numbers
differ, or threads that make groups at once, would wait for each other under different names, forever.

A rank has only its own groups of a mesh. So a name is made from the groups of one member, whose coordinates are 0 in
all dims in which the members differ. The others find these groups in the store, one dim at a time: rank (1, 1) of a
2 x 2 mesh shares a group with rank (0, 1), which shares one with rank (0, 0).

Two meshes may share their groups along one dim: one that joins the weights' dim of one mesh and the tensor-parallel dim
of another. Rank (0, 0) then shares one group with rank (0, 1) for both meshes, and has a group along the other dim for
each. Both ranks list their groups along the other dim in the order in which PyTorch made them, which is the same on all
ranks of a mesh; an index into this list says which one is meant.
"""

from __future__ import annotations

import hashlib
import itertools
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

announced: set[tuple[str, ...]] = set()  # names of meshes that other ranks can look up


def announce(names: tuple[str, ...], grid: _planner.Mesh) -> None:
    """Writes the names of this rank's groups along the dims of a mesh into the store, for `of_first` on other ranks."""
    if names in announced:
        return
    announced.add(names)
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    for dim, other in itertools.permutations([d for d in range(grid.ndim) if grid.shape[d] > 1], 2):
        store.set(_key(names[dim], grid, rank, other, _index(names[other])), names[other])


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
    rank, indices = dist.get_rank(), [_index(name) for name in names]
    found = list(names)
    for i, dim in enumerate(dims):
        own = grid.coordinate(rank)
        assert own is not None
        first = next(member for member in grid.group_ranks(rank, [dim]) if (grid.coordinate(member) or own)[dim] == 0)
        if first != rank:
            rank, shared = first, found[i]
            keys = [_key(shared, grid, rank, d, index) for d, index in zip(dims, indices, strict=True)]
            found = [shared if d == dim else _read(key, rank, timeout) for d, key in zip(dims, keys, strict=True)]
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


def _key(name: str, grid: _planner.Mesh, rank: int, dim: int, index: int) -> str:
    """Returns the store key for the group along `dim` of a rank whose group along another dim is `name`."""
    return f"shardwright/groups/{name}/{rank}/{_digest(str(grid.group_ranks(rank, [dim])))}/{index}"


def _index(name: str) -> int:
    """Returns how many groups of the same ranks PyTorch made before this one. 0 for groups made here.

    Groups made here are not counted: their members alone make them, so other ranks of a mesh may have fewer.
    """
    group = distributed_c10d._resolve_process_group(name)
    if group.group_desc == DESCRIPTION:
        return 0
    known = [g for g in distributed_c10d._world.pg_group_ranks if isinstance(g, dist.ProcessGroup)]
    ranks = dist.get_process_group_ranks(group)
    equals = [g for g in known if g.group_desc != DESCRIPTION and dist.get_process_group_ranks(g) == ranks]
    return equals.index(group)


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read(key: str, rank: int, timeout: timedelta) -> str:
    """Returns the value that a rank wrote. Polls, because a store client that waits blocks other threads."""
    store = distributed_c10d._get_default_store()
    end = time.monotonic() + timeout.total_seconds()
    while not store.check([key]):
        if time.monotonic() > end:
            raise RuntimeError(
                f"group: rank {dist.get_rank()} waited {timeout.total_seconds():g} s for rank {rank} to redistribute "
                "on the same mesh. All ranks along several mesh dims must call a redistribute over these dims"
            )
        time.sleep(_POLL_SECONDS)
    return bytes(store.get(key)).decode()
