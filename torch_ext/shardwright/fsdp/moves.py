"""Moves of one weight between its layouts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._native import _planner, _runtime
from ..runtime import executables, groups
from .layouts import Layouts


class Moves:
    """Starts moves. What carries a weight holds on to this, so that nothing needs to refer to the weight itself."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self._device_type = layouts.mesh.device_type

    def __call__(
        self, src: _planner.Layout, dst: _planner.Layout, given: torch.Tensor, out: torch.Tensor
    ) -> dist.Work | None:
        """Returns while transfers are under way: what to wait for, None if nothing is pending."""
        return executables.start_into(self.executable(src, dst), given, out)

    def executable(self, src: _planner.Layout, dst: _planner.Layout) -> _runtime.Executable:
        device_type = self._device_type
        mesh = self.layouts.mesh  # also for kept copies, which may lie on another mesh of the same ranks

        def build() -> _runtime.Executable:
            return executables.bind(executables.make_plan(src, dst, device_type), device_mesh=mesh)

        executable = executables.lookup(("weight", src, dst, device_type, mesh, groups.key_of_mesh(mesh)), build)
        assert isinstance(executable, _runtime.Executable)
        return executable

    def predicted_ps(self, src: _planner.Layout, dst: _planner.Layout) -> int:
        return round(1e6 * executables.make_plan(src, dst, self._device_type).predicted_us)
