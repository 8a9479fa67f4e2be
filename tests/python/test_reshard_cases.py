"""Tests of the named moves of docs/resharding_cases.md: schemes deliver every element, the page shows results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import oracle

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import reshard_cases  # noqa: E402
from reshard_cases import CASES, Case  # noqa: E402
from reshard_schemes import SCHEMES, CannotDo, End, figures  # noqa: E402

pytestmark = pytest.mark.any_torch

ROWS = json.loads(reshard_cases.RESULTS.read_text())["rows"]
CHUNKS = [
    case for case in CASES if all(p == "R" or p.startswith("S(") for e in (case.src, case.dst) for p in e.placements)
]


def _ranks(case: Case) -> int:
    return len({*case.src.ranks, *case.dst.ranks})


def held(numbers: torch.Tensor, end: End) -> dict[int, torch.Tensor]:
    """Returns the numbers of the elements that each rank holds, as torch.chunk cuts them."""
    return {rank: oracle.local(numbers, end.sizes, end.placements, where) for rank, where in end.coordinates()}


@pytest.mark.parametrize("case", CHUNKS, ids=lambda case: case.name)
def test_schemes_deliver_every_element(case: Case) -> None:
    """Simulates each message: its sender must hold the elements, and at the end no receiver lacks any."""
    numbers = torch.arange(torch.Size(case.small).numel()).reshape(case.small)
    src, dst = held(numbers, case.src), held(numbers, case.dst)
    delivered = 0
    for name, scheme in SCHEMES.items():
        try:
            schedule = scheme(case.problem(case.small))
        except CannotDo:
            continue
        given = {rank: torch.full(case.small, -1).flatten() for rank in src}
        got = {rank: torch.full(case.small, -1).flatten() for rank in dst}
        for rank, part in src.items():
            given[rank][part.flatten()] = part.flatten()
        for message in (message for step in schedule.steps for message in step.messages):
            where = numbers[tuple(slice(begin, end) for begin, end in message.box)].flatten()
            values = (got if message.forwarded else given)[message.sender][where]
            assert torch.equal(values, where), f"{name}: rank {message.sender} does not hold what it sends"
            got[message.receiver][where] = values
        for rank, part in dst.items():
            assert torch.equal(got[rank][part.flatten()], part.flatten()), f"{name}: rank {rank} lacks something"
        delivered += 1
    assert delivered >= 2  # the schemes of NeMo-RL and TorchStore support all shards


@pytest.mark.parametrize("case", [case for case in CASES if _ranks(case) < 200], ids=lambda case: case.name)
def test_plans_deliver_every_element(case: Case) -> None:
    plan, _ = reshard_cases.ours(case, case.small)
    assert plan.simulate() == plan.wire_bytes_sum


def test_page_shows_recorded_results() -> None:
    page = reshard_cases.PAGE.read_text()
    assert reshard_cases.with_tables(page, ROWS) == page
    assert [row["name"] for row in ROWS] == [case.name for case in CASES]
    assert len({case.name for case in CASES}) == len(CASES) >= 25


@pytest.mark.parametrize("case", [case for case in CASES if _ranks(case) < 96], ids=lambda case: case.name)
def test_recorded_costs_equal_computed_costs(case: Case) -> None:
    recorded = next(row["schemes"] for row in ROWS if row["name"] == case.name)
    for name, scheme in SCHEMES.items():
        try:
            problem = case.problem()
            assert recorded[name] == figures(problem, scheme(problem), reshard_cases.topology_of(case)), name
        except CannotDo as reason:
            assert recorded[name] == str(reason)


def test_predicted_times_of_schemes_and_plans_agree() -> None:
    """A scheme that sends the same bytes and messages as a plan of one step has the same predicted time."""
    compared = 0
    for row in ROWS:
        ours = row["schemes"][reshard_cases.OURS]
        for name in ("NCCL m2n, direct", "NeMo-RL", "Megatron"):
            theirs = row["schemes"][name]
            same = ("received_max", "received_sum", "sent_max", "messages_max", "steps")
            if row["moves"] != ["cross"] or isinstance(theirs, str) or any(ours[key] != theirs[key] for key in same):
                continue
            assert theirs["predicted_us"] == pytest.approx(ours["predicted_us"], rel=1e-5), (row["name"], name)
            compared += 1
    assert compared > 8
