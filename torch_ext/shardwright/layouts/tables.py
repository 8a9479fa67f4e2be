"""Defaults for plans and products: pinned plans, measurements of `calibrate`, and the environment's topology.

They form one immutable value, `current`, which is replaced on a change. It is part of the keys of caches
(`executables.PlanningCache`), so a change takes effect at once. It must be equal on all ranks: all ranks pin or measure
at the same point of their programs. Measurements are dropped when the default process group ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from .._planner import GemmModel, Lowering, PlanningTables, Topology

_log = logging.getLogger("shardwright")

current = PlanningTables()
_was_noted = False  # True once `note_default` has logged

# Functions to call after each change of `current`.
change_hooks: list[Callable[[], None]] = []


def change(tables: PlanningTables) -> None:
    """Replaces `current`, and calls the functions in `change_hooks`."""
    global current
    if tables == current:
        return
    current = tables
    for changed in change_hooks:
        changed()


def set_measured(backend: str, topology: Topology, gemm_models: Mapping[tuple[str, str], GemmModel]) -> None:
    """Makes plans over `backend`, and products, use these measurements unless they are given others."""
    change(current.with_measured(backend, topology, dict(gemm_models)))


def forget_measured() -> None:
    """Makes plans and products use the defaults again. All ranks must call this at the same point."""
    change(current.without_measured())


def measured_topology(backend: str) -> Topology | None:
    """Returns the topology that `calibrate` measured over a backend, or None."""
    return current.measured_topology(backend)


def measured_gemm_model(device_type: str, dtype: str) -> GemmModel | None:
    """Returns the times of products that `calibrate` measured, or None."""
    return current.measured_gemm_model(device_type, dtype)


def default_gemm_model(device_type: str) -> GemmModel:
    """Returns the built-in times of products of a device type."""
    return Lowering.of_device(device_type).default_gemm_model


def notes_default() -> bool:
    """Returns True if `note_default` would log: it has not yet, and the logger shows its level."""
    return not _was_noted and _log.isEnabledFor(logging.INFO)


def note_default(table: str) -> None:
    """Logs, once per process, that plans are chosen with a default table."""
    global _was_noted
    if notes_default():
        _was_noted = True
        _log.info("plans are chosen with the default table %r; shardwright.calibrate() measures this machine", table)
