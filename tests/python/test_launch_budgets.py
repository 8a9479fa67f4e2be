"""Driver calls of products, layers of experts, steps of `sw.fully_shard`, batches and copies between peers, counted on
the test device.

They determine the time of small calls. test_device_rules.py has the budgets of single redistributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import async_tests  # noqa: F401  (so that async_device is found)
import shardwright as sw
from shardwright._native import _runtime
from shardwright.runtime import groups

DEVICE = "asyncdev"
WARM_UP = (
    4  # calls before the first counted one; the third step of a model is the first that is neither recorded nor timed
)
COUNTED = 9  # the least count is taken, because memory that streams have used is freed at a later call


class Calls(NamedTuple):
    launches: int
    events: int  # recorded events
    waits: int  # waits of streams for events
    lookups: int = 0  # of process groups
    made: int = 0  # events that were created, not reused


# Launches are maximum numbers. Those of steps include a small margin: the device also counts the work that overwrites
# freed memory, which may be done one call later. The other numbers are exact, so that one more event or wait, and a
# budget that is too large, both fail.
BUDGETS = {
    "product": Calls(7, 10, 10),
    "serial product": Calls(4, 5, 2),
    "experts": Calls(221, 2, 0),
    "step": Calls(84, 57, 28),
    "offloaded step": Calls(96, 90, 48),
    "batch": Calls(20, 17, 15),
    "asynchronous": Calls(10, 20, 12),
    "two streams": Calls(4, 4, 2),  # two redistributes. From here on, each one records an event for other streams
    "peer gather": Calls(8, 3, 2),
    "peer messages": Calls(10, 3, 2),
    "flags": Calls(16, 10, 8),
}
ARENA_BYTES = 1 << 16


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    import async_device

    async_device.build()


def _step(**options: object) -> Callable[[], object]:
    """Returns a training step of three layers under `sw.fully_shard`, without an optimizer."""
    mesh = init_device_mesh(DEVICE, (2,))
    model = nn.Sequential(*(nn.Linear(16, 16, device=DEVICE) for _ in range(3)))
    for module in (*model, model):
        sw.fully_shard(module, mesh=mesh, **options)  # type: ignore[arg-type]
    x = torch.ones(4, 16, device=DEVICE)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def _calls() -> dict[str, Callable[[], object]]:
    x, weight = torch.ones(4, 6, device=DEVICE), torch.ones(6, 4, device=DEVICE)
    ids = torch.tensor([[0, 2], [1, 3], [2, 1]], device=DEVICE)
    tokens, scores = torch.ones(3, 4, device=DEVICE), torch.ones(3, 2, device=DEVICE)

    def experts() -> torch.Tensor:
        fixed = {"rows_per_rank": 3, "overflow": "drop"}
        rows, _, handle = sw.experts.dispatch(tokens, ids, scores, [[0, 1], [2, 3]], **fixed)  # type: ignore[arg-type]
        return sw.experts.combine(rows, handle)

    mesh = sw.Mesh({"a": 2})
    rows, columns, whole = (sw.Layout(mesh, [8, 12], [placement]) for placement in ("S(0)", "S(1)", "R"))
    part = torch.ones(4, 12, device=DEVICE)
    streams = [torch.Stream(device=DEVICE) for _ in range(2)]

    def on_two_streams() -> None:
        for stream in streams:
            with stream:
                sw.redistribute_local(part, rows, whole)

    def beside_asynchronous() -> None:
        handle = sw.redistribute_many([(part, rows, columns)], async_op=True)
        result = sw.redistribute_local(part, rows, whole, async_op=True)
        sw.redistribute_local(part, rows, whole)
        handle.wait()
        torch.ops._c10d_functional.wait_tensor(result)

    return {
        "product": lambda: sw.all_gather_matmul(x, weight, size=8, columns=8, method="ring", chunks=4, depth=3),
        "serial product": lambda: sw.matmul_reduce_scatter(x, weight, size=12, method="serial"),
        "experts": experts,
        "step": _step(),
        "offloaded step": _step(offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()),
        "batch": lambda: sw.redistribute_many([(part, rows, columns), (part, rows, whole)], bucket_bytes=256),
        "asynchronous": beside_asynchronous,
        "two streams": on_two_streams,
    }


def _calls_of_peers() -> dict[str, Callable[[], object]]:
    """Returns calls whose transfers are copies between peers, after making their arenas."""
    mesh = sw.Mesh({"a": 2})
    sw.prepare(mesh, device_type=DEVICE, peer_arena_bytes=ARENA_BYTES, peer_min_bytes=0)
    rows, columns, whole = (sw.Layout(mesh, [8, 12], [placement]) for placement in ("S(0)", "S(1)", "R"))
    part = torch.ones(4, 12, device=DEVICE)
    x, weight = (torch.ones(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((256, 16), (16, 8)))
    return {
        "peer gather": lambda: sw.redistribute_local(part, rows, whole),
        "peer messages": lambda: sw.redistribute_local(part, rows, columns),
        "flags": lambda: sw.all_gather_matmul(x, weight, size=512, columns=16, method="flags", chunks=1),
    }


def _all_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    yield from _calls().items()
    yield from _calls_of_peers().items()  # their arenas serve all later calls


def _counted(rank: int, size: int, path: str) -> dict[str, Calls]:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 60.0, alone=True)
    lookups = 0
    find_or_make = groups.find_or_make

    def counting(*args: object, **how: object) -> object:
        nonlocal lookups
        lookups += 1
        return find_or_make(*args, **how)  # type: ignore[arg-type]

    groups.find_or_make = counting  # type: ignore[assignment]

    def counts() -> tuple[int, ...]:
        now = native.counts()
        return now["works"], now["events"], now["waits"], lookups, _runtime.num_stream_events_made()

    found = {}
    for name, call in _all_calls():
        for _ in range(WARM_UP):
            call()
            native.synchronize()
        seen = []
        for _ in range(COUNTED):
            before = counts()
            call()
            seen.append([now - earlier for now, earlier in zip(counts(), before, strict=True)])
            native.synchronize()
        found[name] = Calls(*(min(each) for each in zip(*seen, strict=True)))
    return found


def test_calls_keep_their_budgets() -> None:
    from async_device import ranks

    for found in ranks.run(_counted, 2, timeout_seconds=180):
        assert found.keys() == BUDGETS.keys()
        wrong = {
            name: calls
            for name, calls in found.items()
            if calls.launches > BUDGETS[name].launches or calls[1:] != BUDGETS[name][1:]
        }
        assert not wrong, f"not within the budgets: {wrong}"
