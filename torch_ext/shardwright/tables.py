"""What plans and products go by where a call does not say: pinned plans, what `calibrate` measured, the environment.

All of it is one immutable value, `current`, which is replaced and never changed. What was made under one value is kept
under it (`executables.Kept`), so a change shows at once, whoever had planned what before. The value must be the same on
all ranks: what is measured or pinned is set by all of them at one point of their programs, and measurements are
forgotten with the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ._planner import GemmModel, PlanningTables, Topology

_log = logging.getLogger("shardwright")

current = PlanningTables()
_said = False

# Called after each change of `current`.
when_changed: list[Callable[[], None]] = []

# What operands of another dtype go by: figures are per operand of 16 bits, and are scaled by size.
_LIKE = ("bfloat16", "float16", "float32", "float64")


def change(tables: PlanningTables) -> None:
    """From now on plans and products go by these."""
    global current
    if tables == current:
        return
    current = tables
    for changed in when_changed:
        changed()


def set_measured(backend: str, topology: Topology, gemm_models: Mapping[tuple[str, str], GemmModel]) -> None:
    """From now on plans over `backend` and products go by these, unless they are given others."""
    change(current.with_measured(backend, topology, dict(gemm_models)))


def forget_measured() -> None:
    """Plans and products go by the defaults again. To be called by all ranks at the same point."""
    change(current.without_measured())


def measured_topology(backend: str) -> Topology | None:
    return current.measured_topology(backend)


def measured_gemm_model(device_type: str, dtype: str) -> GemmModel | None:
    for like in (dtype, *_LIKE):
        found = current.measured_gemm_model(device_type, like)
        if found is not None:
            return found
    return None


def default_gemm_model(device_type: str) -> GemmModel:
    return GemmModel.named("cpu" if device_type == "cpu" else "h100")


def note_default(table: str, speaks: Callable[[], bool]) -> None:
    """Says once in this process, where `speaks` is true, that choices are made by a default table."""
    global _said
    if _said:
        return
    _said = True
    if speaks():
        _log.warning(
            "plans and the chunks of products are chosen by %r, a default of about the right order of magnitude that "
            "nobody has measured here. Call shardwright.calibrate() once on all ranks, after init_process_group: it "
            "takes seconds, and what is planned later goes by what it measures",
            table,
        )
