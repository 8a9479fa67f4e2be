"""Tests of csrc/runtime/open_groups.cpp, which reads PyTorch's count of the NCCL groups that a thread has open.

Torch must have NCCL's process groups. No GPU is needed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import run_isolated
from shardwright._native import _runtime

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
COUNTER = "_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E"


def _open_group() -> None:
    counter = ctypes.c_uint64.in_dll(ctypes.CDLL(str(LIBRARY)), COUNTER)  # this thread's
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    _runtime.check_no_open_group("cuda:0")
    counter.value = 1
    with pytest.raises(RuntimeError, match="_coalescing_manager"):
        _runtime.connect_group(name, "cuda:0")
    counter.value = 0
    _runtime.check_no_open_group("cuda:0")


@pytest.mark.skipif(not (_runtime.has_cuda and LIBRARY.exists()), reason="torch or shardwright is built without CUDA")
def test_open_nccl_group_is_detected() -> None:
    (outcome,) = run_isolated(_open_group, 1)
    assert outcome.ok, outcome.error
