"""The model of examples/context_parallel.py trains on a mesh of four dims as on one rank."""

from __future__ import annotations

import pathlib
import sys

import pytest
from torch.distributed.device_mesh import init_device_mesh

from pool import Pool

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

import context_parallel


def _losses() -> tuple[list[float], list[float]]:
    # Weights are sharded over the ranks of cp. Eight ranks, with two for samples, take much longer on few cores.
    mesh = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=context_parallel.DIMS)
    return context_parallel.train(mesh, length=13, steps=3)


@pytest.mark.long
@pytest.mark.cpu_only("its mesh is of CPU ranks")
def test_trains_like_the_unsharded_model(pool: Pool) -> None:
    for actual, right in pool.run(_losses, 4):
        assert actual == pytest.approx(right, rel=1e-5)
        assert right[0] != right[1] != right[2]
