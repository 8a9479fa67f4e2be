"""Runs functions on the ranks of several jobs, each of which has its own default process group."""

from __future__ import annotations

import multiprocessing
import pathlib
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")


def _process(end: Connection, folder: str, role: str, rank: int, size: int, work: Callable[..., Any]) -> None:
    """Runs one rank of one job. Each job's world has its own store."""
    try:
        torch.set_num_threads(1)
        own = dist.FileStore(f"{folder}/{role}", size)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        shared = dist.FileStore(f"{folder}/shared", -1)
        end.send((work(shared, role, rank), None))
        dist.destroy_process_group()
    except BaseException:
        end.send((None, traceback.format_exc()))


def launch(folder: pathlib.Path, work: Callable[..., Any], jobs: dict[str, int]) -> dict[tuple[str, int], Any]:
    """Runs a function on all ranks of all jobs. Returns the results by (role, rank)."""
    running = {}
    for role, size in jobs.items():
        for rank in range(size):
            parent_end, child_end = _context.Pipe()
            process = _context.Process(
                target=_process, args=(child_end, str(folder), role, rank, size, work), daemon=True
            )
            process.start()
            child_end.close()
            running[role, rank] = parent_end, process
    values, errors = {}, []
    for who, (parent_end, process) in running.items():
        value, error = parent_end.recv() if parent_end.poll(240) else (None, "no answer")
        values[who] = value
        errors += [f"{who}: {error}"] if error is not None else []
        process.join(10)
        process.kill()
    assert not errors, "\n".join(errors)
    return values
