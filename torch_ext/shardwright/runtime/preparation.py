"""Makes process groups at the start of a job, instead of at their first use: `prepare`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._native import _planner, _runtime
from .._planner import gradient_layout, has_gradient
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import Mesh
from ..planning import check_layout
from . import argument_checks, executables, groups


def prepare(
    mesh: Any,
    mesh_dims: Iterable[Sequence[int | str]] | None = None,
    *,
    redistributes: Iterable[tuple[_planner.Layout, _planner.Layout]] | None = None,
    device_type: str | None = None,
    peer_arena_bytes: int | None = None,
    peer_min_bytes: int = 1 << 20,
) -> None:
    """Makes the process groups that redistributes on `mesh` may need, now instead of at their first use.

    Also connects their ranks: on a device, the first operation of a group would otherwise make its communicator, which
    is not possible in a CUDA graph.

    The groups of a ``DeviceMesh`` belong to it: redistributes on other meshes, or without a mesh, do not use them.
    Under ``make_groups=False``, plans on one mesh use those of `mesh_dims`, and not those of `redistributes`.

    All ranks of the mesh must call this at the same point, with the same arguments; if `redistributes` include other
    meshes, all ranks of these too.

    A plan may use groups over any set of mesh dims, and for every set there are layouts that need it. So by default all
    groups are made: 2^n - 1 sets for n mesh dims larger than 1. On NCCL each is a communicator, with device buffers.

    Args:
        mesh: a torch ``DeviceMesh`` or a `Mesh`.
        mesh_dims: sets of mesh dims, by name or index, each the span of one group, e.g. ``[("dp", "tp")]``. Default:
            every set of mesh dims, or none if `redistributes` are given.
        redistributes: pairs of layouts, source and destination, of which one or both are on this mesh. Only the groups
            that the plans of these pairs and of their gradients need are made.
        device_type: the device type of the tensors; the groups are connected on its current device. Default: the
            DeviceMesh's; else the accelerator's if the default group has a backend for it; else ``"cpu"``.
        peer_arena_bytes: bytes of memory, on each device and for each of these groups, through which their gathers and
            messages are sent as copies between peers. All ranks of a group must be able to read each other's memory, as
            within an NVLink domain. Experimental: it has not run on GPUs. Default: None, no peer copies.
        peer_min_bytes: messages, and parts of gathers, of fewer bytes are left to the process group.

    Raises:
        RuntimeError: torch.distributed is not initialized, or a group is missing or not connected while a CUDA graph
            is captured.
        ValueError: the mesh has no such dim; `redistributes` are not pairs of layouts, or neither layout of a pair is
            on `mesh`; the device type is neither CPU nor CUDA; an arena is on CPU, is too small for the number of
            ranks, or differs in its settings from the group's existing arena.
    """
    groups.check_initialized()
    device_mesh = mesh if argument_values.is_device_mesh(mesh) else None
    grid = mesh if isinstance(mesh, _planner.Mesh) else Mesh(mesh)
    pairs = _pairs_of_layouts(grid, redistributes)
    if device_type is not None:
        device_type = argument_checks.device_of("device_type", device_type).type
    kind = device_type or (device_mesh.device_type if device_mesh is not None else _default_device_type())
    arena = None  # (size in bytes, minimum bytes of a message), for peer copies
    if peer_arena_bytes is not None:
        if kind == "cpu":
            raise argument_error("peer_arena_bytes", "None for tensors on CPU", peer_arena_bytes)
        arena = (
            argument_values.integer(peer_arena_bytes, "peer_arena_bytes"),
            argument_values.integer(peer_min_bytes, "peer_min_bytes"),
        )
    if mesh_dims is None:
        chosen = groups.sets_of_large_dims(grid) if redistributes is None else []
    else:
        sets = argument_values.items(mesh_dims, "mesh_dims", "a list of sets of mesh dims, such as [('dp', 'tp')]")
        chosen = [
            tuple(sorted(set(argument_values.mesh_dim_indices(grid.dim_names, dims, "mesh_dims")))) for dims in sets
        ]
    rank, owner = dist.get_rank(), groups.owner_of(device_mesh)
    group_names = []
    for dims in chosen if grid.coordinate(rank) is not None else []:
        ranks = grid.group_ranks(rank, list(dims))
        if len(ranks) > 1:
            group_names.append(groups.find_or_make(ranks, owner).group_name)
            groups.note_prepared(owner, grid, tuple(dim for dim in dims if grid.shape[dim] > 1))
    for src, dst in pairs:
        if src.mesh.coordinate(rank) is None and dst.mesh.coordinate(rank) is None:
            continue
        group_names += executables.bind(executables.make_plan(src, dst, kind), device_mesh=device_mesh).group_names
    _connect(dict.fromkeys(group_names), kind)
    if arena is not None:
        _make_arenas(dict.fromkeys(group_names), kind, *arena)


def _pairs_of_layouts(grid: _planner.Mesh, redistributes: Any) -> list[tuple[_planner.Layout, _planner.Layout]]:
    """Returns source and destination of each redistribute, followed by those of its gradient if there is one."""
    if redistributes is None:
        return []
    allowed = "a list of pairs of layouts, such as [(src, dst)]"
    pairs = []
    for item in argument_values.items(redistributes, "redistributes", allowed):
        pair = argument_values.items(item, "redistributes", allowed)
        if len(pair) != 2:
            raise argument_error("redistributes", allowed, f"an item of {len(pair)} layouts")
        src, dst = pair
        for layout in pair:
            check_layout("redistributes", layout)
        if not (src.mesh.has_same_ranks(grid) or dst.mesh.has_same_ranks(grid)):
            raise argument_error("redistributes", f"pairs with at least one layout on {grid}", f"{src} -> {dst}")
        pairs.append((src, dst))
        if has_gradient(src) and has_gradient(dst):
            pairs.append((gradient_layout(dst, "redistributes"), gradient_layout(src, "redistributes")))
    return pairs


def _default_device_type() -> str:
    """Returns the accelerator's type if the default group has a backend for it, else "cpu"."""
    world = dist.group.WORLD
    assert world is not None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_backend = accelerator is not None and accelerator.type in {device.type for device in world._device_types}
    return accelerator.type if accelerator is not None and has_backend else "cpu"


def _current_device(device_type: str) -> str:
    """Returns "cpu", or the type and index of the current device, such as "cuda:0"."""
    return device_type if device_type == "cpu" else f"{device_type}:{torch.accelerator.current_device_index()}"


def _connect(names: Iterable[str], device_type: str) -> None:
    """Makes the communicators of groups on the current device. Collective among the members of each."""
    for name in names:
        group = distributed_c10d._resolve_process_group(name)
        types = {device.type for device in group._device_types} - {"cpu"}
        backend = group._get_backend(torch.device(device_type)).name().lower() if device_type in types else None
        if backend not in (None, groups.DRY_RUN_BACKEND, "gloo"):  # Gloo sends from memory of the host
            _runtime.connect_group(name, _current_device(device_type))


def _make_arenas(names: Iterable[str], device_type: str, arena_bytes: int, min_bytes: int) -> None:
    """Allocates memory on the current device, which peers copy from. Collective among the members of each group."""
    names = list(names)
    _runtime.drain(names)
    for name in names:
        _runtime.use_peer_copies(name, _current_device(device_type), arena_bytes, min_bytes)
