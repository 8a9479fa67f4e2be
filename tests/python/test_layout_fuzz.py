"""Random moves between layouts of all kinds on real ranks. `tools/fuzz_gloo` runs more of them, for any time.

SHARDWRIGHT_FUZZ_SEED chooses another seed, SHARDWRIGHT_FUZZ_SCALE multiplies the number of cases.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

import fuzz
import layout_fuzz
import shardwright as sw
from pool import Pool

CASES = {2: 60, 3: 60, 5: 60, 8: 60}


def test_every_kind_is_drawn() -> None:
    kinds: Counter[str] = Counter()
    for world_size, count in CASES.items():
        for case in layout_fuzz.make_cases(str(fuzz.seed_from_environment()), world_size, count):
            kinds[layout_fuzz.relation(case)] += 1
            kinds[case.way] += 1
            kinds["empty"] += layout_fuzz.elements(case) == 0
            kinds["scalar"] += case.shape == ()
            for end, side in ((case.src, "from"), (case.dst, "to")):
                for placement in end.placements:
                    name = placement.split("(")[0] if isinstance(placement, str) else type(placement).__name__
                    kinds[f"{side} {name}"] += 1
    names = [f"{side} {name}" for side in ("from", "to") for name in ("R", "S", "SS", "P", *_kinds_of_cuts())]
    wanted = ["one mesh", "the same ranks", "overlapping", "disjoint", "plain", "async", "out", "backward"]
    missing = {kind: kinds[kind] for kind in [*wanted, "empty", "scalar", *names] if kinds[kind] < 4}
    assert not missing, f"too few cases of {missing}"


def _kinds_of_cuts() -> list[str]:
    return [
        kind.__name__
        for kind in (
            sw.placements.Ragged,
            sw.placements.Blocks,
            sw.placements.Cyclic,
            sw.placements.Owned,
            sw.placements.Packed,
        )
    ]


@pytest.mark.cpu_only("tensors are made on the CPU")
@pytest.mark.parametrize("world_size", list(CASES))
def test_moves_on_real_ranks(pool: Pool, world_size: int) -> None:
    seed = str(fuzz.seed_from_environment())
    count = int(CASES[world_size] * float(os.environ.get("SHARDWRIGHT_FUZZ_SCALE", "1")))
    cases = layout_fuzz.make_cases(seed, world_size, count)
    problems = layout_fuzz.judge(cases, pool.run(layout_fuzz.run_cases, world_size, cases))
    assert not problems, f"SHARDWRIGHT_FUZZ_SEED={seed}: {len(problems)} problems\n" + "\n".join(problems[:5])
