"""How long the uses of a step take, measured in one step and agreed on by all ranks."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._planner import StepSchedule
from ..debug.explaining import HeardStep
from ..runtime.agreement import MeshWords
from .hosting import Copy


class Event(NamedTuple):
    """One activation of a step (fsdp/saved.py)."""

    number: int  # in the order in which they were saved
    name: str
    kept_bytes: int
    whole_bytes: int
    gather_ps: int
    saved: int  # use
    first: int  # and last use that needs it
    last: int
    until: int  # the turn in which it is let go

    @property
    def parts(self) -> tuple[str, int, int, int, int, int, int, int]:
        """What schedules have to know, as `StepSchedule` says."""
        return self[1:]


class Times(NamedTuple):
    """Of a step, in picoseconds, the same on all ranks."""

    uses: list[int]
    # By unit: the copies from the host for a gather, and those to it for a reduction.
    copies: list[tuple[int, int]]
    activations: list[Event] = []  # whose gathers schedules plan


class Clock:
    """Measures stretches of compute: on CPU the host's time, elsewhere that of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # begin and end of each stretch, in turns: nanoseconds, or events

    def end(self) -> None:
        """Ends the stretch that has begun, if one has."""
        if len(self._marks) % 2:
            self.mark()

    def mark(self) -> None:
        """Marks the beginning or the end of a stretch."""
        self._marks.append(_mark(self._device))

    def stretches_ps(self) -> list[int]:
        """Waits for the last one, and returns the length of each: at least a nanosecond."""
        begins, ends = self._marks[::2], self._marks[1::2]
        if self._device.type == "cpu":
            return [max(1, end - begin) * 1000 for begin, end in zip(begins, ends, strict=True)]
        if ends:
            ends[-1].synchronize()
        return [max(1000, round(1e9 * a.elapsed_time(b))) for a, b in zip(begins, ends, strict=True)]

    def stretches_since(self, origins: dict[str, Any]) -> list[tuple[float, float]]:
        """Begin and end of each stretch, in seconds since the marks that there are by type of device."""
        origin = origins[self._device.type]
        if self._device.type == "cpu":
            seconds = [(mark - origin) / 1e9 for mark in self._marks]
        else:
            seconds = [origin.elapsed_time(mark) / 1e3 for mark in self._marks]
        return list(zip(seconds[::2], seconds[1::2]))


def _mark(device: torch.device) -> Any:
    """Returns the present time: nanoseconds, or an event."""
    if device.type == "cpu":
        return time.perf_counter_ns()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))  # which may be another device than the current one
    return event


class Listener:
    """Hears of the steps that end while it listens."""

    def __init__(self) -> None:
        self.steps: list[HeardStep] = []
        devices = [torch.device("cpu"), torch.accelerator.current_accelerator(check_available=True)]
        self._origins = {device.type: _mark(device) for device in devices if device is not None}

    def hear(self, schedule: StepSchedule, names: list[str], clock: Clock, copies: Sequence[Sequence[Copy]]) -> None:
        """`copies` by unit."""
        clock.stretches_ps()  # waits
        heard = [
            (name, copy.is_outward, *copy.seconds_since(self._origins))
            for name, all_copies in zip(names, copies, strict=True)
            for copy in all_copies
        ]
        self.steps.append(HeardStep(schedule, names, clock.stretches_since(self._origins), heard))


listener: Listener | None = None


@contextlib.contextmanager
def listening() -> Iterator[list[HeardStep]]:
    """Steps of models in this block are timed, and are in the list when they have ended."""
    global listener
    before, listener = listener, Listener()
    try:
        yield listener.steps
    finally:
        listener = before


def measured(clock: Clock, copies: Sequence[Sequence[Copy]], schedule: StepSchedule) -> Times:
    """On this rank, in a step that has followed a schedule. `copies` by unit; each takes as long as on average."""
    num_copied = Counter((False, weight) for weight, _, _, _, from_copy in schedule.gathers if not from_copy)
    num_copied.update((True, weight) for weight, *_ in schedule.reductions)

    def length_ps(unit: int, is_outward: bool) -> int:
        lengths = [copy.length_ps for copy in copies[unit] if copy.is_outward == is_outward]
        return sum(lengths) // max(1, num_copied[is_outward, unit])

    each = [(length_ps(unit, False), length_ps(unit, True)) for unit in range(len(copies))]
    return Times(clock.stretches_ps(), each)


def agreed_times(found: Times, meshes: set[DeviceMesh], device: torch.device) -> Times:
    """Returns the largest over the ranks of the only mesh, which all call this; zeros if there are several meshes."""
    if len(meshes) != 1:
        return Times([0] * len(found.uses), [(0, 0)] * len(found.copies))
    (mesh,) = meshes
    all_ps = MeshWords(mesh, device).largest([*found.uses, *(ps for pair in found.copies for ps in pair)])
    copies = all_ps[len(found.uses) :]
    return Times(all_ps[: len(found.uses)], list(zip(copies[::2], copies[1::2])))
