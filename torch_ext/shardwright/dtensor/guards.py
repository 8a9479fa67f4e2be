"""Guards of compiled code on sizes of DTensors, the groups of their meshes, and the options of `sw.enable`.

Dynamo's guards for a DTensor compare its local tensor, mesh and placements, but not its sizes (pytorch#163820). A rank
that holds 3 rows of 6 and 3 rows of 5 would run code for 6 where the other ranks run code for 5. Its guards also treat
meshes of the same ranks as equal, although their process groups may differ.

So this module adds guards on

    each DTensor input      its static sizes and strides, and the names of its mesh's process groups; only while the
                            drop-in is on or if the graph has operators of shardwright. Dynamo guards symbolic sizes.
    graphs with DTensors    the options of `sw.enable`
    graphs with operators   the options of `sw.enable`, and the planning tables
        of shardwright
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

_MAX_MARKS = 1024  # entries of `_marks`; the oldest is dropped first
_GUARDS_ATTRIBUTE = "_shardwright_seen"  # attribute of a builder of guards: the keys of `_is_new_guard`

_marks: dict[Any, None] = {}  # ids of compilations whose graphs have operators of shardwright


def mark_graph() -> None:
    """Records that the graph being compiled has an operator of shardwright."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is not None:
        executables.put_bounded(_marks, compile_id, None, _MAX_MARKS)


def _is_graph_marked() -> bool:
    """Returns True if the graph being compiled has an operator of shardwright."""
    return CompileContext.current_compile_id() in _marks


def _wrap_create(original: Callable[[Guard, Any], Any]) -> Callable[[Guard, Any], Any]:
    """Returns a wrapper of `Guard.create` that adds guards after PyTorch's for a DTensor or for the global state."""

    @functools.wraps(original)
    def create(self: Guard, builder: Any) -> Any:
        created = original(self, builder)
        kind = self.create_fn_name()
        if kind == "DTENSOR_SPEC_MATCH":
            _guard_mode(self, builder)
            if mode.is_on_anywhere() or _is_graph_marked():
                _guard_spec(self, builder)
        elif kind == "GLOBAL_STATE" and _is_graph_marked():
            _guard_mode(self, builder)
            _guard_tables(self, builder)
        return created

    return create


def _add_guard(guard: Guard, manager: Any, is_same: Callable[[Any], bool], text: str) -> None:
    """Adds a guard that fails unless `is_same` returns True. Logs of recompilations show `text`."""
    from torch._dynamo.guards import get_verbose_code_parts

    manager.add_lambda_guard(is_same, get_verbose_code_parts(f"{text}  # shardwright", guard), guard.user_stack)


def _is_new_guard(builder: Any, key: object) -> bool:
    """Returns True at the first call with this key for a graph. `builder` builds the guards of the graph."""
    seen = vars(builder).setdefault(_GUARDS_ATTRIBUTE, set())
    is_new = key not in seen
    seen.add(key)
    return is_new


def _guard_mode(guard: Guard, builder: Any) -> None:
    """Guards the graph on the options of `sw.enable`, once per graph."""
    if _is_new_guard(builder, "mode"):
        decided = mode.graph_options()
        _add_guard(
            guard, builder.guard_manager.root, lambda _: mode.graph_options() == decided, f"sw.enable as {decided}"
        )


def _guard_tables(guard: Guard, builder: Any) -> None:
    """Guards the graph on the planning tables: pins, measurements and the environment's topology."""
    planned_with = tables.current
    _add_guard(guard, builder.guard_manager.root, lambda _: tables.current == planned_with, "the same tables of plans")


def _guard_spec(guard: Guard, builder: Any) -> None:
    """Adds guards for the DTensor whose spec `guard` checks."""
    spec: DTensorSpec = builder.get(guard)
    if spec.tensor_meta is None:
        return
    traced = builder.check_fn_manager.output_graph.input_source_to_sizes_strides.get(guard.originating_source.base)
    shape = _static_sizes(spec.tensor_meta.shape if traced is None else traced["size"])
    stride = _static_sizes(spec.tensor_meta.stride if traced is None else traced["stride"])
    key, mesh_of = groups.key_of_mesh(spec.mesh), weakref.ref(spec.mesh)
    encodes_order = spec.use_strided_shard_as_shard_order

    def is_same(spec: DTensorSpec) -> bool:
        meta = spec.tensor_meta
        return (
            meta is not None
            and _sizes_match(meta.shape, shape)
            and _sizes_match(meta.stride, stride)
            and spec.use_strided_shard_as_shard_order == encodes_order
            and (spec.mesh is mesh_of() or groups.key_of_mesh(spec.mesh) == key)
        )

    _add_guard(guard, builder.get_guard_manager(guard), is_same, f"{guard.name}: global shape {shape}, stride {stride}")
    if _is_new_guard(builder, ("groups", key)):
        flattened = groups.flattened_names(spec.mesh)

        def has_same_groups(_: Any) -> bool:
            mesh = mesh_of()
            return mesh is None or groups.flattened_names(mesh) == flattened

        _add_guard(guard, builder.guard_manager.root, has_same_groups, f"{guard.name}: the same flattened mesh dims")


def _static_sizes(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns the sizes, with None for those that are still symbols after the graph was traced."""
    return tuple(size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size for size in sizes)


def _sizes_match(sizes: Sequence[int], guarded: tuple[int | None, ...]) -> bool:
    """Returns True if sizes equal the guarded sizes. None among them matches any size."""
    return sizes == guarded or (
        len(sizes) == len(guarded) and all(b is None or a == b for a, b in zip(sizes, guarded, strict=True))
    )


# Dynamo builds each guard of a graph by this method.
Guard.create = _wrap_create(Guard.create)  # type: ignore[method-assign]
