"""The wire meter counts the bytes that each collective must deliver, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Replicate, Shard

import dtensors
import shardwright as sw
from meshes import get_mesh
from pairs import ONE_DIM
from pool import Pool

WORLD = 4
BYTES = 4  # all tensors are float32

# The counts of a call: (received bytes, sent bytes, the operator under which it is counted).
Count = tuple[int, int, str]


def _measure(call: Callable[[], object]) -> Count:
    with sw.debug.wire_meter() as meter:
        call()
    assert meter.calls == 1 == len(meter.by_op), meter.by_op
    ((name, (calls, received)),) = meter.by_op.items()
    assert (calls, received) == (1, meter.received_bytes)
    return meter.received_bytes, meter.sent_bytes, name


def _plain_collectives() -> dict[str, Count]:
    """torch.distributed calls, which reach the dispatcher as c10d operators like those of our runtime."""
    rank = dist.get_rank()
    small, large = torch.ones(6), torch.ones(WORLD * 6)
    parts = [torch.ones(6) for _ in range(WORLD)]
    out_splits = [rank + 1] * WORLD
    in_splits = [peer + 1 for peer in range(WORLD)]
    empty_splits = [3 if peer == (rank + 1) % WORLD else 0 for peer in range(WORLD)]
    from_splits = [3 if peer == (rank - 1) % WORLD else 0 for peer in range(WORLD)]
    is_root = rank == 1
    return {
        "all_gather_into_tensor": _measure(lambda: dist.all_gather_into_tensor(large, small)),
        "all_gather": _measure(lambda: dist.all_gather(parts, small)),
        "reduce_scatter_tensor": _measure(lambda: dist.reduce_scatter_tensor(small, large)),
        "all_reduce": _measure(lambda: dist.all_reduce(torch.ones(7))),
        "all_to_all_even": _measure(lambda: dist.all_to_all_single(torch.empty(8, 3), torch.ones(8, 3))),
        "all_to_all_uneven": _measure(
            lambda: dist.all_to_all_single(
                torch.empty(sum(out_splits), 2), torch.ones(sum(in_splits), 2), out_splits, in_splits
            )
        ),
        "all_to_all_sparse": _measure(
            lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3), from_splits, empty_splits)
        ),
        "broadcast": _measure(lambda: dist.broadcast(small, src=1)),
        "reduce": _measure(lambda: dist.reduce(small, dst=1)),
        "gather": _measure(lambda: dist.gather(small, parts if is_root else None, dst=1)),
        "scatter": _measure(lambda: dist.scatter(small, parts if is_root else None, src=1)),
        "send_or_receive": _measure(
            lambda: dist.send(small, dst=rank - 1) if rank % 2 else dist.recv(small, src=rank + 1)
        ),
    }


def test_meter_counts_plain_collectives(pool: Pool) -> None:
    for rank, counts in enumerate(pool.run(_plain_collectives, WORLD)):
        own, others = 6 * BYTES, (WORLD - 1) * 6 * BYTES
        root = rank == 1
        all_reduce = 42  # 2 * 3/4 of 28 bytes
        received_rows, sent_rows = (WORLD - 1) * (rank + 1), sum(range(1, WORLD + 1)) - (rank + 1)
        assert counts == {
            "all_gather_into_tensor": (others, others, "c10d._allgather_base_"),
            "all_gather": (others, others, "c10d.allgather_"),
            "reduce_scatter_tensor": (others, others, "c10d._reduce_scatter_base_"),
            "all_reduce": (all_reduce, all_reduce, "c10d.allreduce_"),
            "all_to_all_even": (6 * 3 * BYTES, 6 * 3 * BYTES, "c10d.alltoall_base_"),
            "all_to_all_uneven": (received_rows * 2 * BYTES, sent_rows * 2 * BYTES, "c10d.alltoall_base_"),
            "all_to_all_sparse": (3 * BYTES, 3 * BYTES, "c10d.alltoall_base_"),
            "broadcast": (0 if root else own, others if root else 0, "c10d.broadcast_"),
            "reduce": (others if root else 0, 0 if root else own, "c10d.reduce_"),
            "gather": (others if root else 0, 0 if root else own, "c10d.gather_"),
            "scatter": (0 if root else own, others if root else 0, "c10d.scatter_"),
            "send_or_receive": (0, own, "c10d.send") if rank % 2 else (own, 0, "c10d.recv_"),
        }


def _functional_collectives() -> dict[str, Count]:
    """The collectives that DTensor uses; each runs a c10d collective underneath, which must not count again."""
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    small, large = torch.ones(6), torch.ones(WORLD * 6)
    ops = torch.ops._c10d_functional

    def waited(result: object) -> object:
        tensors = result if isinstance(result, (list, tuple)) else [result]
        return [ops.wait_tensor(tensor) for tensor in tensors]

    splits = [2] * WORLD
    return {
        "all_gather": _measure(lambda: waited(ops.all_gather_into_tensor(small, WORLD, name))),
        "all_gather_out": _measure(lambda: waited(ops.all_gather_into_tensor_out(small, WORLD, name, out=large))),
        "all_gather_coalesced": _measure(
            lambda: waited(ops.all_gather_into_tensor_coalesced([small, torch.ones(2)], WORLD, name))
        ),
        "reduce_scatter": _measure(lambda: waited(ops.reduce_scatter_tensor(large, "sum", WORLD, name))),
        "reduce_scatter_coalesced": _measure(
            lambda: waited(ops.reduce_scatter_tensor_coalesced([large, torch.ones(8)], "sum", WORLD, name))
        ),
        "all_reduce": _measure(lambda: waited(ops.all_reduce(small, "sum", name))),
        "all_reduce_in_place": _measure(lambda: waited(ops.all_reduce_(small, "sum", name))),
        "all_reduce_coalesced": _measure(lambda: waited(ops.all_reduce_coalesced([small, small], "sum", name))),
        "all_to_all": _measure(lambda: waited(ops.all_to_all_single(torch.ones(8, 3), splits, splits, name))),
        "broadcast": _measure(lambda: waited(ops.broadcast(small, 1, name))),
    }


def test_meter_counts_functional_collectives(pool: Pool) -> None:
    for rank, counts in enumerate(pool.run(_functional_collectives, WORLD)):
        own, others = 6 * BYTES, (WORLD - 1) * 6 * BYTES
        others_of_two = others + (WORLD - 1) * 2 * BYTES
        all_reduce = 36  # 2 * 3/4 of 24 bytes
        broadcast = (0, others) if rank == 1 else (own, 0)
        prefix = "_c10d_functional."
        assert counts == {
            "all_gather": (others, others, prefix + "all_gather_into_tensor"),
            "all_gather_out": (others, others, prefix + "all_gather_into_tensor_out"),
            "all_gather_coalesced": (others_of_two, others_of_two, prefix + "all_gather_into_tensor_coalesced"),
            "reduce_scatter": (others, others, prefix + "reduce_scatter_tensor"),
            "reduce_scatter_coalesced": (others_of_two, others_of_two, prefix + "reduce_scatter_tensor_coalesced"),
            "all_reduce": (all_reduce, all_reduce, prefix + "all_reduce"),
            "all_reduce_in_place": (all_reduce, all_reduce, prefix + "all_reduce_"),
            "all_reduce_coalesced": (2 * all_reduce, 2 * all_reduce, prefix + "all_reduce_coalesced"),
            "all_to_all": (6 * 3 * BYTES, 6 * 3 * BYTES, prefix + "all_to_all_single"),
            "broadcast": (*broadcast, prefix + "broadcast"),
        }


def _sub_group_and_async() -> tuple[Count, Count, Count]:
    """Sizes and ranks are those of the group, not of the world; an asynchronous call counts when it is issued."""
    mesh = get_mesh((2, 2))
    group = mesh.get_group("b")
    rows = [[1, 2], [3, 4]][mesh.get_local_rank("b")]
    expected_rows = [[1, 3], [2, 4]][mesh.get_local_rank("b")]
    in_group = _measure(
        lambda: dist.all_to_all_single(
            torch.empty(sum(expected_rows)), torch.ones(sum(rows)), expected_rows, rows, group
        )
    )
    later = []
    asynchronous = _measure(lambda: later.append(dist.all_reduce(torch.ones(6), group=group, async_op=True)))
    later[0].wait()
    functional = _measure(lambda: funcol.all_reduce(torch.ones(6), "sum", group).add(1))
    return in_group, asynchronous, functional


def test_meter_counts_subgroups_and_asynchronous_calls(pool: Pool) -> None:
    for rank, (in_group, asynchronous, functional) in enumerate(pool.run(_sub_group_and_async, WORLD)):
        received, sent = [(3, 2), (2, 3)][rank % 2]
        assert in_group == (received * BYTES, sent * BYTES, "c10d.alltoall_base_")
        assert asynchronous == (24, 24, "c10d.allreduce_")
        assert functional == (24, 24, "_c10d_functional.all_reduce")


def _stock_dtensor() -> dict[str, tuple[int, list[str]]]:
    """DTensor's own path, with the engine off: received bytes and operators of single moves."""
    mesh = get_mesh((WORLD,))
    tensor = torch.ones(8, 8)
    result = {}
    for name, (src, dst) in ONE_DIM.items():
        source = dtensors.distribute(tensor, mesh, src)
        with sw.debug.wire_meter() as meter:
            source.redistribute(mesh, dtensors.to_placements(dst))
        result[name] = (meter.received_bytes, sorted(meter.by_op))
    return result


@pytest.mark.cpu_only("stock has other collectives on CPU")
def test_stock_dtensor_bytes(pool: Pool) -> None:
    total = 8 * 8 * BYTES
    for moved in pool.run(_stock_dtensor, WORLD):
        # On CPU a Shard -> Shard gathers everything and keeps a slice: four times what an all-to-all moves.
        assert moved == {
            "S->R": (total * 3 // 4, ["_c10d_functional.all_gather_into_tensor"]),
            "S->S": (total * 3 // 4, ["_c10d_functional.all_gather_into_tensor"]),
            "P->S": (total * 3 // 4, ["_c10d_functional.reduce_scatter_tensor"]),
            "P->R": (total * 6 // 4, ["_c10d_functional.all_reduce"]),
            "R->S": (0, []),
        }


def _backward_and_nesting() -> tuple[int, int]:
    mesh = get_mesh((WORLD,))
    local = torch.ones(2, 8, requires_grad=True)
    with sw.debug.wire_meter() as outer:
        source = dtensors.wrap(local, mesh, (8, 8), ["S(0)"])
        gathered = source.redistribute(mesh, [Replicate()])
        with sw.debug.wire_meter() as inner:
            gathered.redistribute(mesh, [Shard(1)]).to_local().sum().backward()
    return outer.received_bytes, inner.received_bytes


def test_meters_count_backward_and_nest(pool: Pool) -> None:
    gather = 8 * 8 * BYTES * 3 // 4
    for outer, inner in pool.run(_backward_and_nesting, WORLD):
        assert (outer, inner) == (2 * gather, gather)
