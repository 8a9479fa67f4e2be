"""The schedule of a step, and the times that decide it: measured in one step and agreed on by all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner
from .._planner import StepSchedule
from ..debug.explaining import HeardStep
from ..runtime import executables
from ..runtime.agreement import MeshWords
from .offload import Copy
from .units import Unit


class Event(NamedTuple):
    """One activation of a step (fsdp/py)."""

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
        """The figures that schedules need, as `StepSchedule` says."""
        return self[1:]


class Times(NamedTuple):
    """The times of a step in picoseconds, the same on all ranks."""

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


# ---- activations that `checkpoint_cut` keeps cut: the uses that save, need and let go of each
#
#     saved        in a forward, numbered in this order
#     its turn     when the backward needs it first; turns come in the order of the schedule
#     let go       when the backward has needed it for the last time
#
# A step that follows a schedule gathers what this says: some before a use begins, some in the turn of another one. Once
# a turn comes out of order, the rest of the step gathers by the order of the sequence (fsdp/activations.py).


class About(NamedTuple):
    name: str
    kept_bytes: int
    device_type: str
    cut: _planner.Layout
    whole: _planner.Layout


class ActivationPlan(NamedTuple):
    """The schedule of activations, by turn."""

    numbers: Sequence[int]
    gathers: Sequence[tuple[int, int]]  # the use in which each starts, and the turn, or -1: before the use


class StepActivations:
    """Those of one step that runs."""

    def __init__(self, plan: ActivationPlan | None) -> None:
        self.use = -1  # that runs
        self.is_over = False
        self._plan = plan
        self._saved: list[tuple[weakref.ref[Any], int]] = []  # with the use that saved it
        self._turns: list[tuple[int, int]] = []  # number, and use
        self._let_go: dict[int, tuple[int, int]] = {}  # by number: the turn and use
        self._about: list[About] = []  # by number

    def save(self, kept: Any, about: About) -> int:
        """Returns its number. `kept` has a method `start_gather`."""
        self._saved.append((weakref.ref(kept), self.use))
        self._about.append(about)
        return len(self._saved) - 1

    def begin_use(self, use: int, as_planned: bool) -> None:
        self.use = use
        if not as_planned:
            self._plan = None
        for kept in self._starting(-1):
            kept.start_gather()

    def take_turn(self, number: int) -> list[Any] | None:
        """Returns what is to be gathered in this turn, ahead of its own; None if no schedule says so."""
        turn = len(self._turns)
        self._turns.append((number, self.use))
        if self._plan is not None and tuple(self._plan.numbers[turn : turn + 1]) != (number,):
            self._plan = None
        return None if self._plan is None else self._starting(turn)

    def let_go(self, number: int) -> None:
        self._let_go[number] = len(self._turns) - 1, self.use

    def _starting(self, turn: int) -> list[Any]:
        if self._plan is None:
            return []
        numbers = [
            number
            for number, (use, trigger) in zip(self._plan.numbers, self._plan.gathers)
            if trigger == turn and (turn >= 0 or use == self.use) and number < len(self._saved)
        ]
        found = [self._saved[number][0]() for number in numbers]
        return [kept for kept in found if kept is not None]

    def end(self) -> None:
        global current_activations
        self.is_over = True
        if current_activations is self:
            current_activations = None

    def events(self) -> list[Event]:
        """Those that have had their turns, in this order."""
        end = len(self._turns) - 1, max(self.use, 0)
        events = []
        for number, first in self._turns:
            until, last = self._let_go.get(number, end)
            about, saved = self._about[number], self._saved[number][1]
            plan = executables.make_plan(about.cut, about.whole, about.device_type)
            gather_ps = round(1e6 * plan.predicted_us)
            whole_bytes = int(about.whole.shape[0]) * getattr(torch, about.whole.dtype).itemsize
            figures = about.kept_bytes, whole_bytes, gather_ps, saved, first, max(first, last), until
            events.append(Event(number, about.name, *figures))
        return events


# Of the step that began last, while it runs.
current_activations: StepActivations | None = None


def begin_activations(plan: ActivationPlan | None) -> StepActivations:
    """For a step that begins."""
    global current_activations
    current_activations = StepActivations(plan)
    return current_activations


def agreed_events(events: list[Event], meshes: set[DeviceMesh], device: torch.device) -> list[Event]:
    """Returns the events with each figure's largest value over the ranks of the only mesh.

    Returns none if there are several meshes, or where ranks differ in anything else.

    All of these ranks call this. What is kept, and so a part of its bytes, may depend on a rank's batch; so may whether
    it is large enough to be cut at all. Then schedules know nothing of activations.
    """
    if len(meshes) != 1:
        return []
    (mesh,) = meshes
    words = MeshWords(mesh, device)
    text = ";".join(f"{e.number} {e.saved} {e.first} {e.last} {e.until}" for e in events)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    count, least_count, most, least = words.largest([len(events), -len(events), digest, -digest])
    if count != -least_count or most != -least or count == 0:
        return []
    figures = words.largest([figure for e in events for figure in (e.kept_bytes, e.whole_bytes, e.gather_ps)])
    return [
        event._replace(kept_bytes=kept, whole_bytes=whole, gather_ps=ps)
        for event, kept, whole, ps in zip(events, figures[::3], figures[1::3], figures[2::3], strict=True)
    ]


# ---- sequences of uses, and their schedules


class Key(NamedTuple):
    """The key of a sequence."""

    units: tuple[int, ...]  # of its first use
    kind: str  # of its first use
    records: bool  # for a backward
    reduces: tuple[bool, ...]  # by unit: gradients, after a backward
    keeps: tuple[bool, ...]  # by unit: whole gradients, before or after the step


class Use(NamedTuple):
    """One use of a sequence: the units that are open, by index, and those whose gradients were complete in it."""

    units: tuple[int, ...]
    kind: str  # "forward", "recompute" or "backward"
    gradients: list[int]
    # Whole gradients that were made in it, where that was looked for: a unit, and which of its weights in chunks.
    made: list[tuple[int, int]]


def are_same(uses: Sequence[Use], others: Sequence[Use]) -> bool:
    return len(uses) == len(others) and all(a[:3] == b[:3] for a, b in zip(uses, others))


def gather_until(units: Sequence[Unit], uses: Sequence[Use]) -> list[int]:
    """By use, the last one whose units users want to be gathered by then."""
    index = {id(unit): number for number, unit in enumerate(units)}
    until = list(range(len(uses)))
    for i, use in enumerate(uses):
        for opened in use.units:
            if use.kind == "recompute" or (i > 0 and opened in uses[i - 1].units):
                continue
            for wished in units[opened].wishes.prefetch(use.kind):
                number = index.get(id(wished))
                following = (j for j in range(i + 1, len(uses)) if number in uses[j].units)
                until[i] = max(until[i], next(following, i))
    return until


class Plan:
    """A schedule, and what it says by use."""

    def __init__(self, uses: list[Use], schedule: _planner.StepSchedule, timed: Times | None) -> None:
        self.uses = uses
        self.schedule = schedule
        self.timed = timed  # None before it was
        self.gathers: dict[int, list[tuple[int, int, bool]]] = {}  # unit, place in the arena, whether in chunks
        self.releases: dict[int, list[int]] = {}
        self.finishes: dict[tuple[int, int], int] = {}  # by unit and use in which a reduction starts
        buffers, form_of = schedule.buffers, schedule.form_of
        self.in_chunks = [{form_of[w] for w in use[0] if form_of[w] >= 0} for use in schedule.uses]
        self.reduces_in_chunks: list[set[int]] = [set() for _ in schedule.uses]
        for weight, buffer, start, _, _ in schedule.gathers:
            is_form = form_of[weight] >= 0
            unit = form_of[weight] if is_form else weight
            self.gathers.setdefault(start, []).append((unit, buffers[buffer][5], is_form))
        self.copies: dict[int, tuple[int, int]] = {}  # by unit: place in the arena of its kept copy, and last use
        for unit, is_copy, _, last, _, offset in buffers:
            if is_copy:
                self.copies[unit] = (offset, last)
            else:
                self.releases.setdefault(last, []).append(form_of[unit] if form_of[unit] >= 0 else unit)
        for unit, first, start, finish, in_chunks in schedule.reductions:
            self.finishes[unit, start] = finish
            for use in range(first, start + 1) if in_chunks else ():
                self.reduces_in_chunks[use].add(unit)
        self.activations: ActivationPlan | None = None
        if timed is not None and timed.activations:
            numbers = [event.number for event in timed.activations]
            self.activations = ActivationPlan(numbers, schedule.activation_gathers)
        # Units some of whose products are in chunks. Others of them have to be ours too: forwards for their backwards,
        # and recomputations, which save what the forward has saved.
        self.multiplies: frozenset[int] = frozenset().union(*self.in_chunks, *self.reduces_in_chunks)


def held_bytes(units: Sequence[Unit], key: Key, uses: list[Use]) -> int:
    """Returns what is held outside of the arena: weights that stay between steps, and whole gradients that are kept."""
    held = sum(unit.use_bytes for unit in units if unit.wishes.stays_between_steps)
    held += sum(unit.kept_gradient_bytes for unit, keeps in zip(units, key.keeps) if keeps)
    arriving = (  # what autograd leaves, until it is added to those
        sum(units[unit].gradient_bytes for unit in use.units if not key.reduces[unit])
        for use in uses
        if use.kind == "backward"
    )
    return held + max(arriving, default=0)
