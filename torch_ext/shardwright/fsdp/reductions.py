"""Reductions of a model's gradients, and the agreement of ranks at the end of a step.

All ranks reduce the same weights of a unit, even if they have gradients of different weights, because routing or a
condition picks different modules on each rank. A rank without a gradient of a weight contributes zeros.

    at the end of             reduced weights
    the backward of a unit    weights that had a gradient on some rank in the latest backward; at first all trained ones
    the entire backward       weights that have a gradient on some rank that was not reduced yet

Before the second reduction, ranks exchange which weights they had gradients of. If no rank had a gradient of a weight,
its sum is dropped, so that `.grad` stays None as in an unsharded model.

If ranks have gathered or reduced different units, messages of equal sizes were mixed up, and all ranks raise an error:
at the end of the backward, of a forward without gradients, or, if no backward has followed a forward, in the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._native import _runtime
from ..runtime import checking
from ..runtime.agreement import MeshWords, Statement
from .gradients import Reduction
from .units import Unit
from .weights import Weight

WeightIndex = tuple[int, int]  # indices of a unit and of a weight in it


class Reductions:
    """The reductions of one model."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._in_flight: list[tuple[int, Reduction]] = []  # (use whose end waits for it, reduction)
        self._started: list[tuple[int, tuple[int, ...]]] = []  # in this backward: (unit index, weight indices)
        self._gathered: list[Unit] = []  # since ranks last compared
        self._used: set[WeightIndex] = set()  # weights that had a gradient on some rank at the latest `_agree`
        self._on_mesh: dict[DeviceMesh, list[WeightIndex]] = {}
        for unit_index, unit in enumerate(units):
            for which, weight in enumerate(unit.weights):
                self._on_mesh.setdefault(weight.mesh, []).append((unit_index, which))

    def start(self, unit_index: int, which: Sequence[int] | None = None) -> Reduction | None:
        """Starts to reduce gradients of a unit. Returns None if there is nothing to reduce.

        `which`: indices of weights; default: weights that had a gradient on some rank in the latest backward.
        """
        unit = self._units[unit_index]
        if which is None:
            which = [i for i, weight in enumerate(unit.weights) if weight.is_expected and weight.sharded.requires_grad]
        self._compare_calls("reduction", unit)
        self._started.append((unit_index, tuple(which)))
        return unit.start_reduction([unit.weights[i] for i in which])

    def note_gather(self, unit: Unit) -> None:
        """Notes that a gather of a unit starts. Under `check_ranks`, all ranks compare the unit before."""
        self._compare_calls("gather", unit)
        self._gathered.append(unit)

    def _compare_calls(self, kind: str, unit: Unit) -> None:
        if checking.is_on():
            for mesh in dict.fromkeys(weight.mesh for weight in unit.weights):
                mine = Statement("sw.fully_shard", {kind: unit.name})
                checking.compare_calls(mine, mesh.mesh.flatten().tolist(), dist.get_rank(), f"{kind} of {unit.name}")

    def compare_gathers(self) -> None:
        """Raises ValueError on all ranks of a mesh that have gathered different units. Collective if there were any."""
        for mesh in self._on_mesh if self._gathered and not self._is_captured else ():
            if any(weight.mesh == mesh for unit in self._gathered for weight in unit.weights):
                self._check(mesh, bytes(MeshWords(mesh, self._device).largest(self._digest(mesh))))
        self._gathered = []

    @property
    def _is_captured(self) -> bool:
        return self._device.type != "cpu" and _runtime.is_capturing(self._device.type)

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
        in_flight, self._in_flight, self._started = self._in_flight, [], []
        for _, reduction in in_flight:
            reduction.discard()

    def end_backward(self) -> None:
        """Reduces gradients that are left on any rank, and waits for all reductions. Collective among the ranks of each
        mesh.

        Raises:
            ValueError: on all ranks of a mesh, if they have gathered or reduced different units.
        """
        reducing = [unit for unit in self._units if unit.unit_options.reduces]
        if not any(weight.sharded.requires_grad for unit in reducing for weight in unit.weights):
            if len(reducing) == len(self._units):  # all weights are frozen; otherwise a later backward compares
                self.compare_gathers()
            return
        for unit_index, late in self._agree().items():
            reduction = self.start(unit_index, late)
            if reduction is not None:
                self.add(0, reduction)
        self.finish()
        for unit_index in dict.fromkeys(unit_index for unit_index, _ in self._started):
            unit = self._units[unit_index]
            for which, weight in enumerate(unit.weights):
                weight.is_expected = (unit_index, which) in self._used or unit.unit_options.reduces_unused
                weight.end_backward(weight.is_expected)
        self._started = []

    def _agree(self) -> dict[int, list[int]]:
        """Returns, by unit index, the indices of weights that have an unreduced gradient on some rank. Sets `_used`.

        Collective among the ranks of each mesh: they take the maximum of a table of bytes, which begins with `_digest`
        and has the two `_flags` of each weight.
        """
        is_captured = self._is_captured
        late: dict[int, list[int]] = {}  # by unit: weights that were not reduced yet
        self._used = set()
        for mesh, indices in self._on_mesh.items():
            table = self._digest(mesh) + bytes(flag for index in indices for flag in self._flags(index))
            if not is_captured:
                table = bytes(MeshWords(mesh, self._device).largest(table))
            self._check(mesh, table)
            for i, index in enumerate(indices):
                had_gradient, is_unreduced = table[2 * _DIGEST_BYTES + 2 * i : 2 * _DIGEST_BYTES + 2 * i + 2]
                if had_gradient or is_unreduced:
                    self._used.add(index)
                if is_unreduced:
                    late.setdefault(index[0], []).append(index[1])
        self._gathered = []
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

    def _flags(self, index: WeightIndex) -> tuple[bool, bool]:
        """Returns two flags of this rank: it had a gradient of the weight; it must still reduce that gradient."""
        weight = self._weight(index)
        return weight.had_gradient, weight.has_gradient and self._units[index[0]].unit_options.reduces

    def _texts(self, mesh: DeviceMesh) -> dict[str, str]:
        """Returns the gathers and reductions that ranks compare on a mesh, as texts for an error."""

        def named(unit: Unit, which: Sequence[int]) -> str:
            return f"{unit.name} ({', '.join(w.name for w in (unit.weights[i] for i in which) if w.mesh == mesh)})"

        gathered = [named(unit, range(len(unit.weights))) for unit in self._gathered]
        reduced = [named(self._units[unit_index], which) for unit_index, which in self._started]
        return {"gathered": "; ".join(gathered) or "none", "reduced": "; ".join(reduced) or "none"}

    def _digest(self, mesh: DeviceMesh) -> bytes:
        """Returns a digest of the gathers and reductions on a mesh, followed by its bytewise complement.

        Ranks agree if and only if the maximum of each byte over ranks and that of its complement sum to 255. Example:
        bytes 3 and 5 have complements 252 and 250, and the maxima 5 and 252 sum to 257.
        """
        units = [index for index, unit in enumerate(self._units) if any(w.mesh == mesh for w in unit.weights)]
        gathered = [index for index in map(self._units.index, self._gathered) if index in units]
        started = [each for each in self._started if each[0] in units]
        digest = hashlib.blake2b(repr((gathered, started)).encode(), digest_size=_DIGEST_BYTES).digest()
        return digest + bytes(255 - byte for byte in digest)

    def _check(self, mesh: DeviceMesh, table: bytes) -> None:
        """Raises ValueError on all ranks if digests differ. `table` begins with the bytewise maxima of `_digest`."""
        pairs = zip(table[:_DIGEST_BYTES], table[_DIGEST_BYTES : 2 * _DIGEST_BYTES])
        if any(largest + complement != 255 for largest, complement in pairs):
            mismatch = "have used different modules in this step; their weights or gradients were mixed up"
            remedy = "Run the same units in the same order on all ranks of a mesh"
            mine = Statement("sw.fully_shard", self._texts(mesh), mismatch=mismatch, remedy=remedy)
            self._gathered = []
            MeshWords(mesh, self._device).compare(mine)


_DIGEST_BYTES = 8
