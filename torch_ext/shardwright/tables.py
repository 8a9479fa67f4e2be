"""The tables behind every choice: what `calibrate` measured on this job, or else defaults, which are said once.

Plans go by a topology, chunks of products by a table of product times too. Both have to be the same on all ranks: what
is measured is set by all ranks of a job at one point of their programs, and forgotten with the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ._planner import GemmModel, Topology

_log = logging.getLogger("shardwright")

_topologies: dict[str, Topology] = {}  # by the lowering they are for, "gloo" or "nccl"
_gemm_models: dict[tuple[str, str], GemmModel] = {}  # by device type and dtype
_times_set = 0
_said = False

# What operands of another dtype go by: figures are per operand of 16 bits, and are scaled by size.
_LIKE = ("bfloat16", "float16", "float32", "float64")


def set_measured(backend: str, topology: Topology, gemm_models: Mapping[tuple[str, str], GemmModel]) -> None:
    """From now on plans over `backend` and products go by these, unless they are given others."""
    _topologies[backend] = topology
    _gemm_models.update(gemm_models)
    _changed()


def forget_measured() -> None:
    """Plans and products go by the defaults again. To be called by all ranks at the same point."""
    if _topologies or _gemm_models:
        _topologies.clear()
        _gemm_models.clear()
        _changed()


def measured_topology(backend: str) -> Topology | None:
    return _topologies.get(backend)


def measured_gemm_model(device_type: str, dtype: str) -> GemmModel | None:
    for like in (dtype, *_LIKE):
        found = _gemm_models.get((device_type, like))
        if found is not None:
            return found
    return None


def default_gemm_model(device_type: str) -> GemmModel:
    return GemmModel.named("cpu" if device_type == "cpu" else "h100")


def times_set() -> int:
    """Goes up with every change: what was kept from before may have been chosen by another table."""
    return _times_set


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


def _changed() -> None:
    global _times_set
    _times_set += 1
