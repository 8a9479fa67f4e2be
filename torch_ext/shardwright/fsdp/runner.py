"""Runs the gathers and reductions of training steps: without a schedule in the first step, with one after that.

A *sequence* is a list of uses, from the first forward of a step to the end of its backward; without gradients, to the
end of the forward. Whenever a unit opens or closes, the running use ends and, if any unit is open, the next use begins.
A unit is open while a forward of one of its modules runs, and from the moment at which gradients reach the outputs of a
forward until they have left its inputs.

    state       gathers start       weights are released    next state
    recording   when a unit opens   when a unit closes      following, after the sequence; its uses are scheduled
    following   as scheduled        as scheduled            recording, at a use that differs from the schedule

The first step that follows a schedule is timed, and all ranks agree on the times. The times decide how far ahead later
steps gather, unless the user has set `prefetch`. The key of a sequence, its first use and the treatment of gradients,
selects the schedule. All ranks see the same uses, so they start the same transfers. Terms of units: see units.py.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from .._native import _runtime
from .._planner import StepSchedule, overlapping_budget_bytes
from ..runtime import counters
from . import scheduler
from .calls import MethodCalls
from .chunks import UnitInChunks
from .gather import measure
from .packing import ALIGNMENT
from .reductions import Reductions
from .scheduler import Clock, Key, Plan, Times, Use, are_same, gather_until, held_bytes
from .units import Unit, forget_written_copies, is_in_backward, options_of

MAX_USES = 1 << 16  # longer sequences are not scheduled: forwards with gradients that no backward follows
MAX_PLANS = 64  # maximum number of kept schedules (FIFO)


class Runner:
    """The units of a model, its schedules, and the running sequence."""

    def __init__(
        self, units: list[Unit], memory_limit: int | None, prefetch: int | None, in_chunks: bool = False
    ) -> None:
        self.units = units
        self.gathers_in_chunks = in_chunks
        self._in_chunks = [UnitInChunks(unit) for unit in units] if in_chunks else []
        self.memory_limit = memory_limit
        self.prefetch = prefetch
        self.device = next((w.memory.device for unit in units for w in unit.weights), torch.device("cpu"))
        self._index = {id(unit): index for index, unit in enumerate(units)}
        for unit in units:
            unit.runner = weakref.ref(self)
        self._plans: dict[Key, Plan] = {}  # schedules, oldest first
        self._arena = torch.empty(0, dtype=torch.uint8)  # memory of scheduled gathers; grows with the schedules
        self.open: list[int] = []  # indices of open units, ascending
        self._uses: list[Use] = []  # uses of the running sequence
        self._is_used = False  # the last of `_uses` has not ended
        self._is_too_long = False  # the running sequence has more than MAX_USES uses
        self._key: Key | None = None  # key of the running sequence; None between sequences
        self._plan: Plan | None = None  # the schedule that is followed; None while recording
        self._clock: Clock | None = None  # times the running sequence; None if it is not timed
        self.reductions = Reductions(units, self.device)
        self._end: weakref.ref[object] | None = None  # callback that the running backward holds until its end
        self._recomputed: set[int] = set()  # units whose forward is recomputed within their own backward
        self._activations = scheduler.StepActivations(None)  # sharded activations (`checkpoint_cut`) of the sequence
        self._num_forwards = 0  # forwards so far; numbers them from 1
        self._multiplies: list[tuple[int, frozenset[int]]] = []  # by sequence, in order: first forward, units in chunks
        self._stream: torch.Stream | None = None  # stream of the last use
        self._is_captured = False  # the last use was captured in a graph
        self.calls = MethodCalls()

    @property
    def schedules(self) -> list[StepSchedule]:
        return [plan.schedule for plan in self._plans.values()]

    @property
    def is_in_backward(self) -> bool:
        return self._end is not None and self._end() is not None

    def begin_forward(self, unit: Unit) -> int:
        """Opens the unit and gathers its weights. Returns the number of this forward."""
        in_backward = is_in_backward()
        if in_backward:
            self._note_backward()
        elif not self.open:
            self._begin_forwards(unit)
        elif self._end is not None:
            self.abort()  # a backward has failed before its end
        was_open = unit.is_open
        self._num_forwards += 1
        unit.forwards.append(self._num_forwards)
        if not was_open:
            bisect.insort(self.open, self._index[id(unit)])
            unit.adopt_changes()
            self._next("recompute" if in_backward else "forward")
        elif in_backward:
            self._recomputed.add(self._index[id(unit)])
        self._put_full(unit, in_backward)
        return self._num_forwards

    def _put_full(self, unit: Unit, in_backward: bool) -> None:
        """Gives the modules full weights: in a recomputation, as in the latest forward whose backward runs."""
        if not self._in_chunks:
            unit.put_full()
            return
        begun = [forward for each in self.units for forward in each.backwards] if in_backward else []
        self._put_for(unit, max(begun, default=self._num_forwards))

    def _put_for(self, unit: Unit, forward: int) -> None:
        """Gives the modules full weights, or matmuls in chunks if the sequence of this forward has them."""
        in_chunks = self._multiplies_in_chunks(self._index[id(unit)], forward)
        if unit.chunks is not None and not in_chunks:
            with torch.no_grad():
                unit.chunks.gather_full()
        unit.put_full(self._in_chunks[self._index[id(unit)]] if in_chunks else None)

    def _multiplies_in_chunks(self, unit: int, forward: int) -> bool:
        """Returns true if modules of the unit multiply in chunks in the sequence of this forward."""
        at = bisect.bisect_right(self._multiplies, forward, key=lambda each: each[0])
        return at > 0 and unit in self._multiplies[at - 1][1]

    def end_forward(self, unit: Unit) -> None:
        """Closes the unit after a forward, unless another one or a backward of it runs."""
        unit.forwards.pop()
        if not unit.is_open or (self._in_chunks and not unit.forwards):
            unit.put_after_forward()
            if unit.backwards:
                self._put_for(unit, max(unit.backwards))
        if not unit.is_open:
            self.open.remove(self._index[id(unit)])
            self._next("backward" if is_in_backward() else "forward")
        if not self.open and not torch.is_grad_enabled() and not is_in_backward():
            self._compare_gathers()
        if self._key is not None and not self._key.records and not self.open:
            self._end_sequence()

    def _compare_gathers(self) -> None:
        """Raises ValueError on all ranks, and aborts the step, if ranks have gathered different units."""
        try:
            self.reductions.compare_gathers()
        except BaseException:
            self.abort(drops_gradients=False)
            raise

    def fail_forward(self, unit: Unit, depth: int, error: BaseException) -> None:
        """Aborts the step if no hook has ended a forward that raised. `depth`: the unit's forwards before that one."""
        if not isinstance(error, Exception) or len(unit.forwards) > depth:
            self.abort()

    def begin_backward(self, unit: Unit, forward: int) -> None:
        """Opens the unit for the backward of forward number `forward`, and gathers its weights."""
        self._note_backward()
        was_open = unit.is_open
        unit.backwards.add(forward)
        if not was_open:
            bisect.insort(self.open, self._index[id(unit)])
            self._next("backward")
        self._put_for(unit, forward)  # checkpoints within the unit recompute parts of its forward

    def end_backward(self, unit: Unit, forward: int) -> None:
        """Ends the backward of a forward. The unit's last one starts the reduction and closes the unit."""
        if forward not in unit.backwards:
            return  # no gradient reached the outputs, so `begin_backward` was not called
        if len(unit.backwards) == 1:
            self._start_reduction(unit)
        unit.backwards.discard(forward)
        if not unit.is_open:
            unit.put_sharded()
            self.open.remove(self._index[id(unit)])
            self._next("backward")

    def note_gradient(self, unit: Unit) -> None:
        """Notes that autograd has computed a gradient, so that the end of the running backward reduces it."""
        if self._end is not None and self._end() is None:
            self.abort()
            raise RuntimeError(
                f"{unit.name} had gradients of a backward that has failed; they are discarded. Run the forward again "
                "before the next backward, or call reset_iter_state() on the module"
            )
        self._note_backward()

    def settle(self) -> None:
        """Aborts the step if its backward, or a registered forward method, has raised: no hook reports that."""
        self.calls.end_failed(self.end_forward)
        if self._end is not None and self._end() is None:
            self.abort()

    def abort(self, drops_gradients: bool = True) -> None:
        """Closes and releases all units, after an exception or between steps. Gradients not reduced yet are lost."""
        self._end = self._plan = self._key = None
        self.open.clear()
        for unit in self.units:
            unit.forwards.clear()
            unit.backwards.clear()
            unit.put_sharded()
            if drops_gradients:
                unit.drop_gradients()
        self.reductions.discard()
        self._drain(keeps_held=False)

    def _begin_forwards(self, unit: Unit) -> None:
        """Prepares for a forward while no unit is open. Ends a sequence of forwards that no backward has followed."""
        if self._end is not None:
            self.abort()
        only_forwards = all(use.kind == "forward" for use in self._uses)
        key = self._key_of((self._index[id(unit)],), "forward")
        if self._key is not None and self._key[:3] == key[:3] and only_forwards:
            # The forwards of the running sequence had no backward yet. A later backward of them gathers again.
            self._compare_gathers()
            self._plan = None
            self._drain()
            self._key = None

    def _note_backward(self) -> None:
        """Makes sure that the running backward calls `_end_backward` at its end."""
        if self.is_in_backward:
            return
        if self._end is not None:
            self.abort()  # the previous backward has failed: its callback was freed without a call

        def end() -> None:
            self._end = None
            try:
                self._end_backward()
            except BaseException:
                self.abort()
                raise

        self._end = weakref.ref(end, functools.partial(_put_back, weakref.ref(self)))
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Reduces the gradients that are left when autograd has finished, and ends the sequence."""
        self.calls.end_failed(self.end_forward, backward_ends=True)
        for unit in self.units:
            if unit.backwards:
                self._start_reduction(unit)
            elif not unit.unit_options.reduces:
                unit.keep_gradients()
            unit.backwards.clear()
            if not unit.forwards:
                unit.put_sharded()
        self.open = [index for index, unit in enumerate(self.units) if unit.is_open]
        self._next("forward" if self.open else "backward")  # forward: a backward within a forward
        self.reductions.end_backward()
        for unit in self.units:
            unit.finish_copies()
        if not self.open:
            self._end_sequence()

    def _key_of(self, units: tuple[int, ...], kind: str) -> Key:
        """Returns the key of a sequence that begins now with a use of these units."""
        reduces = tuple(unit.unit_options.reduces for unit in self.units)
        keeps = tuple(not unit.unit_options.reduces or unit.keeps_gradients for unit in self.units)
        return Key(units, kind, torch.is_grad_enabled() or is_in_backward(), reduces, keeps)

    def _end_sequence(self) -> None:
        """Ends the sequence. Schedules it if it differed from its schedule, or if times are new."""
        key, uses, plan, clock, is_too_long = self._key, self._uses, self._plan, self._clock, self._is_too_long
        activations = self._activations
        self._drain()
        copies = [[] if unit.host_copies is None else unit.host_copies.end_timing() for unit in self.units]
        self._key = None
        if key is None or not uses or is_too_long:
            return
        while key not in self._plans and len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        if plan is None or not are_same(plan.uses, uses):
            self._follow(key, uses, None, {})
        elif clock is not None and plan.timed is None:
            times = self._agreed_times(scheduler.own_times(clock, copies, plan.schedule, activations))
            self._follow(key, uses, times, {})
        if clock is not None and scheduler.listener is not None:
            scheduler.listener.hear(self._plans[key].schedule, [unit.name for unit in self.units], clock, copies)

    def _agreed_times(self, times: Times) -> Times:
        """Returns times that are equal on all ranks, from those of this rank; zeros if units are on several meshes."""
        return scheduler.agreed_times(times, {w.mesh for unit in self.units for w in unit.weights}, self.device)

    def reschedule(self) -> None:
        """Makes all schedules again with the current unit options, for the sequences that begin after this call."""
        options = options_of(self.units)
        for key, plan in self._plans.items():
            if self._in_chunks or options not in plan.variants:
                self._follow(key, plan.uses, plan.timed, plan.variants)
            else:
                self._plans[key] = plan.variants[options]

    def _follow(self, key: Key, uses: list[Use], timed: Times | None, variants: dict[Hashable, Plan]) -> None:
        """Schedules the next sequence with this key. Grows the arena now, because a captured step cannot."""
        plan = variants[options_of(self.units)] = Plan(uses, self._schedule(key, uses, timed), timed, variants)
        self._plans[key] = plan
        if self._arena.numel() < plan.schedule.arena_bytes:
            self._arena = torch.empty(plan.schedule.arena_bytes, dtype=torch.uint8, device=self.device)

    def _schedule(self, key: Key, uses: list[Use], timed: Times | None) -> StepSchedule:
        """Returns the schedule of a sequence. To StepSchedule, a unit is one weight. `timed`: None before times."""
        weights = []
        for unit_index, unit in enumerate(self.units):
            in_arena = (0, 0) if unit.unit_options.keep_between_steps else (unit.use_bytes, unit.keep_bytes)
            lasts = (0, 0, 0, 0) if timed is None else (unit.gather_ps, unit.reduce_ps, *timed.copies[unit_index])
            weights.append((unit.name, unit.sharded_bytes, *in_arena, unit.gradient_bytes, *lasts))
        all_ps = [0] * len(uses) if timed is None else timed.uses
        parts = [(use.units, use.kind, use.gradients, ps) for use, ps in zip(uses, all_ps, strict=True)]
        options: dict[str, Any] = {
            "alignment_bytes": ALIGNMENT,
            "held_bytes": held_bytes(self.units, key, uses),
            "gather_until": gather_until(self.units, uses),
            "activations": [] if timed is None else [event.parts for event in timed.activations],
        }
        budget = self.memory_limit
        if budget is None:  # computed without times, so that the memory limit does not depend on them
            options["prefetch"] = 1 if self.prefetch is None else self.prefetch
            budget = overlapping_budget_bytes(weights, parts, **options)
        trains = key.records and key.kind == "forward"
        forms = []
        for unit_index, each in enumerate(self._in_chunks):
            gathers = trains and unit_index not in self._recomputed  # a recomputation gathers it in full
            made = [(which, i) for i, use in enumerate(uses) for unit, which in use.made if unit == unit_index]
            form = each.form(gathers, trains and key.reduces[unit_index] and not key.keeps[unit_index], made)
            if form is not None:
                forms.append((unit_index, *form))
        options.update(chunked_weights=forms, may_add_chunks=self.memory_limit is None, prefetch=self.prefetch)
        return StepSchedule(weights, parts, budget_bytes=budget, **options)

    def _drain(self, keeps_held: bool = True) -> None:
        """Ends the sequence: waits for all transfers, and releases units, except held ones if `keeps_held`."""
        with torch.no_grad():
            self.reductions.finish()  # also those scheduled to end in later uses, which may not run
        for unit in self.units:
            if unit.is_resident and not (keeps_held and unit.is_held):
                unit.release()
            with torch.no_grad():
                unit.end_step()
        self._activations.end()
        self._uses = []
        self._is_used = self._is_too_long = False
        self._plan = self._clock = None

    def _next(self, kind: str) -> None:
        """Ends the running use, and begins the next if units are open. Called when the set of open units changes."""
        units = tuple(self.open)
        key = self._key_of(units, kind) if self._key is None else self._key
        self._follow_stream()
        with torch.no_grad():
            if self._is_used:
                self._leave(len(self._uses) - 1)
            self._is_used = bool(units)
            if not units:
                return
            if self._key is None:
                self._begin_sequence(key)
            if len(self._uses) == MAX_USES:
                self.reductions.finish()
                self._uses, self._plan, self._clock, self._is_too_long = [], None, None, True
            self._uses.append(Use(units, kind, [], []))
            self._enter(len(self._uses) - 1)
            if len(self._uses) == 1:
                self._start_refreshes()

    def _start_refreshes(self) -> None:
        """Starts to refresh all units whose gathers have not begun, in the order of their uses."""
        planned = [index for use in self._plan.uses for index in use.units] if self._plan is not None else []
        for index in dict.fromkeys([*planned, *range(len(self.units))]):
            self.units[index].start_refresh()

    def _follow_stream(self) -> None:
        """Orders uses on different streams: a buffer of the arena may be used by consecutive uses."""
        if self.device.type == "cpu":
            return
        current, was_captured = torch.accelerator.current_stream(self.device), self._is_captured
        self._is_captured = _runtime.is_capturing(str(self.device))
        # Between a captured and an uncaptured use, the user's code that captures must order streams.
        if self._stream is not None and self._stream != current and self._is_captured == was_captured:
            current.wait_stream(self._stream)
        self._stream = current

    def _begin_sequence(self, key: Key) -> None:
        """Finds the schedule of the key, and makes units whose parameters were written gather again."""
        self._uses = []
        self._key = key
        self._plan = self._plans.get(key)
        self._activations = scheduler.begin_activations(None if self._plan is None else self._plan.activations)
        is_timed = scheduler.listener is not None or (self._plan is not None and self._plan.timed is None)
        self._clock = Clock(self.device) if is_timed else None
        for unit in self.units:
            if is_timed and unit.host_copies is not None:
                unit.host_copies.begin_timing()
        for chunks in self._in_chunks:
            chunks.begin_step()
        if self._in_chunks:
            first = self._num_forwards + (key.kind == "backward")
            self._multiplies.append((first, frozenset() if self._plan is None else self._plan.multiplies))
            del self._multiplies[:-MAX_USES]
        for unit in self.units:
            if not unit.forwards:  # `begin_forward` has done this for the unit that opens
                unit.adopt_changes()
        forget_written_copies(self.units, self.device)
        measured = [unit for unit in self.units if any(w.gather.format.needs_largest for w in unit.weights)]
        for unit in measured:
            unit.start_refresh()
        weights = (weight for unit in measured for weight in unit.weights)
        measure(weight.measured for weight in weights if weight.gather.format.needs_largest)

    def _enter(self, index: int) -> None:
        """Begins a use: starts the gathers that the schedule assigns to it, and waits for those it needs."""
        use = self._uses[index]
        if self._plan is not None:
            planned = self._plan.uses[index] if index < len(self._plan.uses) else None
            if planned is None or (planned.units, planned.kind) != (use.units, use.kind):
                counters.counts.unplanned_steps += 1
                self._plan = None
        self._activations.begin_use(index, self._plan is not None)
        for unit, offset, in_chunks in self._plan.gathers.get(index, ()) if self._plan is not None else ():
            self._gather_ahead(self.units[unit], offset, self._in_chunks[unit] if in_chunks else None)
        self._gather_now(use.units, self._plan.in_chunks[index] if self._plan is not None else set())
        if use.kind == "backward":
            reduces = self._plan.reduces_in_chunks[index] if self._plan is not None else set()
            for unit_index in use.units if self._in_chunks else ():
                self._in_chunks[unit_index].begin_backward(unit_index in reduces)
                if self.units[unit_index].chunks is not None:
                    self._in_chunks[unit_index].gather_full(which_were_read=True)
        if self._clock is not None:
            self._clock.mark()

    def _gather_ahead(self, unit: Unit, offset_bytes: int, chunks: UnitInChunks | None) -> None:
        """Starts a scheduled gather. `chunks`: the weights that the use itself gathers in chunks."""
        if unit.is_resident and not unit.is_stale:
            return  # gathered by `unshard`, or in the previous step
        if unit.is_resident:
            unit.release()
        unit.set_chunks(chunks)
        if unit.unit_options.keep_between_steps:
            unit.start_gather_alone()
        else:
            unit.start_gather(self._arena, offset_bytes)

    def _gather_now(self, needed: Iterable[int], in_chunks: set[int]) -> None:
        """Waits for the gathers of these units; starts those that were not started ahead."""
        for unit_index in needed:
            unit = self.units[unit_index]
            unit.is_unsharded = False
            is_other = unit.chunks is not None and unit_index not in in_chunks
            if unit.is_resident and (unit.is_stale or is_other):
                unit.release()
            if not unit.is_resident:
                unit.start_gather_alone()
            unit.finish_gather()

    def _leave(self, index: int) -> None:
        """Ends a use: releases weights, and waits for the reductions that must end by then."""
        if self._clock is not None:
            self._clock.end()
        for unit_index in self._uses[index].units:
            self._note_gradients(unit_index)
        if self._plan is not None:
            for released in self._plan.releases.get(index, ()):
                if self.units[released].is_held:
                    continue
                offset, last_use = self._plan.copies.get(released, (0, -1))
                if index < last_use:
                    self.units[released].keep(self._arena, offset)
                else:
                    self.units[released].drop_kept()
                self.units[released].release()
            self.reductions.finish(index)
        else:
            for unit in self.units:
                if unit.is_resident and not (unit.is_open or unit.is_held or unit.is_left_full):
                    unit.release()

    def _note_gradients(self, unit: int) -> None:
        """Notes the full gradients that the running use has computed, if this sequence will be scheduled."""
        if self._in_chunks and self._uses and (self._plan is None or self._clock is not None):
            self._uses[-1].made.extend((unit, which) for which in self._in_chunks[unit].new_gradients())

    def _start_reduction(self, unit: Unit) -> None:
        """Starts to reduce the unit's gradients after its backward, or keeps them if it does not reduce."""
        unit_index = self._index[id(unit)]
        self._note_gradients(unit_index)
        with torch.no_grad():
            if not unit.unit_options.reduces:
                unit.keep_gradients()
                return
            reduction = self.reductions.start(unit_index)
            if reduction is None:
                return
            index = len(self._uses) - 1
            if self._uses:
                self._uses[index].gradients.append(unit_index)
            if self._plan is None:
                self.reductions.finish(index)  # without a schedule, one reduction runs at a time
            finish = index if self._plan is None else self._plan.finishes.get((unit_index, index), index)
            self.reductions.add(finish, reduction)


def _put_back(runner: weakref.ref[Runner], ended: object) -> None:
    """Gives modules their sharded parameters back if a backward has failed. Called when its callback is freed."""
    if (found := runner()) is not None and found._end is ended:
        for unit in found.units:
            unit.put_sharded()
