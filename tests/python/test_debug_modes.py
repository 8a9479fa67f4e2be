"""PyTorch's debugging modes see our collectives: they go through the dispatcher, and are recorded as redistributes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

WORLD = 4


def _source(src: Sequence[str]) -> torch.Tensor:
    return dtensors.distribute(oracle.global_tensor((8, 8), torch.float32, 1, True), get_mesh((2, 2)), src)


def _counted(src: Sequence[str], dst: Sequence[str]) -> tuple[int, list[str]]:
    source = _source(src)
    with sw.enabled(strict=True), CommDebugMode() as mode:
        source.redistribute(source.device_mesh, dtensors.to_placements(dst))
    return mode.get_total_counts(), sorted(str(packet) for packet in mode.get_comm_counts())


@pytest.mark.parametrize(
    ("src", "dst", "communicates"),
    [
        (["S(0)", "R"], ["R", "R"], True),
        (["S(0)", "S(0)"], ["R", "R"], True),
        (["S(0)", "R"], ["S(1)", "R"], True),
        (["P(sum)", "R"], ["R", "R"], True),
        (["P(sum)", "R"], ["S(0)", "R"], True),
        (["R", "R"], ["S(0)", "S(1)"], False),
        (["S(0)", "S(1)"], ["S(0)", "S(1)"], False),
    ],
)
def test_comm_debug_mode(pool: Pool, src: list[str], dst: list[str], communicates: bool) -> None:
    for total, operators in pool.run(_counted, WORLD, src, dst):
        assert (total > 0) == communicates
        assert all(operator.startswith("c10d.") for operator in operators), "someone else communicated"


def _counted_in_backward() -> tuple[int, int]:
    mesh = get_mesh((2, 2))
    local = torch.ones(4, 8, requires_grad=True)
    with sw.enabled(strict=True), CommDebugMode() as mode:
        moved = dtensors.wrap(local, mesh, (8, 8), ["S(0)", "R"]).redistribute(
            mesh, dtensors.to_placements(["S(1)", "R"])
        )
        forward = mode.get_total_counts()
        moved.to_local().sum().backward()
        return forward, mode.get_total_counts() - forward


def test_comm_debug_mode_sees_the_backward(pool: Pool) -> None:
    for forward, backward in pool.run(_counted_in_backward, WORLD):
        assert forward > 0 and backward > 0


def _recorded() -> tuple[str, str]:
    source = _source(["S(0)", "R"])
    replica = _source(["R", "R"])
    with sw.enabled(strict=True):
        with DebugMode() as explicit:
            source.redistribute(source.device_mesh, [Replicate(), Replicate()])
        with DebugMode() as implicit:
            _source(["S(0)", "R"]) @ _source(["S(0)", "R"]) + replica
    return explicit.debug_string(), implicit.debug_string()


def test_debug_mode(pool: Pool) -> None:
    for explicit, implicit in pool.run(_recorded, WORLD):
        assert "redistribute_input [explicit]" in explicit and "c10d::" in explicit, explicit
        assert "redistribute_input" in implicit and "c10d::" in implicit, implicit


class _Names(TorchDispatchMode):
    """Any other mode sees them too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, dtensors.DTensor) for kind in types):
            return NotImplemented
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _seen_by_any_mode(async_op: bool) -> list[str]:
    source = _source(["S(0)", "S(1)"])
    with sw.enabled(strict=True), _Names() as mode:
        result = source.redistribute(source.device_mesh, [Replicate(), Replicate()], async_op=async_op)
        result.to_local().sum().item()
    return [name for name in mode.seen if name.startswith("c10d.")]


@pytest.mark.parametrize("async_op", [False, True])
def test_any_dispatch_mode(pool: Pool, async_op: bool) -> None:
    for seen in pool.run(_seen_by_any_mode, WORLD, async_op):
        assert seen, "no collective of ours went through the dispatcher"
