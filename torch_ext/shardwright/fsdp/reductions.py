"""Reductions of a model's gradients, and the agreement of ranks at the end of a backward.

All ranks reduce the same weights of a unit, even if they have gradients of different weights, because routing or a
condition picks different modules on each rank. A rank without a gradient of a weight contributes zeros.

    at the end of             reduced weights
    the backward of a unit    weights that had a gradient on some rank in the latest backward; at first all trained ones
    the entire backward       weights that have a gradient on some rank that was not reduced yet

Before the second reduction, ranks exchange which weights they had gradients of. If no rank had a gradient of a weight,
its sum is dropped, so that `.grad` stays None as in an unsharded model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .agreed_layouts import NUM_CODES
from .comparisons import Comparisons, WeightIndex
from .gradients import Reduction
from .reads import written_error
from .units import Unit
from .weights import Weight


class Reductions:
    """The reductions of one model."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self.comparisons = Comparisons(units, device)
        self._in_flight: list[tuple[int, Reduction]] = []  # (use whose end waits for it, reduction)
        self._used: set[WeightIndex] = set()  # weights that had a gradient on some rank at the latest `_agree`

    def start(
        self, unit_index: int, which: Sequence[int] | None = None, drops_result: bool = False
    ) -> Reduction | None:
        """Starts to reduce gradients of a unit. Returns None if there is nothing to reduce.

        Args:
            which: indices of weights; default: weights that had a gradient on some rank in the latest backward.
            drops_result: contribute zeros and drop the result, so that gradients stay as they are.
        """
        unit = self._units[unit_index]
        which = self.expected(unit_index) if which is None else which
        self.comparisons.note_reduction(unit_index, which)
        return unit.start_reduction([unit.weights[i] for i in which], drops_result)

    def expected(self, unit_index: int) -> list[int]:
        """Returns the indices of weights of a unit that had a gradient on some rank in the latest backward."""
        weights = enumerate(self._units[unit_index].weights)
        return [which for which, weight in weights if weight.is_expected and weight.sharded.requires_grad]

    def add(self, last_use: int, reduction: Reduction) -> None:
        """Adds a reduction in progress. `last_use`: the use whose end waits for it."""
        self._in_flight.append((last_use, reduction))

    def finish(self, use: int | None = None) -> None:
        """Waits for the reductions that must end by the end of this use; default: all reductions."""
        for last_use, reduction in self._in_flight:
            if use is None or last_use <= use:
                reduction.finish()
        self._in_flight = [] if use is None else [each for each in self._in_flight if each[0] > use]

    def discard(self) -> None:
        """Waits for all reductions, but drops their results."""
        in_flight, self._in_flight = self._in_flight, []
        self.comparisons.started, self.comparisons.error = [], None
        for _, reduction in in_flight:
            reduction.discard()

    def end_backward(self, event: str) -> None:
        """Reduces gradients that are left on any rank, and waits for all reductions. Collective among the ranks of each
        mesh. `event`: see `Comparisons.compare`.

        Raises:
            ValueError: on all ranks of a mesh, if they differ.
        """
        self.comparisons.compares_transfers = False
        trained = [unit for unit in self._units if any(weight.may_have_gradient for weight in unit.weights)]
        if not any(unit.unit_options.reduces for unit in trained):
            # With frozen weights alone this is the end of the step; otherwise a later backward compares on slow meshes.
            self.comparisons.compare(event, is_end=not trained)
            self.comparisons.started = []
            return
        for unit_index, late in self._agree(event).items():
            reduction = self.start(unit_index, late)
            if reduction is not None:
                self.add(0, reduction)
        self.finish()
        for unit_index in dict.fromkeys(unit_index for unit_index, _ in self.comparisons.started):
            unit = self._units[unit_index]
            for which, weight in enumerate(unit.weights):
                weight.is_expected = (unit_index, which) in self._used or unit.unit_options.reduces_unused
                weight.end_backward(weight.is_expected)
        self.comparisons.started = []
        for unit in self._units:
            if unit.unit_options.reduces:
                unit.has_accumulated_gradients = False

    def _agree(self, event: str) -> dict[int, list[int]]:
        """Returns, by unit index, the indices of weights that have an unreduced gradient on some rank. Sets `_used`.

        Collective among the ranks of each mesh: they take the maximum of each weight's `_state`.
        """
        late: dict[int, list[int]] = {}  # by unit: weights that were not reduced yet
        self._used = set()
        complete = [unit for unit in self._units if unit.unit_options.reduces_over_replicas]
        if any(weight.gradients.has_partial_reduced for unit in complete for weight in unit.weights):
            self.finish()  # a reduction in flight may be that over the replicas
        states = {mesh: bytes(map(self._state, indices)) for mesh, indices in self.comparisons.on_mesh.items()}
        for unit in self._units:
            was_written = unit.is_resident and unit.is_stale and unit.unit_options.reduces
            if was_written and any(weight.has_gradient for weight in unit.weights):  # its forward ran no hook
                error = written_error(f"parameters of {unit.name} were")
                self.comparisons.error = self.comparisons.error or error
        states |= self.comparisons.compare(event, is_end=True, tables=states)
        is_captured = self.comparisons.is_captured
        for mesh, indices in self.comparisons.on_mesh.items():
            for index, byte in zip(indices, states[mesh], strict=True):
                state, code = divmod(byte, NUM_CODES)
                if state > 0:
                    self._used.add(index)
                if state > 0 and not is_captured:
                    self._weight(index).gradients.agree(code)
                if state == 2:
                    late.setdefault(index[0], []).append(index[1])
        if is_captured and late:
            names = [self._weight((unit, which)).name for unit, several in late.items() for which in several]
            raise RuntimeError(
                "the captured backward must use the same weights as the steps before the capture, got gradients also "
                f"of {', '.join(names)}. Run a step that uses them before the capture"
            )
        return late

    def _weight(self, index: WeightIndex) -> Weight:
        """Returns the weight at an index."""
        return self._units[index[0]].weights[index[1]]

    def _state(self, index: WeightIndex) -> int:
        """Returns a byte: a state times NUM_CODES, plus the number of the layout of the gradient.

        The state is 2 if this rank must still reduce a gradient of the weight, 1 if it only had one, 0 if it had none.
        """
        weight = self._weight(index)
        unit_options = self._units[index[0]].unit_options
        is_kept = weight.gradients.has_partial_reduced and unit_options.reduces_over_replicas
        must_reduce = (weight.has_gradient or is_kept) and unit_options.reduces
        state = 2 if must_reduce else int(weight.had_gradient)
        return NUM_CODES * state + (weight.layout_code if state > 0 else 0)
