"""The clock of the benchmarks: the compared calls alternate, and the lower quartile of the turns counts.

Other load on the machine only adds to a time, and alternating spreads it over all calls. The order is reversed in every
turn. With several ranks, a batch of calls begins after a barrier, and its time is that of the slowest rank.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

QUANTILE = 0.25

Call = Callable[[], Any]


class Times(NamedTuple):
    """Seconds per call, by name, and the samples they were computed from."""

    low: dict[str, float]
    median: dict[str, float]
    rounds: int
    calls_per_batch: dict[str, int]

    def us(self) -> dict[str, float]:
        return {name: round(1e6 * seconds, 1) for name, seconds in self.low.items()}


def low(values: Sequence[float]) -> float:
    """Returns the lower quartile, interpolated linearly."""
    return float(statistics.quantiles(values, n=4, method="inclusive")[0]) if len(values) > 1 else values[0]


def seconds_of(call: Call, calls: int = 1) -> float:
    """Returns the time per call of back-to-back calls on this rank."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def least_us(call: Call, before: Call, repeats: int = 3) -> float:
    """Returns the microseconds of a cold call: the shortest of several, each after a call of `before`."""
    times = []
    for _ in range(repeats):
        before()
        times.append(seconds_of(call))
    return 1e6 * min(times)


class Turns:
    """The compared calls, by name.

    Args:
        calls: each is called once before anything is timed.
        around: the context of a batch of this name; entering and leaving it is not timed.
        settles: if true, an untimed call within that context precedes each batch.
        slowest: returns the maximum over ranks of each of some values, the same on all ranks; None with one rank.
        barrier: called before each batch.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        *,
        around: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
        settles: bool = False,
        slowest: Callable[[list[float]], list[float]] | None = None,
        barrier: Call | None = None,
    ) -> None:
        self.calls, self.around, self.settles = calls, around, settles
        self.slowest = slowest or (lambda values: values)
        self.barrier = barrier or (lambda: None)

    def of_count(self, rounds: int, calls: int = 1) -> Times:
        """Makes this many turns of this many calls."""
        for name in self.calls:
            self._batch(name, 1)
        return self._timed(rounds, dict.fromkeys(self.calls, calls))

    def of_length(
        self, seconds: float, batch_seconds: float = 0.0, rounds: tuple[int, int] = (5, 40), most_calls: int = 50
    ) -> Times:
        """Runs for about this many seconds, in batches of about `batch_seconds` and at least one call each."""
        start = time.perf_counter()
        first = [self._batch(name, 2) for name in self.calls]
        *first, left = self.slowest([*first, seconds - (time.perf_counter() - start)])
        calls = {n: min(max(round(batch_seconds / t), 1), most_calls) for n, t in zip(self.calls, first, strict=True)}
        a_round = sum(t * calls[name] for name, t in zip(self.calls, first, strict=True))
        least, most = rounds
        return self._timed(min(max(round(left / a_round), least), most), calls)

    def _timed(self, rounds: int, calls: dict[str, int]) -> Times:
        times: dict[str, list[float]] = {name: [] for name in self.calls}
        for turn in range(rounds):
            for name in self.calls if turn % 2 == 0 else reversed(self.calls):
                times[name].append(self._batch(name, calls[name]))
        slowest = {name: self.slowest(values) for name, values in times.items()}
        medians = {name: statistics.median(values) for name, values in slowest.items()}
        return Times({name: low(values) for name, values in slowest.items()}, medians, rounds, calls)

    def _batch(self, name: str, calls: int) -> float:
        call = self.calls[name]
        with self.around(name):
            if self.settles:
                call()
            self.barrier()
            return seconds_of(call, calls)


def among_ranks(calls: Mapping[str, Call], **more: Any) -> Turns:
    """Times calls on all ranks of the default process group, each of which makes the same calls."""
    import torch.distributed as dist

    from ranks import over_ranks

    return Turns(calls, slowest=lambda values: over_ranks(values, dist.ReduceOp.MAX), barrier=dist.barrier, **more)
