"""Runs functions on the ranks of several jobs, each of which has its own default process group."""

from __future__ import annotations

import multiprocessing
import pathlib
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 240.0
GRACE_SECONDS = 20.0  # for the other ranks after an error

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
    """Runs a function on all ranks of all jobs. Returns the results by (role, rank), or raises all errors."""
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
    answers: dict[tuple[str, int], tuple[Any, str | None]] = {}
    pending = {end: who for who, (end, _) in running.items()}
    last = time.monotonic() + TIMEOUT_SECONDS
    while pending and (left := last - time.monotonic()) > 0:
        for end in wait(list(pending), left):
            try:
                answers[pending[end]] = end.recv()
            except EOFError:
                answers[pending[end]] = None, "died"
            if answers[pending.pop(end)][1] is not None:
                last = min(last, time.monotonic() + GRACE_SECONDS)
    for who, (_, process) in running.items():
        process.join(10 if who in answers else 0)
        process.kill()
    answers |= dict.fromkeys(pending.values(), (None, "no answer"))
    errors = [f"{who}: {error}" for who, (_, error) in answers.items() if error is not None]
    assert not errors, "\n".join(errors)
    return {who: value for who, (value, _) in answers.items()}
