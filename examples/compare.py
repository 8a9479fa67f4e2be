"""Runs the same redistributes with stock DTensor and with shardwright, and compares correctness, bytes and time."""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from ranks import coordinate, over_ranks
from redistribute_cases import Case, expected_local, source_local, torch_placements
from report import in_mebibytes, say

ENGINES = {"stock": contextlib.nullcontext, "shardwright": sw.enabled}

Move = Callable[[], list[torch.Tensor]]
"""Redistributes some DTensors and returns this rank's new local tensors."""


@dataclass
class Outcome:
    """The outcome of a move with one engine, over all ranks. Bytes are those received from other ranks."""

    verdict: str
    received_bytes: float = 0.0
    median_ms: float = 0.0
    wrong: list[int] = field(default_factory=list)
    """Indices of the tensors that were wrong on any rank."""

    @property
    def ran(self) -> bool:
        """Returns whether the move returned anything, right or wrong."""
        return not self.verdict.startswith("raises")


def compare(move: Move, expected: list[torch.Tensor], rounds: int = 5, repeats: int = 3) -> dict[str, Outcome]:
    """Runs a move with both engines alternately: `rounds` times `repeats` runs each.

    A run takes as long as its slowest rank; the median over runs is reported. Both must accept the same arguments on
    every rank: an engine that raises is expected to raise everywhere, before it communicates.
    """
    outcomes = {name: _first_run(engine, move, expected) for name, engine in ENGINES.items()}
    seconds: dict[str, list[float]] = {name: [] for name, outcome in outcomes.items() if outcome.ran}
    for _ in range(rounds):
        for name in seconds:
            with ENGINES[name]():
                for _ in range(repeats):
                    dist.barrier()
                    start = time.perf_counter()
                    move()
                    seconds[name].append(time.perf_counter() - start)
    for name, values in seconds.items():
        outcomes[name].median_ms = 1000 * statistics.median(over_ranks(values, dist.ReduceOp.MAX))
    return outcomes


def _first_run(engine: Callable, move: Move, expected: list[torch.Tensor]) -> Outcome:
    """Checks the result and counts the bytes. Afterwards plans are cached."""
    with engine(), sw.debug.wire_meter() as meter:
        try:
            results = move()
        except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
            return Outcome(f"raises {type(error).__name__}")
    right = [float(torch.equal(result, wanted)) for result, wanted in zip(results, expected, strict=True)]
    wrong = [index for index, value in enumerate(over_ranks(right, dist.ReduceOp.MIN)) if value == 0]
    received_bytes = over_ranks([meter.received_bytes], dist.ReduceOp.SUM)[0]
    return Outcome("WRONG" if wrong else "right", received_bytes, wrong=wrong)


def compare_case(case: Case, n: int, mesh: DeviceMesh, rounds: int = 5, repeats: int = 3) -> dict[str, Outcome]:
    """Calls `compare` for one case of redistribute_cases."""
    here = coordinate(mesh)
    shape = torch.Size(case.shape(n))
    local, src, dst = source_local(case, n, here), torch_placements(case.src), torch_placements(case.dst)
    source = DTensor.from_local(local, mesh, src, run_check=False, shape=shape, stride=(shape[1], 1))

    def move() -> list[torch.Tensor]:
        return [source.redistribute(placements=dst).to_local()]

    return compare(move, [expected_local(case, n, here)], rounds, repeats)


def least_bytes(mesh: DeviceMesh, shape: tuple[int, ...], src: tuple[str, ...], dst: tuple[str, ...]) -> int:
    """Returns what all ranks together must receive in any plan: shardwright's proven bound, for float32."""
    return sw.plan(sw.Layout(mesh, shape, src), sw.Layout(mesh, shape, dst)).bound_bytes_sum


def say_header(label: str) -> None:
    """Prints the head of the table."""
    say(f"  {'':44}{'--- stock ---':>22}   {'--- shardwright ---':>23}")
    say(f"  {label:44}{'':6}{'MiB':>8}{'ms':>8}   {'':6}{'MiB':>7}{'ms':>7}{'bound':>7}{'times':>8}")


def say_row(label: str, outcomes: dict[str, Outcome], bound_bytes: float) -> None:
    """Prints one move: verdicts, MiB received by all ranks, ms, the bound in MiB, and our speedup."""
    stock, ours = outcomes.values()
    cells = f"  {label:44}"
    if stock.ran:
        cells += f"{stock.verdict:6}{in_mebibytes(stock.received_bytes):>8}{stock.median_ms:>8.2f}   "
    else:
        cells += f"{stock.verdict[:22]:22}   "
    cells += f"{ours.verdict:6}"
    if ours.ran:
        cells += f"{in_mebibytes(ours.received_bytes):>7}{ours.median_ms:>7.2f}{in_mebibytes(bound_bytes):>7}"
        if stock.ran:
            cells += f"{stock.median_ms / ours.median_ms:>8.2f}"
    say(cells)
