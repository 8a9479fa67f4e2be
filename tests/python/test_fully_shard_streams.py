"""Streams, overlap and lifetimes of memory of `sw.fully_shard`.

With ``--device asyncdev`` these tests check waits and events; on CPU they check the order of calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshes
import shardwright as sw
from fsdp_models import flat_fully_shard
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp.gradients import Reduction
from shardwright.fsdp.packing import MoveBatch
from shardwright.fsdp.units import Unit
from shardwright.fsdp.weights import Weight
from test_fully_shard import Model, full, loss_of, parts, shard, tokens_of, train, train_whole

pytestmark = pytest.mark.on_device

PATIENCE_SECONDS = 20.0


@contextmanager
def replaced(owner: type, **functions: Callable[..., Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


# ----------------------------------------------------------------------------- equal bits with NaN in unused memory


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills released weights and gathered shards with NaN, and sent gradients with 1e30 after their reduction."""
    values_of: dict[int, list[torch.Tensor]] = {}  # by id of a unit: values of its shards while these hold NaN
    start_gather, finish_gather, release, finish = (
        Unit.start_gather,
        Unit.finish_gather,
        Unit.release,
        Reduction.finish,
    )

    def restore(unit: Unit) -> None:
        for weight, value in zip(unit.weights, values_of.pop(id(unit), []), strict=False):
            weight.part.data.copy_(value)

    def start_and_restore(unit: Unit, *memory: Any, **where: Any) -> None:
        restore(unit)
        start_gather(unit, *memory, **where)

    def finish_and_poison(unit: Unit) -> None:
        was_under_way = unit._is_gathering
        finish_gather(unit)
        if was_under_way:
            values_of[id(unit)] = [weight.part.clone() for weight in unit.weights]
            for weight in unit.weights:
                weight.part.data.fill_(torch.nan)

    def poison_and_release(unit: Unit) -> None:
        unit.finish_gather()
        for weight in unit.weights:
            for message in weight.gather.undecoded[0] if weight.gather.undecoded is not None else ():
                message.fill_(torch.nan if message.is_floating_point() else 0x7F)  # NaN of float8_e4m3fn
            with contextlib.suppress(RuntimeError):  # the weight has no memory
                weight.memory.data.fill_(torch.nan)
        release(unit)
        restore(unit)  # an optimizer may be next

    def finish_and_fill(reduction: Reduction) -> None:
        gradients = [pending.sent for _, pending in reduction.in_flight if pending.sent is not None]
        finish(reduction)
        for gradient in gradients:
            gradient.fill_(1e30)

    with (
        replaced(Unit, start_gather=start_and_restore, finish_gather=finish_and_poison, release=poison_and_release),
        replaced(Reduction, finish=finish_and_fill),
    ):
        yield


def _equal_bits(kind: str, memory_limit: int | None) -> None:
    mesh = get_mesh((2,))

    def trained() -> list[torch.Tensor]:
        return parts(train(shard(Model(kind), flat_fully_shard, mesh, memory_limit=memory_limit), 3, evaluate=True))

    expected = trained()
    with poisoned():
        found = trained()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind, memory_limit", [("repeated", 9000), ("checkpointed", None)])
def test_nothing_reads_poisoned_memory(pool: Pool, kind: str, memory_limit: int | None) -> None:
    pool.run(_equal_bits, 2, kind, memory_limit)


def _as_unsharded(kind: str) -> None:
    ours = train(shard(Model(kind), flat_fully_shard, get_mesh((3,))), 3, evaluate=True)
    for a, b in zip(ours, train_whole(kind, 3, evaluate=True), strict=True):
        torch.testing.assert_close(full(a), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["repeated", "checkpointed reentrant"])
def test_trains_as_the_unsharded_model(pool: Pool, kind: str) -> None:
    """test_fully_shard.py also compares with stock FSDP2, but only on CPU."""
    pool.run(_as_unsharded, 3, kind)


# --------------------------------------------------------------------------------- overlap of transfers and products


def _is_done(works: list[Any]) -> bool:
    """Returns true if the transfers end although nothing waits for them."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(work is None or work.is_completed() for work in works):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _works_of(unit: Unit) -> list[Any]:
    arriving = [weight.gather._pending for weight in unit.weights]
    return [work for each in arriving if each is not None for work in each.works]


@contextmanager
def _rank_1_late(name: str) -> Iterator[list[bool]]:
    """Makes rank 1 start each transfer after rank 0 has. Yields, by transfer, true if it was open after its start."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    start = MoveBatch.start
    were_open: list[bool] = []

    def start_late(batch: MoveBatch, memory: torch.Tensor | None = None) -> None:
        works = [call.deferred for calls in batch._calls.values() for call in calls]
        key = f"{name}, transfer {len(were_open)}"
        if works and rank == 1:
            store.wait([key])
        start(batch, memory)
        if works:
            were_open.append(not all(work.is_completed() for work in works))
        if works and rank == 0:
            store.set(key, "")

    with replaced(MoveBatch, start=start_late):
        yield were_open


def _overlap(prefetch: int | str, overlaps: bool) -> None:
    """The next gather and the previous reduction end before the product of a layer is submitted."""
    model = shard(Model(), flat_fully_shard, get_mesh((2,)), prefetch=prefetch)
    train(model, 2)
    units: list[Unit] = [layer._shardwright_unit.unit for layer in model.layers]
    reduced: dict[int, list[Any]] = {}  # by id of a unit: transfers of its reduction
    start_reduction = Unit.start_reduction
    seen: list[tuple[str, int, bool]] = []

    def note_reduction(unit: Unit, weights: list[Weight], drops_result: bool = False) -> Reduction | None:
        reduction = start_reduction(unit, weights, drops_result)
        if reduction is not None:
            reduced[id(unit)] = [pending.work for _, pending in reduction.in_flight]
        return reduction

    def in_forward(i: int) -> Callable[..., None]:
        def look(*_: Any) -> None:
            if i + 1 < len(units):
                is_there = units[i + 1].is_resident
                seen.append(("gather", i + 1, is_there and _is_done(_works_of(units[i + 1]))))

        return look

    def in_backward(i: int) -> Callable[..., None]:
        def look(*_: Any) -> None:
            if i + 1 < len(units):
                seen.append(("reduction", i + 1, _is_done(reduced[id(units[i + 1])])))

        return look

    handles = []
    for i, layer in enumerate(model.layers):
        handles.append(layer.up.register_forward_pre_hook(in_forward(i)))
        handles.append(layer.down.register_full_backward_pre_hook(in_backward(i)))
    with replaced(Unit, start_reduction=note_reduction), _rank_1_late(f"prefetch {prefetch}") as were_open:
        loss_of(model, tokens_of(3)).backward()
    for handle in handles:
        handle.remove()
    assert seen == [
        ("gather", 1, overlaps),
        ("gather", 2, overlaps),
        ("reduction", 2, True),
        ("reduction", 1, True),
    ]
    assert len(were_open) >= 6 and (dist.get_rank() != 0 or all(were_open)), were_open


@pytest.mark.parametrize("prefetch, overlaps", [("auto", True), (0, False)])
def test_gathers_and_reductions_overlap_with_products(pool: Pool, prefetch: int | str, overlaps: bool) -> None:
    pool.run(_overlap, 2, prefetch, overlaps)


# ------------------------------------------------------------------------------------------- streams of the caller

WIDTH = 64
SLEEP_MS = 30


class Branch(nn.Module):
    """A linear layer whose product starts late if `sleeps`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device=meshes.device)

    def forward(self, x: torch.Tensor, sleeps: bool) -> torch.Tensor:
        if sleeps:
            import async_device

            async_device.native().sleep(SLEEP_MS)
        return self.linear(x)


def _two_streams() -> None:
    """A stream still reads the weights of one branch when another stream gathers those of the next branch."""
    torch.manual_seed(0)
    branches = nn.ModuleList(Branch() for _ in range(4))
    weights = [branch.linear.weight.detach().cpu().clone() for branch in branches]
    for branch in branches:
        sw.fully_shard(branch, mesh=get_mesh((2,)))
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(meshes.device)
    other, main = torch.Stream(device=meshes.device), torch.accelerator.current_stream()

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = branches

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            other.wait_stream(main)
            outs = []
            for i, branch in enumerate(self.branches):
                if i % 2 == 0:
                    with other:
                        outs.append(branch(x, True))
                else:
                    outs.append(branch(x, False))
            main.wait_stream(other)
            return outs

    model = All()
    sw.fully_shard(model, mesh=get_mesh((2,)), options=sw.fsdp.Options(prefetch=0, memory_limit=WIDTH * WIDTH * 4))
    with torch.no_grad():
        for _ in range(4):
            for out, weight in zip(model(x), weights, strict=True):
                torch.testing.assert_close(out.cpu(), x.cpu() @ weight.T)


def test_units_on_several_streams(async_pool: Pool) -> None:
    async_pool.run(_two_streams, 2)
