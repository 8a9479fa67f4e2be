"""Products of plain tensors in a process group and of DTensors, with autograd."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .._native import _planner
from ..dtensor.specs import layout_of, placement_of, row_major_spec, with_placements
from ..layouts.argument_values import placement_texts
from ..layouts.errors import argument_error
from ..layouts.topology import tables_now
from ..runtime import checking, counters, executables, groups, plan_log
from .running import Product, ProductRanks


class ProductKey(NamedTuple):
    """The arguments of a product except its tensors, hashable."""

    function: str  # "linear", "gather" or "sum"
    ranks: ProductRanks
    placements: tuple[Placement, ...] | None
    with_gathered: bool  # True to return the gathered `x` after the results, if it was gathered
    options: tuple[tuple[str, Any], ...]  # options of `_planner.plan_product`


def product_key(
    function: str,
    x: torch.Tensor,
    placements: Any = None,
    group: dist.ProcessGroup | None = None,
    with_gathered: bool = False,
    **options: Any,
) -> ProductKey:
    """Returns the arguments in a hashable form.

    Raises RuntimeError if torch.distributed is not initialized, ValueError for a `group` of DTensors.
    """
    groups.check_initialized()
    if placements is not None:  # with dims that count from the front
        ndim = max(x.ndim, 1)
        placements = tuple(Shard(p.dim % ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)
    mesh = x.device_mesh if isinstance(x, DTensor) else None
    if mesh is not None and group is not None:
        raise argument_error("group", "None for DTensors, which have the groups of their mesh", group)
    ranks = ProductRanks(x.device.type, groups.weakly(group), mesh, None if mesh is None else groups.key_of_mesh(mesh))
    hashable = tuple((name, _hashable(option)) for name, option in options.items())
    return ProductKey(function, ranks, placements, with_gathered, hashable)


def _hashable(option: Any) -> Any:
    """Returns the option with tuples in place of lists."""
    return tuple(map(_hashable, option)) if isinstance(option, (list, tuple)) else option


class Planned(NamedTuple):
    """A planned product and how its tensors are passed."""

    product: Product | None  # None on a rank that holds no part of it
    transposed: tuple[bool, ...]  # by weight: True if it is passed transposed
    specs: tuple[DTensorSpec, ...]  # of the results, if they are DTensors


# Makes a DTensor without calling DTensor's __init__, which is slow and does nothing.
_new_dtensor = functools.partial(DTensor.__new__, DTensor)

# Planned products by all inputs of a plan except the planning tables, which `PlanningCache` tracks.
_products: executables.PlanningCache[Planned] = executables.PlanningCache(is_local=True)

_AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def autocast(tensors: Sequence[Any]) -> list[Any]:
    """Casts tensors as torch's own linear does under ``torch.autocast``."""
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in _AUTOCAST_DTYPES else t for t in tensors]


def multiply(
    function: str, x: torch.Tensor, weights: Sequence[Any], biases: Sequence[Any], scales: Sequence[Any], **options: Any
) -> Any:
    """Returns one result per weight. `scales` belong to x and the weights; all are None if operands are not scaled.

    `options` are passed to `product_key`. Raises ValueError for invalid arguments; a combination is checked when first
    used.
    """
    is_scaled = any(scale is not None for scale in scales)
    tensors = [x, *weights, *biases] if is_scaled else autocast([x, *weights, *biases])
    product, transposed, specs = find_planned(product_key(function, x, **options), len(weights), tensors, scales)
    if product is None:
        return list(_MultiplyOutside.apply(specs, *tensors))  # type: ignore[no-untyped-call]
    for j, is_transposed in enumerate(transposed, 1):
        if is_transposed:
            tensors[j] = tensors[j].t()
    if torch.is_inference_mode_enabled():  # autograd functions cannot return DTensors in it with torch 2.11
        return _with_specs(product, specs, product.forward(_locals(tensors), _locals(scales)), False)
    return list(_Multiply.apply(product, specs, _locals(scales), *tensors))  # type: ignore[no-untyped-call]


def _with_specs(
    product: Product, specs: tuple[DTensorSpec, ...], outputs: Sequence[torch.Tensor], requires_grad: bool
) -> list[torch.Tensor]:
    """Returns the results among the outputs of a product: as DTensors, if there are specs."""
    if not specs:
        return list(outputs[: product.num_weights])
    pairs = zip(outputs[: len(specs)], specs, strict=True)
    return [_new_dtensor(y, spec, requires_grad=requires_grad) for y, spec in pairs]


def find_planned(key: ProductKey, num_weights: int, tensors: Sequence[Any], scales: Sequence[Any]) -> Planned:
    """Returns the planned product of `tensors`: the operand, weights, biases. Computes and sends nothing."""
    is_scaled = any(scale is not None for scale in scales)
    needs_grad = is_scaled and torch.is_grad_enabled()
    needs_grad = needs_grad and any(getattr(t, "requires_grad", False) for t in (*tensors, *scales))
    cache_key = (key, num_weights, needs_grad, checking.is_on(), *map(_key_of, tensors), *map(_key_of, scales))
    return _products.get_or_make(cache_key, lambda: _plan(key, num_weights, tensors, scales, needs_grad))


def _key_of(value: Any) -> Any:
    """Returns the properties of a tensor on which its plan depends, hashable; other values unchanged."""
    if isinstance(value, DTensor):
        return value._spec
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def _plan(key: ProductKey, num_weights: int, tensors: Sequence[Any], scales: Sequence[Any], grads: bool) -> Planned:
    """Plans a product, without the cache. `grads` is True for scaled operands that require a gradient."""
    ranks, x = key.ranks, tensors[0]
    layout = layout_of(x._spec) if isinstance(x, DTensor) else None
    lower = executables.lowering if layout is None else functools.partial(executables.lowering_for_mesh, layout.mesh)
    counters.counts.plans += 1
    descriptions = list(map(_with_layout, tensors))
    plan = _planner.plan_product(
        key.function,
        descriptions[0],
        descriptions[1 : 1 + num_weights],
        descriptions[1 + num_weights :],
        list(map(_with_layout, scales)),
        requires_grad=grads,
        placements=None if key.placements is None else placement_texts(key.placements),
        rank=ranks.rank,
        num_ranks=dist.get_world_size(ranks.group),
        checks_parts=not checking.is_on(),  # the debug mode reports errors on all ranks
        backend=lower(ranks.device_type, ranks.group).name,
        tables=tables_now(),
        device_type=ranks.device_type,
        **dict(key.options),
    )
    plan_log.note_product(plan)
    if layout is None:
        return Planned(Product(plan, ranks), tuple(",nk->" in axes for axes in plan.axes), ())
    specs = [row_major_spec(x.device_mesh, layout, key.placements) for layout in plan.results]
    if key.with_gathered and plan.keeps_gathered:
        specs.append(row_major_spec(x.device_mesh, plan.moved_operand))
    is_on_mesh = x.device_mesh.get_coordinate() is not None
    return Planned(Product(plan, ranks) if is_on_mesh else None, (), tuple(specs))


def _with_layout(tensor: Any) -> Any:
    """Returns (tensor, layout), where the layout is None for a plain tensor; None for None."""
    return None if tensor is None else (tensor, layout_of(tensor._spec) if isinstance(tensor, DTensor) else None)


class _Multiply(torch.autograd.Function):
    """The autograd function of products. `specs` are the specs of the results if they are DTensors, else ()."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, product: Product, specs: tuple[DTensorSpec, ...], scales: list[torch.Tensor], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        locals_ = _locals(tensors)
        outputs = product.forward(locals_, scales)
        ctx.product_and_specs = product, [None if t is None else getattr(t, "_spec", None) for t in tensors]
        requires_grad = any(t is not None and t.requires_grad for t in tensors)
        results = _with_specs(product, specs, outputs, requires_grad)
        # DTensors, not their local tensors: writes to a DTensor do not change the version of its local tensor.
        gathered = results[-1] if len(results) > product.num_weights else outputs[-1]
        x = gathered if product.keeps_gathered else tensors[0]
        ctx.save_for_backward(x, *tensors[1 : product.num_weights + 1])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        product, specs = ctx.product_and_specs
        layouts = [layout_of(dy._spec) if isinstance(dy, DTensor) else None for dy in gradients]
        dys = [None if dy is None else _local(dy).contiguous() for dy in gradients]
        saved = _locals(ctx.saved_tensors)
        found = product.backward(*saved, dys=dys, layouts=layouts, needs=ctx.needs_input_grad[3:])
        # A weight has no gradient if its result has none; the ranks compute it all the same, to stay together.
        unused = [dy is None for dy in dys[: product.num_weights]]
        found = [None if j > 0 and unused[(j - 1) % len(unused)] else dx for j, dx in enumerate(found)]
        if specs[0] is not None:
            specs_of_gradients = [_gradient_spec(specs[0], product.operand_gradient), *map(_gradient_spec, specs[1:])]
            pairs = zip(found, specs_of_gradients, strict=True)
            found = [dx if dx is None else _new_dtensor(dx, spec, requires_grad=False) for dx, spec in pairs]
        return None, None, None, *found


class _MultiplyOutside(torch.autograd.Function):
    """Products on a rank outside the mesh: its parts of results and gradients have no elements."""

    @staticmethod
    def forward(ctx: Any, specs: tuple[DTensorSpec, ...], *tensors: Any) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.device = tensors[0].device
        ctx.specs = [None if t is None else t._spec for t in tensors]
        requires_grad = any(t is not None and t.requires_grad for t in tensors)
        return tuple(_empty_dtensor(spec, ctx.device, requires_grad) for spec in specs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        specs = [_gradient_spec(spec) if needs else None for spec, needs in zip(ctx.specs, ctx.needs_input_grad[1:])]
        return None, *(None if spec is None else _empty_dtensor(spec, ctx.device, False) for spec in specs)


def _empty_dtensor(spec: DTensorSpec, device: torch.device, requires_grad: bool) -> torch.Tensor:
    """Returns a DTensor without elements on this rank."""
    assert spec.tensor_meta is not None
    empty = torch.empty(0, dtype=spec.tensor_meta.dtype, device=device)
    return _new_dtensor(empty, spec, requires_grad=requires_grad)


def _locals(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Returns this rank's parts of the tensors that are not None."""
    return [_local(tensor) for tensor in tensors if tensor is not None]


def _local(x: Any) -> torch.Tensor:
    """Returns this rank's part, after waiting for it if it is in flight."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    waited: torch.Tensor = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return waited


def gradient_placements(placements: Sequence[Placement], texts: Sequence[str] = ()) -> tuple[Placement, ...]:
    """Returns the placements of a gradient: R in place of pending sums, and a pending sum where `texts` has P."""
    pending = [placement_of(text).is_partial() for text in texts] or [False] * len(placements)
    full = (Replicate() if placement.is_partial() else placement for placement in placements)
    return tuple(Partial() if is_pending else p for is_pending, p in zip(pending, full, strict=True))


def _gradient_spec(spec: DTensorSpec | None, texts: tuple[str, ...] = ()) -> DTensorSpec | None:
    """Returns the spec of the gradient of a tensor with this spec, with the placements of `gradient_placements`."""
    return None if spec is None else _cached_gradient_spec(spec, groups.key_of_mesh(spec.mesh), texts)


@executables.cached
def _cached_gradient_spec(spec: DTensorSpec, _: Hashable, texts: tuple[str, ...]) -> DTensorSpec:
    """Does the work of `_gradient_spec`. `_` is the key of the mesh's process groups, by which results are cached."""
    placements = gradient_placements(spec.placements, texts)
    return spec if placements == spec.placements else with_placements(spec, placements, is_row_major=True)
