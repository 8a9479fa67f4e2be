"""Measures on a live job what plans are chosen by: the latencies and bandwidths of a `Topology`, times of products.

All ranks are busy with whatever is measured at the same time, because in a redistribute the groups of a mesh dim all
move at once and share network, memory and cores. `job` says who measures, `links` measures links, `products` products.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import argument_values, groups, tables
from ..topology import Topology
from .job import job_of
from .links import measure_links, traffic_of
from .products import check_dtype, measure_products, report_of

logger = logging.getLogger(__name__)


def calibrate(
    group: dist.ProcessGroup | Any | None = None,
    *,
    device: torch.device | str | None = None,
    ranks_per_node: int | None = None,
    name: str = "calibrated",
    mesh: Any | None = None,
    quick: bool = False,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    apply: bool | None = None,
) -> Topology:
    """Measures links and products on a job, in a few seconds; what is planned later goes by what was measured.

    To be called by all ranks of the group at the same point, while they do nothing else: once, after
    ``init_process_group``. Process groups that it makes are kept for redistributes, as those of `prepare` are. Logs
    what was measured, on the first rank, at level INFO.

    Later redistributes and products of this job over the same backend go by it, unless they are given a topology (or
    their mesh has one) or a ``gemm_model``, until `forget_calibration` or the end of the default process group.

    Args:
        group: whose ranks to measure; default, the default group. Or a mesh, as `mesh`.
        device: where the tensors are that shall be redistributed, ``"cpu"`` or ``"cuda"``: it decides the backend.
            Default: that of the mesh, else CUDA if the group has NCCL, else CPU.
        ranks_per_node: how many consecutive ranks are on a node, 0 for all. Default: what torchrun says
            (``LOCAL_WORLD_SIZE``), else as the host names of the ranks are.
        name: of the topology, for plans to say what they were chosen by.
        mesh: a torch ``DeviceMesh`` within the group; each of its mesh dims gets a link of its own, by name.
        quick: fewer sizes and repeats, for figures that are only about right.
        dtypes: of products to measure, floating, of 16 bits and more. Others go by these, scaled by size. Empty: none.
        apply: whether later plans and products go by it. Default: where all ranks of the job were measured, since
            tables have to be the same on all of them.

    Returns:
        A `Topology`, equal on all ranks, with times in picoseconds, per collective, per message, per KiB. On one node
        `between` is `inside`. Rates are at least 1; latencies may be 0, where none can be told from noise.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: fewer than 2 ranks, a rank outside the group, a mesh that reaches beyond it or is no DeviceMesh,
            nodes that do not hold the same number of consecutive ranks each, a dtype without products, `apply` for a
            part of the job.
    """
    if argument_values.is_device_mesh(group) and mesh is None:
        group, mesh = None, group
    job = job_of(group, device, mesh, quick)
    is_whole = len(job.members) == dist.get_world_size()
    if apply and not is_whole:
        raise ValueError(
            f"apply: True for {len(job.members)} of {dist.get_world_size()} ranks, whose plans would differ from the "
            "others'; allowed is all ranks of the job, or False and sw.Mesh(..., topology=) for plans on some"
        )
    wanted = argument_values.items(dtypes, "dtypes", "a list of dtypes, such as [torch.float32]")
    for dtype in wanted:
        check_dtype("dtypes", dtype)
    topology, report = measure_links(job, ranks_per_node, name, mesh)
    gemm_models = {}
    for dtype in wanted:
        model = measure_products(job.ranks, job.device, dtype, traffic_of(job, topology), quick)
        gemm_models[job.device.type, argument_values.dtype_text(dtype)] = model
        report.append(report_of(dtype, model))
    if apply or (apply is None and is_whole):
        tables.set_measured(job.backend, topology, gemm_models)
    if dist.get_rank(job.ranks.group) == 0:
        logger.info("\n".join(report))
    return topology


def forget_calibration() -> None:
    """Plans and products go by the default tables again. To be called by all ranks at the same point."""
    tables.forget_measured()


groups.when_gone.append(tables.forget_measured)
