"""Guards of compiled code on sizes of DTensors, the groups of their meshes, and our options.

Dynamo's guards for a DTensor compare its local tensor, mesh and placements, but not its sizes (pytorch#163820). A rank
that holds 3 rows of 6 and 3 rows of 5 would run code for 6 where the other ranks run code for 5. Its guards also treat
meshes of the same ranks as equal, although their process groups may differ.

While the drop-in is on, and for graphs that hold operators of ours, guards are added for each DTensor that is an
input of the graph: static sizes and strides must be the same, and so must the names of the mesh's groups. Dynamo
guards symbolic sizes itself. Graphs with DTensors are guarded on our mode, graphs with our operators also on the
planning tables.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import CompileContext, Guard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..layouts import tables
from ..runtime import executables, groups
from . import mode

_MAX_MARKS = 1024
_SEEN = "_shardwright_seen"

_marks: dict[Any, None] = {}  # graphs that hold operators of ours, by the id of their compilation


def mark() -> None:
    """Records that the graph being compiled has an operator of ours."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is not None:
        executables.put_bounded(_marks, compile_id, None, _MAX_MARKS)


def _is_marked() -> bool:
    """Returns True if the graph being compiled has an operator of ours."""
    return CompileContext.current_compile_id() in _marks


def _create(original: Callable[[Guard, Any], Any]) -> Callable[[Guard, Any], Any]:
    """Wraps `Guard.create`: after PyTorch's guard for a DTensor or for the global state, adds ours."""

    @functools.wraps(original)
    def create(self: Guard, builder: Any) -> Any:
        created = original(self, builder)
        kind = self.create_fn_name()
        if kind == "DTENSOR_SPEC_MATCH":
            _guard_mode(self, builder)
            if mode.is_wanted() or _is_marked():
                _guard_spec(self, builder)
        elif kind == "GLOBAL_STATE" and _is_marked():
            _guard_mode(self, builder)
            _guard_tables(self, builder)
        return created

    return create


def _add(guard: Guard, manager: Any, is_same: Callable[[Any], bool], text: str) -> None:
    """Adds a guard that fails unless `is_same` returns True. Logs of recompilations show `text`."""
    from torch._dynamo.guards import get_verbose_code_parts

    manager.add_lambda_guard(is_same, get_verbose_code_parts(f"{text}  # shardwright", guard), guard.user_stack)


def _is_first(builder: Any, what: object) -> bool:
    """Returns True if the graph has no such guard yet, and records it."""
    seen = vars(builder).setdefault(_SEEN, set())
    is_new = what not in seen
    seen.add(what)
    return is_new


def _guard_mode(guard: Guard, builder: Any) -> None:
    """Guards the graph on the drop-in's options, once per graph."""
    if _is_first(builder, "mode"):
        decided = mode.decided_in_graphs()
        _add(
            guard, builder.guard_manager.root, lambda _: mode.decided_in_graphs() == decided, f"sw.enable as {decided}"
        )


def _guard_tables(guard: Guard, builder: Any) -> None:
    """Guards the graph on the planning tables: pins, measurements and the environment's topology."""
    planned_with = tables.current
    _add(guard, builder.guard_manager.root, lambda _: tables.current == planned_with, "the same tables of plans")


def _guard_spec(guard: Guard, builder: Any) -> None:
    """Adds guards for the DTensor whose spec `guard` checks."""
    spec: DTensorSpec = builder.get(guard)
    if spec.tensor_meta is None:
        return
    known = builder.check_fn_manager.output_graph.input_source_to_sizes_strides.get(guard.originating_source.base)
    shape = _numbers(spec.tensor_meta.shape if known is None else known["size"])
    stride = _numbers(spec.tensor_meta.stride if known is None else known["stride"])
    key, mesh_of = groups.key_of_mesh(spec.mesh), weakref.ref(spec.mesh)
    is_order = spec.use_strided_shard_as_shard_order

    def is_same(spec: DTensorSpec) -> bool:
        meta = spec.tensor_meta
        return (
            meta is not None
            and _fits(meta.shape, shape)
            and _fits(meta.stride, stride)
            and spec.use_strided_shard_as_shard_order == is_order
            and (spec.mesh is mesh_of() or groups.key_of_mesh(spec.mesh) == key)
        )

    _add(guard, builder.get_guard_manager(guard), is_same, f"{guard.name}: global shape {shape}, stride {stride}")
    if _is_first(builder, ("groups", key)):
        flattened = groups.flattened_names(spec.mesh)

        def has_same_groups(_: Any) -> bool:
            mesh = mesh_of()
            return mesh is None or groups.flattened_names(mesh) == flattened

        _add(guard, builder.guard_manager.root, has_same_groups, f"{guard.name}: the same flattened mesh dims")


def _numbers(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns the sizes, with None for symbols that were not made numbers while the graph was traced."""
    return tuple(size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size for size in sizes)


def _fits(sizes: Sequence[int], wanted: tuple[int | None, ...]) -> bool:
    """Returns True if sizes equal the guarded ones, of which None matches any size."""
    return sizes == wanted or (
        len(sizes) == len(wanted) and all(b is None or a == b for a, b in zip(sizes, wanted, strict=True))
    )


# Dynamo builds each guard of a graph by this method.
Guard.create = _create(Guard.create)  # type: ignore[method-assign]
