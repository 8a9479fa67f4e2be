"""Products of plain tensors in a process group and of DTensors, with autograd."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._prims_common import make_contiguous_strides_for
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .. import _planner, checking, counters, executables
from ..argument_values import dtype_text, placement_texts
from ..dtensor.specs import layout_of_spec, placement_of
from ..topology import tables_now
from .running import Product, Setting


class Asked(NamedTuple):
    """Everything that is asked of a product but its tensors; csrc/products/product_arguments.h says more."""

    function: str  # "linear", "gather" or "sum"
    setting: Setting
    placements: tuple[Placement, ...] | None = None
    dim: int | None = None
    size: int | None = None
    columns: int | tuple[int, ...] | None = None
    out_dtype: torch.dtype | None = None
    shares: bool = False  # whether the results are followed by `x` as it was gathered, if it was


class Planned(NamedTuple):
    """A product, None on a rank that holds nothing of it; which weights it takes transposed; specs of its DTensors."""

    product: Product | None
    are_turned: tuple[bool, ...]
    specs: tuple[DTensorSpec, ...]


class StoppedShort(Exception):
    """Raised in place of computing a product, with what was planned."""

    def __init__(self, planned: Planned) -> None:
        super().__init__()
        self.planned = planned


_thread = threading.local()


@contextlib.contextmanager
def stopping_short() -> Iterator[None]:
    """During the block, this thread raises StoppedShort where it would compute a product."""
    _thread.stops = True
    try:
        yield
    finally:
        _thread.stops = False


# DTensor's own __init__ does nothing, slowly.
_new_dtensor = functools.partial(DTensor.__new__, DTensor)

# By all that they depend on but what is pinned and measured, with which they are forgotten.
_products: executables.Kept[Planned] = executables.Kept()

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast(tensors: Sequence[Any]) -> list[Any]:
    """As torch's own linear does under ``torch.autocast``."""
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in _CAST else t for t in tensors]


def multiply(
    asked: Asked, x: torch.Tensor, weights: Sequence[Any], biases: Sequence[Any], scales: Sequence[Any]
) -> list[Any]:
    """One result by weight. `scales` are those of x and weights; all None where operands are not scaled.

    Arguments are checked where they are seen for the first time. Raises ValueError for those that do not fit.
    """
    is_scaled = any(scale is not None for scale in scales)
    tensors = [x, *weights, *biases]
    if not is_scaled:
        tensors = autocast(tensors)
    needs_grad = is_scaled and torch.is_grad_enabled()
    needs_grad = needs_grad and any(getattr(t, "requires_grad", False) for t in (*tensors, *scales))
    key = (asked, len(weights), needs_grad, checking.is_on(), *map(_described, tensors), *map(_described, scales))
    planned = _products.get(key)
    if planned is None:
        x, weights, biases = tensors[0], tensors[1 : len(weights) + 1], tensors[len(weights) + 1 :]
        planned = _plan(asked, x, weights, biases, scales, needs_grad)
        _products.put(key, planned)
    if getattr(_thread, "stops", False):
        raise StoppedShort(planned)
    product, are_turned, specs = planned
    if product is None:
        nothing = tensors[0]._local_tensor.new_empty(0, dtype=specs[0].tensor_meta.dtype)  # type: ignore[union-attr]
        return [_new_dtensor(nothing, spec, requires_grad=x.requires_grad) for spec in specs]
    for j, is_turned in enumerate(are_turned, 1):
        if is_turned:
            tensors[j] = tensors[j].t()
    if not is_scaled:
        return list(_Multiply.apply(product, specs, *tensors))  # type: ignore[no-untyped-call]
    outputs: list[Any] = product.forward(_locals(tensors), _locals(scales))[0]
    return (
        [_new_dtensor(y, spec, requires_grad=False) for y, spec in zip(outputs, specs, strict=True)]
        if specs
        else outputs
    )


def _described(given: Any) -> Any:
    """All of it that a plan depends on."""
    if isinstance(given, DTensor):
        return given._spec
    return (given.shape, given.stride(), given.dtype, given.device) if isinstance(given, torch.Tensor) else given


def _plan(
    asked: Asked, x: Any, weights: Sequence[Any], biases: Sequence[Any], scales: Sequence[Any], needs_grad: bool
) -> Planned:
    where, group = asked.setting, asked.setting.group
    layout = layout_of(x._spec) if isinstance(x, DTensor) else None
    dtypes = {tensor.dtype for tensor in (x, *weights) if isinstance(tensor, torch.Tensor)}
    if any(scale is not None for scale in scales):
        dtypes.add(asked.out_dtype or torch.bfloat16)
    counters.counts.plans += 1
    plan = _planner.plan_product(
        asked.function,
        (x, layout),
        list(map(_given, weights)),
        list(map(_given, biases)),
        _given(scales[0]),
        list(map(_given, scales[1:])),
        out_dtype=None if asked.out_dtype is None else str(asked.out_dtype),
        requires_grad=needs_grad,
        placements=None if asked.placements is None else placement_texts(asked.placements),
        dim=asked.dim,
        size=asked.size,
        columns=asked.columns,
        rank=where.rank,
        num_ranks=dist.get_world_size(group),
        checks_parts=not checking.is_on(),  # which tells all ranks
        method=where.method,
        chunks=where.chunks,
        depth=where.depth,
        save=where.save,
        backend=executables.lowering(where.device_type, group)
        if layout is None
        else executables.lowering_on(layout.mesh, where.device_type, group),
        tables=tables_now(),
        gemm_models={name: where.model(name) for name in map(dtype_text, dtypes)},
    )
    if layout is None:
        return Planned(Product(plan, where), tuple(",nk->" in axes for axes in plan.axes), ())
    specs = [_spec_of(x.device_mesh, layout, asked.placements or _placements(layout)) for layout in plan.results]
    if asked.shares and plan.keeps_gathered:
        specs.append(_spec_of(x.device_mesh, plan.moved_operand, _placements(plan.moved_operand)))
    holds_any = x.device_mesh.get_coordinate() is not None
    return Planned(Product(plan, where) if holds_any else None, (), tuple(specs))


def _given(tensor: Any) -> Any:
    """With the layout of a DTensor."""
    return None if tensor is None else (tensor, layout_of(tensor._spec) if isinstance(tensor, DTensor) else None)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, product: Product, specs: tuple[DTensorSpec, ...], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        locals_ = _locals(tensors)
        outputs, kept = product.forward(locals_)
        ctx.made = product, [None if t is None else getattr(t, "_spec", None) for t in tensors]
        ctx.save_for_backward(locals_[0] if kept is None else kept, *locals_[1 : product.num_weights + 1])
        ctx.set_materialize_grads(False)
        if not specs:
            return tuple(outputs)
        if kept is not None and len(specs) > len(outputs):
            outputs.append(kept)
        requires_grad = any(t is not None and t.requires_grad for t in tensors)
        return tuple(_new_dtensor(y, spec, requires_grad=requires_grad) for y, spec in zip(outputs, specs, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        product, specs = ctx.made
        layouts = [layout_of(dy._spec) if isinstance(dy, DTensor) else None for dy in gradients]
        dys = [None if dy is None else _local(dy).contiguous() for dy in gradients]
        found = product.backward(*ctx.saved_tensors, dys=dys, layouts=layouts, needs=ctx.needs_input_grad[2:])
        if specs[0] is not None:
            wanted = [_gradient_spec(specs[0], product.operand_gradient), *map(_gradient_spec, specs[1:])]
            found = [
                None if local is None else _new_dtensor(local, spec, requires_grad=False)
                for local, spec in zip(found, wanted, strict=True)
            ]
        return None, None, *found


def _locals(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """What this rank holds of those that there are."""
    return [_local(tensor) for tensor in tensors if tensor is not None]


def _local(x: Any) -> torch.Tensor:
    """What this rank holds, waited for where it is still under way."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    waited: torch.Tensor = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return waited


@executables.kept
def layout_of(spec: DTensorSpec) -> _planner.Layout:
    assert spec.tensor_meta is not None
    return layout_of_spec(spec, spec.shape, spec.tensor_meta.dtype)


@executables.kept
def _spec_of(mesh: Any, layout: _planner.Layout, placements: tuple[Placement, ...]) -> DTensorSpec:
    """Returns the spec of a row-major tensor. Layouts that differ only along mesh dims of size 1 are equal, so the
    placements must be given."""
    stride = make_contiguous_strides_for(layout.shape)
    meta = TensorMeta(torch.Size(layout.shape), tuple(stride), getattr(torch, layout.dtype))
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def _placements(layout: _planner.Layout) -> tuple[Placement, ...]:
    return tuple(map(placement_of, layout.placements))


def gradient_placements(placements: Sequence[Placement], names: Sequence[str] = ()) -> tuple[Placement, ...]:
    """Returns the placements of a gradient: R in place of pending sums, but pending sums where `names` have P."""
    pending = [placement_of(name).is_partial() for name in names] or [False] * len(placements)
    whole = (Replicate() if placement.is_partial() else placement for placement in placements)
    return tuple(Partial() if pends else p for pends, p in zip(pending, whole, strict=True))


@executables.kept
def _gradient_spec(spec: DTensorSpec | None, names: tuple[str, ...] = ()) -> DTensorSpec | None:
    """Of the gradient of what lies as `spec`, as `gradient_placements` says."""
    if spec is None:
        return None
    placements = gradient_placements(spec.placements, names)
    return spec if placements == spec.placements else _spec_of(spec.mesh, layout_of(spec), placements)
