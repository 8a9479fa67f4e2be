"""With async_op=True a result is an AsyncCollectiveTensor wherever stock returns one, and for Shard to Shard."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.runtime import executables

pytestmark = pytest.mark.on_device

WORLD = 4
Move = tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]

# Moves that end with communication, so that they can still be in flight when the call returns.
ASYNCHRONOUS: list[Move] = [
    ((4,), ("S(0)",), ("R",)),
    ((4,), ("S(0)",), ("S(1)",)),
    ((4,), ("S(1)",), ("S(0)",)),
    ((4,), ("P(sum)",), ("R",)),
    ((4,), ("P(sum)",), ("S(0)",)),
    ((4,), ("P(sum)",), ("S(1)",)),
    ((4,), ("P(avg)",), ("R",)),
    ((4,), ("P(max)",), ("R",)),
    ((2, 2), ("S(0)", "S(0)"), ("R", "R")),
    ((2, 2), ("S(0)", "S(1)"), ("R", "R")),
    ((2, 2), ("S(0)", "S(0)"), ("S(1)", "S(1)")),
    ((2, 2), ("P(sum)", "P(sum)"), ("R", "R")),
    ((2, 2), ("P(sum)", "S(1)"), ("S(0)", "R")),
    ((2, 2), ("R", "P(sum)"), ("S(0)", "R")),
]
LOCAL: list[Move] = [
    ((4,), ("R",), ("S(0)",)),
    ((4,), ("S(0)",), ("S(0)",)),
    ((2, 2), ("R", "S(0)"), ("S(1)", "S(0)")),
]


def _start(move: Move, shape: Sequence[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts a move. Returns the local result, which may be in flight, and its expected value."""
    mesh_shape, src, dst = move
    mesh = get_mesh(mesh_shape)
    reducible = any(map(oracle.reduce_op, src))
    tensor = oracle.global_tensor(shape, torch.float32, seed, reducible)
    source = dtensors.distribute(tensor, mesh, src)
    result = source.redistribute(mesh, dtensors.to_placements(dst), async_op=True)
    return result._local_tensor, dtensors.my_local(tensor, mesh, dst)


def _wait(local: torch.Tensor) -> torch.Tensor:
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _types_and_values(move: Move) -> list[str]:
    found = []
    with sw.enabled(strict=True):
        for shape in ((8, 8), (5, 7), (1, 3), (0, 3)):
            local, expected = _start(move, shape, seed=1)
            found.append(type(local).__name__)
            wrong = oracle.difference(_wait(local), expected, rounded="P(avg)" in move[1])
            assert wrong is None, f"{shape}: {wrong}"
    return found


@pytest.mark.parametrize("move", ASYNCHRONOUS, ids=str)
def test_communicating_moves_return_async_tensors(pool: Pool, move: Move) -> None:
    for found in pool.run(_types_and_values, WORLD, move):
        assert found[:2] == ["AsyncCollectiveTensor"] * 2


@pytest.mark.cpu_only("on streams all ranks have something to wait for")
def test_ranks_without_messages_return_plain_tensors(pool: Pool) -> None:
    """The mesh dims that cut rows and columns are swapped: ranks 0 and 3 keep their blocks, 1 and 2 exchange theirs."""
    found = pool.run(_types_and_values, WORLD, ((2, 2), ("S(0)", "S(1)"), ("S(1)", "S(0)")))
    assert [kinds[0] for kinds in found] == ["Tensor", "AsyncCollectiveTensor", "AsyncCollectiveTensor", "Tensor"]


@pytest.mark.parametrize("move", LOCAL, ids=str)
def test_local_moves_return_plain_tensors(pool: Pool, move: Move) -> None:
    for found in pool.run(_types_and_values, WORLD, move):
        assert found == ["Tensor"] * 4


def _operators_without_wait(move: Move) -> None:
    """Operators on the DTensor and on the result of to_local() wait without a call to wait()."""
    with sw.enabled(strict=True):
        local, expected = _start(move, (8, 8), seed=2)
        assert oracle.difference(local * 2, expected * 2, rounded="P(avg)" in move[1]) is None
        dropped, _ = _start(move, (8, 8), seed=3)
        del dropped


@pytest.mark.parametrize("move", ASYNCHRONOUS, ids=str)
def test_operators_wait_for_async_results(pool: Pool, move: Move) -> None:
    pool.run(_operators_without_wait, WORLD, move)


def _in_flight_together(reverse_on_odd_ranks: bool) -> None:
    with sw.enabled(strict=True):
        for shape in ((8, 8), (5, 7)):
            started = [(move, *_start(move, shape, seed)) for seed, move in enumerate(ASYNCHRONOUS)]
            if reverse_on_odd_ranks and dist.get_rank() % 2:
                started.reverse()
            for move, local, expected in started:
                wrong = oracle.difference(_wait(local), expected, rounded="P(avg)" in move[1])
                assert wrong is None, f"{move} {shape}: {wrong}"


@pytest.mark.parametrize("reverse_on_odd_ranks", [False, True])
def test_several_async_redistributes_in_flight(pool: Pool, reverse_on_odd_ranks: bool) -> None:
    """Each rank may wait in any order. Only the order of the calls must be the same, as in stock."""
    pool.run(_in_flight_together, WORLD, reverse_on_odd_ranks)


def _orders_differ() -> None:
    """The moves of 6 MiB have several steps, so a rank that waits for one must also advance the other."""
    x = torch.ones(3 << 19)
    started = []
    both = [DeviceMesh.from_group(dist.new_group(list(range(WORLD))), "cpu") for _ in range(2)]
    for mesh in both if dist.get_rank() == 0 else reversed(both):
        src, dst = (sw.Layout(mesh, x.shape, [text], x.dtype) for text in ("P(sum)", "R"))
        started.append(sw.redistribute_local(x, src, dst, device_mesh=mesh, async_op=True))
    for result in started:
        assert torch.equal(result + 0, x * WORLD)


@pytest.mark.cpu_only("on devices with streams, all ranks must start redistributes in one order")
def test_ranks_may_use_two_groups_in_different_orders(pool: Pool) -> None:
    pool.run(_orders_differ, WORLD)


def _synchronous_in_between() -> None:
    mesh = get_mesh((4,))
    with sw.enabled(strict=True):
        first, expected = _start(((4,), ("S(0)",), ("S(1)",)), (8, 12), seed=5)
        tensor = oracle.global_tensor((9, 4), torch.float32, seed=6)
        second = dtensors.distribute(tensor, mesh, ["S(0)"]).redistribute(mesh, dtensors.to_placements(["R"]))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert oracle.difference(second.to_local(), tensor) is None
        assert oracle.difference(_wait(first), expected) is None
        assert total.item() == WORLD


def test_synchronous_redistribute_between_async_ones(pool: Pool) -> None:
    pool.run(_synchronous_in_between, WORLD)


def _start_before_rank_0(move: Move) -> None:
    """Rank 0 starts after the calls of the others have returned. A call that waited for rank 0 would hang."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    with sw.enabled(strict=True):
        _wait(_start(move, (64, 64), seed=7)[0])  # makes plans and groups
        if rank == 0:
            store.wait([f"{move} started by {other}" for other in range(1, WORLD)])
        local, expected = _start(move, (64, 64), seed=8)
        store.set(f"{move} started by {rank}", "")
        assert oracle.difference(_wait(local), expected) is None


@pytest.mark.parametrize(
    "move",
    [((4,), ("S(0)",), ("S(1)",)), ((4,), ("S(0)",), ("R",)), ((2, 2), ("S(0)", "S(0)"), ("S(1)", "S(1)"))],
    ids=str,
)
def test_async_call_returns_before_late_ranks(pool: Pool, move: Move) -> None:
    pool.run(_start_before_rank_0, WORLD, move)


def _drop_works() -> None:
    """The last rank joins only after the others have dropped their works, so a drop that waited for it would hang."""
    mesh, rank, store = sw.Mesh({"a": WORLD}), dist.get_rank(), dist.distributed_c10d._get_default_store()
    src, dst = sw.Layout(mesh, (WORLD, 6), ["S(0)"]), sw.Layout(mesh, (WORLD, 6), ["R"])
    executable = executables.bind(executables.make_plan(src, dst, "cpu"))
    tensor = oracle.global_tensor((WORLD, 6), torch.float32, 1)
    out = torch.zeros_like(tensor)
    if rank == WORLD - 1:
        store.wait([f"dropped by {other}" for other in range(rank)])
    work = executables.start_into(executable, tensor[rank : rank + 1], out)
    assert work is not None
    if rank == WORLD - 1:
        work.wait()
    else:
        time.sleep(0.1)  # until the progress thread waits for the last rank
    del work
    store.set(f"dropped by {rank}", "")
    dist.barrier()
    executables.run(executable, tensor[rank : rank + 1], False)  # runs after everything that was started
    assert rank < WORLD - 1 or torch.equal(out, tensor)


@pytest.mark.cpu_only("on streams nobody waits on the host")
def test_dropping_a_work_does_not_block(pool: Pool) -> None:
    pool.run(_drop_works, WORLD)


def _saved(given: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def _copies_of_async_results() -> None:
    mesh = get_mesh((WORLD,))
    tensor = oracle.global_tensor((64, 64), torch.float32, seed=11)
    local = dtensors.my_local(tensor, mesh, ["S(0)"])
    for copied in (copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given)), _saved):
        for of_part in (True, False):
            dist.barrier()
            if mesh.get_rank() == WORLD - 1:
                time.sleep(0.05)
            with sw.enabled(strict=True):
                source = dtensors.wrap(local, mesh, tensor.shape, ["S(0)"])
                moved = source.redistribute(mesh, dtensors.to_placements(["R"]), async_op=True)
            result = copied(moved._local_tensor) if of_part else copied(moved)._local_tensor
            assert type(result) is torch.Tensor and torch.equal(result, tensor), copied


@pytest.mark.cpu_only("copies are pickled on the host")
def test_copies_wait_for_async_results(pool: Pool) -> None:
    pool.run(_copies_of_async_results, WORLD)


def _backward(shape: tuple[int, ...]) -> None:
    """The gradient is asynchronous too."""
    mesh = get_mesh((4,))
    tensor = oracle.global_tensor(shape, torch.float32, seed=9)
    gradient = oracle.global_tensor(shape, torch.float32, seed=10)
    with sw.enabled(strict=True):
        for src, dst in [("S(0)", "S(1)"), ("S(0)", "R"), ("R", "S(1)"), ("P(sum)", "S(0)")]:
            local = dtensors.my_local(tensor, mesh, [src]).requires_grad_()
            source = dtensors.wrap(local, mesh, shape, [src])
            moved = source.redistribute(mesh, dtensors.to_placements([dst]), async_op=True).to_local()
            moved.backward(dtensors.my_local(gradient, mesh, [dst]))
            back = ["R"] if oracle.reduce_op(src) else [src]
            wrong = oracle.difference(local.grad + 0, dtensors.my_local(gradient, mesh, back))
            assert wrong is None, f"gradient of {src} -> {dst}: {wrong}"


@pytest.mark.parametrize("shape", [(8, 8), (5, 7)], ids=str)
def test_backward_is_asynchronous(pool: Pool, shape: tuple[int, ...]) -> None:
    pool.run(_backward, WORLD, shape)
