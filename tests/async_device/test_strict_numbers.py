"""Valid operations of strict process groups give correct results, from several streams, with random delays."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import async_device
from async_device import ranks, strict
from async_device.ranks import DEVICE, begin, group_of, numbers

pytestmark = pytest.mark.on_device

NUM_OPERATIONS = 30
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64)

# The works that an operation returned, and pairs of a tensor on the device and its expected value.
Begun = tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    async_device.build()


class Operations:
    """One method per kind of operation. All ranks draw the same numbers, so each can compute all ranks' inputs."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank, self.size = rank, size
        self.draw = random.Random(seed)
        self.values = torch.Generator().manual_seed(seed)
        self.alive: list[Any] = []  # tensors of operations that may not have finished

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self.alive.append(tensor.to(DEVICE))
        return self.alive[-1]

    def zeros(self, count: int) -> torch.Tensor:
        return self.on_device(torch.zeros(count, dtype=self.dtype))

    def of_all(self) -> list[torch.Tensor]:
        return [torch.randint(0, 4, (self.count,), generator=self.values).to(self.dtype) for _ in range(self.size)]

    def begin_one(self) -> Begun:
        self.dtype, self.count = self.draw.choice(DTYPES), self.draw.choice([0, 1, 5, 64])
        self.is_async, self.root = self.draw.random() < 0.5, self.draw.randrange(self.size)
        self.inputs = self.of_all()
        self.mine = self.on_device(self.inputs[self.rank])
        self.parts = [self.of_all() for _ in range(self.size)]  # parts[r][p]: sent by r to p
        self.pieces = [self.on_device(part) for part in self.parts[self.rank]]
        self.flat = self.on_device(torch.cat(self.parts[self.rank]))
        self.to_me = [parts[self.rank] for parts in self.parts]
        kinds = [name for name in vars(type(self)) if name.startswith("do_")]
        begun: Begun = getattr(self, self.draw.choice(kinds))()
        return begun

    def summed(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tensors).double().sum(0).to(self.dtype)

    def do_all_reduce(self) -> Begun:
        stacked = torch.stack(self.inputs).double()
        operator, reduced = self.draw.choice(
            [
                (dist.ReduceOp.SUM, stacked.sum(0)),
                (dist.ReduceOp.MAX, stacked.amax(0)),
                (dist.ReduceOp.MIN, stacked.amin(0)),
                (dist.ReduceOp.PRODUCT, stacked.prod(0)),
            ]
        )
        work = dist.all_reduce(self.mine, operator, async_op=self.is_async)
        return [work], [(self.mine, reduced.to(self.dtype))]

    def do_reduce(self) -> Begun:
        work = dist.reduce(self.mine, self.root, async_op=self.is_async)
        return [work], [(self.mine, self.summed(self.inputs))] if self.rank == self.root else []

    def do_broadcast(self) -> Begun:
        work = dist.broadcast(self.mine, self.root, async_op=self.is_async)
        return [work], [(self.mine, self.inputs[self.root])]

    def do_all_gather(self) -> Begun:
        out = self.zeros(self.size * self.count)
        work = dist.all_gather_into_tensor(out, self.mine, async_op=self.is_async)
        return [work], [(out, torch.cat(self.inputs))]

    def do_all_gather_to_list(self) -> Begun:
        outs = [self.zeros(self.count) for _ in range(self.size)]
        work = dist.all_gather(outs, self.mine, async_op=self.is_async)
        return [work], list(zip(outs, self.inputs))

    def do_reduce_scatter(self) -> Begun:
        out = self.zeros(self.count)
        work = dist.reduce_scatter_tensor(out, self.flat, async_op=self.is_async)
        return [work], [(out, self.summed(self.to_me))]

    def do_reduce_scatter_of_list(self) -> Begun:
        out = self.zeros(self.count)
        work = dist.reduce_scatter(out, self.pieces, async_op=self.is_async)
        return [work], [(out, self.summed(self.to_me))]

    def do_all_to_all(self) -> Begun:
        out = self.zeros(self.size * self.count)
        work = dist.all_to_all_single(out, self.flat, async_op=self.is_async)
        return [work], [(out, torch.cat(self.to_me))]

    def do_all_to_all_of_lists(self) -> Begun:
        outs = [self.zeros(self.count) for _ in range(self.size)]
        work = dist.all_to_all(outs, self.pieces, async_op=self.is_async)
        return [work], list(zip(outs, self.to_me))

    def do_scatter(self) -> Begun:
        pieces = self.pieces if self.rank == self.root else None
        work = dist.scatter(self.mine, pieces, self.root, async_op=self.is_async)
        return [work], [(self.mine, self.parts[self.root][self.rank])]

    def do_gather(self) -> Begun:
        outs = [self.zeros(self.count) for _ in range(self.size)] if self.rank == self.root else None
        work = dist.gather(self.mine, outs, self.root, async_op=self.is_async)
        return [work], list(zip(outs or [], self.inputs))

    def do_coalesced(self) -> Begun:
        others = self.of_all()
        other = self.on_device(others[self.rank])
        outs = [self.zeros(self.size * self.count) for _ in range(2)]
        device = torch.device(DEVICE) if self.draw.random() < 0.5 else None  # coalesced by the group, or by c10d
        with dist.distributed_c10d._coalescing_manager(device=device, async_ops=self.is_async) as manager:
            for out, tensor in zip(outs, (self.mine, other)):
                if device is None:
                    dist.all_gather_into_tensor(out, tensor)
                else:
                    options = dist.distributed_c10d.AllgatherOptions()
                    options.asyncOp = self.is_async
                    group_of()._allgather_base(out, tensor, options)
        return [manager] if self.is_async else [], list(zip(outs, (torch.cat(self.inputs), torch.cat(others))))

    def do_messages(self) -> Begun:
        pairs = [(r, p) for r in range(self.size) for p in range(self.size) if self.draw.random() < 0.6]
        received = [(self.zeros(self.count), r) for r, p in pairs if p == self.rank]
        operations = [dist.P2POp(dist.irecv, tensor, r) for tensor, r in received]
        operations += [dist.P2POp(dist.isend, self.pieces[p], p) for r, p in pairs if r == self.rank]
        works = dist.batch_isend_irecv(operations) if operations else []
        return works, [(tensor, self.to_me[r]) for tensor, r in received]


def random_operations(rank: int, size: int, path: str, seed: int, rules: dict[str, bool]) -> None:
    native = begin(rank, size, path, 30.0, **rules)
    native.set_delays(seed * 100 + rank, 0.3, 3000)
    streams = [torch.Stream(device=DEVICE) for _ in range(3)]
    operations = Operations(rank, size, seed)
    doubled: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(NUM_OPERATIONS):
        with streams[operations.draw.randrange(3)]:
            works, wanted = operations.begin_one()
            for work in works:
                if work is not None:
                    work.wait()
            # Later work on the stream sees the result.
            doubled += [(tensor.add(tensor), value + value) for tensor, value in wanted]
            operations.alive.append(works)
    native.synchronize()
    for got, value in doubled:
        assert torch.equal(got.cpu(), value), (got.cpu(), value)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_operations_give_correct_results(size: int) -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    draw = random.Random(seed)
    rules = {name: draw.random() < 0.5 for name in ("is_eager", "has_real_work", "is_high_priority_stream")}
    ranks.run(random_operations, size, seed, rules)


def averages(rank: int, size: int, path: str) -> None:
    begin(rank, size, path)
    x, full = numbers(rank + 1.0, 2.0), numbers(7 * rank + 1, 5, dtype=torch.int64)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    dist.all_reduce(full, dist.ReduceOp.AVG)
    scaled = numbers(rank + 1.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    total = sum(range(1, size + 1))
    assert x.tolist() == [total / size, 2.0] and scaled.item() == 0.5 * total
    assert full.tolist() == [sum(7 * r + 1 for r in range(size)) // size, 5]
    uneven = [numbers(*[0.0] * (r + 1)) for r in range(size)]
    local = numbers(*[float(rank)] * (rank + 1))
    dist.all_gather(uneven, local)
    assert [t.tolist() for t in uneven] == [[float(r)] * (r + 1) for r in range(size)]
    rows = [(rank + p) % 3 for p in range(size)]
    out = torch.zeros(sum((r + rank) % 3 for r in range(size)), 2).to(DEVICE)
    data = torch.full((sum(rows), 2), float(rank)).to(DEVICE)
    dist.all_to_all_single(out, data, [(r + rank) % 3 for r in range(size)], rows)
    assert out.cpu()[:, 0].tolist() == [float(r) for r in range(size) for _ in range((r + rank) % 3)]
    group_of().barrier().wait()
    assert strict.counters()["barrier"] == 1


def test_averages_uneven_parts_and_barriers_give_correct_results() -> None:
    ranks.run(averages, 3)


def on_a_mesh(rank: int, size: int, path: str) -> list[float]:
    begin(rank, size, path, bound=True)
    mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("a", "b"))
    totals = []
    for name in ("a", "b"):
        total = numbers(10.0**rank)
        dist.all_reduce(total, group=mesh.get_group(name))
        totals.append(total.item())
    counters = strict.counters()
    assert counters["rendezvous"] == 1 and counters["split"] >= 2 and counters["communicators"] == 3
    return totals


def test_mesh_groups_are_split_off_a_bound_group() -> None:
    assert ranks.run(on_a_mesh, 4) == [[101.0, 11.0], [1010.0, 11.0], [101.0, 1100.0], [1010.0, 1100.0]]
