"""The command ``torchrun --nproc-per-node 4 -m shardwright calibrate --out topology.json``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..calibration.job import job_of
from ..calibration.links import measure_links, num_link_rounds
from .options import parse_mesh, write_file
from .parsers import calibrate_parser

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 2, with a sentence on stderr, for wrong arguments or environment."""
    arguments = calibrate_parser().parse_args(argv)
    missing = [name for name in _REQUIRED if name not in os.environ]
    try:
        if missing and not dist.is_initialized():
            raise ValueError(
                f"{', '.join(missing)} not in the environment. "
                "Start it with: torchrun --nproc-per-node 4 -m shardwright calibrate"
            )
        _calibrate_job(arguments)
    except (ValueError, OSError) as error:
        print(f"shardwright calibrate: {error}", file=sys.stderr)
        return 2
    return 0


def _calibrate_job(arguments: argparse.Namespace) -> None:
    """Measures the job, and prints or writes the topology on rank 0."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        mesh = _make_mesh(arguments.mesh, device)
        job = job_of(None, device, mesh, arguments.quick)
        with job.ranks.showing(num_link_rounds(arguments.quick)):
            topology, report = measure_links(job, arguments.ranks_per_node, arguments.name, mesh)
        if dist.get_rank() == 0:
            print("\n".join(report))
            _show(topology.to_json(), arguments.out)
    finally:
        if is_ours:
            dist.destroy_process_group()


def _show(table: str, path: str | None) -> None:
    """Writes a topology to a file, or prints it without one. Prints it and raises ValueError if writing fails."""
    if path:
        try:
            write_file("--out", path, table + "\n")
        except ValueError as error:
            print(table)
            raise ValueError(f"{error}; the topology is printed instead") from None
    print(f"written to {path}" if path else table)


def _make_mesh(text: str | None, device: str) -> Any | None:
    """Returns the mesh of the option --mesh, or None. Raises ValueError if it is not as large as the job."""
    if text is None:
        return None
    dims = parse_mesh(text)
    if math.prod(dims.values()) != dist.get_world_size():
        raise ValueError(
            f"--mesh must have as many ranks as the job, {dist.get_world_size()}, got {math.prod(dims.values())} in "
            f"{text!r}"
        )
    return init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))
