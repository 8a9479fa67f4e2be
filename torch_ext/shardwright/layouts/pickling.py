"""Pickling of layouts, meshes, topologies and plans, for copies, ``torch.save`` and messages between processes.

Layouts and meshes are pickled as the arguments of their constructors, and plans as ``Plan.to_bytes``, so unpickling
makes the same checks as a constructor. The types of the extension module are registered with `copyreg` too, because
plans return them. Each `_<type>` function returns (constructor, its arguments) of an object.
"""

from __future__ import annotations

import copy
import copyreg
from typing import Any

from .._native import _planner
from .layout import Layout, Mesh


def _mesh(mesh: Mesh) -> tuple[Any, ...]:
    return Mesh, (dict(zip(mesh.dim_names, mesh.shape, strict=True)), mesh.ranks, mesh.topology)


def _plain_mesh(mesh: _planner.Mesh) -> tuple[Any, ...]:
    return _planner.Mesh, (mesh.dim_names, mesh.shape, mesh.ranks, mesh.topology)


def _layout(layout: _planner.Layout) -> tuple[Any, ...]:
    placed = (layout.placements, layout.dtype, layout.shard_order, "literal", layout.flattened)
    return type(layout), (layout.mesh, layout.shape, *placed)


def _link(link: _planner.Link) -> tuple[Any, ...]:
    return _planner.Link, (link.message_ps, link.ps_per_kib)


def _topology(table: _planner.Topology) -> tuple[Any, ...]:
    costs = (table.ranks_per_node, table.step_ps, table.memory_ps_per_kib)
    return _planner.Topology, (table.name, *costs, table.inside, table.between, table.mesh_dims)


def _plan(plan: _planner.Plan) -> tuple[Any, ...]:
    return plan_of, (plan.to_bytes(),)


def plan_of(data: bytes) -> _planner.Plan:
    """Calls ``Plan.from_bytes``. Unlike a static method of the extension module, a function can be pickled."""
    return _planner.Plan.from_bytes(data)


def register() -> None:
    """Registers the functions above with `copyreg`. Called when the package is imported."""
    copyreg.pickle(Mesh, _mesh)
    copyreg.pickle(_planner.Mesh, _plain_mesh)
    copyreg.pickle(Layout, _layout)
    copyreg.pickle(_planner.Layout, _layout)
    copyreg.pickle(_planner.Link, _link)
    copyreg.pickle(_planner.Topology, _topology)
    copyreg.pickle(_planner.Plan, _plan)


def wait_before(kind: Any) -> None:
    """Makes pickle, `torch.save` and `copy.deepcopy` wait for asynchronous results of this class.

    PyTorch's class lacks these methods, so the memory would be read before the result is complete.
    """
    if "__reduce_ex__" not in vars(kind):
        kind.__reduce_ex__ = lambda self, protocol: _arrived(self).__reduce_ex__(protocol)
        kind.__deepcopy__ = lambda self, memo: copy.deepcopy(_arrived(self), memo)


def _arrived(result: Any) -> Any:
    """Waits for an asynchronous result, and returns its plain tensor."""
    tensor = result.wait().detach()
    return tensor.requires_grad_() if result.requires_grad else tensor
