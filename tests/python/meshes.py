"""Device meshes for tests, cached for each default process group: making their groups takes longer than most tests."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

NAMES = ("a", "b", "c")

# Device type of the tests' tensors: "cpu", "cuda", or the asynchronous device of tests/async_device.
device = "cpu"

IS_2_11 = torch.__version__.startswith("2.11.")
IS_BEFORE_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)

_cache: dict[tuple[object, ...], DeviceMesh] = {}
_timeout = datetime.timedelta(minutes=30)


def begin_life(collective_timeout_seconds: float) -> None:
    """Drops all meshes, because their process group is gone, and sets the timeout of future ones."""
    global _timeout
    _cache.clear()
    _timeout = datetime.timedelta(seconds=collective_timeout_seconds)


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns all subsets of at least two names, in order: the dims that can be flattened."""
    return [chosen for count in range(2, len(names) + 1) for chosen in itertools.combinations(names, count)]


def get_mesh(
    shape: Sequence[int],
    *,
    flatten: Sequence[Sequence[str]] | str = (),
    keep: Sequence[str] | None = None,
) -> DeviceMesh:
    """Returns a mesh over all ranks with dims named a, b, c. Every rank of the world must request the same meshes.

    flatten: the sets of dims to flatten, such as [("a", "b")], or "all".
    keep: names of dims; returns the submesh of these dims that contains this rank. Flattened dims must be kept.
    """
    shape = tuple(shape)
    names = NAMES[: len(shape)]
    kept = tuple(keep) if keep is not None else names
    chosen = tuple(subsets(kept) if flatten == "all" else map(tuple, flatten))
    key = (shape, kept, chosen)
    if key not in _cache:
        root = DeviceMesh(
            torch.device(device).type, torch.arange(math.prod(shape)).reshape(shape), mesh_dim_names=names
        )
        flattened = [root[dims]._flatten("_".join(dims)) for dims in chosen]
        for group in [] if device != "cpu" else [*root.get_all_groups(), *(mesh.get_group() for mesh in flattened)]:
            # DeviceMesh gives its groups 30 minutes regardless of the default group; strict groups never take longer.
            group._get_backend(torch.device("cpu"))._set_default_timeout(_timeout)
        _cache[key] = root if kept == names else root[kept]
    return _cache[key]


def slice_index(mesh_shape: Sequence[int], keep: Sequence[str], rank: int) -> int:
    """Returns the number, from 0, of the parallel submesh of `keep` that a rank belongs to."""
    index = 0
    for name, size, coordinate in zip(NAMES, mesh_shape, coordinates(mesh_shape, rank)):
        if name not in keep:
            index = index * size + coordinate
    return index


def coordinates(mesh_shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns a rank's coordinate in a mesh over ranks 0, 1, ... in row-major order."""
    result = []
    for size in reversed(mesh_shape):
        rank, coordinate = divmod(rank, size)
        result.append(coordinate)
    return tuple(reversed(result))
