"""Tensors on the second device of tests/async_device while the first is the current one. Any launch, operation of a
process group or allocation on the first device raises an error."""

from __future__ import annotations

import unittest.mock as mock
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshes
import test_attention
import test_checkpoint_cut
import test_experts
import test_fully_shard_chunks
import test_fully_shard_streams
import test_matmul
import test_offload
from pool import Pool


def _on_the_second(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Runs the function of another test with its tensors on the second device."""
    import async_device

    native = async_device.native()
    assert native.current_device() == 0
    native.forbid_device(0)
    try:
        with mock.patch.object(meshes, "device", f"{async_device.DEVICE}:1"):
            function(*args)
    finally:
        native.forbid_device(-1)
    assert native.current_device() == 0


CASES: list[tuple[Callable[..., Any], int, tuple[Any, ...]]] = [
    (test_fully_shard_streams._equal_bits, 2, ("checkpointed", None)),
    (test_fully_shard_chunks._trains, 2, ((2,),)),
    (test_checkpoint_cut._with_sharded_weights, 4, ()),
    (test_offload._host_access_in_order, 2, ()),
    (test_offload._copies_in_lanes, 2, ()),
    (test_experts._check_layers, 3, ()),
    (test_experts._fixed, 3, ("uneven", 9)),
    (test_experts._nodes, 4, (2,)),
    (test_matmul._gathers, 4, ((9, 6), (8,), 0, torch.float32)),
    (test_matmul._explicit_chunks, 4, ()),
    (test_attention._traced, 4, ("ring",)),
]


@pytest.mark.parametrize(
    ("function", "world", "args"), CASES, ids=[f"{case[0].__module__[5:]}.{case[0].__name__}" for case in CASES]
)
def test_tensors_device_is_used(
    async_pool: Pool, function: Callable[..., Any], world: int, args: tuple[Any, ...]
) -> None:
    async_pool.run(_on_the_second, world, function, args)
