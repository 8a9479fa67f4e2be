"""Products of plain tensors in a process group and of DTensors, with autograd."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .. import _planner, checking, executables
from .._planner import Layout
from ..dtensor.specs import layout_of_spec
from ..layout import Layout as MadeLayout
from ..layout import Mesh, without_dims
from .running import Product, Setting, make_plan
from .scales import Scaled, part_of_scale

Specs = tuple[DTensorSpec, ...]
Optionals = Sequence[torch.Tensor | None]


class StoppedShort(Exception):
    """Raised in place of computing a product, with what was to be computed.

    product: None on a rank that holds nothing of it. are_turned: weights, that are taken transposed. specs: of results
    that are DTensors.
    """

    def __init__(self, product: Product | None, are_turned: Sequence[bool] = (), specs: Specs = ()) -> None:
        super().__init__()
        self.product = product
        self.are_turned = tuple(are_turned)
        self.specs = specs


_thread = threading.local()


@contextlib.contextmanager
def stopping_short() -> Iterator[None]:
    """During the block, this thread raises StoppedShort where it would compute a product."""
    _thread.stops = True
    try:
        yield
    finally:
        _thread.stops = False


def _stops() -> bool:
    return getattr(_thread, "stops", False)


# DTensor's own __init__ does nothing, slowly.
_new_dtensor = functools.partial(DTensor.__new__, DTensor)

# By all that they depend on but what is pinned and measured, with which they are forgotten.
_products: executables.Kept[tuple[Product | None, Specs]] = executables.Kept()

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """As torch's own linear does under ``torch.autocast``."""
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in _CAST else t for t in tensors)


def local_of(x: Any) -> torch.Tensor:
    """What this rank holds, waited for where it is still under way."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    waited: torch.Tensor = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return waited


def run(product: Product, x: Any, weights: Sequence[Any], biases: Sequence[Any], scales: Sequence[Any] = ()) -> Any:
    """The forward of `Product`, on whole DTensors or this rank's plain tensors."""
    locals_ = [local_of(tensor) for tensor in (x, *weights, *(bias for bias in biases if bias is not None))]
    parts = [
        part_of_scale(local_of(scale), layout, product.rank)
        for scale, layout in zip(scales, product.scale_layouts, strict=True)
    ]
    return product.forward([*locals_, *parts])


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, product: Product, specs: Specs, x: torch.Tensor, *others: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = others[: product.num_weights], others[product.num_weights :]
        outputs, kept = run(product, x, weights, biases)
        ctx.product = product
        ctx.specs = specs, [None if t is None else getattr(t, "_spec", None) for t in (x, *others)]
        ctx.save_for_backward(local_of(x) if kept is None else kept, *map(local_of, weights))
        ctx.set_materialize_grads(False)
        if not specs:
            return tuple(outputs)
        if kept is not None and len(specs) > len(outputs):
            outputs.append(kept)
        requires_grad = any(t is not None and t.requires_grad for t in (x, *others))
        return tuple(_new_dtensor(y, spec, requires_grad=requires_grad) for y, spec in zip(outputs, specs, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        product: Product = ctx.product
        specs, given_specs = ctx.specs
        dys, layouts = [], []
        for j, layout in enumerate(product.result_gradients):
            dy = gradients[j]
            if specs:
                layout = layout_of(specs[j] if dy is None else dy._spec)
            dys.append(product.empty(x, layout).zero_() if dy is None else local_of(dy).contiguous())
            layouts.append(layout)
        added = gradients[-1] if len(gradients) > len(dys) else None
        if added is not None:
            dys.append(local_of(added).contiguous())
            layouts.append(layout_of(added._spec))
        found = product.backward(x, weights, dys, layouts, ctx.needs_input_grad[2:])
        if specs:
            names = tuple(product.plan.operand_gradient.placements)
            wanted = [_gradient_spec(given_specs[0], names), *map(_gradient_spec, given_specs[1:])]
            found = [
                None if local is None else _new_dtensor(local, spec, requires_grad=False)
                for local, spec in zip(found, wanted, strict=True)
            ]
        return None, None, *found


def _multiply(product: Product, specs: Specs, x: Any, weights: Any, biases: Any, scaled: Scaled | None) -> list[Any]:
    if scaled is None:
        return list(_Multiply.apply(product, specs, x, *weights, *biases))  # type: ignore[no-untyped-call]
    outputs: list[Any] = run(product, x, weights, biases, scaled.all)[0]
    if not specs:
        return outputs
    return [_new_dtensor(y, spec, requires_grad=False) for y, spec in zip(outputs, specs, strict=True)]


def _scaled_by(scaled: Scaled | None) -> str:
    return "" if scaled is None else "row" if scaled.by_row else "tensor"


# ---- plain tensors


class PlainGroup:
    """The group that plain tensors lie in."""

    def __init__(self, setting: Setting, dtype: torch.dtype) -> None:
        self.setting = setting
        self.num_ranks = dist.get_world_size(setting.group)
        self.rank = setting.rank
        self.dtype = dtype

    def total(self, said: int | None, here: int, argument: str, what: str) -> int:
        """The length of a dim in all, of which this rank has `here`."""
        if said is None and self.num_ranks > 1:
            raise ValueError(
                f"{argument}: has to be said for plain tensors on {self.num_ranks} ranks: {what} in all, "
                f"{here * self.num_ranks} if every rank has as much as this one"
            )
        total = here if said is None else said
        chunk = -(-total // self.num_ranks)
        mine = max(min(total - self.rank * chunk, chunk), 0)
        if total < 0 or (mine != here and not checking.is_on()):  # which tells all ranks
            raise ValueError(
                f"{argument}: {total} in all, of which rank {self.rank} of {self.num_ranks} has {mine} as torch.chunk "
                f"cuts; it was given {here}"
            )
        return total

    def layout(self, shape: Sequence[int], placement: str, dtype: torch.dtype | None = None) -> MadeLayout:
        return _layout_in_group(self.num_ranks, tuple(shape), placement, dtype or self.dtype)

    def multiply(
        self,
        axes: str,
        x: tuple[torch.Tensor, Layout],
        weights: Sequence[tuple[torch.Tensor, Layout]],
        results: Sequence[Layout],
        cut: str,
        biases: Optionals,
        bias_placement: str,
        scaled: Scaled | None = None,
    ) -> list[torch.Tensor]:
        stored = [_as_stored(axes, *weight) for weight in weights]
        bias_layouts = tuple(self._bias_layout(b, r, bias_placement) for b, r in zip(biases, results, strict=True))
        parts = (
            tuple(one.axes for one in stored),
            x[1],
            tuple(one.layout for one in stored),
            bias_layouts,
            tuple(results),
            cut if self.num_ranks > 1 else "-",
            _scaled_by(scaled),
        )
        product, _ = _products.get_or_make(
            (self.setting, *parts), lambda: (Product(make_plan(self.setting, *parts), self.setting), ())
        )
        if _stops():
            raise StoppedShort(product, [one.axes != axes for one in stored])
        assert product is not None
        return _multiply(product, (), x[0], [one.tensor for one in stored], biases, scaled)

    def _bias_layout(self, bias: torch.Tensor | None, result: Layout, placement: str) -> MadeLayout | None:
        if bias is None:
            return None
        layout = self.layout([result.shape[-1]], placement, bias.dtype)
        if isinstance(bias, DTensor) or tuple(bias.shape) != tuple(layout.local_shape(self.rank)):
            raise ValueError(
                f"bias: is a {type(bias).__name__} of shape {tuple(bias.shape)} on rank {self.rank}; allowed is a "
                f"plain tensor of {tuple(layout.local_shape(self.rank))}"
            )
        return layout


@functools.lru_cache(maxsize=4096)
def _layout_in_group(num_ranks: int, shape: tuple[int, ...], placement: str, dtype: torch.dtype) -> MadeLayout:
    return MadeLayout(Mesh({"group": num_ranks}), shape, [placement], dtype)


class _Stored(NamedTuple):
    axes: str
    tensor: torch.Tensor
    layout: Layout


_SWAPPED = {"S(0)": "S(1)", "S(1)": "S(0)"}


def _as_stored(axes: str, weight: torch.Tensor, layout: Layout) -> _Stored:
    """A weight (k, n) that is a view of a contiguous (n, k), as ``linear.weight.t()`` is, without a copy.

    Told by strides, not by contiguity: a single row or column has both, and ranks have to answer alike.
    """
    turned = weight.t()
    is_view = weight.stride(0) == 1 and weight.stride(1) == max(weight.shape[0], 1) != 1
    if not is_view or not turned.is_contiguous():
        return _Stored(axes, weight, layout)
    placement = _SWAPPED.get(layout.placements[0], layout.placements[0])
    swapped = _layout_in_group(layout.mesh.shape[0], tuple(layout.shape[::-1]), placement, weight.dtype)
    return _Stored(axes.replace("kn", "nk"), turned, swapped)


# ---- DTensors


class Asked(NamedTuple):
    """What is asked of a product of DTensors but its operands."""

    axes: str
    # Of every result; None for where it comes to lie by itself, with `sums_to` where sums are due.
    placements: tuple[Placement, ...] | None
    sums_to: Placement | None
    # Whether the axes that operands are cut along stay cut while it computes; else those predicted fastest are.
    stays_cut: bool
    setting: Setting
    shares: bool = False  # whether the results are followed by `x` as it was gathered, if it was


def multiply_dtensors(
    asked: Asked, x: DTensor, weights: Sequence[Any], biases: Sequence[Any], scaled: Scaled | None = None
) -> list[DTensor]:
    specs_of = tuple(None if tensor is None else tensor._spec for tensor in (x, *weights, *biases))
    scale_key: tuple[Any, ...] = ()
    if scaled is not None:
        cut = tuple(s._spec if isinstance(s, DTensor) and s.ndim > 1 else None for s in scaled.all)
        scale_key = (_scaled_by(scaled), scaled.out_dtype, cut)
    key = (asked, specs_of, scale_key)
    known = _products.get(key)
    if known is None:
        known = _plan_of_dtensors(asked, x, specs_of, len(weights), scaled)
        _products.put(key, known)
    product, specs = known
    if _stops():
        raise StoppedShort(product, [False] * len(weights), specs)
    if product is None:  # this rank holds nothing of it
        nothing = x._local_tensor.new_empty(0, dtype=specs[0].tensor_meta.dtype)  # type: ignore[union-attr]
        return [_new_dtensor(nothing, spec, requires_grad=x.requires_grad) for spec in specs]
    return _multiply(product, specs, x, weights, biases, scaled)


def _plan_of_dtensors(
    asked: Asked, x: DTensor, specs_of: tuple[Any, ...], num_weights: int, scaled: Scaled | None
) -> tuple[Product | None, Specs]:
    operand, *others = (None if spec is None else layout_of(spec) for spec in specs_of)
    assert operand is not None
    weights: list[Any] = others[:num_weights]
    dtype = x.dtype if scaled is None else scaled.out_dtype
    column = asked.axes.split(",")[1].index("n")
    specs: list[DTensorSpec] = []
    for weight in weights:
        wanted = asked.placements or _placements_in_place(asked, operand, weight)
        specs.append(_spec_of(x.device_mesh, (*x.shape[:-1], weight.shape[column]), dtype, wanted))
    if x.device_mesh.get_coordinate() is None:
        return None, tuple(specs)
    scales: list[Layout | None] = []
    if scaled is not None and scaled.by_row:
        scales = [_layout_of_rows(asked.axes, scale, i) for i, scale in enumerate(scaled.all)]
    plan = make_plan(
        asked.setting,
        [asked.axes] * num_weights,
        operand,
        weights,
        others[num_weights:],
        [layout_of(spec) for spec in specs],
        _planner.cuts_in_place(asked.axes, operand, weights[0]) if asked.stays_cut else None,
        _scaled_by(scaled),
        scales,
    )
    if asked.shares and plan.keeps_gathered:
        moved = [_placement(name) for name in plan.moved_operand.placements]
        specs.append(_spec_of(x.device_mesh, tuple(x.shape), x.dtype, tuple(moved)))
    return Product(plan, asked.setting), tuple(specs)


def _placements_in_place(asked: Asked, operand: Layout, weight: Layout) -> tuple[Placement, ...]:
    """What a result is without a move of its own, but for sums."""
    names = _planner.placements_in_place(asked.axes, operand, weight)
    return tuple(asked.sums_to if asked.sums_to and name.startswith("P") else _placement(name) for name in names)


def _placement(name: str) -> Placement:
    if name.startswith("S("):
        return Shard(int(name[2:-1]))
    return Partial() if name.startswith("P") else Replicate()


def _layout_of_rows(axes: str, scale: torch.Tensor, operand: int) -> Layout | None:
    """Of a scale by row that is a DTensor, which may lie anywhere; without the summed dim, of which it has one."""
    if not isinstance(scale, DTensor) or scale.ndim < 2:
        return None
    k_dim = axes.partition("->")[0].split(",")[min(operand, 1)].index("k")
    return without_dims(layout_of(scale._spec), [k_dim], "float32")


@executables.kept
def layout_of(spec: DTensorSpec) -> Layout:
    assert spec.tensor_meta is not None
    return layout_of_spec(spec, spec.shape, spec.tensor_meta.dtype)


@executables.kept
def _spec_of(mesh: Any, shape: tuple[int, ...], dtype: torch.dtype, placements: tuple[Placement, ...]) -> DTensorSpec:
    stride = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        stride[d] = stride[d + 1] * max(shape[d + 1], 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def gradient_placements(placements: Sequence[Placement], names: Sequence[str] = ()) -> tuple[Placement, ...]:
    """Returns the placements of a gradient: R in place of pending sums, but pending sums where `names` have P."""
    found = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    if names:
        found = tuple(Partial() if name.startswith("P") else p for name, p in zip(names, found, strict=True))
    return found


@executables.kept
def _gradient_spec(spec: DTensorSpec | None, names: tuple[str, ...] = ()) -> DTensorSpec | None:
    """Of a gradient that lies as `spec`, with R for sums that are due; with sums that are due where `names` have P."""
    if spec is None:
        return None
    assert spec.tensor_meta is not None
    placements = gradient_placements(spec.placements, names)
    if placements == spec.placements:
        return spec
    meta = spec.tensor_meta
    return _spec_of(spec.mesh, tuple(meta.shape), meta.dtype, placements)
