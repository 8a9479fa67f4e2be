"""Pickling of layouts, meshes, topologies and plans, for copies, ``torch.save`` and messages between processes.

Layouts and meshes are pickled as the arguments of their constructors, and plans as ``Plan.to_bytes``, so unpickling
makes the same checks as a constructor. The types of the extension module are registered with `copyreg` too, because
plans return them. Each `_reduce_<type>` function returns the constructor of an object and its arguments.
"""

from __future__ import annotations

import copy
import copyreg
from typing import Any

from .._native import _planner
from .layout import Layout, Mesh


def _reduce_mesh(mesh: Mesh) -> tuple[Any, ...]:
    """Reduces a `Mesh` for pickle."""
    return Mesh, (dict(zip(mesh.dim_names, mesh.shape, strict=True)), mesh.ranks, mesh.topology)


def _reduce_plain_mesh(mesh: _planner.Mesh) -> tuple[Any, ...]:
    """Reduces a mesh of the planner for pickle."""
    return _planner.Mesh, (mesh.dim_names, mesh.shape, mesh.ranks, mesh.topology)


def _reduce_layout(layout: _planner.Layout) -> tuple[Any, ...]:
    """Reduces a layout for pickle."""
    placed = (layout.placements, layout.dtype, layout.shard_order, "literal", layout.flattened)
    return type(layout), (layout.mesh, layout.shape, *placed)


def _reduce_link(link: _planner.Link) -> tuple[Any, ...]:
    """Reduces a link for pickle."""
    return _planner.Link, (link.message_ps, link.ps_per_kib)


def _reduce_topology(table: _planner.Topology) -> tuple[Any, ...]:
    """Reduces a topology for pickle."""
    costs = (table.ranks_per_node, table.step_ps, table.memory_ps_per_kib)
    return _planner.Topology, (table.name, *costs, table.inside, table.between, table.mesh_dims)


def _reduce_plan(plan: _planner.Plan) -> tuple[Any, ...]:
    """Reduces a plan for pickle, to its bytes."""
    return plan_of, (plan.to_bytes(),)


def plan_of(data: bytes) -> _planner.Plan:
    """Calls ``Plan.from_bytes``. Unlike a static method of the extension module, a function can be pickled."""
    return _planner.Plan.from_bytes(data)


def register() -> None:
    """Registers the functions above with `copyreg`. Called when the package is imported."""
    copyreg.pickle(Mesh, _reduce_mesh)
    copyreg.pickle(_planner.Mesh, _reduce_plain_mesh)
    copyreg.pickle(Layout, _reduce_layout)
    copyreg.pickle(_planner.Layout, _reduce_layout)
    copyreg.pickle(_planner.Link, _reduce_link)
    copyreg.pickle(_planner.Topology, _reduce_topology)
    copyreg.pickle(_planner.Plan, _reduce_plan)


def wait_before(kind: Any) -> None:
    """Makes pickle, `torch.save` and `copy.deepcopy` wait for asynchronous results of this class.

    PyTorch's class lacks these methods, so the memory would be read before the result is complete.
    """
    if "__reduce_ex__" not in vars(kind):
        kind.__reduce_ex__ = lambda self, protocol: _finished(self).__reduce_ex__(protocol)
        kind.__deepcopy__ = lambda self, memo: copy.deepcopy(_finished(self), memo)


def _finished(result: Any) -> Any:
    """Waits for an asynchronous result, and returns its plain tensor."""
    tensor = result.wait().detach()
    return tensor.requires_grad_() if result.requires_grad else tensor
