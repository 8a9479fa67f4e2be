"""Sequences of uses: what one is known by, its schedule, and what that says by use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._native import _planner
from . import saved
from .times import Times
from .units import Unit


class Key(NamedTuple):
    """What a sequence is known by."""

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
        self.activations: saved.Plan | None = None
        if timed is not None and timed.activations:
            numbers = [event.number for event in timed.activations]
            self.activations = saved.Plan(numbers, schedule.activation_gathers)
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
