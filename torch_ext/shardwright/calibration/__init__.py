"""Measures a running job for planning: the latencies and bandwidths of a `Topology`, and times of matrix products.

All ranks take part in each measurement at the same time, because in a redistribute all groups of a mesh dim move data
at once and share network, memory and cores. `job` describes the ranks, `links` measures links, `products` products.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..layouts import argument_values, tables
from ..layouts.topology import Topology
from ..runtime import groups
from .job import job_of
from .links import measure_links, num_link_rounds, traffic_of
from .products import calibrate_gemm, check_dtype, measure_products, num_product_rounds, report_of

__all__ = ["calibrate", "calibrate_gemm", "forget"]

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
    progress: bool = False,
) -> Topology:
    """Measures the links and products of a job in a few seconds. Later plans use the result.

    All ranks of the group must call this at the same point, while they do nothing else; once, after
    ``init_process_group``, is enough. Process groups that it makes are kept for redistributes, like those of `prepare`.
    The first rank logs the measurements at level INFO.

    Later redistributes and products of this job over the same backend use the measurements until `forget`
    or the end of the default process group, unless they are given a topology (or their mesh has one) or a
    ``gemm_model``. Without measurements, rank 0 logs once, at level INFO of the logger ``shardwright``, that a built-in
    table was used where another table could change the plan.

    Args:
        group: the group whose ranks to measure; default, the default group. A mesh is also accepted, as for `mesh`.
        device: the device of the tensors to be redistributed, ``"cpu"`` or ``"cuda"``; it decides the backend.
            Default: the mesh's device, else CUDA if the group has NCCL, else CPU.
        ranks_per_node: the number of consecutive ranks on a node, 0 for all. Default: torchrun's ``LOCAL_WORLD_SIZE``,
            else according to the host names of the ranks.
        name: the name of the topology, which plans show.
        mesh: a torch ``DeviceMesh`` within the group; each of its mesh dims gets a link of its own, by name.
        quick: use fewer sizes and repeats, for rougher results.
        dtypes: the dtypes of the products to measure: floating types of 16 bits and more. Other dtypes use these
            measurements, scaled by size. If empty, no products are measured.
        apply: use the measurements for later plans and products. Default: only if all ranks of the job were measured,
            since tables must be equal on all ranks.
        progress: True for a bar on rank 0 if stderr is a terminal, with tqdm if it is installed.

    Returns:
        A `Topology`, equal on all ranks, with times in picoseconds per collective, per message and per KiB. On one node
        `between` is `inside`. Rates are at least 1; latencies that are lost in noise are 0.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: there are fewer than 2 ranks, this rank is outside the group, the mesh reaches beyond the group or
            is not a DeviceMesh, nodes do not hold the same number of consecutive ranks each, a dtype cannot be
            measured, or `apply` is True for a part of the job.
    """
    if argument_values.is_device_mesh(group) and mesh is None:
        group, mesh = None, group
    job = job_of(group, device, mesh, quick)
    has_all_ranks = len(job.members) == dist.get_world_size()
    if apply and not has_all_ranks:
        raise ValueError(
            f"apply must be False for a part of the job, got True for {len(job.members)} of {dist.get_world_size()} "
            "ranks. Plans would differ between ranks. Pass the topology to sw.Mesh instead, for plans on these ranks"
        )
    wanted = argument_values.items(dtypes, "dtypes", "a list of dtypes, such as [torch.float32]")
    for dtype in wanted:
        check_dtype("dtypes", dtype)
    num_rounds = num_link_rounds(quick) + len(wanted) * num_product_rounds(quick, with_traffic=job.device.type == "cpu")
    with job.ranks.showing(num_rounds if progress else 0):
        topology, report = measure_links(job, ranks_per_node, name, mesh)
        gemm_models = {}
        for dtype in wanted:
            model = measure_products(job.ranks, job.device, dtype, traffic_of(job, topology), quick)
            gemm_models[job.device.type, argument_values.dtype_text(dtype)] = model
            report.append(report_of(dtype, model))
    if apply or (apply is None and has_all_ranks):
        tables.set_measured(job.lowering.name, topology, gemm_models)
    if dist.get_rank(job.ranks.group) == 0:
        logger.info("\n".join(report))
    return topology


def forget() -> None:
    """Makes plans and products use the default tables again. All ranks must call this at the same point."""
    tables.forget_measured()


groups.default_group_gone_hooks.append(tables.forget_measured)
