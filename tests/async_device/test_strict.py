"""Strict process groups enforce each of NCCL's rules.

Needs the extension of async_device, which is built first if it is missing or old.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import async_device
from async_device import ranks, strict
from async_device.ranks import (
    DEVICE,
    begin,
    error_of,
    failure_of,
    group_of,
    numbers,
    set_key,
    synchronous_barrier,
    wait_for_key,
)

pytestmark = pytest.mark.on_device

SHORT_SECONDS = 1.5


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    async_device.build()


# ------------------------------------------------------------------------------------------- functions run on the ranks


def batch(*operations: tuple[Callable[..., Any], torch.Tensor, int]) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(call, tensor, peer) for call, tensor, peer in operations])
    for work in works:
        work.wait()


def first_message_of_two(
    rank: int, size: int, path: str, begin_together: bool, bound: bool
) -> tuple[str, dict[str, int]]:
    native = begin(rank, size, path, SHORT_SECONDS if not (begin_together or bound) else 20.0, bound=bound)
    if begin_together:
        dist.all_reduce(numbers(1.0))
    sent, received = numbers(float(rank)), numbers(-1.0)
    if rank == 2:
        native.synchronize()
        return "took no part", strict.counters()
    error = error_of(batch, (dist.isend, sent, 1 - rank), (dist.irecv, received, 1 - rank))
    if error == "nothing was raised":
        assert received.item() == 1 - rank
    return error, strict.counters()


def test_the_first_batch_of_a_lazy_group_needs_all_ranks() -> None:
    for rank, (error, counters) in enumerate(ranks.run(first_message_of_two, 3, False, False)):
        assert "rendezvous" not in counters
        if rank != 2:
            assert "DistBackendError" in error and f"rank {rank} in group" in error
            assert "needs all ranks of the group; rank 2 did not come in 1500 ms" in error


@pytest.mark.parametrize("bound", [False, True])
def test_sparse_batch_works_once_the_communicator_exists(bound: bool) -> None:
    answers = ranks.run(first_message_of_two, 3, not bound, bound)
    assert [error for error, _ in answers] == ["nothing was raised"] * 2 + ["took no part"]
    assert all(counters["rendezvous"] == 1 and counters["communicators"] == 1 for _, counters in answers)
    assert [counters.get("batch", 0) for _, counters in answers] == [1, 1, 0]


def eager_without_rank_1(rank: int, size: int, path: str) -> str:
    return (
        "stayed away" if rank == 1 else error_of(lambda: begin(rank, size, path, SHORT_SECONDS, bound=True, alone=True))
    )


def test_an_eager_group_needs_all_ranks_when_it_is_made() -> None:
    first, _, third = ranks.run(eager_without_rank_1, 3)
    assert "rank 1 did not come" in first and "rank 1 did not come" in third


def members_alone(rank: int, size: int, path: str, unbind: bool) -> tuple[str, dict[str, int]]:
    begin(rank, size, path, SHORT_SECONDS if not unbind else 20.0, bound=True, alone=True)
    world = dist.group.WORLD
    if rank == 2:
        return "is no member", strict.counters()
    if unbind:
        world.bound_device_id = None
    made: list[Any] = []
    error = error_of(
        lambda: made.append(dist.new_group([0, 1], use_local_synchronization=True, device_id=torch.device(DEVICE, 0)))
    )
    if unbind:
        world.bound_device_id = torch.device(DEVICE, 0)
        total = numbers(rank + 1.0)
        dist.all_reduce(total, group=made[0])
        assert total.item() == 3.0
    return error, strict.counters()


def test_splitting_a_bound_group_needs_all_ranks_of_the_parent() -> None:
    for error, counters in ranks.run(members_alone, 3, False)[:2]:
        assert "splitting off a group" in error and "rank 2 did not come" in error
        assert "split" not in counters


def test_members_alone_make_a_group_while_the_default_group_is_unbound() -> None:
    for error, counters in ranks.run(members_alone, 3, True)[:2]:
        assert error == "nothing was raised"
        assert "split" not in counters and counters["communicators"] == 2


def split_by_all(rank: int, size: int, path: str) -> tuple[float, dict[str, int]]:
    begin(rank, size, path, bound=True)
    groups = [dist.new_group(members) for members in ([0, 2], [1])]
    total = numbers(rank + 1.0)
    dist.all_reduce(total, group=groups[rank % 2])
    return total.item(), strict.counters()


def test_a_split_by_all_ranks_gives_groups_that_work() -> None:
    answers = ranks.run(split_by_all, 3)
    assert [total for total, _ in answers] == [4.0, 2.0, 4.0]
    assert all(counters["split"] == 2 and counters["communicators"] == 2 for _, counters in answers)


def split_in_another_order(rank: int, size: int, path: str) -> str:
    begin(rank, size, path, SHORT_SECONDS, bound=True, alone=True)
    order = [[0, 1], [1, 2]] if rank != 2 else [[1, 2], [0, 1]]
    return error_of(lambda: [dist.new_group(members) for members in order])


def test_splits_in_different_orders_raise() -> None:
    errors = ranks.run(split_in_another_order, 3)
    assert any("all ranks must make groups in the same order" in error for error in errors)


def name_used_twice(rank: int, size: int, path: str) -> str:
    begin(rank, size, path)
    store = dist.FileStore(path, size)
    native = async_device.load()

    def group() -> None:
        strict_group = native.StrictGroup(store, rank, size, "twice", [], timedelta(seconds=60), native.Rules())
        strict_group.connect()
        strict_group.shutdown()

    assert error_of(group) == "nothing was raised"
    dist.barrier(device_ids=None)
    return error_of(group)


def test_reused_group_name_raises() -> None:
    assert all("from before" in error for error in ranks.run(name_used_twice, 2))


# --------------------------------------------------------------------------------------------------------- streams


def late_peer(rank: int, size: int, path: str, blocks_host: bool) -> None:
    """Rank 1 is late. Rank 0's asynchronous collective blocks only the streams or hosts that wait for it."""
    begin(rank, size, path, has_real_work=True, waits_block_host=blocks_host)
    dist.all_reduce(numbers(1.0))
    x = numbers(rank + 1.0)
    if rank == 1:
        wait_for_key("come")
        if blocks_host:
            time.sleep(0.2)
        dist.all_reduce(x)
        assert x.item() == 3.0
        return
    work = dist.all_reduce(x, async_op=True)
    after = torch.Event(device=DEVICE)
    after.record(torch.accelerator.current_stream())
    after.synchronize()  # the current stream is not blocked
    assert not work.is_completed()
    if blocks_host:
        set_key("come")
        work.wait()
        assert work.is_completed()
    else:
        work.wait()
        after.record(torch.accelerator.current_stream())
        assert not after.query() and not work.is_completed()  # the stream waits, the host does not
        set_key("come")
    assert x.item() == 3.0


@pytest.mark.parametrize("blocks_host", [False, True])
def test_wait_blocks_the_stream_and_the_host_only_if_asked(blocks_host: bool) -> None:
    ranks.run(late_peer, 2, blocks_host)


def synchronous_on_current_stream(rank: int, size: int, path: str, has_real_work: bool) -> None:
    native = begin(rank, size, path, has_real_work=has_real_work)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    x = numbers(1.0)
    work = group_of().allreduce([x], options)
    assert (work is not None) == has_real_work
    assert x.item() == size
    # The same on a side stream, while the default stream is blocked.
    side = torch.Stream(device=DEVICE)
    native.synchronize()
    with side:
        y = numbers(1.0)
    native.sleep(1500)
    held_up = torch.Event(device=DEVICE)
    held_up.record(torch.accelerator.current_stream())
    with side:
        group_of().allreduce([y], options)
    side.synchronize()
    assert not held_up.query()
    with side:
        assert y.item() == size
    native.synchronize()


@pytest.mark.parametrize("has_real_work", [False, True])
def test_synchronous_collective_runs_on_the_current_stream(has_real_work: bool) -> None:
    ranks.run(synchronous_on_current_stream, 2, has_real_work)


def two_streams(rank: int, size: int, path: str) -> None:
    """Two collectives on two streams, the first of which is blocked, still match in the order of the calls."""
    native = begin(rank, size, path)
    dist.all_reduce(numbers(1.0))
    first_stream, second_stream = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with first_stream:
        x = numbers(1.0, 2.0)
        if rank == 0:
            native.sleep(200)
        dist.all_reduce(x)
    with second_stream:
        y = numbers(10.0, 20.0)
        if rank == 1:
            native.sleep(100)
        dist.all_reduce(y)
    native.synchronize()
    assert x.tolist() == [size, 2.0 * size] and y.tolist() == [10.0 * size, 20.0 * size]


def test_operations_match_in_the_order_of_the_calls() -> None:
    ranks.run(two_streams, 2)


def mismatched_order(rank: int, size: int, path: str) -> str:
    native = begin(rank, size, path, 3.0)
    dist.all_reduce(numbers(1.0))
    calls = [
        lambda: dist.all_reduce(numbers(1.0)),
        lambda: dist.all_gather_into_tensor(numbers(*range(size)), numbers(1.0)),
    ]
    for call in calls if rank == 0 else reversed(calls):
        call()
    return failure_of(native)


def test_errors_name_mismatched_operations() -> None:
    first, second = ranks.run(mismatched_order, 2)
    assert "gave up in operation 2, all_reduce: rank 1 is in all_gather instead" in first
    assert "gave up in operation 2, all_gather: rank 0 is in all_reduce instead" in second


def missing_rank(rank: int, size: int, path: str) -> str:
    native = begin(rank, size, path)
    dist.all_reduce(numbers(1.0))
    native.synchronize()
    group_of().set_timeout(timedelta(seconds=1))
    if rank == 1:
        wait_for_key("gave up 0")
        wait_for_key("gave up 2")
        return "stayed away"
    dist.all_reduce(numbers(1.0))
    error = failure_of(native)
    set_key(f"gave up {rank}")
    return error


def test_timeout_names_missing_ranks() -> None:
    first, _, third = ranks.run(missing_rank, 3)
    for rank, error in ((0, first), (2, third)):
        assert f"rank {rank} in group" in error and "gave up in operation 2, all_reduce" in error
        assert "rank 1 did not come in 1000 ms" in error or f"rank {2 - rank} is gone" in error
        assert "rank 1 waits for nothing in this group" in error and f"rank {2 - rank} gave up in operation 2" in error


def temporary_input(rank: int, size: int, path: str, rule: str, batched: bool) -> float:
    """The input of an asynchronous operation is freed before the peer starts the operation."""
    native = begin(rank, size, path, has_real_work=True, **({rule: True} if rule else {}))
    dist.all_reduce(numbers(1.0))
    output = numbers(*[0.0] * size)
    if rank == 1:
        wait_for_key("come")
    if batched:
        received = numbers(0.0)
        sent = numbers(rank + 1.0)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        )
        del sent
    else:
        works = [dist.all_gather_into_tensor(output, numbers(rank + 1.0), async_op=True)]
    if rank == 0:
        torch.Event(device=DEVICE).record(torch.accelerator.current_stream())
        torch.accelerator.current_stream().synchronize()  # the allocator has finished its work on this stream
        set_key("come")
    for work in works:
        work.wait()
    native.synchronize()
    return received.item() if batched else output.tolist()[0]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rule", ["", "keeps_tensors", "records_streams"])
def test_nothing_keeps_tensors_alive_unless_asked(rule: str, batched: bool) -> None:
    value = ranks.run(temporary_input, 2, rule, batched)[1]  # rank 0's input as rank 1 received it
    if rule == "keeps_tensors" or (rule == "records_streams" and batched):
        assert value == 1.0
    else:
        assert value != value


# -------------------------------------------------------------------------------------------------------- messages


def match_messages(rank: int, size: int, path: str) -> None:
    begin(rank, size, path)
    group = group_of()
    assert "outside of a batch" in error_of(group.send, [numbers(1.0)], 1 - rank, 0)
    assert "outside of a batch" in error_of(group.recv, [numbers(1.0)], 1 - rank, 0)
    assert "without startCoalescing" in error_of(group._end_coalescing)
    # Messages match by order whatever their tags, also those to the own rank and those without elements.
    own, first, second, nothing = numbers(0.0), numbers(0.0), numbers(0.0, 0.0), numbers()
    group._start_coalescing()
    group.recv([first], 1 - rank, 7)
    group.recv([nothing], 1 - rank, 0)
    group.recv([second], 1 - rank, 7)
    group.recv([own], rank, 0)
    kept = [numbers(rank + 1.0), numbers(), numbers(rank + 2.0, rank + 3.0), numbers(rank + 5.0)]
    for tensor, tag in zip(kept[:3], (3, 2, 1)):
        group.send([tensor], 1 - rank, tag)
    group.send([kept[3]], rank, 1)
    group._end_coalescing().wait()
    assert first.item() == 2.0 - rank and second.tolist() == [3.0 - rank, 4.0 - rank] and own.item() == rank + 5.0
    # An empty batch does nothing.
    group._start_coalescing()
    assert group._end_coalescing() is None
    assert strict.counters()["batch"] == 1


def test_messages_match_by_order() -> None:
    ranks.run(match_messages, 2)


def mismatched_sizes(rank: int, size: int, path: str) -> str:
    native = begin(rank, size, path, 2.0)
    group = group_of()
    group._start_coalescing()
    kept = numbers(1.0, 2.0) if rank == 0 else numbers(1.0, 2.0, 3.0)
    group.send([kept], 1, 0) if rank == 0 else group.recv([kept], 0, 0)
    group._end_coalescing()
    return failure_of(native)


def test_errors_name_mismatched_message_sizes() -> None:
    assert "rank 0 sends 8 bytes where 12 are expected" in ranks.run(mismatched_sizes, 2)[1]


def left_open(rank: int, size: int, path: str) -> None:
    begin(rank, size, path)
    dist.all_reduce(numbers(1.0))
    group = group_of()
    peer = 1 - rank
    x, y = numbers(rank + 1.0), numbers(0.0)
    group._start_coalescing()
    group.recv([y], peer, 0)
    group.send([x], peer, 0)
    assert "outside" not in error_of(group._start_coalescing)
    assert "left open or is nested" in error_of(group._start_coalescing)
    # The current collective may not belong to the batch, so it raises.
    assert "left open" in error_of(dist.all_reduce, numbers(1.0))
    assert "endCoalescing" in error_of(group.send, [x], peer, 0)
    assert "endCoalescing" in error_of(dist.all_reduce, numbers(1.0))
    group._end_coalescing().wait()
    assert y.item() == peer + 1.0
    # An error of the batch itself does the same.
    group._start_coalescing()
    assert "must be in [0, 1]" in error_of(group.send, [x], 5, 0)
    assert "call endCoalescing" in error_of(dist.all_reduce, numbers(1.0))
    assert "must be in [0, 1]" in error_of(group.recv, [x], peer, 0)  # the error repeats the reason
    assert group._end_coalescing() is None
    # A rank does not receive its message to itself.
    group._start_coalescing()
    group.send([x], rank, 0)
    assert "1 messages to its own rank and receives 0" in error_of(group._end_coalescing)
    total = numbers(1.0)
    dist.all_reduce(total)
    assert total.item() == 2.0


def test_a_batch_left_open_makes_the_group_unusable_until_it_is_ended() -> None:
    ranks.run(left_open, 2)


# ------------------------------------------------------------------------------------------------------- arguments


def rejected_arguments(rank: int, size: int, path: str) -> None:
    native = begin(rank, size, path)
    group = group_of()
    for dtype in (torch.int16, torch.uint16, torch.complex64):
        x, out = torch.zeros(2, dtype=dtype).to(DEVICE), torch.zeros(2 * size, dtype=dtype).to(DEVICE)
        assert "NCCL does not carry" in error_of(group._allgather_base, out, x)
        group._start_coalescing()
        assert "NCCL does not carry" in error_of(group.send, [x], rank, 0)
        group._end_coalescing()
    assert "TypeError" in error_of(dist.all_reduce, torch.zeros(2, dtype=torch.int16).to(DEVICE))
    assert "does not reduce" in error_of(dist.all_reduce, torch.zeros(2).to(torch.float8_e4m3fn).to(DEVICE))
    assert "does not average" in error_of(
        dist.all_reduce, torch.zeros(2, dtype=torch.bool).to(DEVICE), dist.ReduceOp.AVG
    )
    assert "does not know" in error_of(dist.all_reduce, numbers(1, dtype=torch.int32), dist.ReduceOp.BAND)
    highest = dist.AllreduceOptions()
    highest.reduceOp = dist.ReduceOp.MAX
    complex_numbers = torch.zeros(2, dtype=torch.complex64).to(DEVICE)
    assert "but by sum and average" in error_of(group.allreduce, [complex_numbers], highest)
    assert "contiguous" in error_of(dist.all_reduce, torch.zeros(4, 4).to(DEVICE).t()[:2])
    assert "expects" in error_of(dist.all_gather_into_tensor, numbers(*range(size + 1)), numbers(1.0))
    assert "expects" in error_of(dist.reduce_scatter_tensor, numbers(1.0), numbers(*range(size + 1)))
    assert "one dtype" in error_of(group._allgather_base, numbers(*range(size)), numbers(1, dtype=torch.int32))
    assert "strict.Rules" in error_of(lambda: dist.new_group(pg_options=object()))
    # None of these has started anything.
    assert "rendezvous" not in strict.counters()
    x = torch.tensor([1 + 2j, 3j]).to(DEVICE)
    group.allreduce([x], dist.AllreduceOptions()).wait()
    assert x.cpu().tolist() == [size * (1 + 2j), size * 3j]
    flags = torch.tensor([rank == 0, False]).to(DEVICE)
    dist.all_reduce(flags)
    assert flags.cpu().tolist() == [True, False]
    small = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn).to(DEVICE)
    gathered = torch.zeros(2 * size).to(torch.float8_e4m3fn).to(DEVICE)
    dist.all_gather_into_tensor(gathered, small)
    assert gathered.cpu().float().tolist() == [1.0, 2.0] * size
    native.synchronize()


def test_arguments_that_nccl_rejects_raise_before_anything_starts() -> None:
    ranks.run(rejected_arguments, 2)


# --------------------------------------------------------------------------------------------------------- capture


def capture_and_replay(rank: int, size: int, path: str) -> None:
    native = begin(rank, size, path, has_real_work=True)
    dist.all_reduce(numbers(1.0))
    x, total, received = numbers(0.0), numbers(0.0), numbers(0.0)
    native.synchronize()
    with async_device.captured() as graph:
        total.copy_(x)
        dist.all_reduce(total)
        work = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
        )
        for handle in work:
            handle.wait()
    assert total.item() == 0.0
    for step in (1.0, 2.0):
        x.fill_(step + 10 * rank)
        graph.replay()
        assert total.item() == size * step + 10 * sum(range(size))
        assert received.item() == step + 10 * ((rank - 1) % size)


def test_each_replay_runs_the_captured_operations() -> None:
    ranks.run(capture_and_replay, 3)


def in_capture(call: Callable[[], Any]) -> tuple[str, str]:
    errors = []

    def attempt() -> None:
        with async_device.captured():
            errors.append(error_of(call))

    return (error_of(attempt), *errors)[::-1]  # type: ignore[return-value]


def forbidden_in_capture(rank: int, size: int, path: str) -> None:
    # Alone: a rank that fails closes the new group of Gloo, to which the other rank may still be connecting.
    native = begin(rank, size, path, alone=True, has_real_work=True)
    x = numbers(1.0)
    for call, name in (
        (lambda: dist.all_reduce(x), "making the communicator"),  # the first operation
        (lambda: dist.new_group([0, 1], pg_options=strict.rules(is_eager=True)), "making the communicator"),
        (lambda: group_of().barrier(synchronous_barrier()), ""),
    ):
        inside, after = in_capture(call)
        assert name in inside and "spoiled" in after, (inside, after)
    assert "spoiled" not in error_of(native.synchronize)
    dist.all_reduce(x)

    def query() -> None:
        dist.all_reduce(x, async_op=True).is_completed()

    inside, after = in_capture(query)
    assert "querying an event" in inside and "spoiled" in after
    assert x.item() == size


def test_forbidden_operations_spoil_the_capture() -> None:
    ranks.run(forbidden_in_capture, 2)


def forbidden_split_in_capture(rank: int, size: int, path: str) -> None:
    begin(rank, size, path, bound=True)
    inside, after = in_capture(lambda: dist.new_group([0, 1]))
    assert "splitting off a process group" in inside and "spoiled" in after


def test_a_split_spoils_the_capture() -> None:
    ranks.run(forbidden_split_in_capture, 2)


# ------------------------------------------------------------------------------------------------------------- end


def destroyed_early(rank: int, size: int, path: str, peer_comes: bool) -> str:
    native = begin(rank, size, path, 20.0 if peer_comes else SHORT_SECONDS)
    dist.all_reduce(numbers(1.0))
    x = numbers(rank + 1.0)
    if rank == 1:
        if not peer_comes:
            return "stayed away"
        time.sleep(0.3)
    work = dist.all_reduce(x, async_op=True)
    before = strict.counters()["communicators"]
    group = group_of()
    dist.destroy_process_group()
    assert "destroyed" in error_of(group.allreduce, [x])
    del group
    assert before == 1 and strict.counters()["communicators"] == 0
    error = failure_of(native)
    if peer_comes:
        work.wait() if work is not None else None
        assert x.item() == 3.0
    return error


def test_destroying_a_group_finishes_pending_operations() -> None:
    assert ranks.run(destroyed_early, 2, True) == ["nothing was raised"] * 2


def test_destroying_a_group_gives_up_on_missing_ranks() -> None:
    assert "rank 1" in ranks.run(destroyed_early, 2, False)[0]


def exit_with_pending_operation(rank: int, size: int, path: str) -> None:
    begin(rank, size, path, 5.0)
    dist.all_reduce(numbers(1.0))
    set_key(f"{rank} is connected")
    wait_for_key(f"{1 - rank} is connected")
    if rank == 0:
        dist.all_reduce(numbers(1.0), async_op=True)


def test_a_process_may_exit_with_pending_operations() -> None:
    ranks.run(exit_with_pending_operation, 2)


def aborted(rank: int, size: int, path: str) -> str:
    native = begin(rank, size, path, 5.0)
    x = numbers(1.0)
    dist.all_reduce(x)
    native.synchronize()
    native.sleep(300)
    dist.all_reduce(x)
    group_of().abort()
    assert "aborted" in error_of(dist.all_reduce, x)
    return failure_of(native)


def test_an_aborted_group_is_unusable() -> None:
    for error in ranks.run(aborted, 2):
        assert "operation 2, all_reduce, was left out: the group was aborted" in error
