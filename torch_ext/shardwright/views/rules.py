"""Sharding rules for DTensor's views, based on `Layout.view`: ``sw.enable(views=True)``.

DTensor's sharding propagator computes the placements of each operator's result. While views are on, this module has the
rules for views and permutations of dims, and for products, sums and elementwise functions of tensors with strided
shards. All other rules are PyTorch's. DTensor caches results by operator, placements and sizes, so its caches are
emptied when views are turned on or off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from .._native import _planner, _runtime
from ..dtensor.specs import is_strided, layout_of_spec, spec_of_layout
from ..graph import plans
from ..runtime import counters, dynamo
from . import literal, strided
from .strided import is_cut, meta_of, sharded_source, spec_like, with_dim, with_local_shape

aten = torch.ops.aten

# A rule returns the spec of an operator's result, and the specs that its inputs need; None if it does not apply. The
# schema has the specs of the inputs.
_Rule = Callable[[OpSchema], OutputSharding | None]
_original: Callable[[OpSchema], OutputSharding] | None = None  # PyTorch's method, while ours replaces it


def install() -> None:
    """Makes DTensor use the rules of this module, and installs literal.py and strided.py."""
    global _original
    if _original is None:
        propagator = DTensor._op_dispatcher.sharding_propagator
        _original = propagator.propagate_op_sharding_non_cached
        _use(_propagate)
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher.redistribute_local_args = _make_contiguous(dispatcher.redistribute_local_args)
        literal.install()
        strided.install()


def uninstall() -> None:
    """Undoes `install`."""
    global _original
    if _original is not None:
        propagator = DTensor._op_dispatcher.sharding_propagator
        _original = None
        literal.uninstall()
        strided.uninstall()
        del DTensor._op_dispatcher.redistribute_local_args
        del propagator.propagate_op_sharding_non_cached  # restores the method of its class
        _use(None)


def _use(rule_function: Callable[[OpSchema], OutputSharding] | None) -> None:
    """Makes the sharding propagator use `rule_function` (None: its own method), and empties its caches."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    if rule_function is not None:
        propagator.propagate_op_sharding_non_cached = rule_function
    # A new cache, because caches are thread-local, and a thread can empty only its own.
    propagator.propagate_op_sharding = LocalLRUCache(propagator.propagate_op_sharding_non_cached)
    torch._C._clear_DTensor_sharding_propagator_cache()


def _make_contiguous(original: Callable[..., None]) -> Callable[..., None]:
    """Makes a local tensor contiguous if its strides do not allow the view. They may differ from the DTensor's."""

    @dynamo.skipped
    def redistribute_local_args(op_info: Any, schema: OpSchema, *others: Any) -> None:
        original(op_info, schema, *others)
        if _RULES.get(schema.op) is not _view:
            return
        local, shape = op_info.local_args[0], schema.args_schema[1]
        is_concrete = isinstance(local, torch.Tensor) and not plans.is_symbolic(shape)
        if is_concrete and local.numel() == math.prod(shape) and not _has_view(local, shape):
            op_info.local_args = (local.contiguous(), *op_info.local_args[1:])

    return redistribute_local_args


def _has_view(local: torch.Tensor, shape: Sequence[int]) -> bool:
    """Returns True if the local tensor can be viewed with this shape without a copy."""
    if local.is_contiguous():
        return True
    try:
        sizes, strides = plans.fixed(local.shape), plans.fixed(local.stride())
        torch.empty_strided(sizes, strides, device="meta").view(tuple(shape))
    except RuntimeError:
        return False
    return True


@dynamo.skipped
def _propagate(schema: OpSchema) -> OutputSharding:
    """Returns the result of our rule, else of PyTorch's, with gathered inputs if that is unsafe for strided shards."""
    assert _original is not None
    if any(spec.mesh.size() == 1 for spec in schema.args_spec):
        # On one rank all placements are equivalent. PyTorch derives the rules of composite operators from meshes of
        # one rank, so the result must have the placements that it would have on larger meshes.
        return _mark_literal(schema, _original(schema))
    if schema.op in _COMPOSITES:
        raise NotImplementedError(f"{schema.op} is made of other operators")
    rule = _RULES.get(schema.op) or (_pointwise if strided.is_pointwise(schema.op) else None)
    result = rule(schema) if rule is not None else None
    if result is not None:
        counters.counts.views += 1
        return result
    if not strided.has_strided(schema) or strided.is_verified(schema) or strided.is_elementwise_on_lists(schema):
        return _mark_literal(schema, _torch_result(schema))
    return strided.gather_first(schema, _torch_result)


def _torch_result(schema: OpSchema) -> OutputSharding:
    """Returns PyTorch's result. The sizes of strided shards are computed with tensors, which must not be fake."""
    assert _original is not None
    is_real = _runtime.is_plain_eager(True) or not any(map(is_strided, schema.args_spec))
    if is_real or any(plans.is_symbolic(spec.shape) for spec in schema.args_spec):
        return _original(schema)
    with _disable_current_modes():
        return _original(schema)


def _mark_literal(schema: OpSchema, result: OutputSharding) -> OutputSharding:
    """Marks split factors of a result as literal if those of all inputs are. Torch before 2.15 loses the mark."""
    strided = [spec for spec in schema.args_spec if is_strided(spec)]
    if not strided or any(spec.use_strided_shard_as_shard_order for spec in strided):
        return result

    def mark(spec: Any) -> Any:
        if not isinstance(spec, DTensorSpec) or not is_strided(spec) or not spec.use_strided_shard_as_shard_order:
            return spec
        return DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta, use_strided_shard_as_shard_order=False)

    def mark_all(tree: Any) -> Any:
        return tree_map(mark, tree, is_leaf=lambda value: isinstance(value, DTensorSpec))

    result.output_spec = mark_all(result.output_spec)
    if result.redistribute_schema is not None:
        result.redistribute_schema.args_schema = mark_all(result.redistribute_schema.args_schema)
    return result


def _view(schema: OpSchema) -> OutputSharding | None:
    """The rule for views: no elements move if the layout of the view exists on the mesh. Else PyTorch decides."""
    spec = sharded_source(schema, or_empty=True)  # PyTorch's rule does not terminate for some tensors without elements
    if spec is None:
        return None
    shape: Any = schema.args_schema[1]
    if plans.is_symbolic((*spec.shape, *shape)):
        if _keeps_sharded_dims(spec, meta_of(schema).shape):
            return None  # PyTorch's rule is right whatever the sizes are
        shape = plans.fixed(shape)  # numeric sizes decide if each rank keeps its elements
    assert spec.tensor_meta is not None
    try:
        layout = layout_of_spec(spec, plans.fixed(spec.shape), spec.tensor_meta.dtype)
        view_layout = _planner.view_of(layout, shape, True)
    except ValueError as error:  # unknown placements, or sizes that PyTorch refuses too
        counters.count_view_fallback(counters.cause_of(error), str(error))
        return None
    if isinstance(view_layout, str):
        return _left_to_torch(schema, spec, layout, shape, view_layout)
    meta: Any = meta_of(schema)
    meta = TensorMeta(torch.Size(plans.fixed(meta.shape)), tuple(plans.fixed(meta.stride)), meta.dtype)
    target = spec_of_layout(view_layout, spec, meta)
    assert target is not None
    return with_local_shape(schema, spec, target)


def _keeps_sharded_dims(spec: DTensorSpec, shape: Sequence[Any]) -> bool:
    """True if every sharded dim is kept, with all dims before it or all dims after it, symbolic sizes included.

    False for tensors without elements: PyTorch's rule does not terminate for some of these.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    def num_equal_sizes(sizes: Sequence[Any], other_sizes: Sequence[Any]) -> int:
        pairs = zip(sizes, other_sizes, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: statically_known_true(pair[0] == pair[1]), pairs))

    first, last = num_equal_sizes(spec.shape, shape), spec.ndim - num_equal_sizes(spec.shape[::-1], shape[::-1])
    cuts: list[Any] = [placement for placement in spec.placements if is_cut(placement)]
    is_empty = any(statically_known_true(size == 0) for size in spec.shape)
    return not is_empty and not is_strided(spec) and all(cut.dim < first or cut.dim >= last for cut in cuts)


def _left_to_torch(
    schema: OpSchema, spec: DTensorSpec, layout: _planner.Layout, shape: Sequence[int], reason: str
) -> OutputSharding:
    """Leaves a view to PyTorch, which may redistribute first or raise. Raises if its result would be wrong."""
    assert _original is not None and spec.tensor_meta is not None
    counters.count_view_fallback(counters.cause_of(ValueError(reason)), f"{layout} as {tuple(shape)}: {reason}")
    result = _torch_result(schema)
    first = spec if result.redistribute_schema is None else result.redistribute_schema.args_schema[0]
    if isinstance(first, DTensorSpec) and first.placements == spec.placements:
        claimed = result.output_spec
        assert isinstance(claimed, DTensorSpec)
        claimed_layout = layout_of_spec(claimed, plans.fixed(claimed.shape), spec.tensor_meta.dtype)
        view_layout = _planner.view_of(layout, claimed_layout.shape)
        ranks = layout.mesh.ranks
        if isinstance(view_layout, str) or any(view_layout.region(r) != claimed_layout.region(r) for r in ranks):
            raise RuntimeError(
                f"view: PyTorch's {claimed.placements} for {layout} as {tuple(shape)} would be wrong, because {reason}"
            )
    return result


def _permutation_rule(dims_of: Callable[..., Sequence[int]]) -> _Rule:
    """Returns a rule for permutations of dims with strided shards. PyTorch's rules are correct for all others."""

    def rule(schema: OpSchema) -> OutputSharding | None:
        spec = sharded_source(schema)
        if spec is None or not is_strided(spec):
            return None
        assert spec.tensor_meta is not None
        dims = dims_of(spec.ndim, *schema.args_schema[1:])
        layout = layout_of_spec(spec, plans.fixed(spec.shape), spec.tensor_meta.dtype).permute(dims)
        target = spec_of_layout(layout, spec, meta_of(schema))
        return None if target is None else OutputSharding(target)

    return rule


def _swap(ndim: int, a: int, b: int) -> list[int]:
    """Returns the permutation that swaps dims a and b."""
    dims = list(range(ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _unsqueeze(schema: OpSchema) -> OutputSharding | None:
    """The rule for unsqueeze with strided shards."""
    spec = sharded_source(schema)
    if spec is None or not is_strided(spec):
        return None
    meta: Any = meta_of(schema)
    dim: Any = schema.args_schema[1]
    at = dim + len(meta.shape) if dim < 0 else dim
    moved = tuple(with_dim(p, p.dim + (p.dim >= at)) if is_cut(p) else p for p in spec.placements)
    return OutputSharding(spec_like(spec, moved, meta))


def _has_mesh_order(spec: DTensorSpec) -> bool:
    """True if placements alone determine the shards: cuts are in mesh order, or split factors encode it."""
    if spec.use_strided_shard_as_shard_order:
        return True
    return all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in spec.shard_order)


def _product_rule(lhs_dims: str, rhs_dims: str, out_dims: str) -> _Rule:
    """Returns a rule for products with strided shards that need no communication.

    Each mesh dim must shard the same axis of both operands equally, or one operand must be replicated.
    """

    def rule(schema: OpSchema) -> OutputSharding | None:
        specs = schema.args_spec
        if not any(is_strided(spec) for spec in specs) or not all(map(_has_mesh_order, specs)):
            return None
        *bias, lhs, rhs = specs
        flags = {spec.use_strided_shard_as_shard_order for spec in specs if is_strided(spec)}
        if len(flags) > 1 or lhs.mesh != rhs.mesh:
            return None
        placements = []
        operands = list(lhs.placements), list(rhs.placements)  # `_placement_of` replaces R by the needed shards
        for mesh_dim in range(lhs.mesh.ndim):
            out = _placement_of(operands, mesh_dim, lhs_dims, rhs_dims, out_dims)
            if out is None or not all(_can_add(spec, spec.placements[mesh_dim], out, len(out_dims)) for spec in bias):
                return None
            placements.append(out)
        strided = next(spec for spec in specs if is_strided(spec))
        result = spec_like(strided, placements, meta_of(schema))
        if all(tuple(now) == spec.placements for now, spec in zip(operands, (lhs, rhs), strict=True)):
            return OutputSharding(result)
        cut = [spec_like(strided, now, spec.tensor_meta) for now, spec in zip(operands, (lhs, rhs), strict=True)]
        sharded = OpSchema(schema.op, (*bias, *cut, *schema.args_schema[len(specs) :]), schema.kwargs_schema)
        return OutputSharding(result, sharded, needs_redistribute=True)

    return rule


def _placement_of(
    operands: tuple[list[Any], list[Any]], mesh_dim: int, lhs_dims: str, rhs_dims: str, out_dims: str
) -> Placement | None:
    """Returns the placement of the product on a mesh dim, or None if elements have to move.

    Of a replicated operand, each rank takes the part that matches the other operand; `operands` is updated accordingly.
    """
    a, b = (placements[mesh_dim] for placements in operands)
    if not (is_cut(a) or is_cut(b)):
        if a.is_replicate() and b.is_replicate():
            return Replicate()
        is_sum = a.is_partial("sum") and b.is_replicate() or a.is_replicate() and b.is_partial("sum")
        return Partial() if is_sum else None
    letter = lhs_dims[a.dim] if is_cut(a) else rhs_dims[b.dim]
    cut, other, its_dims, its = (a, b, rhs_dims, operands[1]) if is_cut(a) else (b, a, lhs_dims, operands[0])
    if letter not in its_dims:
        return with_dim(cut, out_dims.index(letter)) if other.is_replicate() else None
    needed = with_dim(cut, its_dims.index(letter))
    if other != needed:
        # After a cut by a later mesh dim, this mesh dim would take another part.
        is_last_cut = not any(is_cut(p) and p.dim == its_dims.index(letter) for p in its[mesh_dim + 1 :])
        if not other.is_replicate() or not is_last_cut:
            return None
        its[mesh_dim] = needed
    return with_dim(cut, out_dims.index(letter)) if letter in out_dims else Partial()


def _pointwise(schema: OpSchema) -> OutputSharding | None:
    """The rule for elementwise functions with strided shards, and for those for which PyTorch would redistribute.

    On each mesh dim, operands must be sharded equally or replicated.
    """
    specs = [arg for arg in schema.args_schema if isinstance(arg, DTensorSpec)]
    is_simple = schema.op._schema.returns and not schema.is_out_variant_op() and len(specs) == len(schema.args_spec)
    if not is_simple or not all(map(_has_mesh_order, specs)):
        return None
    if not any(map(is_strided, specs)):
        has_equal_placements = len({spec.placements for spec in specs}) < 2
        if has_equal_placements or not _torch_result(schema).needs_redistribute:
            return None
    flags = {spec.use_strided_shard_as_shard_order for spec in specs if is_strided(spec)}
    if len(flags) > 1 or any(spec.mesh != specs[0].mesh for spec in specs):
        return None
    meta: Any = meta_of(schema)
    if not isinstance(meta, TensorMeta):
        return None
    like = next(filter(is_strided, specs), specs[0])
    placements: list[Placement] = []
    needed: list[list[Placement]] = [[] for _ in specs]
    for mesh_dim in range(like.mesh.ndim):
        operands = [spec.placements[mesh_dim] for spec in specs]
        cuts: list[Any] = [
            with_dim(p, p.dim + len(meta.shape) - s.ndim) for p, s in zip(operands, specs, strict=True) if is_cut(p)
        ]
        out = cuts[0] if cuts else Replicate()
        if len(specs) == 2 and schema.op in _LINEAR and operands[0] == operands[1] and operands[0].is_partial("sum"):
            placements.append(operands[0])
            for now in needed:
                now.append(operands[0])
            continue
        if schema.is_inplace_op():  # the written tensor keeps its placement; the others move
            out = operands[0]
            if out.is_partial():
                return None
        for placement, spec, now in zip(operands, specs, needed, strict=True):
            wanted = _operand_placement(out, placement, spec, mesh_dim, meta.shape, schema.is_inplace_op())
            if wanted is None:
                return None
            now.append(wanted)
        placements.append(out)
    if schema.is_inplace_op() and tuple(needed[0]) != specs[0].placements:
        return None
    result = spec_like(like, placements, meta)
    if all(tuple(now) == spec.placements for now, spec in zip(needed, specs, strict=True)):
        return OutputSharding(result)
    left = iter([spec_like(like, now, spec.tensor_meta) for now, spec in zip(needed, specs, strict=True)])
    args = tuple(next(left) if isinstance(arg, DTensorSpec) else arg for arg in schema.args_schema)
    return OutputSharding(result, OpSchema(schema.op, args, schema.kwargs_schema), needs_redistribute=True)


def _operand_placement(
    out: Any, placement: Any, spec: DTensorSpec, mesh_dim: int, shape: Sequence[int], may_move: bool
) -> Placement | None:
    """Returns the placement that an operand needs for a result placed as `out`.

    Returns None if elements would have to move and `may_move` is false.
    """
    dim = out.dim - (len(shape) - spec.ndim) if is_cut(out) else -1
    if dim < 0 or spec.shape[dim] != shape[out.dim]:  # the operand is broadcast
        return Replicate() if may_move or placement.is_replicate() else None
    wanted = with_dim(out, dim)
    if may_move:
        return wanted
    # After a cut by a later mesh dim, this mesh dim would take another part.
    fits = placement.is_replicate() and not any(is_cut(p) and p.dim == dim for p in spec.placements[mesh_dim + 1 :])  # type: ignore[attr-defined]
    return wanted if placement == wanted or fits else None


def _can_add(spec: DTensorSpec, placement: Any, out: Any, ndim: int) -> bool:
    """True if a bias with this placement can be added to a product placed as `out`."""
    if not is_cut(out):
        return bool(out.is_replicate() and placement.is_replicate())
    dim = out.dim - (ndim - spec.ndim)
    if dim < 0 or spec.shape[dim] == 1:
        return bool(placement.is_replicate())
    return bool(placement == with_dim(out, dim))


def _sum(schema: OpSchema) -> OutputSharding | None:
    """The rule for sums of tensors with strided shards."""
    spec = sharded_source(schema)
    if spec is None or not is_strided(spec) or not _has_mesh_order(spec):
        return None
    summed_dims: Any = schema.args_schema[1] if len(schema.args_schema) > 1 else None
    keeps_dims = len(schema.args_schema) > 2 and bool(schema.args_schema[2])
    dims = {dim % spec.ndim for dim in summed_dims or range(spec.ndim)}
    placements: list[Placement] = []
    for placement in spec.placements:
        if is_cut(placement):
            dim = placement.dim  # type: ignore[attr-defined]
            below = 0 if keeps_dims else sum(summed < dim for summed in dims)
            placements.append(Partial() if dim in dims else with_dim(placement, dim - below))
        elif placement.is_replicate() or placement.is_partial("sum"):
            placements.append(placement)
        else:
            return None
    return OutputSharding(spec_like(spec, placements, meta_of(schema)))


_LINEAR = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)  # linear: applicable to pending sums

_RULES: dict[Any, _Rule] = {
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.t.default: _permutation_rule(lambda ndim: list(reversed(range(ndim)))),
    aten.transpose.int: _permutation_rule(_swap),
    aten.permute.default: _permutation_rule(lambda ndim, dims: dims),
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: strided.squeeze_rule,
    aten.squeeze.dims: strided.squeeze_rule,
    aten.squeeze_.dim: strided.squeeze_rule,
    aten.expand.default: strided.expand_rule,
    aten.new_zeros.default: strided.creation_rule,
    aten.new_ones.default: strided.creation_rule,
    aten.new_full.default: strided.creation_rule,
    aten.new_empty.default: strided.creation_rule,
    aten.copy_.default: _pointwise,
    aten.native_dropout_backward.default: _pointwise,
    aten.mm.default: _product_rule("mk", "kn", "mn"),
    aten.addmm.default: _product_rule("mk", "kn", "mn"),
    aten.bmm.default: _product_rule("bmk", "bkn", "bmn"),
    aten.dot.default: _product_rule("k", "k", ""),
    aten.sum.dim_IntList: _sum,
    **dict.fromkeys(
        (
            *(aten.alias.default, aten.clone.default, aten.detach.default, aten._to_copy.default, aten.zero_.default),
            *(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default),
            *(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype),
            *(aten.native_dropout.default, aten.bernoulli.default, aten.bernoulli_.float, aten.normal_.default),
            *(aten.uniform_.default, aten.fill_.Scalar, aten.detach_.default),
        ),
        strided.same_placements_rule,
    ),
}

# Composite operators. In inference mode DTensor gets them undecomposed, and decomposes those without a rule. The
# rules that PyTorch derives from the decompositions are wrong for some views.
_COMPOSITES = {
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.linear.default,
    aten.matmul.default,
}
