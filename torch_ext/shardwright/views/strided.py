"""DTensor's operators on tensors with strided shards, in addition to rules.py.

PyTorch's rules were written for plain shards. Some treat a strided shard as a plain one, and return wrong numbers
without an error (pytorch#178785). PyTorch's rule is therefore used for such inputs only if verified.py lists the
operator for this torch. Otherwise the inputs are gathered along the mesh dims with strided shards. An operator that
writes to such a tensor raises, because it would write to the gathered copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as torch_redistribute
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves, tree_map

from ..dtensor.specs import is_strided, layout_of_spec
from ..graph import plans
from ..runtime import counters, dynamo
from . import verified

aten = torch.ops.aten

# Operators that DTensor runs by handlers instead of rules, and that are correct for any shards.
_SAFE_HANDLERS = ("is_same_size", "is_pinned", "_amp_foreach_non_finite_check_and_unscale_", "as_strided")

_handlers: dict[Any, Any] | None = None  # PyTorch's, while ours replace them


def install() -> None:
    """Makes DTensor's handlers gather inputs with strided shards, except handlers that are correct for them."""
    global _handlers
    dispatcher: Any = DTensor._op_dispatcher
    _handlers = dispatcher._custom_op_handlers
    assert _handlers is not None
    for op, handler in list(_handlers.items()):
        if op._schema.name.removeprefix("aten::") not in _SAFE_HANDLERS:
            _handlers[op] = _gathering_handler(handler)


def uninstall() -> None:
    """Restores DTensor's handlers."""
    global _handlers
    for op, handler in (_handlers or {}).items():
        assert _handlers is not None
        _handlers[op] = getattr(handler, "__wrapped__", handler)
    _handlers = None


def sharded_source(schema: OpSchema, or_empty: bool = False) -> DTensorSpec | None:
    """Returns the spec of the first argument if it is sharded, or with `or_empty` if it has no elements; else None."""
    spec = schema.args_schema[0]
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None:
        return None
    applies = any(is_cut(placement) for placement in spec.placements) or (or_empty and 0 in spec.shape)
    return spec if applies else None


def is_cut(placement: Placement) -> bool:
    """Returns True for plain and for strided shards."""
    return isinstance(placement, Shard | _StridedShard)


def meta_of(schema: OpSchema) -> Any:
    """Returns the `TensorMeta` of the operator's result: shape, strides, dtype. A sequence for several results."""
    return DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_non_cached(schema)


def with_dim(placement: Any, dim: int) -> Placement:
    """Returns the placement with another tensor dim."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def spec_like(spec: DTensorSpec, placements: Sequence[Placement], meta: Any) -> DTensorSpec:
    """Returns `spec` with other placements and meta. Its split factors keep their meaning."""
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    is_order = strided and spec.use_strided_shard_as_shard_order
    return DTensorSpec(spec.mesh, tuple(placements), meta, use_strided_shard_as_shard_order=is_order)


@functools.cache
def is_pointwise(op: Any) -> bool:
    """Returns True if an operator is elementwise, by its tags or those of its out-of-place variant."""
    tags = list(op.tags)
    name = op._schema.name.removeprefix("aten::")
    if name.endswith("_"):
        functional = getattr(getattr(aten, name[:-1], None), op._overloadname, None)
        tags += getattr(functional, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def has_strided(schema: OpSchema) -> bool:
    """Returns True if any input has strided shards, also in a list or a keyword argument."""
    return next(_strided_specs(schema.args_schema, schema.kwargs_schema), None) is not None


def is_verified(schema: OpSchema) -> bool:
    """Returns True if PyTorch's rule for this operator was verified with inputs like these."""
    name = schema.op.name().removeprefix("aten::")
    return name in verified.anywhere() or (name in verified.along_other_dims() and works_along_other_dims(schema))


def works_along_other_dims(schema: OpSchema) -> bool:
    """Returns True if the arguments name the dims to work along, and these dims have no strided shards."""
    dims = _working_dims(schema)
    return bool(dims) and not any(
        isinstance(p, _StridedShard) and p.dim in [dim % spec.ndim for dim in dims]
        for spec in _strided_specs(schema.args_schema, schema.kwargs_schema)
        for p in spec.placements
    )


def _working_dims(schema: OpSchema) -> list[int]:
    """Returns the dims that an operator works along, by its arguments; empty if they name none."""
    dims: list[int] = []
    for argument, value in zip(schema.op._schema.arguments, schema.args_schema, strict=False):
        if argument.name in ("dim", "dims", "axis"):
            dims += [value] if isinstance(value, int) else list(value or ())  # type: ignore[call-overload]
        elif argument.name == "normalized_shape":
            dims += [-1 - i for i in range(len(value))]  # type: ignore[arg-type]
    return dims


def gather_first(schema: OpSchema, torch_result: Callable[[OpSchema], OutputSharding]) -> OutputSharding:
    """Returns PyTorch's result for inputs that are first gathered along the mesh dims with strided shards.

    Raises RuntimeError if the operator writes to such an input, or takes it as a keyword argument, which DTensor does
    not redistribute.
    """
    for argument, value in _named_arguments(schema):
        cut = next(_strided_specs(value), None)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if cut is not None and (is_written or argument.name in schema.kwargs_schema):
            raise RuntimeError(
                f"{argument.name} must not be a strided shard if {schema.op} "
                f"{'writes to it' if is_written else 'takes it as a keyword'}, got {cut.placements} of shape "
                f"{tuple(cut.shape)}. Redistribute it first, or run this operator on to_local()"
            )
    gathered_args = tree_map(_gathered_spec, schema.args_schema, is_leaf=_is_spec)
    first = OpSchema(schema.op, gathered_args, schema.kwargs_schema, schema_info=schema.schema_info)
    result = torch_result(first)
    counters.count_strided_gather(str(schema.op))
    if result.redistribute_schema is None:
        result.redistribute_schema = first
    result.needs_redistribute = True
    return result


def _named_arguments(schema: OpSchema) -> Iterator[tuple[Any, Any]]:
    """Yields each given argument of an operator: its entry in the schema, and its value."""
    arguments = schema.op._schema.arguments
    yield from zip(arguments, schema.args_schema, strict=False)
    yield from ((arg, schema.kwargs_schema[arg.name]) for arg in arguments if arg.name in schema.kwargs_schema)


def _is_spec(value: Any) -> bool:
    """Returns True for a DTensorSpec."""
    return isinstance(value, DTensorSpec)


def _strided_specs(*trees: Any) -> Iterator[DTensorSpec]:
    """Yields the specs with strided shards in nested arguments."""
    return (value for value in tree_leaves(trees, is_leaf=_is_spec) if _is_spec(value) and is_strided(value))


def _gathered_spec(spec: Any) -> Any:
    """Returns the spec with R in place of strided shards; other values unchanged."""
    if not _is_spec(spec) or not is_strided(spec):
        return spec
    placements = tuple(Replicate() if isinstance(p, _StridedShard) else p for p in spec.placements)
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta)


def _gathering_handler(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a handler of DTensor, which uses no rules (e.g. for convolutions): strided shards are gathered first."""

    def gather(x: Any) -> Any:
        if not isinstance(x, DTensor) or not is_strided(x._spec):
            return x
        spec = _gathered_spec(x._spec)
        local = torch_redistribute.redistribute_local_tensor(x._local_tensor, x._spec, spec)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]

    @dynamo.skipped
    def call_with_gathered(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(x, DTensor) and is_strided(x._spec) for x in args):
            counters.count_strided_gather(str(op))
            args = tuple(map(gather, args))
        return handler(op, args, kwargs)

    call_with_gathered.__wrapped__ = handler  # type: ignore[attr-defined]
    return call_with_gathered


def squeeze_rule(schema: OpSchema) -> OutputSharding | None:
    """The rule for squeeze with strided shards."""
    spec = sharded_source(schema)
    if spec is None or not is_strided(spec):
        return None
    squeezed_dims: Any = schema.args_schema[1]
    dims = {dim % spec.ndim for dim in ([squeezed_dims] if isinstance(squeezed_dims, int) else squeezed_dims)}
    if any(spec.shape[dim] != 1 for dim in dims):  # nothing is squeezed, whatever the size of the local dim
        return None
    moved = tuple(with_dim(p, p.dim - sum(d < p.dim for d in dims)) if is_cut(p) else p for p in spec.placements)
    return OutputSharding(spec_like(spec, moved, meta_of(schema)))


def expand_rule(schema: OpSchema) -> OutputSharding | None:
    """The rule for expand with strided shards. None if a sharded dim would be expanded."""
    spec = sharded_source(schema)
    if spec is None or not is_strided(spec) or plans.is_symbolic(spec.shape):
        return None
    meta: Any = meta_of(schema)
    added = len(meta.shape) - spec.ndim
    if any(is_cut(p) and meta.shape[p.dim + added] != spec.shape[p.dim] for p in spec.placements):  # type: ignore[attr-defined]
        return None
    moved = tuple(with_dim(p, p.dim + added) if is_cut(p) else p for p in spec.placements)
    return with_local_shape(schema, spec, spec_like(spec, moved, meta))


def with_local_shape(schema: OpSchema, spec: DTensorSpec, target: DTensorSpec) -> OutputSharding:
    """Returns the result for an operator with a shape argument, which on each rank becomes the shape of its part."""
    assert target.tensor_meta is not None
    shape = layout_of_spec(target, target.shape, target.tensor_meta.dtype).local_shape(dist.get_rank())
    local = OpSchema(schema.op, (spec, shape, *schema.args_schema[2:]), schema.kwargs_schema)
    return OutputSharding(target, local, needs_redistribute=True, use_val_from_redistribute_schema=True)


def same_placements_rule(schema: OpSchema) -> OutputSharding | None:
    """The rule for operators whose results, one or several, have the placements of the first argument."""
    spec = sharded_source(schema)
    if spec is None or not is_strided(spec) or (_is_pending(spec) and schema.op not in _KEEP_PENDING):
        return None
    meta: Any = meta_of(schema)
    if isinstance(meta, TensorMeta):
        return OutputSharding(spec.shallow_copy_with_tensor_meta(meta))
    return OutputSharding(tuple(spec.shallow_copy_with_tensor_meta(tensor_meta) for tensor_meta in meta))


# Functions that can be applied to each contribution of a pending sum. Others cannot: ones_like would be summed.
_KEEP_PENDING = (aten.alias.default, aten.clone.default, aten.detach.default, aten.zero_.default)


def _is_pending(spec: DTensorSpec) -> bool:
    """Returns True if some placement is a pending reduction."""
    return any(placement.is_partial() for placement in spec.placements)


def creation_rule(schema: OpSchema) -> OutputSharding | None:
    """The rule for new tensors of an argument's type: sharded as it if they have its shape, else replicated."""
    spec = sharded_source(schema)
    if spec is None or not is_strided(spec) or plans.is_symbolic(spec.shape):
        return None
    meta: Any = meta_of(schema)
    if meta.shape == spec.shape and not _is_pending(spec):
        return with_local_shape(schema, spec, spec.shallow_copy_with_tensor_meta(meta))
    return OutputSharding(DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta))


def is_elementwise_on_lists(schema: OpSchema) -> bool:
    """True for elementwise functions of lists of tensors, as optimizers call them.

    PyTorch's rule gives all tensors at one index of the lists the placements of the first, which is correct for any
    shards.
    """
    name = schema.op._schema.name.removeprefix("aten::")
    return name.startswith(("_foreach_", "_fused_ada", "_fused_sgd")) and not name.startswith(_REDUCING_LISTS)


_REDUCING_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm")
