"""A state dict of a large model, planned for thousands of ranks, with costs that can be counted by hand."""

from __future__ import annotations

import json
import math
import time

import pytest

import shardwright as sw

TRAIN = sw.Mesh({"pp": 8, "dp": 16, "tp": 8}, range(1024))
SERVE = sw.Mesh({"dp": 64, "tp": 32}, range(1024, 3072))
# Shape, placements of source and destination, and number of equal parts at the destination.
KINDS = [
    ((4096, 4096), ["R", "S(0)", "S(1)"], ["R", "S(0)"], 32),
    ((14336, 4096), ["R", "R", "S(0)"], ["R", "S(0)"], 32),
    ((4096,), ["R", "R", "R"], ["R", "R"], 1),
    ((128, 768, 2048), ["R", "S(0)", "S(1)"], ["S(0)", "R"], 64),
    ((1024, 352), ["R", "S(0)", "S(0)"], ["R", "S(1)"], 32),
]
COUNT = 20_000


@pytest.mark.long
def test_twenty_thousand_tensors_on_thousands_of_ranks() -> None:
    begin = time.perf_counter()
    kinds = [
        (sw.Layout(TRAIN, shape, src, "bfloat16"), sw.Layout(SERVE, shape, dst, "bfloat16"))
        for shape, src, dst, _ in KINDS
    ]
    plan = sw.plan_many([kinds[i % len(kinds)] for i in range(COUNT)])
    costs = json.loads(plan.to_json())
    print(f"planned and certified in {time.perf_counter() - begin:.2f} s\n{plan}")
    per_rank = sum(2 * math.prod(shape) // parts for shape, _, _, parts in KINDS) * COUNT // len(KINDS)
    everything = sum(2 * math.prod(shape) for shape, _, _, _ in KINDS) * COUNT // len(KINDS)
    assert plan.received_bytes_max == per_rank
    assert plan.received_bytes_sum == per_rank * SERVE.size
    # Replicas share the sending. The busiest rank sends at least an equal share of all received bytes.
    assert costs["sent_bytes_bound"] * TRAIN.size >= plan.received_bytes_sum >= everything
    assert plan.sent_bytes_max <= 1.05 * costs["sent_bytes_bound"]
    assert plan.memory_bytes == plan.buckets * plan.bucket_bytes <= 3 * (64 << 20)
    assert plan.num_kinds <= 16 * len(KINDS)
