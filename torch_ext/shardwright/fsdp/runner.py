"""Runs the gathers and reductions of training steps: without a schedule in the first step, with one after that.

A *sequence* is a list of uses, from the first forward of a step to the end of its backward; without gradients, to the
end of the forward. Whenever a unit opens or closes, the running use ends and, if any unit is open, the next use begins.
A unit is open from the pre-forward hook to the post-forward hook of one of its modules, and from the pre-backward hook
(a gradient reaches an output of the forward) to the post-backward hook (the gradients of its inputs are computed).

    state       gathers start       weights are released    next state
    recording   when a unit opens   when a unit closes      following, after the sequence; its uses are scheduled
    following   as scheduled        as scheduled            recording, at a use that differs from the schedule

The first step that follows a schedule is timed, and all ranks agree on the times. The times decide how far ahead later
steps gather, unless the user has set `prefetch`. The `Key` of a sequence selects its schedule. All ranks see the same
uses, so they start the same transfers. units.py has the terms of units.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable

import torch

from .._planner import StepSchedule
from . import scheduler
from .calls import MethodCalls
from .chunks import ChunkedUnit
from .departures import Departures, release
from .gather import set_scales
from .packing import empty_bytes
from .reductions import Reductions
from .scheduler import Clock, Key, Plan, Times, Use, make_schedule, same_uses
from .units import Unit, is_in_backward, options_key

# Maximum number of uses of a scheduled sequence. Longer ones are forwards with gradients that no backward follows.
MAX_USES = 1 << 16
MAX_PLANS = 64  # maximum number of kept schedules (FIFO)


class Runner(Departures):
    """The units of a model, its schedules, and the running sequence."""

    def __init__(
        self, units: list[Unit], memory_limit: int | None, prefetch: int | None, is_chunked: bool = False
    ) -> None:
        super().__init__()
        self.units = units
        self.is_chunked = is_chunked
        self._chunked_units = [ChunkedUnit(unit) for unit in units] if is_chunked else []
        self.memory_limit = memory_limit
        self.prefetch = prefetch
        self.device = next((w.memory.device for unit in units for w in unit.weights), torch.device("cpu"))
        self._index = {id(unit): index for index, unit in enumerate(units)}
        for unit in units:
            unit.runner = weakref.ref(self)
            unit.last_replaced_forward = 0
        self._plans: dict[Key, Plan] = {}  # schedules, oldest first
        self._arena = torch.empty(0, dtype=torch.uint8)  # memory of scheduled gathers; grows with the schedules
        self.open: list[int] = []  # indices of open units, ascending
        self._uses: list[Use] = []  # uses of the running sequence
        self._is_in_use = False  # the last of `_uses` has not ended
        self._is_too_long = False  # the running sequence has more than MAX_USES uses
        self._key: Key | None = None  # key of the running sequence; None between sequences
        self._plan: Plan | None = None  # the schedule that is followed; None while recording
        self._clock: Clock | None = None  # times the running sequence; None if it is not timed
        self.reductions = Reductions(units, self.device)
        # The callback at the end of the running backward. Autograd frees it without a call if the backward fails.
        self._backward_callback: weakref.ref[object] | None = None
        self._recomputed: set[int] = set()  # units whose forward is recomputed within their own backward
        self._activations = scheduler.StepActivations(None)  # sharded activations (`checkpoint_cut`) of the sequence
        self.num_forwards = 0  # forwards so far; numbers them from 1
        # By sequence, in order: its first forward, and the units that multiply in chunks (`Plan.units_in_chunks`).
        self._chunked_by_sequence: list[tuple[int, frozenset[int]]] = []
        self._streams = scheduler.StreamOrder(self.device)
        self.calls = MethodCalls()

    @property
    def schedules(self) -> list[StepSchedule]:
        """The schedules, oldest first."""
        return [plan.schedule for plan in self._plans.values()]

    @property
    def is_in_backward(self) -> bool:
        """True from the first event of a backward to its end."""
        return self._backward_callback is not None and self._backward_callback() is not None

    @property
    def _has_failed_backward(self) -> bool:
        """True if the latest backward has raised, and the step was not aborted yet."""
        return self._backward_callback is not None and self._backward_callback() is None

    def begin_forward(self, unit: Unit) -> int:
        """Opens the unit and gathers its weights. Returns the number of this forward."""
        in_backward = is_in_backward()
        if in_backward:
            self._register_final_callback()
        elif not self.open:
            self._prepare_sequence(unit)
        elif self._backward_callback is not None:
            self.abort()  # the backward has failed
        was_open = unit.is_open
        self.num_forwards += 1
        unit.forwards.append(self.num_forwards)
        if not was_open:
            bisect.insort(self.open, self._index[id(unit)])
            unit.adopt_changes(torch.is_grad_enabled() and not in_backward)
            self._change_use("recompute" if in_backward else "forward")
        elif in_backward:
            self._recomputed.add(self._index[id(unit)])
        # A recomputation multiplies like the forward that it repeats: the latest one whose backward runs.
        begun = [forward for each in self.units for forward in each.backwards] if in_backward else []
        self._to_unsharded(unit, max(begun, default=self.num_forwards))
        return self.num_forwards

    def _to_unsharded(self, unit: Unit, forward: int) -> None:
        """Gives the modules unsharded parameters, or matmuls in chunks if the sequence of this forward has those."""
        in_chunks = self._computes_in_chunks(self._index[id(unit)], forward)
        if unit.chunked_gather is not None and not in_chunks:
            with torch.no_grad():
                unit.chunked_gather.gather_full()
        unit.to_unsharded(self._chunked_units[self._index[id(unit)]] if in_chunks else None)

    def _computes_in_chunks(self, unit: int, forward: int) -> bool:
        """Returns true if modules of the unit multiply in chunks in the sequence that this forward belongs to."""
        at = bisect.bisect_right(self._chunked_by_sequence, forward, key=lambda each: each[0])
        return at > 0 and unit in self._chunked_by_sequence[at - 1][1]

    def end_forward(self, unit: Unit) -> None:
        """Closes the unit after a forward, unless another one or a backward of it runs."""
        unit.forwards.pop()
        if not unit.is_open or (self._chunked_units and not unit.forwards):
            unit.to_sharded_after_forward()
            if unit.backwards:
                self._to_unsharded(unit, max(unit.backwards))
        if not unit.is_open:
            self.open.remove(self._index[id(unit)])
            self._change_use("backward" if is_in_backward() else "forward")
        if not self.open and not torch.is_grad_enabled() and not is_in_backward():
            self._compare("end of a forward", is_end=True)
        if self._key is not None and not self._key.records and not self.open:
            self._end_sequence()

    def fail_backward(self, error: RuntimeError) -> None:
        """Makes the running backward raise an error at its end, on all ranks."""
        self._register_final_callback()
        self.reductions.comparisons.error = self.reductions.comparisons.error or error

    def fail_forward(self, unit: Unit, depth: int, error: BaseException) -> None:
        """Aborts the step after a forward has raised, unless its hook has closed the unit.

        `depth`: number of running forwards of the unit before this one.
        """
        if not isinstance(error, Exception) or len(unit.forwards) > depth:
            self.abort()

    def begin_backward(self, unit: Unit, forward: int) -> None:
        """Opens the unit for the backward of forward number `forward`, and gathers its weights."""
        self._register_final_callback()
        was_open = unit.is_open
        unit.backwards.add(forward)
        if not was_open:
            bisect.insort(self.open, self._index[id(unit)])
            self._change_use("backward")
        self._to_unsharded(unit, forward)  # checkpoints within the unit recompute parts of its forward

    def end_backward(self, unit: Unit, forward: int) -> None:
        """Ends the backward of a forward. The unit's last one starts the reduction and closes the unit."""
        if forward not in unit.backwards:
            return  # no gradient reached the outputs, so `begin_backward` was not called
        if len(unit.backwards) == 1:
            self._start_reduction(unit)
        unit.backwards.discard(forward)
        if not unit.is_open:
            unit.to_sharded()
            self.open.remove(self._index[id(unit)])
            self._change_use("backward")

    def note_gradient(self, unit: Unit) -> None:
        """Makes sure that the end of the running backward reduces a gradient that autograd has computed."""
        if self._has_failed_backward:
            self.abort()
            raise RuntimeError(
                f"{unit.name} had gradients of a backward that has failed; they are discarded. Run the forward again "
                "before the next backward, or call reset_iter_state() on the module"
            )
        self._register_final_callback()

    def abort_if_failed(self) -> None:
        """Ends registered forward methods that have raised, and aborts the step if its backward has raised."""
        self.calls.end_failed(self.end_forward)
        if self._has_failed_backward:
            self.abort()

    def abort(self, drops_gradients: bool = True) -> None:
        """Closes and releases all units, after an exception or between steps. Gradients not reduced yet are lost."""
        self._backward_callback = self._plan = self._key = None
        self.open.clear()
        for unit in self.units:
            unit.forwards.clear()
            unit.backwards.clear()
            unit.to_sharded()
            if drops_gradients:
                unit.drop_gradients()
        self.reductions.discard()
        self._drain(keeps_held=False)

    def _prepare_sequence(self, unit: Unit) -> None:
        """Prepares for a forward while no unit is open. Ends a sequence of forwards if it begins again."""
        if self._backward_callback is not None:
            self.abort()
        only_forwards = all(use.kind == "forward" for use in self._uses)
        key = self._key_of((self._index[id(unit)],), "forward")
        if self._key is not None and self._key[:3] == key[:3] and only_forwards:
            # The forwards of the running sequence had no backward yet. If one follows later, it gathers again.
            self._plan = None
            self._drain()
            self._key = None

    def _register_final_callback(self) -> None:
        """Makes the running backward call `_end_backward` at its end, unless it was called for this backward before."""
        if self.is_in_backward:
            return
        if self._backward_callback is not None:
            self.abort()  # the previous backward has failed
        for unit in (each for each in self.units if not each.forwards):
            unit.adopt_for_backward()
        self._call_at_end(self._end_uses)
        if self._key is not None:  # otherwise a sequence begins, which is an event too
            self._defer("beginning of a backward")
            self._is_past_forward = True

    def _call_at_end(self, function: Callable[[], None]) -> None:
        """Makes the running backward call a function of this runner at its end, after those it has been given before.

        Several models may share a backward. Each starts its last reductions before any of them waits for other ranks.
        """

        def end() -> None:
            self._backward_callback = None
            try:
                function()
            except BaseException:
                self.abort()
                raise

        self._backward_callback = weakref.ref(end, functools.partial(_to_sharded_after_failure, weakref.ref(self)))
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _end_uses(self) -> None:
        """Ends the uses of a backward, and starts the reductions of units whose own end it has not reached."""
        self.calls.end_failed(self.end_forward, backward_ends=True)
        event = self._reach("end of a backward")
        for unit in self.units:
            if unit.backwards:
                self._start_reduction(unit)
            elif not unit.unit_options.reduces:
                unit.accumulate_gradients()
            unit.backwards.clear()
            if not unit.forwards:
                unit.to_sharded()
        self.open = [index for index, unit in enumerate(self.units) if unit.is_open]
        self._change_use("forward" if self.open else "backward")  # forward: a backward within a forward
        self._call_at_end(functools.partial(self._end_backward, event))

    @torch.no_grad()
    def _end_backward(self, event: str) -> None:
        """Reduces gradients that are left, and ends the sequence if no unit is open. `event`: a text, to compare."""
        self.reductions.end_backward(event)
        self._is_past_forward = False
        for unit in self.units:
            unit.end_backward()
        if not self.open:
            self._end_sequence()

    def _key_of(self, units: tuple[int, ...], kind: str) -> Key:
        """Returns the key of a sequence that begins now, with a use of these units."""
        reduces = tuple(unit.unit_options.reduces for unit in self.units)
        accumulates = tuple(not unit.unit_options.reduces or unit.has_accumulated_gradients for unit in self.units)
        return Key(units, kind, torch.is_grad_enabled() or is_in_backward(), reduces, accumulates)

    def _end_sequence(self) -> None:
        """Ends the sequence. Makes its schedule if it had none or did not follow it, and again after it was timed."""
        key, uses, plan, clock, is_too_long = self._key, self._uses, self._plan, self._clock, self._is_too_long
        activations = self._activations
        self._drain()
        copies = [[] if unit.host_copies is None else unit.host_copies.end_timing() for unit in self.units]
        self._key = None
        if key is None or not uses or is_too_long:
            return
        while key not in self._plans and len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        if plan is None or not same_uses(plan.uses, uses):
            self._make_plan(key, uses, None, {})
        elif clock is not None and plan.timed is None:
            times = self._agreed_times(scheduler.own_times(clock, copies, plan.schedule, activations))
            self._make_plan(key, uses, times, {})
        if clock is not None and scheduler.listener is not None:
            scheduler.listener.add_step(self._plans[key].schedule, [unit.name for unit in self.units], clock, copies)

    def _agreed_times(self, times: Times) -> Times:
        """Returns times that are equal on all ranks, from those of this rank; zeros if units are on several meshes."""
        return scheduler.agreed_times(times, {w.mesh for unit in self.units for w in unit.weights}, self.device)

    def reschedule(self) -> None:
        """Makes all schedules again with the current unit options, for the sequences that begin after this call."""
        options = options_key(self.units)
        for key, plan in self._plans.items():
            if self._chunked_units or options not in plan.variants:
                self._make_plan(key, plan.uses, plan.timed, plan.variants)
            else:
                self._plans[key] = plan.variants[options]

    def _make_plan(self, key: Key, uses: list[Use], timed: Times | None, variants: dict[Hashable, Plan]) -> None:
        """Makes the schedule of later sequences with this key. Grows the arena now, because a captured step cannot."""
        limits = {"memory_limit": self.memory_limit, "prefetch": self.prefetch}
        schedule = make_schedule(self.units, self._chunked_units, self._recomputed, key, uses, timed, **limits)
        if self._arena.numel() < schedule.arena_bytes:
            self._arena = empty_bytes(schedule.arena_bytes, self.device)
        variants[options_key(self.units)] = self._plans[key] = Plan(uses, schedule, timed, variants)

    def _drain(self, keeps_held: bool = True) -> None:
        """Waits for all transfers, releases units, and resets the sequence. `keeps_held`: keep held units."""
        with torch.no_grad():
            self.reductions.finish()  # also those scheduled to end in later uses, which may not run
        for unit in self.units:
            if unit.is_resident and not (keeps_held and unit.is_held):
                unit.release()
            with torch.no_grad():
                unit.end_step()
        self._activations.end()
        self._uses = []
        self._is_in_use = self._is_too_long = self._is_past_forward = False
        self.reductions.comparisons.compares_transfers = False
        self._plan = self._clock = None

    def _change_use(self, kind: str) -> None:
        """Ends the running use, and begins a use of the open units, if any. Called when the set of open units changes.

        `kind`: kind of the use that begins.
        """
        units = tuple(self.open)
        key = self._key_of(units, kind) if self._key is None else self._key
        self._streams.order()
        with torch.no_grad():
            if self._is_in_use:
                self._end_use(len(self._uses) - 1)
            self._is_in_use = bool(units)
            if not units:
                return
            if self._key is None:
                self._begin_sequence(key)
            if len(self._uses) == MAX_USES:
                self.reductions.finish()
                self._uses, self._plan, self._clock, self._is_too_long = [], None, None, True
            self._uses.append(Use(units, kind, [], []))
            self._begin_use(len(self._uses) - 1)
            if len(self._uses) == 1:
                self._start_refreshes()

    def _start_refreshes(self) -> None:
        """Starts to refresh all units whose gathers have not begun, in the order of their uses."""
        planned = [index for use in self._plan.uses for index in use.units] if self._plan is not None else []
        for index in dict.fromkeys([*planned, *range(len(self.units))]):
            self.units[index].start_refresh()

    def _begin_sequence(self, key: Key) -> None:
        """Begins to follow the schedule of the key, if there is one, and marks gathered weights as stale if their
        parameters were written. Sets the scales of quantized weights."""
        self._uses = []
        plan = self._plans.get(key)
        self._defer(key.text(self.units) + ("" if plan is None else ", scheduled"))
        self._key, self._plan = key, plan
        self._is_past_forward = key.kind != "forward"
        self.reductions.comparisons.compares_transfers = plan is None and self.reductions.comparisons.are_complete
        self._activations = scheduler.begin_activations(None if self._plan is None else self._plan.activations)
        is_timed = scheduler.listener is not None or (self._plan is not None and self._plan.timed is None)
        self._clock = Clock(self.device) if is_timed else None
        for unit in self.units:
            if is_timed and unit.host_copies is not None:
                unit.host_copies.begin_timing()
        for chunks in self._chunked_units:
            chunks.begin_step()
        if self._chunked_units:
            first = self.num_forwards + (key.kind == "backward")
            self._chunked_by_sequence.append((first, frozenset() if self._plan is None else self._plan.units_in_chunks))
            del self._chunked_by_sequence[:-MAX_USES]
        for unit in self.units:
            if not unit.forwards and not is_in_backward():  # `begin_forward` has done this for the unit that opens
                unit.adopt_changes(key.records)
        self._forget_written_copies()
        scaled = [unit for unit in self.units if any(w.gather.format.needs_amax for w in unit.weights)]
        for unit in scaled:
            unit.start_refresh()
        weights = (weight for unit in scaled for weight in unit.weights)
        set_scales(weight.scale_request for weight in weights if weight.gather.format.needs_amax)

    def _begin_use(self, index: int) -> None:
        """Begins a use: starts the gathers that the schedule assigns to it, and waits for those it needs."""
        use = self._uses[index]
        if self._plan is not None:
            planned = self._plan.uses[index] if index < len(self._plan.uses) else None
            if planned is None or (planned.units, planned.kind) != (use.units, use.kind):
                self._leave_schedule(index, use.text(self.units))
        gathered = self._plan.gathers.get(index, ()) if self._plan is not None else ()
        if index > 0 and not all(self.units[unit].is_prepared for unit, *_ in gathered):
            self._leave_schedule(index, f"{use.text(self.units)}, after a write")
        self._activations.begin_use(index, self._plan is not None)
        for unit, place, in_chunks in gathered if self._plan is not None else ():
            self._gather_ahead(self.units[unit], place, self._chunked_units[unit] if in_chunks else None)
        resident = (self.units[unit] for unit in use.units if self.units[unit].is_resident)
        if self._plan is not None and any(unit.is_stale for unit in resident):
            self._leave_schedule(index, f"{use.text(self.units)}, written since their gather", has_gathered=True)
        self._gather_now(use.units, self._plan.gathers_in_chunks[index] if self._plan is not None else set())
        if use.kind == "backward":
            reduces = self._plan.reduces_in_chunks[index] if self._plan is not None else set()
            for unit_index in use.units if self._chunked_units else ():
                self._chunked_units[unit_index].begin_backward(unit_index in reduces)
                if self.units[unit_index].chunked_gather is not None:
                    self._chunked_units[unit_index].gather_full(only_read=True)
        if self._clock is not None:
            self._clock.mark()

    def _gather_ahead(self, unit: Unit, place: slice, chunks: ChunkedUnit | None) -> None:
        """Starts a scheduled gather in a range of the arena. `chunks`: weights to gather in chunks during the use."""
        if unit.is_resident and not unit.is_stale:
            return  # gathered by `unshard`, or in the previous step
        if unit.is_resident:
            unit.release()
        unit.set_chunked_gather(chunks)
        unit.start_scheduled_gather(self._arena[place])

    def _gather_now(self, needed: Iterable[int], in_chunks: set[int]) -> None:
        """Waits for the gathers of these units, and starts those that were not started ahead.

        `in_chunks`: indices of units that are gathered in chunks in this use.
        """
        for unit_index in needed:
            unit = self.units[unit_index]
            unit.is_unsharded = False
            lacks_weights = unit.chunked_gather is not None and unit_index not in in_chunks
            if unit.is_resident and (unit.is_stale or lacks_weights):
                unit.release()
            if not unit.is_resident:
                unit.start_gather_alone()
            unit.finish_gather()

    def _end_use(self, index: int) -> None:
        """Ends a use: releases weights, and waits for the reductions that must end by then."""
        if self._clock is not None:
            self._clock.end()
        for unit_index in self._uses[index].units:
            self._record_gradients(unit_index)
        if self._plan is not None:
            release(self.units, self._arena, self._plan, index)
            self.reductions.finish(index)
        else:
            for unit in self.units:
                if unit.is_resident and not (unit.is_open or unit.is_held or unit.is_left_unsharded):
                    unit.release()

    def _record_gradients(self, unit: int) -> None:
        """Records the full gradients that the running use has computed, if this sequence will be scheduled."""
        if self._chunked_units and self._uses and (self._plan is None or self._clock is not None):
            self._uses[-1].computed.extend((unit, which) for which in self._chunked_units[unit].new_gradients())

    def _start_reduction(self, unit: Unit) -> None:
        """Starts to reduce the unit's gradients after its backward, or keeps them if it does not reduce."""
        unit_index = self._index[id(unit)]
        self._record_gradients(unit_index)
        with torch.no_grad():
            if not unit.unit_options.reduces:
                unit.accumulate_gradients()
                return
            is_scheduled = self._reach_reduction(unit_index)
            reduction = self.reductions.start(unit_index)
            if not is_scheduled:
                self._gather_now(self.open, set())  # the schedule may have released units that are open here
            if reduction is None:
                return
            index = len(self._uses) - 1
            if self._uses:
                self._uses[index].gradients.append(unit_index)
            if self._plan is None:
                self.reductions.finish(index)  # without a schedule, one reduction runs at a time
            finish = index if self._plan is None else self._plan.finishes.get((unit_index, index), index)
            self.reductions.add(finish, reduction)


def _to_sharded_after_failure(runner: weakref.ref[Runner], freed: object) -> None:
    """Gives modules their sharded parameters after a failed backward. `freed`: reference to its callback, now dead."""
    if (found := runner()) is not None and found._backward_callback is freed:
        for unit in found.units:
            unit.to_sharded()
