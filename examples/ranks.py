"""Starts the ranks of examples: processes on this machine, connected by Gloo over the loopback device."""

import itertools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def launch(world_size: int, body: Callable, *args) -> None:
    """Runs `body(*args)` on `world_size` ranks and returns when all are done; raises if one fails.

    Under torchrun, this process is one of the ranks. Otherwise ranks are forked from one server that has imported
    torch, so that only the first launch pays for the import.
    """
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != world_size:
            raise SystemExit(f"this program needs {world_size} ranks, got {os.environ['WORLD_SIZE']} from torchrun")
        _run(body, args, init_method="env://")
        return
    forkserver.set_forkserver_preload(["torch.distributed.tensor.parallel"])
    with tempfile.TemporaryDirectory() as folder:
        rank_args = (world_size, os.path.join(folder, "store"), body, args)
        mp.start_processes(_run_rank, rank_args, nprocs=world_size, start_method="forkserver")


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns a CPU mesh with all sets of mesh dims flattened, so that stock DTensor may merge steps."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for count in range(2, len(names) + 1):
        for subset in itertools.combinations(names, count):
            mesh[subset]._flatten("_".join(subset))
    return mesh


def coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    """Returns this rank's coordinate in the mesh."""
    return tuple(mesh.get_coordinate())


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Returns each value reduced over all ranks."""
    result = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(result, op)
    return result.tolist()


def _run_rank(rank: int, world_size: int, store_path: str, body: Callable, args: tuple) -> None:
    store = dist.FileStore(store_path, world_size)
    _run(body, args, store=store, rank=rank, world_size=world_size)


def _run(body: Callable, args: tuple, **of_group: Any) -> None:
    """Runs the body on this rank, in a process group of its own."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    for module in ("_collective_utils", "_redistribute"):  # stock's performance warnings would break the tables
        logging.getLogger(f"torch.distributed.tensor.{module}").setLevel(logging.ERROR)
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120), **of_group)
    try:
        body(*args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
