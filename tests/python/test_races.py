"""Tests of concurrent redistributes that share inputs and are waited for in an order that differs by rank."""

from __future__ import annotations

import random
import threading

import torch
import torch.distributed as dist

import oracle
import shardwright as sw
from pairs import TWO_DIMS
from parts import part_of
from pool import Pool

WORLD = 4
REPEATS = 200
SHAPE = (9, 10)
IN_FLIGHT = [pair for pair in TWO_DIMS.values() if pair[0] in (["S(0)", "R"], ["S(0)", "S(1)"], ["P(sum)", "P(sum)"])]


def _concurrent() -> None:
    """Runs all pairs at once; pairs with the same source layout share it, and it is overwritten after the last wait."""
    mesh, rank = sw.Mesh({"a": 2, "b": 2}), dist.get_rank()
    pairs = [tuple(sw.Layout(mesh, SHAPE, p) for p in pair) for pair in IN_FLIGHT]
    full = oracle.global_tensor(SHAPE, torch.float32, 7, True)
    expected = [
        part_of(full * (WORLD if "P(sum)" in pair[0] else 1), dst, rank) for pair, (_, dst) in zip(IN_FLIGHT, pairs)
    ]
    sources = {tuple(src.placements): part_of(full, src, rank).contiguous() for src, _ in pairs}
    kept = {name: source.clone() for name, source in sources.items()}
    order = random.Random(rank)
    for turn in range(REPEATS):
        for name, source in sources.items():
            torch.mul(kept[name], turn + 1, out=source)
        results = [sw.redistribute_local(sources[tuple(s.placements)], s, d, async_op=True) for s, d in pairs]
        for i in order.sample(range(len(pairs)), len(pairs)):
            assert torch.equal(results[i] + 0, expected[i] * (turn + 1)), f"{IN_FLIGHT[i]} on turn {turn}"


def test_concurrent_redistributes_share_inputs(pool: Pool) -> None:
    pool.run(_concurrent, WORLD)


def _other_threads_wait() -> None:
    """Other threads wait for redistributes while this thread starts the next ones."""
    mesh = sw.Mesh({"a": WORLD})
    src, dst = (sw.Layout(mesh, SHAPE, [p]) for p in ("P", "R"))
    wrong: list[float] = []

    def wait(result: torch.Tensor, expected: float) -> None:
        if not torch.equal(result + 0, torch.full(SHAPE, expected)):
            wrong.append(expected)

    for turn in range(REPEATS // 4):
        threads = []
        for i in range(8):
            result = sw.redistribute_local(torch.full(SHAPE, float(turn + i)), src, dst, async_op=True)
            threads.append(threading.Thread(target=wait, args=(result, float(WORLD * (turn + i)))))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_other_threads_wait_for_redistributes(pool: Pool) -> None:
    pool.run(_other_threads_wait, WORLD)
