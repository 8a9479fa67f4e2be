"""Driver calls of products, layers of experts and steps of `sw.fully_shard`, counted on the test device.

They determine the time of small calls. test_device_rules.py has the budgets of redistributes.
"""

from __future__ import annotations

from collections.abc import Callable
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
COUNTED = 5  # the least count is taken, because memory that streams have used is freed at a later call


class Calls(NamedTuple):
    launches: int
    events: int  # recorded events
    waits: int  # waits of streams for events
    lookups: int = 0  # of process groups
    made: int = 0  # events that were created, not reused


# Maximum numbers; they may fall but not rise. Launches of steps include a small margin: the device also counts the work
# that overwrites freed memory, which may be done one call later.
BUDGETS = {
    "product": Calls(7, 10, 10),
    "serial product": Calls(4, 5, 2),
    "experts": Calls(221, 2, 0),
    "step": Calls(84, 57, 28),
    "offloaded step": Calls(96, 90, 48),
}


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

    return {
        "product": lambda: sw.all_gather_matmul(x, weight, size=8, columns=8, method="ring", chunks=4, depth=3),
        "serial product": lambda: sw.matmul_reduce_scatter(x, weight, size=12, method="serial"),
        "experts": experts,
        "step": _step(),
        "offloaded step": _step(offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()),
    }


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
    for name, call in _calls().items():
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
        over = {name: calls for name, calls in found.items() if any(n > m for n, m in zip(calls, BUDGETS[name]))}
        assert not over, f"more than the budget: {over}"
