"""Schedules of steps, and the times they are made from: measured in one step, and agreed on by all ranks.

A *sequence* is the list of *uses* of a step: ranges of compute, each with the open units (runner.py). The native
`StepSchedule` (csrc/schedule/schedule.h) calls a unit a weight. Times are in picoseconds. "By unit" and "by use" mean a
list whose index is the unit's or the use's number.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner, _runtime
from .._planner import StepSchedule, overlapping_budget_bytes
from ..debug.explaining import RecordedStep
from ..runtime import executables
from ..runtime.agreement import MeshWords
from .chunks import ChunkedUnit
from .offload import TimedCopy
from .packing import ALIGNMENT
from .units import Unit


class ActivationUses(NamedTuple):
    """The uses and sizes of one sharded activation of a step (activations.py)."""

    saved_index: int  # index in the order of saving
    name: str
    kept_bytes: int  # size of this rank's shard
    full_bytes: int  # size of the gathered activation
    gather_ps: int  # predicted time of the gather
    saved: int  # use that saves it
    first: int  # first use that needs it
    last: int  # last use that needs it
    until: int  # turn in which it is freed (the comment before `ActivationInfo` explains turns)

    @property
    def fields(self) -> tuple[str, int, int, int, int, int, int, int]:
        """All fields except `saved_index`, as `StepSchedule` takes them."""
        return self[1:]


class Times(NamedTuple):
    """The times of a step in picoseconds. Schedules are made from times that are equal on all ranks."""

    uses: list[int]  # compute time of each use
    copies: list[tuple[int, int]]  # by unit: copies from the host for a gather, and to the host for a reduction
    activations: list[ActivationUses] = []  # activations whose gathers are scheduled


class Clock:
    """Measures intervals of compute: by the host's clock on CPU, by events of the current stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # begin and end of each interval, alternating: nanoseconds or events

    def end(self) -> None:
        """Ends the current interval, if any."""
        if len(self._marks) % 2:
            self.mark()

    def mark(self) -> None:
        """Begins an interval, or ends the current one."""
        self._marks.append(_mark(self._device))

    def intervals_ps(self) -> list[int]:
        """Waits for the last interval to end. Returns the length of each interval, at least a nanosecond."""
        begins, ends = self._marks[::2], self._marks[1::2]
        if self._device.type == "cpu":
            return [max(1, end - begin) * 1000 for begin, end in zip(begins, ends, strict=True)]
        if ends:
            ends[-1].synchronize()
        return [max(1000, round(1e9 * a.elapsed_time(b))) for a, b in zip(begins, ends, strict=True)]

    def intervals_since(self, origins: dict[str, Any]) -> list[tuple[float, float]]:
        """Returns begin and end of each interval in seconds since a mark. `origins`: a mark of each device type."""
        origin = origins[self._device.type]
        if self._device.type == "cpu":
            seconds = [(mark - origin) / 1e9 for mark in self._marks]
        else:
            seconds = [origin.elapsed_time(mark) / 1e3 for mark in self._marks]
        return list(zip(seconds[::2], seconds[1::2]))


class StreamOrder:
    """Orders the streams of successive uses, because both may share memory in the arena."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None  # stream of the last use
        self._is_captured = False  # the last use was captured in a graph

    def order(self) -> None:
        """Makes the current stream wait for that of the last use."""
        if self._device.type == "cpu":
            return
        current, was_captured = torch.accelerator.current_stream(self._device), self._is_captured
        self._is_captured = _runtime.is_capturing(str(self._device))
        # Between a captured and an uncaptured use, the user's code that captures must order streams.
        if self._stream is not None and self._stream != current and self._is_captured == was_captured:
            current.wait_stream(self._stream)
        self._stream = current


def _mark(device: torch.device) -> Any:
    """Returns a mark of the current time: nanoseconds on CPU, an event of the current stream elsewhere."""
    if device.type == "cpu":
        return time.perf_counter_ns()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))  # `device` may differ from the current device
    return event


class Listener:
    """Collects the times of steps that end while `listening` is active."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        devices = [torch.device("cpu"), torch.accelerator.current_accelerator(check_available=True)]
        self._origins = {device.type: _mark(device) for device in devices if device is not None}

    def add_step(
        self, schedule: StepSchedule, names: list[str], clock: Clock, copies: Sequence[Sequence[TimedCopy]]
    ) -> None:
        """Adds a step that has ended. `names` and `copies` are lists by unit."""
        clock.intervals_ps()  # waits for the last interval
        named_copies = [
            (name, copy.to_host, *copy.seconds_since(self._origins))
            for name, all_copies in zip(names, copies, strict=True)
            for copy in all_copies
        ]
        self.steps.append(RecordedStep(schedule, names, clock.intervals_since(self._origins), named_copies))


listener: Listener | None = None  # active in a block of `listening`; None outside


@contextlib.contextmanager
def listening() -> Iterator[list[RecordedStep]]:
    """Times all steps of models in this block. Each step is added to the yielded list when it ends."""
    global listener
    before, listener = listener, Listener()
    try:
        yield listener.steps
    finally:
        listener = before


def own_times(
    clock: Clock, copies: Sequence[Sequence[TimedCopy]], schedule: StepSchedule, activations: StepActivations
) -> Times:
    """Returns the times of this rank in a step that has followed a schedule.

    `copies`: by unit, its copies between host and device. The result has their average time in each direction: for each
    gather of the unit, in chunks or not, and for each reduction. The time of a use in chunks includes the time in which
    its matmuls wait for chunks.
    """
    unit_of = units_of(schedule)
    num_copied = Counter((False, unit_of[weight]) for weight, _, _, _, from_copy in schedule.gathers if not from_copy)
    num_copied.update((True, weight) for weight, *_ in schedule.reductions)

    def length_ps(unit: int, to_host: bool) -> int:
        return sum(c.length_ps for c in copies[unit] if c.to_host == to_host) // max(1, num_copied[to_host, unit])

    each = [(length_ps(unit, False), length_ps(unit, True)) for unit in range(len(copies))]
    return Times(clock.intervals_ps(), each, activations.activation_uses())


def agreed_times(times: Times, meshes: set[DeviceMesh], device: torch.device) -> Times:
    """Returns each time's maximum over the ranks of the mesh. Collective.

    If there are several meshes, returns zeros and no activations.
    """
    if len(meshes) != 1:
        return Times([0] * len(times.uses), [(0, 0)] * len(times.copies))
    words = MeshWords(next(iter(meshes)), device)
    step = "sw.fully_shard, comparing times"
    all_ps = words.largest([*times.uses, *(ps for pair in times.copies for ps in pair)], step)
    copies = all_ps[len(times.uses) :]
    pairs = list(zip(copies[::2], copies[1::2]))
    return Times(all_ps[: len(times.uses)], pairs, agreed_activations(times.activations, words))


# ---- activations that `checkpoint_cut` shards: the uses that save, need and free each of them
#
#     saved    a forward saves the activation; activations are numbered in this order
#     turn     the part of the backward that begins when it needs the activation for the first time, and ends at the
#              turn of another activation; turns are numbered in this order
#     freed    the backward has needed it for the last time
#
# A schedule starts some gathers before a use begins, and others in the turn of another activation. If a turn differs
# from the schedule, the rest of the step gathers one activation ahead in the recorded order (activations.py).


class ActivationInfo(NamedTuple):
    """Sizes and layouts of a sharded activation."""

    name: str
    kept_bytes: int  # size of this rank's shard
    device_type: str
    sharded: _planner.Layout
    full: _planner.Layout


class ActivationPlan(NamedTuple):
    """The schedule of activations. Lists are in the order of turns."""

    indices: Sequence[int]  # the activation of each turn
    gathers: Sequence[tuple[int, int]]  # the use and the turn in which the gather starts; turn -1: before the use


class StepActivations:
    """The sharded activations of a running step."""

    def __init__(self, plan: ActivationPlan | None) -> None:
        self.use = -1  # index of the running use
        self.is_over = False  # the step has ended
        self._plan = plan
        self._saved: list[tuple[weakref.ref[Any], int]] = []  # by number: the activation, and the use that saved it
        self._turns: list[tuple[int, int]] = []  # by turn: the activation's number, and the use
        self._freed: dict[int, tuple[int, int]] = {}  # by number: the turn and the use in which it was freed
        self._infos: list[ActivationInfo] = []  # by number of the activation

    def save(self, activation: Any, info: ActivationInfo) -> int:
        """Adds an activation that a forward saves; it must have a method `start_gather`. Returns its number."""
        self._saved.append((weakref.ref(activation), self.use))
        self._infos.append(info)
        return len(self._saved) - 1

    def begin_use(self, use: int, as_planned: bool) -> None:
        """Begins a use, and starts the gathers before it. Unless `as_planned`, leaves the schedule."""
        self.use = use
        if not as_planned:
            self._plan = None
        for activation in self._starting(-1):
            activation.start_gather()

    def begin_turn(self, index: int) -> list[Any] | None:
        """Records that the backward needs an activation for the first time.

        Returns the activations whose gathers the schedule starts in this turn; None if no schedule is followed.
        """
        turn = len(self._turns)
        self._turns.append((index, self.use))
        if self._plan is not None and tuple(self._plan.indices[turn : turn + 1]) != (index,):
            self._plan = None
        return None if self._plan is None else self._starting(turn)

    def note_freed(self, index: int) -> None:
        """Records that the backward has freed an activation."""
        self._freed[index] = len(self._turns) - 1, self.use

    def _starting(self, turn: int) -> list[Any]:
        """Returns the existing activations whose gathers start when the backward first reads activation `turn`.

        -1: when the running use begins.
        """
        if self._plan is None:
            return []
        indices = [
            index
            for index, (use, trigger) in zip(self._plan.indices, self._plan.gathers)
            if trigger == turn and (turn >= 0 or use == self.use) and index < len(self._saved)
        ]
        found = [self._saved[index][0]() for index in indices]
        return [activation for activation in found if activation is not None]

    def end(self) -> None:
        """Ends the step: later unpacks of its activations do not follow the schedule."""
        global current_activations
        self.is_over = True
        if current_activations is self:
            current_activations = None

    def activation_uses(self) -> list[ActivationUses]:
        """Returns the activations that had a turn, in the order of turns."""
        end = len(self._turns) - 1, max(self.use, 0)
        uses = []
        for index, first in self._turns:
            until, last = self._freed.get(index, end)
            info, saved = self._infos[index], self._saved[index][1]
            plan = executables.make_plan(info.sharded, info.full, info.device_type)
            gather_ps = round(1e6 * plan.predicted_us)
            full_bytes = int(info.full.shape[0]) * getattr(torch, info.full.dtype).itemsize
            figures = info.kept_bytes, full_bytes, gather_ps, saved, first, max(first, last), until
            uses.append(ActivationUses(index, info.name, *figures))
        return uses


current_activations: StepActivations | None = None  # activations of the running step


def begin_activations(plan: ActivationPlan | None) -> StepActivations:
    """Begins a step that follows `plan`, or no plan. Returns its activations."""
    global current_activations
    current_activations = StepActivations(plan)
    return current_activations


def agreed_activations(uses: list[ActivationUses], words: MeshWords) -> list[ActivationUses]:
    """Returns the activations with the maximum of each size and time over the ranks of a mesh. Collective.

    Returns an empty list if ranks differ in the number, uses or turns of activations. They may differ because the size
    of an activation depends on a rank's batch, and small ones are not sharded.
    """
    text = ";".join(f"{each.saved_index} {each.saved} {each.first} {each.last} {each.until}" for each in uses)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    step = "sw.fsdp.checkpoint_cut, comparing activations"
    count, least_count, most, least = words.largest([len(uses), -len(uses), digest, -digest], step)
    if count != -least_count or most != -least or count == 0:
        return []
    sizes_and_times = [figure for each in uses for figure in (each.kept_bytes, each.full_bytes, each.gather_ps)]
    figures = words.largest(sizes_and_times, step)
    return [
        each._replace(kept_bytes=kept, full_bytes=full, gather_ps=ps)
        for each, kept, full, ps in zip(uses, figures[::3], figures[1::3], figures[2::3], strict=True)
    ]


# ---- sequences of uses, and their schedules


class Key(NamedTuple):
    """The key of a sequence, which selects its schedule: its first use, and the treatment of gradients."""

    units: tuple[int, ...]  # open units of the first use
    kind: str  # kind of the first use
    records: bool  # autograd records it for a backward
    reduces: tuple[bool, ...]  # by unit: its backward reduces gradients
    accumulates: tuple[bool, ...]  # by unit: there are accumulated gradients, from earlier backwards or for later ones

    def text(self, units: Sequence[Unit]) -> str:
        """Returns a text, for errors. Example: "forward of Model without gradients"."""
        kept = [unit.name for unit, reduces in zip(units, self.reduces) if not reduces]
        text = f"{self.kind} of {', '.join(units[index].name for index in self.units)}"
        text += "" if self.records else " without gradients"
        return text + (f", not reducing gradients of {', '.join(kept)}" if kept else "")


class Use(NamedTuple):
    """One use of a sequence."""

    units: tuple[int, ...]  # indices of the open units
    kind: str  # "forward", "recompute" or "backward"
    gradients: list[int]  # indices of units whose reduction starts in it
    computed: list[tuple[int, int]]  # full gradients that it computes: (unit, index into `ChunkedUnit.weights`)

    def text(self, units: Sequence[Unit]) -> str:
        """Returns a text, for errors. Example: "forward of Model"."""
        return f"{self.kind} of {', '.join(units[unit].name for unit in self.units)}"


def same_uses(uses: Sequence[Use], others: Sequence[Use]) -> bool:
    """Returns true if the uses have the same units, kinds and reductions."""
    return len(uses) == len(others) and all(a[:3] == b[:3] for a, b in zip(uses, others))


def gather_until(units: Sequence[Unit], uses: Sequence[Use]) -> list[int]:
    """Returns, by use, the last use whose gathers must have started by then (`set_modules_to_*_prefetch`).

    Example: the forwards of units 0, 1 and 2, where unit 0 prefetches unit 2: [2, 1, 2].
    """
    index = {id(unit): unit_index for unit_index, unit in enumerate(units)}
    until = list(range(len(uses)))
    for i, use in enumerate(uses):
        for opened in use.units:
            if use.kind == "recompute" or (i > 0 and opened in uses[i - 1].units):
                continue
            for prefetched in units[opened].unit_options.prefetch(use.kind):
                unit_index = index.get(id(prefetched))
                following = (j for j in range(i + 1, len(uses)) if unit_index in uses[j].units)
                until[i] = max(until[i], next(following, i))
    return until


def units_of(schedule: StepSchedule) -> list[int]:
    """Returns the unit of each weight of a schedule. Additional weights are chunked weights of units (chunks.py)."""
    return [weight if unit < 0 else unit for weight, unit in enumerate(schedule.original_of)]


class Plan:
    """A schedule as the runner executes it: its actions by use."""

    def __init__(
        self,
        uses: list[Use],
        schedule: _planner.StepSchedule,
        timed: Times | None,
        variants: dict[Hashable, Plan],
    ) -> None:
        self.variants = variants  # plans of the same uses and times, by `options_key` (units.py); shared by all of them
        self.uses = uses  # the recorded sequence
        self.schedule = schedule
        self.timed = timed  # the times it was made from; None if no step was timed
        # By use: unit, range of bytes in the arena, in chunks.
        self.gathers: dict[int, list[tuple[int, slice, bool]]] = {}
        self.releases: dict[int, list[int]] = {}  # by use after which they are released: units
        self.finishes: dict[tuple[int, int], int] = {}  # by unit and use that starts a reduction: its last use
        unit_of = units_of(schedule)
        # By use: units gathered in chunks.
        self.gathers_in_chunks = [{unit_of[w] for w in weights if unit_of[w] != w} for weights, *_ in schedule.uses]
        self.reduces_in_chunks: list[set[int]] = [set() for _ in schedule.uses]  # by use: units
        places = [slice(offset, offset + size) for *_, size, offset in schedule.buffers]
        for weight, buffer, start, *_ in schedule.gathers:
            self.gathers.setdefault(start, []).append((unit_of[weight], places[buffer], unit_of[weight] != weight))
        self.copies: dict[int, tuple[int, int]] = {}  # by unit: arena offset of its kept copy, and the copy's last use
        for weight, is_kept_copy, _, last, _, offset in schedule.buffers:
            if is_kept_copy:
                self.copies[weight] = (offset, last)
            else:
                self.releases.setdefault(last, []).append(unit_of[weight])
        for unit, first, start, finish, in_chunks in schedule.reductions:
            self.finishes[unit, start] = finish
            for use in range(first, start + 1) if in_chunks else ():
                self.reduces_in_chunks[use].add(unit)
        self.activations: ActivationPlan | None = None
        if timed is not None and timed.activations:
            indices = [each.saved_index for each in timed.activations]
            self.activations = ActivationPlan(indices, schedule.activation_gathers)
        # Units that multiply in chunks in some use. Their modules have the class for chunks in all uses: a forward must
        # prepare its backward, and a recomputation must save the same tensors as its forward.
        self.units_in_chunks: frozenset[int] = frozenset().union(*self.gathers_in_chunks, *self.reduces_in_chunks)


def make_schedule(
    units: Sequence[Unit],
    chunked_units: Sequence[ChunkedUnit],
    recomputed: set[int],
    key: Key,
    uses: Sequence[Use],
    times: Times | None,
    memory_limit: int | None,
    prefetch: int | None,
) -> StepSchedule:
    """Returns the schedule of a sequence. StepSchedule calls a unit a weight.

    Args:
        chunked_units: the weights of each unit that may be transferred in chunks; empty without ``chunked``.
        recomputed: indices of units whose forward is recomputed within their own backward.
        times: None before a step was timed.
        memory_limit: bytes; None: enough to gather one unit ahead (`prefetch`) and to reduce during the next backward.
    """
    weights = []
    for unit_index, unit in enumerate(units):
        in_arena = (0, 0) if unit.unit_options.keep_between_steps else (unit.use_bytes, unit.keep_bytes)
        all_ps = (0, 0, 0, 0) if times is None else (unit.gather_ps, unit.reduce_ps, *times.copies[unit_index])
        weights.append((unit.name, unit.sharded_bytes, *in_arena, unit.gradient_bytes, *all_ps))
    use_ps = [0] * len(uses) if times is None else times.uses
    parts = [(use.units, use.kind, use.gradients, ps) for use, ps in zip(uses, use_ps, strict=True)]
    options: dict[str, Any] = {
        "alignment_bytes": ALIGNMENT,
        "held_bytes": held_bytes(units, key, uses),
        "gather_until": gather_until(units, uses),
        "activations": [] if times is None else [each.fields for each in times.activations],
    }
    budget = memory_limit
    if budget is None:  # computed without times, so that the memory limit does not depend on them
        options["prefetch"] = 1 if prefetch is None else prefetch
        budget = overlapping_budget_bytes(weights, parts, **options)
    trains = key.records and key.kind == "forward"
    chunked_weights = []
    for unit_index, each in enumerate(chunked_units):
        in_backwards = trains and unit_index not in recomputed  # a recomputation gathers it in full
        reduces = trains and key.reduces[unit_index] and not key.accumulates[unit_index]
        computed = [(which, i) for i, use in enumerate(uses) for owner, which in use.computed if owner == unit_index]
        entry = each.schedule_entry(in_backwards, reduces, computed)
        if entry is not None:
            chunked_weights.append((unit_index, *entry))
    options.update(chunked_weights=chunked_weights, may_add_chunks=memory_limit is None, prefetch=prefetch)
    return StepSchedule(weights, parts, budget_bytes=budget, **options)


def held_bytes(units: Sequence[Unit], key: Key, uses: Sequence[Use]) -> int:
    """Returns the bytes outside the arena: weights that stay gathered between steps, and accumulated gradients."""
    held = sum(unit.use_bytes for unit in units if unit.unit_options.keep_between_steps)
    held += sum(unit.accumulated_gradient_bytes for unit, accumulates in zip(units, key.accumulates) if accumulates)
    new = (  # gradients from autograd, until they are added to the accumulated ones
        sum(units[unit].gradient_bytes for unit in use.units if not key.reduces[unit])
        for use in uses
        if use.kind == "backward"
    )
    return held + max(new, default=0)
