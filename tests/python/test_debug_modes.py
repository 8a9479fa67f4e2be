"""PyTorch's debugging modes see a collective for each step of a plan, and the redistribute itself."""

from __future__ import annotations

import contextlib
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


def _counted(src: Sequence[str], dst: Sequence[str]) -> tuple[int, int, list[str]]:
    """Returns the number of collectives that the mode counts, the number of the plan's steps, and the operators."""
    source = _source(src)
    with sw.enabled(strict=True), CommDebugMode() as mode:
        source.redistribute(source.device_mesh, dtensors.to_placements(dst))
    layouts = [sw.Layout(sw.Mesh({"a": 2, "b": 2}), source.shape, placements) for placements in (src, dst)]
    steps = [step for step in sw.plan(*layouts, backend="gloo").steps if step.op != "slice"]
    return mode.get_total_counts(), len(steps), sorted(str(packet) for packet in mode.get_comm_counts())


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        (["S(0)", "R"], ["S(1)", "R"], 1),
        (["P(sum)", "S(0)"], ["R", "S(1)"], 2),
        (["R", "R"], ["S(0)", "S(1)"], 0),
        (["S(0)", "S(1)"], ["S(0)", "S(1)"], 0),
    ],
)
def test_comm_debug_mode_counts_steps(pool: Pool, src: list[str], dst: list[str], steps: int) -> None:
    for total, planned, operators in pool.run(_counted, WORLD, src, dst):
        assert total == planned == steps
        assert all("c10d" in operator or "_dtensor" in operator for operator in operators), operators


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


def test_debug_mode_records_redistributes(pool: Pool) -> None:
    for explicit, implicit in pool.run(_recorded, WORLD):
        assert "redistribute_input [explicit]" in explicit, explicit
        assert "_c10d_functional::all_gather_into_tensor" in explicit and "c10d::" not in explicit, explicit
        assert "redistribute_input" in implicit and "_c10d_functional::" in implicit, implicit


class _Names(TorchDispatchMode):
    """A dispatch mode that records operators."""

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
    return [name for name in mode.seen if "c10d" in name and "wait_tensor" not in name]


@pytest.mark.parametrize("async_op", [False, True])
def test_dispatch_modes_see_collectives(pool: Pool, async_op: bool) -> None:
    for seen in pool.run(_seen_by_any_mode, WORLD, async_op):
        assert seen == ["_c10d_functional.all_gather_into_tensor.default"]


def _counts_of_both(shape: tuple[int, ...], src: str, dst: str) -> list[dict[str, int]]:
    """Returns CommDebugMode's counts of one redistribute with stock PyTorch and with ours."""
    mesh = get_mesh((WORLD,))
    counts = []
    for on in (False, True):
        tensor = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
        source = dtensors.distribute(tensor, mesh, [src])
        with sw.enabled(strict=True) if on else contextlib.nullcontext(), CommDebugMode() as mode:
            result = source.redistribute(mesh, dtensors.to_placements([dst]))
        dtensors.check(result, tensor, [dst])
        counts.append({str(packet): count for packet, count in mode.get_comm_counts().items()})
    return counts


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (2048, 1024)], ids=str)
@pytest.mark.parametrize(("src", "dst"), [("S(0)", "R"), ("S(1)", "R"), ("P(sum)", "R"), ("P(sum)", "S(0)")])
def test_comm_debug_counts_equal_stock(pool: Pool, shape: tuple[int, ...], src: str, dst: str) -> None:
    """Counts one collective where PyTorch counts one, even if ours consists of messages."""
    for stock, ours in pool.run(_counts_of_both, WORLD, shape, src, dst):
        assert ours == stock and sum(ours.values()) == 1


def test_shard_to_shard_counts_one_all_to_all(pool: Pool) -> None:
    """PyTorch gathers on CPU and counts that instead."""
    for _, ours in pool.run(_counts_of_both, WORLD, (8, 8), "S(0)", "S(1)"):
        assert ours == {"_dtensor.shard_dim_alltoall": 1}


def _metered() -> tuple[int, int]:
    """Returns the received bytes as metered inside and outside of a mode that counts collectives."""
    source = dtensors.distribute(oracle.global_tensor((8, 8), torch.float32, 1), get_mesh((WORLD,)), ["S(0)"])
    with sw.enabled(strict=True):
        with sw.debug.wire_meter() as outer, CommDebugMode() as mode:
            source.redistribute(source.device_mesh, [Replicate()])
        assert mode.get_total_counts() == 1
        with CommDebugMode() as mode, sw.debug.wire_meter() as inner:
            source.redistribute(source.device_mesh, [Replicate()])
        assert mode.get_total_counts() == 1
    return outer.received_bytes, inner.received_bytes


def test_wire_meter_counts_bytes_under_debug_modes(pool: Pool) -> None:
    assert pool.run(_metered, WORLD) == [(8 * 8 * 4 * 3 // 4,) * 2] * WORLD


def _profiled(async_op: bool) -> list[str]:
    source = dtensors.distribute(oracle.global_tensor((8, 8), torch.float32, 1), get_mesh((WORLD,)), ["S(0)"])
    with sw.enabled(strict=True), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        source.redistribute(source.device_mesh, dtensors.to_placements(["S(1)"]), async_op=async_op).to_local().add(0)
    return [event.name for event in profile.events() if event.name.startswith("shardwright::")]


@pytest.mark.parametrize("async_op", [False, True])
def test_profiler_shows_redistributes_and_steps(pool: Pool, async_op: bool) -> None:
    """A profile has the redistribute and its steps, each with layouts and bytes."""
    for names in pool.run(_profiled, WORLD, async_op):
        assert "shardwright::redistribute [S(0)] -> [S(1)], 48 bytes received" in names, names
        step = "shardwright::step 1 of 1 (all_to_all over a) [S(0)] -> [S(1)], 48 bytes received"
        assert step in names, names
