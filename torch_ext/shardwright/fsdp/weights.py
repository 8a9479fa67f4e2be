"""Weights that are cut at rest and whole in use, in groups that are gathered together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .. import _planner, _runtime, executables, groups
from ..layout import Layout, Mesh
from ..plain_tensors import redistribute_part

# Of each weight in its group's memory, in bytes.
ALIGNMENT = 256


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Weight:
    """A parameter: `sharded`, a DTensor that the module has between uses, and `whole`, which it has in use.

    `whole` is one tensor for the weight's life. Autograd holds on to it and to views of it, from forward to backward.
    It has memory only while the weight is gathered.
    """

    def __init__(
        self,
        name: str,
        given: nn.Parameter,
        places: Sequence[tuple[nn.Module, str]],
        mesh: DeviceMesh,
        rest: Sequence[Placement],
    ) -> None:
        self.name = name
        self.places = list(places)
        self.mesh = mesh
        self.placements = tuple(rest)
        shape, dtype = given.shape, given.dtype
        layout_mesh = Mesh(mesh)
        self.rest = Layout(layout_mesh, shape, rest, dtype)
        self.use = Layout(layout_mesh, shape, [Replicate()] * mesh.ndim, dtype)
        self.partial = Layout(layout_mesh, shape, [Partial("avg")] * mesh.ndim, dtype)
        data = given.detach()
        part = redistribute_part(data, self.use, self.rest, mesh, False, True)  # a slice, without communication
        if part.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
            part = part.clone()
        self.sharded = nn.Parameter(self.as_dtensor(part), requires_grad=given.requires_grad)
        self.whole = nn.Parameter(torch.empty(shape, dtype=dtype, device=data.device), given.requires_grad)
        self.whole_bytes = self.whole.nbytes
        self.rest_bytes = part.nbytes
        _runtime.give_back_memory(self.whole)
        self.put(self.sharded)

    def as_dtensor(self, part: torch.Tensor) -> DTensor:
        stride = tuple(torch.empty(self.rest.shape, device="meta").stride())
        shape = torch.Size(self.rest.shape)
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    @property
    def part(self) -> torch.Tensor:
        """This rank's part at rest, as a plain tensor."""
        part: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return part.detach()

    @property
    def version(self) -> int:
        """Grows with each write to the part at rest."""
        return int(self.sharded._local_tensor._version)  # type: ignore[attr-defined]

    def put(self, parameter: nn.Parameter) -> None:
        """Makes this the parameter that the modules have."""
        for module, name in self.places:
            module._parameters[name] = parameter

    def take_up_changes(self) -> None:
        """Looks at the parameter that the modules have between uses: users may replace or freeze it.

        Raises:
            RuntimeError: it is none that this weight could be gathered from.
        """
        module, name = self.places[0]
        found: Any = module._parameters[name]
        if found is not self.sharded:
            fits = (
                isinstance(found, DTensor) and found.shape == self.sharded.shape and found.dtype == self.sharded.dtype
            )
            if not fits or found.device_mesh != self.mesh or tuple(found.placements) != self.placements:
                raise RuntimeError(
                    f"{self.name}: the module has another parameter than sw.fully_shard gave it, a "
                    f"{type(found).__name__}; allowed is a DTensor parameter of shape "
                    f"{tuple(self.sharded.shape)} and dtype {self.sharded.dtype}, placed as {self.placements}"
                )
            self.sharded = found
        elif self.part.dtype != self.whole.dtype:
            raise RuntimeError(
                f"{self.name}: has become {self.part.dtype}; allowed is {self.whole.dtype}, its dtype when "
                "sw.fully_shard was called. Convert modules before"
            )
        self.whole.requires_grad_(self.sharded.requires_grad)

    def start_gather(self, memory: torch.Tensor, offset_bytes: int) -> dist.Work | None:
        _runtime.borrow_memory(self.whole, memory, offset_bytes)
        # `.data` has a version counter of its own: autograd should not take a gather for a change of what it saved.
        return executables.start_into(self._executable(self.rest, self.use), self.part, self.whole.data)

    def start_reduction(self, gradient: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        out = torch.empty_like(self.part)
        return out, executables.start_into(self._executable(self.partial, self.rest), gradient, out)

    def add_gradient(self, part: torch.Tensor) -> None:
        """Adds to the gradient of the sharded parameter, and calls its hooks after that."""
        if self.sharded.grad is None:
            self.sharded.grad = self.as_dtensor(part)
        else:
            self.sharded.grad._local_tensor.add_(part)  # type: ignore[attr-defined]
        for hook in (getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.sharded)

    def _executable(self, src: _planner.Layout, dst: _planner.Layout) -> _runtime.Executable:
        device_type = self.whole.device.type

        def build() -> _runtime.Executable:
            return executables.bind(executables.make_plan(src, dst, device_type), device_mesh=self.mesh)

        key = ("weight", src, dst, device_type, groups.DEFAULT, self.mesh)
        executable = executables.lookup(key, build)
        assert isinstance(executable, _runtime.Executable)
        return executable


@dataclasses.dataclass
class Reduction:
    """Gradients of a unit that are being reduced. The whole ones stay until that is done."""

    under_way: list[tuple[Weight, torch.Tensor, torch.Tensor, dist.Work | None]]

    def finish(self) -> None:
        for weight, _, part, work in self.under_way:
            if work is not None:
                work.wait()
            weight.add_gradient(part)
        self.under_way = []

    def discard(self) -> None:
        """Waits, but adds nothing."""
        for _, _, _, work in self.under_way:
            if work is not None:
                work.wait()
        self.under_way = []


class Unit:
    """The weights of one call of `sw.fully_shard`. They are gathered together."""

    def __init__(self, name: str, modules: tuple[nn.Module, ...], weights: list[Weight], stays: bool) -> None:
        self.name = name
        self.modules = modules
        self.weights = weights
        self.stays = stays  # from the first use of a step to the last
        self.forwards: list[int] = []  # numbers of the forwards that are running, innermost last
        self.backwards: set[int] = set()  # numbers of forwards whose backward has begun and not ended
        self.is_resident = False
        self._works: list[dist.Work | None] = []
        self._gathered_from: list[tuple[nn.Parameter, int]] = []  # parameters at rest, and their versions

    @property
    def is_open(self) -> bool:
        return bool(self.forwards or self.backwards)

    @property
    def use_bytes(self) -> int:
        return sum(_aligned(weight.whole_bytes) for weight in self.weights)

    @property
    def rest_bytes(self) -> int:
        return sum(weight.rest_bytes for weight in self.weights)

    @property
    def gradient_bytes(self) -> int:
        return sum(weight.whole_bytes for weight in self.weights if weight.sharded.requires_grad)

    def start_gather(self, memory: torch.Tensor, offset_bytes: int = 0) -> None:
        self.is_resident = True
        self._gathered_from = [(weight.sharded, weight.version) for weight in self.weights]
        for weight in self.weights:
            self._works.append(weight.start_gather(memory, offset_bytes))
            offset_bytes += _aligned(weight.whole_bytes)

    def finish_gather(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []

    @property
    def is_stale(self) -> bool:
        """Whether a part at rest was written or replaced after it was gathered."""
        return any(
            weight.sharded is not sharded or weight.version != version
            for weight, (sharded, version) in zip(self.weights, self._gathered_from)
        )

    def take_up_changes(self) -> None:
        """Looks at the parameters that the modules have between uses."""
        for weight in self.weights:
            weight.take_up_changes()

    def release(self) -> None:
        self.finish_gather()
        for weight in self.weights:
            _runtime.give_back_memory(weight.whole)
        self.is_resident = False

    def put_whole(self) -> None:
        for weight in self.weights:
            weight.put(weight.whole)

    def put_sharded(self) -> None:
        for weight in self.weights:
            weight.put(weight.sharded)

    def start_reduction(self) -> Reduction | None:
        """Starts to reduce the gradients that autograd has left; None if there are none."""
        reduction = Reduction([])
        for weight in self.weights:
            gradient = weight.whole.grad
            if gradient is None:
                continue
            weight.whole.grad = None
            reduction.under_way.append((weight, gradient, *weight.start_reduction(gradient)))
        return reduction if reduction.under_way else None

    def drop_gradients(self) -> None:
        for weight in self.weights:
            weight.whole.grad = None
