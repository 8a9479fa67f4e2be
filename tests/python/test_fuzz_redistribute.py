"""Random redistributes on real process groups: every element is right, nothing hangs, nothing falls back.

SHARDWRIGHT_FUZZ_SEED chooses another seed, SHARDWRIGHT_FUZZ_SCALE multiplies the number of cases.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

import fuzz
import oracle
from pool import Pool

CASES = {1: 60, 2: 160, 3: 160, 4: 320, 6: 320, 8: 320}
BATCH = 50


def _count(world_size: int) -> int:
    return int(CASES[world_size] * float(os.environ.get("SHARDWRIGHT_FUZZ_SCALE", "1")))


def test_enough_cases_of_every_kind() -> None:
    """The fuzz covers everything that it promises, for any seed."""
    seed = fuzz.seed_from_environment()
    cases = [case for world_size in CASES for case in fuzz.make_cases(seed, world_size, CASES[world_size])]
    assert sum(case.src != case.dst for case in cases) >= 1000
    kinds: Counter[str] = Counter()
    for case in cases:
        placements = case.src + case.dst
        kinds[case.dtype] += 1
        kinds[case.memory] += 1
        kinds["backward"] += case.backward
        kinds["flattened"] += bool(case.flatten)
        kinds["sliced"] += case.keep is not None
        kinds["strided, encoding an order"] += any(map(oracle.is_strided, placements)) and case.strided == "order"
        kinds["strided, literal"] += case.strided == "literal"
        kinds["reordered"] += any(
            list(group) != sorted(group) for order in (case.src_order, case.dst_order) for _, group in order or ()
        )
        kinds["empty"] += 0 in case.shape
        kinds["zero-dim"] += case.shape == ()
        kinds["to pending"] += any(map(oracle.reduce_op, case.dst))
        for placement in set(placements):
            kinds["SS" if oracle.is_strided(placement) else placement] += 1
    wanted = [str(dtype).removeprefix("torch.") for dtype in fuzz.DTYPES]
    wanted += ["contiguous", "transposed", "strided", "offset", "backward", "flattened", "sliced"]
    wanted += ["strided, encoding an order", "strided, literal", "reordered", "empty", "zero-dim", "to pending"]
    wanted += ["R", "S(0)", "S(1)", "S(2)", "SS"]
    wanted += sorted({op for ops in fuzz.REDUCTIONS.values() for op in ops})
    missing = {kind: kinds[kind] for kind in wanted if kinds[kind] < 4}
    assert not missing, f"seed {seed}: too few cases of {missing}"


@pytest.mark.parametrize("world_size", list(CASES))
def test_fuzz(pool: Pool, world_size: int) -> None:
    seed = fuzz.seed_from_environment()
    cases = fuzz.make_cases(seed, world_size, _count(world_size))
    print(f"world size {world_size}: {len(cases)} redistributes, SHARDWRIGHT_FUZZ_SEED={seed}")
    problems: list[str] = []
    calls = 0
    for begin in range(0, len(cases), BATCH):
        batch = cases[begin : begin + BATCH]
        reports = pool.run(fuzz.run_cases, world_size, batch)
        found = [(f"rank {rank}", *wrong) for rank, report in enumerate(reports) for wrong in report.wrong]
        found += [("all ranks", *wrong) for wrong in fuzz.judge_contributions(batch, reports)]
        problems += [f"{batch[index]}\n    {ranks}: {text}" for ranks, index, text in found]
        for rank, report in enumerate(reports):
            if report.stats["fallbacks"]:
                problems.append(f"rank {rank} fell back: {report.stats['fallback_reasons']}")
        calls += reports[0].stats["calls"]
    assert not problems, f"seed {seed}: {len(problems)} problems\n" + "\n".join(problems[:20])
    assert calls > 0, "the engine was never called"
