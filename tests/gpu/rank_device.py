"""The device of the ranks of nccl_ranks.py and model_ranks.py, and helpers for these scripts.

SHARDWRIGHT_RANKS_DEVICE is "cuda" by default, over NCCL. With "asyncdev", the device of tests/async_device, over
process groups with NCCL's rules, the scripts run where there is no GPU: CI does so. With "cpu", models run over Gloo.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEVICE = os.environ.get("SHARDWRIGHT_RANKS_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
# After this time a rank prints the stacks of its threads and exits, so that a hang is explained.
LIMIT_SECONDS = float(os.environ.get("SHARDWRIGHT_RANKS_SECONDS", "100"))


def begin(prefers_own_gpu: bool = False) -> torch.device:
    """Makes the default process group, and returns this rank's device.

    Ranks share GPU 0. With `prefers_own_gpu`, each rank gets its own GPU if there are enough.
    """
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    timeout = timedelta(seconds=min(60.0, LIMIT_SECONDS))
    if DEVICE == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    if not IS_CUDA:
        sys.path.append(str(Path(__file__).resolve().parent.parent))
        import async_device

        async_device.load()
        async_device.strict.set_rules(keeps_tensors=True)  # PyTorch's own functions rely on it
        dist.init_process_group(async_device.BACKEND, timeout=timeout)
        return torch.device(DEVICE, 0)
    has_own_gpu = prefers_own_gpu and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    index = int(os.environ["RANK"]) if has_own_gpu else 0
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return device


def synchronize() -> None:
    if DEVICE != "cpu":
        torch.get_device_module(DEVICE).synchronize()


@contextlib.contextmanager
def captured() -> Iterator[Any]:
    """Captures the block's work on the current stream. Yields the graph, whose ``replay()`` runs it."""
    synchronize()
    if IS_CUDA:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph
        return
    import async_device

    with async_device.captured() as graph:
        yield graph


def has_scaled_products() -> bool:
    return IS_CUDA and torch.cuda.get_device_capability() >= (9, 0)


def end() -> None:
    synchronize()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
