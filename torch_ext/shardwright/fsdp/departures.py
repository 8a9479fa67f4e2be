"""Leaving a schedule: a rank takes part in the transfers of scheduled uses that it does not run.

A rank that leaves its schedule cannot know whether the others leave it too. Until the next event at which ranks compare
(comparisons.py), it takes part in all transfers that the schedule has, so that no rank waits for it, and drops the
results. Then either all ranks have left the schedule in the same way, and go on without it, or all of them raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ..runtime import counters
from .reductions import Reductions
from .scheduler import Clock, Plan, Use
from .units import Unit, forget_written_copies, is_in_backward


class Departures:
    """Base class of `Runner`: compares events between ranks, and leaves schedules. The attributes are Runner's."""

    units: list[Unit]
    reductions: Reductions
    is_chunked: bool
    _arena: torch.Tensor
    _uses: list[Use]
    _plan: Plan | None
    _clock: Clock | None
    _is_in_use: bool

    def __init__(self) -> None:
        self._is_past_forward = False  # the latest event is the beginning of a backward

    def note_gather(self, unit: Unit) -> None:
        """Notes that a gather starts. If that is an event and ranks differ, aborts the step and raises."""
        with self._aborting():
            self.reductions.comparisons.note_gather(unit)

    def _defer(self, event: str) -> None:
        """Compares an event before the next transfer, or with the next event if that comes first."""
        with self._aborting():
            self.reductions.comparisons.defer(self._reach(event))

    def _compare(self, event: str, is_end: bool = False) -> None:
        """Compares an event with other ranks. If they differ, aborts the step and raises."""
        with self._aborting():
            self.reductions.comparisons.compare(self._reach(event), is_end)

    def _forget_written_copies(self) -> None:
        """Marks copies of parameters that any rank has written as stale."""
        comparisons = self.reductions.comparisons
        with self._aborting():
            forget_written_copies(self.units, lambda flags: comparisons.compare("flags of writes", tables=flags))

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Aborts the step if the block raises. In a backward, this discards gradients that are not reduced."""
        try:
            yield
        except BaseException:
            self.abort(drops_gradients=is_in_backward())
            raise

    def abort(self, drops_gradients: bool = True) -> None:
        raise NotImplementedError

    def _end_use(self, index: int) -> None:
        raise NotImplementedError

    @property
    def _may_depart(self) -> bool:
        """True if this rank can take part in the rest of its schedule, and all ranks compare afterwards."""
        is_simple = self._plan is not None and not self.is_chunked and self._plan.activations is None
        return is_simple and self.reductions.comparisons.are_complete

    def _reach(self, event: str) -> str:
        """Returns the text of an event. Leaves the schedule if it has further uses before the event."""
        index = len(self._uses)
        if self._plan is not None and next_event(self._plan, index, self._is_past_forward) > index:
            self._leave_schedule(index)
        return f"{event}, after {index} uses"

    def _reach_reduction(self, unit_index: int) -> bool:
        """Leaves the schedule, and returns false, if the next transfer in it is another one. Else returns true."""
        if self._plan is None or not self._may_depart or not self.reductions.expected(unit_index):
            return True
        index = len(self._uses) - 1
        num_reduced = len(self._uses[index].gradients)
        if self._plan.uses[index].gradients[num_reduced : num_reduced + 1] == [unit_index]:
            return True
        self._leave_schedule(index + 1, f"reduction of {self.units[unit_index].name}")
        return False

    def _leave_schedule(self, index: int, event: str = "", has_gathered: bool = False) -> None:
        """Leaves the schedule before use number `index`.

        Args:
            event: a text of what differs from the schedule, to compare. Empty: the caller compares an event.
            has_gathered: the gathers that the schedule has at this use have started.

        Raises:
            ValueError: other ranks do not leave the schedule at this event.
        """
        counters.counts.unplanned_steps += 1
        may_depart = self._may_depart
        if may_depart and index == len(self._uses) and self._is_in_use:
            self._end_use(index - 1)
            self._is_in_use = False
        plan, self._plan, self._clock = self._plan, None, None
        if plan is None or not may_depart:
            return
        uses = range(index, next_event(plan, index, self._is_past_forward))
        num_reduced = len(self._uses[index - 1].gradients) if index > 0 else 0
        written = [unit for unit in self.units if index > 0 and not unit.is_prepared]
        for weight in (weight for unit in written for weight in unit.weights):
            weight.mark_prepared(True)  # the other ranks start no transfers for the writes of this one
        run_transfers(self.units, self.reductions, self._arena, plan, uses, num_reduced, has_gathered)
        for unit in written:
            unit.forget_copies()
        self.reductions.comparisons.compares_transfers = True
        if event:
            self._compare(f"{event}, not as scheduled")


def next_event(plan: Plan, index: int, in_backward: bool) -> int:
    """Returns the first use from `index` on before which ranks that follow the plan compare; its length at the end.

    `in_backward`: the latest event is the beginning of a backward.
    """
    while index < len(plan.uses) and (plan.uses[index].kind != "forward") == in_backward:
        index += 1
    return index


@torch.no_grad()
def run_transfers(
    units: Sequence[Unit],
    reductions: Reductions,
    arena: torch.Tensor,
    plan: Plan,
    uses: range,
    num_reduced: int,
    has_gathered: bool,
) -> None:
    """Takes part in the transfers of these uses, and in the reductions of the use before them.

    `num_reduced`: number of reductions of the use before them that have started. `has_gathered`: the gathers scheduled
    at the first use have started.
    """

    def gather(unit: Unit, memory: torch.Tensor | None) -> None:
        if unit.is_resident and not unit.is_forgotten:
            return
        if unit.is_resident:
            unit.release()
        if memory is None:
            unit.start_gather_alone()
        else:
            unit.start_scheduled_gather(memory)

    def reduce(index: int, num_reduced: int) -> None:
        for unit_index in plan.uses[index].gradients[num_reduced:] if 0 <= index < len(plan.uses) else ():
            reduction = reductions.start(unit_index, drops_result=True)
            if reduction is not None:
                reductions.add(plan.finishes.get((unit_index, index), index), reduction)

    reduce(uses.start - 1, num_reduced)
    for index in uses:
        for unit_index, place, _ in () if has_gathered else plan.gathers.get(index, ()):
            gather(units[unit_index], arena[place])
        has_gathered = False
        for unit_index in plan.uses[index].units:
            gather(units[unit_index], None)
            units[unit_index].finish_gather()
        reduce(index, 0)
        release(units, arena, plan, index)
        reductions.finish(index)


def release(units: Sequence[Unit], arena: torch.Tensor, plan: Plan, index: int) -> None:
    """Releases the weights that the schedule releases at the end of a use. Makes kept copies, or drops them."""
    for released in plan.releases.get(index, ()):
        if units[released].is_held:
            continue
        offset_bytes, last_use = plan.copies.get(released, (0, -1))
        if index < last_use:
            units[released].save_kept_copy(arena, offset_bytes)
        else:
            units[released].drop_kept()
        units[released].release()
