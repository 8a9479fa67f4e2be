"""What must hold before a DTensor moves to another mesh: that all ranks mean the same two meshes and placements.

What each rank can see for itself is checked on every call. The rest is compared through the store of torch.distributed
when two layouts are first used.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner
from ..layouts.layout import Mesh
from ..runtime import checking, groups


class _Agreed(NamedTuple):
    """What ranks have compared under one default process group.

    Nothing is dropped: whether ranks compare must depend on nothing that could differ among them, such as tables.
    """

    pairs: set[Hashable]  # of layouts, for all sizes and dtypes
    meeting: checking.Meeting  # apart from that of `check_ranks`, which some ranks may have left after an error


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreed] = weakref.WeakKeyDictionary()
groups.when_gone.append(_agreed.clear)

_MAX_SHOWN = 16  # ranks of a mesh

_REMEDY = (
    "\nOn ranks outside the mesh of x, PyTorch may choose other placements for the results of operators than on its "
    "ranks. x.redistribute(placements=...) on the mesh of x gives it the same ones on all ranks"
)


def check_meshes(here: DeviceMesh, there: DeviceMesh) -> None:
    """Raises ValueError, without communication, if one of the meshes is another one on other ranks that take part.

    That is so for a proper slice of a mesh, such as ``mesh["tp"]``, unless all ranks that take part are on it.
    """
    for argument, mesh, other in (("mesh (device_mesh)", there, here), ("x: its mesh", here, there)):
        root = mesh._get_root_mesh()
        if root.size() > mesh.size() and not covers(mesh, other):
            raise ValueError(
                f"{argument}: {Mesh(mesh)} is a slice of {Mesh(root)}, and its ranks differ from rank to rank (here "
                f"{_ranks(Mesh(mesh))}); allowed are a mesh that all ranks make alike, as DeviceMesh(...) does, and "
                f"moves among the ranks of one slice. To cut a tensor along some dims of {Mesh(root)} alone, "
                "redistribute it on that mesh, with Replicate() along the others"
            )


def covers(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Returns whether all ranks of the other mesh are on this one."""
    return set(Mesh(mesh).ranks) >= set(Mesh(other).ranks)


def agree(src: _planner.Layout, dst: _planner.Layout) -> None:
    """Raises RuntimeError on all ranks of both meshes if they differ in the layouts. Compares them when first used.

    What a DTensor says of itself on ranks outside its mesh may be wrong: where operators can choose among placements,
    PyTorch takes moves to cost nothing there, and chooses differently.
    """
    if src.mesh == dst.mesh or groups.moves_nothing(None):
        return
    agreed = _agreed_now()
    key = tuple((one.mesh, tuple(one.placements), str(one.shard_order)) for one in (src, dst))
    if key in agreed.pairs:
        return
    ranks, rank = tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks})), dist.get_rank()
    if rank not in ranks:
        return
    mine = {"x": _text(src), "result": _text(dst)}
    timeout = groups.default_timeout() or timedelta(minutes=30)
    kind = "redistribute to another mesh"
    checking.compare_calls(ranks, rank, kind, mine, judged={}, meeting=agreed.meeting, timeout=timeout, remedy=_REMEDY)
    agreed.pairs.add(key)


def _agreed_now() -> _Agreed:
    world = dist.group.WORLD
    assert world is not None
    if (found := _agreed.get(world)) is None:
        store = dist.PrefixStore("shardwright/layouts", distributed_c10d._get_default_store())
        found = _agreed[world] = _Agreed(set(), checking.Meeting(store, Counter()))
    return found


def _text(layout: _planner.Layout) -> str:
    return f"{layout}, ranks {_ranks(layout.mesh)}"


def _ranks(mesh: _planner.Mesh) -> str:
    ranks = mesh.ranks
    if len(ranks) <= _MAX_SHOWN:
        return str(ranks)
    return f"[{', '.join(map(str, ranks[:_MAX_SHOWN]))}, ... {len(ranks)} in all, with hash {hash(tuple(ranks))}]"
