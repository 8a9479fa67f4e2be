"""Runs a function of a test module on several ranks, each in its own process that exits normally. Also helpers for such
functions.

    values = ranks.run(function, 3, argument)          # function(rank, size, store_path, argument); values[rank]

Raises AssertionError with the traceback of every rank that raised, hung, or exited with a code other than 0.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import async_device
from async_device import strict

DEVICE = async_device.DEVICE

TIMEOUT_SECONDS = 60.0
_TESTS = str(Path(__file__).parents[1])

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor"])


def _serve(pipe: Connection, path: list[str], module: str, name: str, arguments: tuple[Any, ...]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        async_device.load()
        answer = (getattr(importlib.import_module(module), name)(*arguments), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    pipe.send(answer)


def run(
    function: Callable[..., Any], size: int, *arguments: Any, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    path = [_TESTS, *sys.path]
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory(prefix="strict_") as folder:
        pipes = [_context.Pipe() for _ in range(size)]
        processes = []
        for rank, (_, child) in enumerate(pipes):
            call = (rank, size, f"{folder}/store", *arguments)
            process = _context.Process(target=_serve, args=(child, path, function.__module__, function.__name__, call))
            process.start()
            child.close()
            processes.append(process)
        values, problems = [], []
        for rank, ((pipe, _), process) in enumerate(zip(pipes, processes)):
            value = error = None
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    value, error = pipe.recv()
            except EOFError:
                error = "it died"
            process.join(max(1.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
                error = f"{error or ''}\nit did not end in {timeout_seconds:g} s"
            elif process.exitcode != 0:
                error = f"{error or ''}\nit ended with exit code {process.exitcode}"
            values.append(value)
            if error:
                problems.append(f"--- rank {rank} of {function.__name__}:\n{error.strip()}")
    if problems:
        raise AssertionError("\n".join(problems))
    return values


# ------------------------------------------------------------------------------------- helpers on ranks


def begin(
    rank: int, size: int, path: str, seconds: float = 20.0, *, bound: bool = False, alone: bool = False, **rules: bool
) -> Any:
    """Makes the default group and returns the extension. Unless `rules` say otherwise, it is lazy and has null works.

    `alone`: without Gloo for tensors on CPU, which needs all members when a group is made.
    """
    strict.set_rules(**{"is_eager": bound, "has_real_work": False, **rules})
    dist.init_process_group(
        f"{DEVICE}:strict" if alone else f"cpu:gloo,{DEVICE}:strict",
        store=dist.FileStore(path, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device(DEVICE, 0) if bound else None,
    )
    return async_device.load()


def begin_on_gloo(rank: int, size: int, path: str) -> None:
    """Makes a default group of Gloo for tensors on CPU and, through host memory, for tensors on the device."""
    async_device.load()
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:gloo",
        store=dist.FileStore(path, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )


def group_of(process_group: Any = None) -> Any:
    """Returns the backend itself, whose calls return its own works."""
    return (process_group or dist.group.WORLD)._get_backend(torch.device(DEVICE))


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("Exception raised from")[0]
    return "nothing was raised"


def failure_of(native: Any) -> str:
    error = error_of(native.synchronize)
    native.forget_failure()
    return error


def wait_for_key(key: str) -> None:
    dist.distributed_c10d._get_default_store().wait([key], timedelta(seconds=20))


def set_key(key: str) -> None:
    dist.distributed_c10d._get_default_store().set(key, "1")


def synchronous_barrier() -> Any:
    options = dist.BarrierOptions()
    options.asyncOp = False
    return options
