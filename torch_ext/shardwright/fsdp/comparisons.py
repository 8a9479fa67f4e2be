"""Comparisons of what the ranks of a model do, before any of them waits for a transfer that others do not start.

Ranks compare at *events*:

    first use of a model       before they compare its units and arguments
    beginning of a sequence    before its first transfer, with the next event if it has none
    beginning of a backward    before its first transfer, with the next event if it has none
    each gather and reduction  before it starts, in a sequence that follows no schedule
    leaving a schedule         after the transfers that the schedule has before its next event (departures.py)
    end of a backward          before the reduction of gradients that were not reduced yet
    end of a forward           if it is without gradients

So ranks that follow a schedule compare three times in a training step. In each comparison, ranks take the bytewise
maximum of a message of `HEAD_BYTES` over all dims of a mesh. The message begins with a digest of the event and of all
transfers since the last one. If digests differ, ranks exchange texts, and all of them raise. All events have messages
of the same size, so ranks at different events can still compare.

If a mesh has groups without a CPU backend (NCCL alone), a comparison would make the host wait for the device. Ranks of
such a mesh compare only at the ends of forwards and backwards. If they started different transfers of equal sizes
before, data was mixed up by then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._native import _runtime
from ..runtime import agreement, checking
from ..runtime.agreement import MeshWords, Statement
from .units import Unit, by_mesh

WeightIndex = tuple[int, int]  # indices of a unit and of a weight in it

HEAD_BYTES = 256  # size of the message of each comparison
_DIGEST_BYTES = 8


class _Latest(NamedTuple):
    """The latest model that the ranks of a mesh have compared."""

    model: int = 0  # number of the model
    unit: int = 0  # number of its first unit


_latest: dict[tuple[int, ...], _Latest] = {}  # by ranks of the mesh, because ranks may have models on other meshes too


class Comparisons:
    """Comparisons between the ranks of one model."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self.compares_transfers = False  # each gather and reduction is an event
        self._deferred: list[str] = []  # events to compare before the next transfer
        self.gathered: list[Unit] = []  # since the last event
        self.started: list[tuple[int, tuple[int, ...]]] = []  # reductions in this backward: unit index, weight indices
        # An error in the running backward. It is raised at the end, because other ranks wait for transfers until then.
        self.error: RuntimeError | None = None
        self.on_mesh: dict[DeviceMesh, list[WeightIndex]] = {}
        for unit_index, unit in enumerate(units):
            for which, weight in enumerate(unit.weights):
                self.on_mesh.setdefault(weight.mesh, []).append((unit_index, which))
        # Indices of the units with a weight on each mesh, and of all units.
        self._units_on = {mesh: {unit_index for unit_index, _ in found} for mesh, found in self.on_mesh.items()}
        self._index_of = {unit: index for index, unit in enumerate(units)}
        # By mesh, the number of this model: equal on all ranks of the mesh, different for each model there.
        self._models = dict.fromkeys(self.on_mesh, 0)
        self._words = {mesh: MeshWords(mesh, device) for mesh in self.on_mesh}
        self._are_slow = {mesh: not all(map(agreement.has_cpu, mesh.get_all_groups())) for mesh in self.on_mesh}

    @property
    def is_captured(self) -> bool:
        """True if a graph captures the device's work, so that the host cannot wait for other ranks."""
        return self._device.type != "cpu" and _runtime.is_capturing(self._device.type)

    @property
    def are_complete(self) -> bool:
        """True if ranks compare at all events on all meshes, and there are several ranks."""
        is_alone = all(mesh.size() == 1 for mesh in self.on_mesh)
        return not is_alone and not any(self._are_slow.values()) and not self.is_captured

    def defer(self, event: str) -> None:
        """Compares an event before the next transfer, or with the next event if that comes first."""
        if any(self._are_slow.values()):
            self.compare(event)
        elif not self.is_captured:
            self._deferred.append(event)

    def compare(
        self, event: str, is_end: bool = False, tables: Mapping[DeviceMesh, bytes] | None = None
    ) -> dict[DeviceMesh, bytes]:
        """Compares an event and the transfers before it with other ranks. Collective.

        Args:
            event: a text that is equal on all ranks, for errors.
            is_end: compare also on slow meshes, if weights were gathered there.
            tables: bytes to exchange on some meshes, in equal numbers on all ranks.

        Returns:
            The maximum of each byte of the tables over the ranks of their mesh; nothing in a capture.

        Raises:
            ValueError: on all ranks of a mesh that differ. A rank with an `error` raises that instead.
        """
        tables, largest = tables or {}, {}
        event = "; ".join([*self._deferred, event])
        for mesh in () if self.is_captured else self.on_mesh:
            gathers = (weight.mesh == mesh for unit in self.gathered for weight in unit.weights)
            if mesh in tables or not self._are_slow[mesh] or (is_end and any(gathers)):
                largest[mesh] = self._exchange(mesh, event, tables.get(mesh, b""))
        if is_end or not any(self._are_slow.values()):
            self.forget()
            if self.error is not None:
                raise self.error
        return largest

    def compare_units(self, options: Mapping[str, object]) -> None:
        """Compares units and options between ranks. Collective among the ranks of the units' meshes.

        Raises:
            ValueError: on all ranks of a mesh if they differ.
        """
        self.compare(f"first use of {self._units[0].name}")
        for mesh, on_mesh in by_mesh(self._units).items():
            # Two models may have equal units. Then only the order in which they were made and used tells them apart.
            ranks, number = tuple(mesh.mesh.flatten().tolist()), self._units[0].number
            latest = _latest.get(ranks, _Latest())
            order = "after" if number > latest.unit else "before"
            options = {**options, "order of calls": f"{order} the model that was used last"}
            units = {f"unit {i}": f"{unit.name}: {unit.description}" for i, unit in enumerate(on_mesh)}
            fields = {"number of units": len(on_mesh), **{name: str(value) for name, value in options.items()}, **units}
            mismatch = "have different modules or arguments"
            remedy = "Pass the same modules and arguments, in the same order, on all ranks of a mesh"
            words = self._words[mesh]
            words.compare(Statement("sw.fully_shard", fields, {}, mismatch, remedy))
            (self._models[mesh],) = words.largest([latest.model + 1], "sw.fully_shard, comparing models")
            _latest[ranks] = _Latest(self._models[mesh], number)

    def _exchange(self, mesh: DeviceMesh, event: str, table: bytes) -> bytes:
        """Compares like `compare` on one mesh. Returns the maximum of each byte of `table` over its ranks."""
        words = self._words[mesh]
        message = self._digest(mesh, event) + table
        step = f"sw.fully_shard, comparing the {event}"
        head = bytes(words.largest(message[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), step))
        self._check(words, event, head)
        rest = message[HEAD_BYTES:]
        return (head[2 * _DIGEST_BYTES :] + (bytes(words.largest(rest, step)) if rest else b""))[: len(table)]

    def forget(self) -> None:
        """Forgets the events and gathers that were not compared yet."""
        self._deferred, self.gathered = [], []

    def note_gather(self, unit: Unit) -> None:
        """Notes that a gather of a unit starts, after a comparison if it is an event."""
        self._note("gather" if unit.is_prepared else "gather after a write", unit)
        self.gathered.append(unit)

    def note_reduction(self, unit_index: int, which: Sequence[int]) -> None:
        """Notes that a reduction of weights of a unit starts, after a comparison if it is an event."""
        self._note("reduction", self._units[unit_index])
        self.started.append((unit_index, tuple(which)))

    def _note(self, kind: str, unit: Unit) -> None:
        event = f"{kind} of {unit.name}"
        if checking.is_on():
            for mesh in dict.fromkeys(weight.mesh for weight in unit.weights):
                mine = Statement("sw.fully_shard", {kind: unit.name})
                checking.compare_calls(mine, mesh.mesh.flatten().tolist(), dist.get_rank(), event)
        if self.compares_transfers or self._deferred:
            self.compare(event)

    def _digest(self, mesh: DeviceMesh, event: str) -> bytes:
        """Returns a digest of an event and of the transfers on a mesh, followed by its bytewise complement.

        Ranks agree if and only if the maximum of each byte over ranks and that of its complement sum to 255. Example:
        bytes 3 and 5 have complements 252 and 250, and the maxima 5 and 252 sum to 257.
        """
        units = self._units_on[mesh]
        gathered = [index for unit in self.gathered if (index := self._index_of[unit]) in units]
        started = [each for each in self.started if each[0] in units]
        text = repr((self._models[mesh], event, gathered, started, str(self.error)))
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
        return digest + bytes(255 - byte for byte in digest)

    def _check(self, words: MeshWords, event: str, head: bytes) -> None:
        """Raises on all ranks if digests differ. `head` begins with the bytewise maxima of `_digest`."""
        pairs = zip(head[:_DIGEST_BYTES], head[_DIGEST_BYTES : 2 * _DIGEST_BYTES])
        if all(largest + complement == 255 for largest, complement in pairs):
            return
        mismatch = "have used different modules in this step, or some have failed; its gradients are not valid"
        remedy = "Run the same units in the same order on all ranks of a mesh"
        mine = Statement("sw.fully_shard", self._texts(words.mesh, event), mismatch=mismatch, remedy=remedy)
        self.forget()
        try:
            words.compare(mine)
        except ValueError as error:
            raise error if self.error is None else self.error from error

    def _texts(self, mesh: DeviceMesh, event: str) -> dict[str, str]:
        """Returns what ranks compare on a mesh, as texts for an error."""

        def named(unit: Unit, which: Sequence[int]) -> str:
            return f"{unit.name} ({', '.join(w.name for w in (unit.weights[i] for i in which) if w.mesh == mesh)})"

        gathered = [named(unit, range(len(unit.weights))) for unit in self.gathered]
        reduced = [named(self._units[unit_index], which) for unit_index, which in self.started]
        texts = {
            "model": str(self._models[mesh]),
            "event": event,
            "gathered": "; ".join(gathered),
            "reduced": "; ".join(reduced),
        }
        texts["error"] = "" if self.error is None else str(self.error)
        return {name: text or "none" for name, text in texts.items()}
