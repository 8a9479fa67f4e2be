"""Asynchronous redistributes whose input is overwritten while they run, and whose result is not waited for."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

WORLD = 4
NUM_REDISTRIBUTES = 2500  # for each seed
MAX_IN_FLIGHT = 6
DEADLINE_SECONDS = 30.0
SHAPES = [(8, 8), (5, 7), (1, 3), (0, 3), (64, 33)]
PLACEMENTS = ["R", "S(0)", "S(1)", "P(sum)"]
# A size from which all-gathers on Gloo send directly from the input's memory.
LARGE = (1100, 1024)


def _pending(local: torch.Tensor) -> torch.Tensor:
    """Returns a result's tensor without waiting for it."""
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def _becomes(memory: torch.Tensor, expected: torch.Tensor, rounded: bool = False) -> bool:
    """True if the values arrive although nothing waits for the result."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while oracle.difference(memory, expected, rounded) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _start(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], src: list[str], dst: list[str], seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Starts a redistribute. Returns the local input, the local result and its expected value."""
    mesh = get_mesh(mesh_shape)
    tensor = oracle.global_tensor(shape, torch.float32, seed, any(map(oracle.reduce_op, src)))
    source = dtensors.distribute(tensor, mesh, src)
    result = source.redistribute(mesh, dtensors.to_placements(dst), async_op=True)
    return source._local_tensor, result._local_tensor, dtensors.my_local(tensor, mesh, dst).clone()


def _overwritten_inputs(src: str, dst: str, pause_seconds: float, times: int) -> int:
    wrong = 0
    with sw.enabled(strict=True):
        for seed in range(times):
            local, result, expected = _start((WORLD,), LARGE, [src], [dst], seed)
            time.sleep(pause_seconds)
            local.fill_(-1)
            wrong += oracle.difference(result + 0, expected) is not None
    return wrong


@pytest.mark.parametrize("pause_seconds", [0.0, 0.1])
@pytest.mark.parametrize(("src", "dst"), [("S(1)", "R"), ("S(0)", "R"), ("P(sum)", "S(0)"), ("S(0)", "S(1)")])
def test_input_may_be_overwritten_after_the_call(pool: Pool, src: str, dst: str, pause_seconds: float) -> None:
    assert pool.run(_overwritten_inputs, WORLD, src, dst, pause_seconds, 4) == [0] * WORLD


def _plan_in_rounds() -> None:
    """The plan packs its input in rounds. Later rounds read the input after a wait."""
    mesh = sw.Mesh({"x": WORLD})
    src, dst = sw.Layout(mesh, (1024, 512), ["S(0)"]), sw.Layout(mesh, (1024, 512), ["S(1)"])
    free = sw.plan(src, dst, backend="gloo")
    plan = sw.plan(src, dst, backend="gloo", memory_limit=free.peak_bytes * 3 // 4)
    assert any(step.rounds > 1 for step in plan.steps)
    sw.pin(plan)
    try:
        tensor = oracle.global_tensor((1024, 512), torch.float32, seed=1)
        local = oracle.local(tensor, (WORLD,), ["S(0)"], (dist.get_rank(),)).contiguous()
        expected = oracle.local(tensor, (WORLD,), ["S(1)"], (dist.get_rank(),))
        result = sw.redistribute_local(local, src, dst, async_op=True)
        local.fill_(-1)
        assert oracle.difference(result + 0, expected) is None
    finally:
        sw.unpin(plan)


def test_input_of_a_plan_in_rounds_may_be_overwritten(pool: Pool) -> None:
    pool.run(_plan_in_rounds, WORLD)


def _pickled(src: str, dst: str) -> None:
    mesh = get_mesh((WORLD,))
    with sw.enabled(strict=True):
        tensor = oracle.global_tensor((64, 48), torch.float32, seed=2, reducible=src.startswith("P"))
        source = dtensors.distribute(tensor, mesh, [src])
        result = source.redistribute(mesh, dtensors.to_placements([dst]), async_op=True)
        expected = dtensors.my_local(tensor, mesh, [dst])
        assert _becomes(_pending(result._local_tensor), expected)
        again = pickle.loads(pickle.dumps(result._local_tensor))
        assert oracle.difference(_pending(again), expected) is None


@pytest.mark.parametrize(("src", "dst"), [("S(0)", "S(1)"), ("S(1)", "R"), ("P(sum)", "S(0)"), ("P(sum)", "R")])
def test_results_arrive_without_a_wait(pool: Pool, src: str, dst: str) -> None:
    pool.run(_pickled, WORLD, src, dst)


def _with_user_collectives(mesh_shape: tuple[int, ...], src: list[str], dst: list[str]) -> list[str]:
    """Runs redistributes of several phases and all-reduces in turn. Some ranks wait at once, others late."""
    own = random.Random(dist.get_rank())
    wrong = []
    group = get_mesh(mesh_shape).get_group(0)
    with sw.enabled(strict=True):
        for number in range(60):
            _, result, expected = _start(mesh_shape, (64, 33), src, dst, number)
            late = own.random() < 0.5
            if not late and oracle.difference(result + 0, expected) is not None:
                wrong.append(f"{number} at once")
            total = torch.full((2,), float(number))
            dist.all_reduce(total, group=group)
            if total.tolist() != [number * group.size()] * 2:
                wrong.append(f"{number}: all_reduce gave {total.tolist()}")
            if late and not _becomes(_pending(result), expected):
                wrong.append(f"{number} late")
    return wrong


@pytest.mark.parametrize(
    ("mesh_shape", "src", "dst"),
    [
        ((WORLD,), ["P(sum)"], ["R"]),
        ((2, 2), ["P(sum)", "P(sum)"], ["R", "R"]),
        ((2, 2), ["P(sum)", "S(1)"], ["R", "S(0)"]),
    ],
    ids=str,
)
def test_user_collectives_do_not_mix_with_redistributes(
    pool: Pool, mesh_shape: tuple[int, ...], src: list[str], dst: list[str]
) -> None:
    """The later phases of a redistribute may start before or after a user's collective on the same group."""
    assert pool.run(_with_user_collectives, WORLD, mesh_shape, src, dst) == [[]] * WORLD


def _random_redistributes(seed: int, times: int) -> list[str]:
    """Runs the same random redistributes on all ranks. Each rank chooses how it uses inputs and results."""
    common, own = random.Random(seed), random.Random(seed * WORLD + dist.get_rank())
    wrong: list[str] = []
    in_flight: deque[tuple[str, torch.Tensor, torch.Tensor]] = deque()
    threads: list[threading.Thread] = []

    def compare(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        difference = oracle.difference(result + 0, expected)
        if difference is not None:
            wrong.append(f"{name}: {difference}")

    def use(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        kind = own.choice(["wait", "wait", "leave", "thread", "drop"])
        if kind == "wait":
            compare(name, result, expected)
        elif kind == "leave":
            if not _becomes(_pending(result), expected):
                wrong.append(f"{name}: never arrived")
        elif kind == "thread":
            thread = threading.Thread(target=compare, args=(name, result, expected))
            thread.start()
            threads.append(thread)

    with sw.enabled(strict=True):
        for number in range(times):
            mesh_shape = common.choice([(4,), (2, 2)])
            shape = common.choice(SHAPES)
            src, dst = ([common.choice(PLACEMENTS) for _ in mesh_shape] for _ in range(2))
            dst = ["R" if placement == "P(sum)" else placement for placement in dst]
            name = f"seed {seed}, {number}: {shape} on {mesh_shape}, {src} -> {dst}"
            local, result, expected = _start(mesh_shape, shape, src, dst, common.randrange(1000))
            if own.random() < 0.1:
                time.sleep(own.random() * 0.002)
            if own.random() < 0.8 and result is not local:
                local.fill_(-1)
            in_flight.append((name, result, expected))
            if common.random() < 0.2:  # a user's collective on the same groups
                own_tensor = torch.full((3,), float(number))
                dist.all_reduce(own_tensor, group=get_mesh(mesh_shape).get_group(common.randrange(len(mesh_shape))))
                if not bool((own_tensor == own_tensor[0]).all()) or own_tensor[0] != number * get_mesh(mesh_shape).size(
                    -1
                ):
                    wrong.append(f"{name}: an all_reduce at the same time gave {own_tensor.tolist()}")
            while len(in_flight) > MAX_IN_FLIGHT or (in_flight and own.random() < 0.3):
                use(*in_flight.popleft())
    for item in in_flight:
        use(*item)
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_random_async_redistributes(pool: Pool, seed: int) -> None:
    """Results are right whether inputs are overwritten, and whether this thread, another one or none waits."""
    for wrong in pool.run(_random_redistributes, WORLD, seed, NUM_REDISTRIBUTES):
        assert wrong == []
