"""One worker process of pool.py: takes calls from a pipe, one at a time, and replies with (value, traceback)."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import logging
import os
import pickle
import signal
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute, debug

import async_tests
import meshes

_note_path = ""
_backend = "gloo"

Job = tuple[str, str, tuple[Any, ...], dict[str, Any]]


def _begin_life(world_size: int, store_path: str, rank: int, collective_timeout_seconds: float) -> None:
    """Replaces the default process group, and drops everything that torch and the tests cached about the old one.

    DTensor keys its caches by meshes that compare equal across process groups, so they would return dead groups.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    meshes.begin_life(collective_timeout_seconds)
    dist.init_process_group(
        _backend,
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=collective_timeout_seconds),
    )
    if _backend == "gloo":
        # Without it, a call that ends its group at once would close connections that slower ranks are still making.
        dist.barrier()


def _call(job: Job) -> Any:
    torch.manual_seed(0)  # the same on all ranks, independent of earlier tests
    module_name, qualified_name, args, kwargs = job
    function: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        function = getattr(function, name)
    return function(*args, **kwargs)


def note(text: str) -> None:
    """Writes a note for the report of a hang: the next operation of this worker. Does nothing outside of workers."""
    if _note_path:
        with open(_note_path, "w") as file:
            file.write(text)


def _share_gpu(index: int) -> str:
    """Puts the tensors of worker `index` on the GPU, and returns the backends of its default process group.

    NCCL refuses two ranks on one GPU unless their host ids differ.
    """
    os.environ |= {"NCCL_HOSTID": f"worker{index}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "4"}
    torch.cuda.set_device(0)
    meshes.device = "cuda"
    return "cpu:gloo,cuda:nccl"


def serve(pipe: Connection, stacks_path: str, index: int, device: str, async_seed: int) -> None:
    """Answers calls until the other end of the pipe closes. SIGUSR1 and crashes write Python stacks to `stacks_path`.

    Args:
        pipe: the connection to the pool.
        stacks_path: the file for Python stacks.
        index: this worker's index in its pool.
        device: the device of tensors; see `pool.Pool`.
        async_seed: seed of the delays on "asyncdev".
    """
    global _note_path, _backend
    _note_path = stacks_path + ".note"
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    current_life = None
    if device == "asyncdev":
        _backend = async_tests.use(async_seed)
    elif device == "cuda":
        _backend = _share_gpu(index)
    with open(stacks_path, "w") as stacks:
        faulthandler.enable(file=stacks, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                life, rank, collective_timeout_seconds, job = pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            note("")
            try:
                if device == "asyncdev":
                    async_tests.forget_failure()
                if life != current_life:
                    current_life = None
                    _begin_life(*life, rank, collective_timeout_seconds)
                    current_life = life
                answer = pickle.dumps((_call(job), None))
            except BaseException:
                answer = pickle.dumps((None, traceback.format_exc()))
            pipe.send_bytes(answer)
    # Skips the interpreter's teardown, in which a group whose peers are gone may block.
    os._exit(0)
