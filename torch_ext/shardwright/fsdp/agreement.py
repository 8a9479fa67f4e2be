"""Agreements between ranks: the arguments of `sw.fully_shard`, the largest of some bytes, and writes to parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._native import _runtime


def all_reduce(
    said: torch.Tensor, mesh: DeviceMesh, device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Returns a CPU tensor reduced over the ranks of a mesh, which all call this with tensors of one shape.

    Where a group of the mesh has a backend for CPU, the host does not wait for the device.
    """
    if mesh.size() == 1:
        return said
    # Ours that are under way start all they communicate before, on all ranks alike.
    _runtime.drain([group.group_name for group in mesh.get_all_groups()])
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        has_cpu = any(kind.type == "cpu" for kind in group._device_types)
        sent = said if has_cpu else said.to(device)
        dist.all_reduce(sent, op, group=group)
        said = sent.cpu()
    return said


def largest(mesh: DeviceMesh, said: bytes, device: torch.device) -> bytes:
    """Returns each byte's largest value over the ranks of a mesh. All of them call this, with as many bytes."""
    table = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    return bytes(all_reduce(table, mesh, device, dist.ReduceOp.MAX).tolist())


def forget_written_copies(units: Sequence[Copying], device: torch.device) -> None:
    """Makes units gather again whose parameters were written on any rank since they were gathered.

    Versions do not show all writes, such as those to tensors of a state dict, so contents are compared. Collective
    among the ranks of the units' meshes if any of them has copies.
    """
    if device.type != "cpu" and _runtime.is_capturing(device.type):
        return  # versions are all that can be compared
    with_copies = [unit for unit in units if unit.has_copies]
    for mesh in dict.fromkeys(weight.mesh for unit in with_copies for weight in unit.weights):
        on_mesh = [unit for unit in with_copies if any(weight.mesh == mesh for weight in unit.weights)]
        said = bytes(unit.was_written() for unit in on_mesh)
        said = largest(mesh, said, device) if mesh.size() > 1 else said
        for unit, is_written in zip(on_mesh, said, strict=True):
            if is_written:
                unit.forget_copies()


class Described(Protocol):
    """A unit."""

    name: str
    weights: list[Any]

    @property
    def description(self) -> str: ...


class Copying(Described, Protocol):
    """A unit that may hold copies of its parameters."""

    @property
    def has_copies(self) -> bool: ...
    def was_written(self) -> bool: ...
    def forget_copies(self) -> None: ...


def check_same(units: Sequence[Described], options: Mapping[str, object], device: torch.device) -> None:
    """Compares units, in their order, and options for all of them. Collective among the ranks of the units' meshes.

    Raises:
        ValueError: on all ranks of a mesh if they differ.
    """
    meshes = dict.fromkeys(weight.mesh for unit in units for weight in unit.weights)
    for mesh in meshes:
        on_mesh = [unit for unit in units if any(weight.mesh == mesh for weight in unit.weights)]
        texts = {name: str(value) for name, value in options.items()}
        _compare(mesh, {"number of units": str(len(on_mesh)), **texts}, device)
        # All ranks have as many now. Names may come twice, where modules have the same.
        _compare(mesh, {f"unit {i}, {unit.name}": unit.description for i, unit in enumerate(on_mesh)}, device)


def _compare(mesh: DeviceMesh, said: dict[str, str], device: torch.device) -> None:
    compare(mesh, said, device, "sw.fully_shard", "what they gave it", "the same modules and arguments")


def compare(mesh: DeviceMesh, said: dict[str, str], device: torch.device, who: str, what: str, allowed: str) -> None:
    """Raises ValueError on all ranks of a mesh if texts under the same number differ. All say as many."""
    if mesh.size() == 1:
        return
    ranks = mesh.mesh.flatten().tolist()
    own = ranks.index(dist.get_rank())
    digests = [hashlib.sha256(f"{name}: {text}".encode()).digest()[:8] for name, text in said.items()]
    table = torch.zeros(len(ranks), len(said), dtype=torch.int64)
    table[own] = torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
    table = all_reduce(table, mesh, device)  # each row is one rank's, so it arrives once
    for (name, text), column in zip(said.items(), table.unbind(1)):
        by_digest: dict[int, list[int]] = {}
        for rank, digest in zip(ranks, column.tolist(), strict=True):
            by_digest.setdefault(digest, []).append(rank)
        if len(by_digest) > 1:
            groups = sorted(by_digest.values(), key=lambda group: (len(group), group))
            raise ValueError(
                f"{who}: ranks {' differ from ranks '.join(map(str, groups))} in {what}; on rank {ranks[own]}, "
                f"{name}: {text}. Allowed are {allowed}, in the same order, on all ranks of a mesh"
            )
