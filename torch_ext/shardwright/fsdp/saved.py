"""Activations that `checkpoint_cut` keeps cut, as events of a step: which use saves, needs and lets go of each.

    saved        in a forward, numbered in this order
    its turn     when the backward needs it first; turns come in the order of the schedule
    let go       when the backward has needed it for the last time

A step that follows a schedule gathers what this says: some before a use begins, some in the turn of another one. Once a
turn comes out of order, the rest of the step gathers by the order of the sequence (fsdp/activations.py).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner
from ..runtime import executables
from ..runtime.agreement import MeshWords
from .times import Event


class About(NamedTuple):
    name: str
    kept_bytes: int
    device_type: str
    cut: _planner.Layout
    whole: _planner.Layout


class Plan(NamedTuple):
    """What a schedule says of them, by turn."""

    numbers: Sequence[int]
    gathers: Sequence[tuple[int, int]]  # the use in which each starts, and the turn, or -1: before the use


class StepActivations:
    """Those of one step that runs."""

    def __init__(self, plan: Plan | None) -> None:
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
        global current
        self.is_over = True
        if current is self:
            current = None

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
current: StepActivations | None = None


def begin(plan: Plan | None) -> StepActivations:
    """For a step that begins."""
    global current
    current = StepActivations(plan)
    return current


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
