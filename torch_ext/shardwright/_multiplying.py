"""Products as functions that autograd knows, of plain tensors and of DTensors."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from . import _engine, checking, groups
from ._cuts import Cuts, choose_cuts, cut_dim, split_axes
from ._planner import Layout
from ._product_calls import Setting, move
from ._products import Problem, Product, product_of
from ._scales import Scaled, part_of_scale
from .dtensor.specs import layout_of_spec
from .layout import Layout as MadeLayout
from .layout import Mesh


class StoppedShort(Exception):
    """Raised in place of computing a product, with what was to be computed.

    product: None on a rank that holds nothing of it. are_turned: weights, that are taken transposed. specs: of results
    that are DTensors. scaled: what was said about scales.
    """

    def __init__(
        self,
        product: Product | None,
        are_turned: Sequence[bool] = (),
        specs: Sequence[DTensorSpec] = (),
        scaled: Scaled | None = None,
    ) -> None:
        super().__init__()
        self.product = product
        self.are_turned = tuple(are_turned)
        self.specs = tuple(specs)
        self.scaled = scaled


_thread = threading.local()


@contextlib.contextmanager
def stopping_short() -> Iterator[None]:
    """While it lasts, this thread raises StoppedShort where it would compute a product."""
    _thread.stops = True
    try:
        yield
    finally:
        _thread.stops = False


def _stops() -> bool:
    return getattr(_thread, "stops", False)


# DTensor's own __init__ does nothing, slowly.
_new_dtensor = functools.partial(DTensor.__new__, DTensor)


class PlainGroup:
    """The group that plain tensors lie in."""

    def __init__(self, setting: Setting, dtype: torch.dtype) -> None:
        self.setting = setting
        self.num_ranks = dist.get_world_size(setting.group)
        self.rank = dist.get_rank(setting.group)
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
        x: torch.Tensor,
        x_layout: Layout,
        weights: Sequence[torch.Tensor],
        weight_layouts: Sequence[Layout],
        results: Sequence[Layout],
        cuts: Cuts,
        biases: Sequence[torch.Tensor | None],
        bias_placement: str,
        scaled: Scaled | None = None,
    ) -> list[torch.Tensor]:
        all_axes, weights, weight_layouts = _as_stored(axes, weights, weight_layouts)
        problem = Problem(
            all_axes,
            x_layout,
            tuple(weight_layouts),
            tuple(self._bias_layout(b, r, bias_placement) for b, r in zip(biases, results, strict=True)),
            tuple(results),
            cuts if self.num_ranks > 1 else (None,),
            self.setting,
            _scaling_of(scaled),
        )
        product = product_of(problem)
        if _stops():
            raise StoppedShort(product, [stored != axes for stored in all_axes], scaled=scaled)
        if scaled is not None:
            scales = scale_parts(product, [None] * len(scaled.all), scaled.all, self.rank)
            return product.forward(x, weights, biases, scales)[0]
        return list(_MultiplyLocal.apply(product, len(weights), x, *weights, *biases))  # type: ignore[no-untyped-call]

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


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """As torch's own linear does under ``torch.autocast``."""
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in _CAST else t for t in tensors)


@functools.lru_cache(maxsize=4096)
def _layout_in_group(num_ranks: int, shape: tuple[int, ...], placement: str, dtype: torch.dtype) -> MadeLayout:
    return MadeLayout(Mesh({"group": num_ranks}), shape, [placement], dtype)


def _as_stored(
    axes: str, weights: Sequence[torch.Tensor], layouts: Sequence[Layout]
) -> tuple[tuple[str, ...], list[torch.Tensor], list[Layout]]:
    """Weights (k, n) that are views of contiguous (n, k), as ``linear.weight.t()`` is, without a copy.

    Told by strides, not by contiguity: a single row or column has both, and ranks have to answer alike.
    """
    all_axes, stored, stored_layouts = [], [], []
    for weight, layout in zip(weights, layouts, strict=True):
        turned = weight.t()
        is_view = weight.stride(0) == 1 and weight.stride(1) == max(weight.shape[0], 1) != 1
        if not is_view or not turned.is_contiguous():
            all_axes.append(axes)
            stored.append(weight)
            stored_layouts.append(layout)
            continue
        all_axes.append(axes.replace("kn", "nk"))
        stored.append(turned)
        swap = {"S(0)": "S(1)", "S(1)": "S(0)"}
        placement = swap.get(layout.placements[0], layout.placements[0])
        stored_layouts.append(
            _layout_in_group(layout.mesh.shape[0], tuple(layout.shape[::-1]), placement, weight.dtype)
        )
    return tuple(all_axes), stored, stored_layouts


class _MultiplyLocal(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, product: Product, num_weights: int, x: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = others[:num_weights], others[num_weights:]
        outputs, kept = product.forward(x, weights, biases)
        ctx.product = product
        ctx.has_kept = kept is not None
        ctx.save_for_backward(x if kept is None else kept, *weights)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        product: Product = ctx.product
        needed = ctx.needs_input_grad[2:]
        needs = (needed[0], list(needed[1 : 1 + len(weights)]), list(needed[1 + len(weights) :]))
        layouts = product.gradient_layouts()
        dx, dws, dbs = product.backward(x, x if ctx.has_kept else None, weights, gradients, layouts, needs)
        return None, None, dx, *dws, *dbs


def multiply_dtensors(
    axes: str,
    x: DTensor,
    weights: Sequence[Any],
    biases: Sequence[Any],
    results: Sequence[Sequence[Placement]],
    setting: Setting,
    cuts: Cuts | None,
    shares: bool = False,
    scaled: Scaled | None = None,
) -> list[DTensor]:
    """The results; with `shares` also `x` as it was gathered, if it was."""
    dtype = x.dtype if scaled is None else scaled.out_dtype
    specs, layouts = _result_specs(axes, x, weights, tuple(tuple(placements) for placements in results), dtype)
    if x.device_mesh.get_coordinate() is None:  # this rank holds nothing of it
        if _stops():
            raise StoppedShort(None, specs=specs)
        nothing = x._local_tensor.new_empty(0, dtype=dtype)
        return [_new_dtensor(nothing, spec, requires_grad=x.requires_grad) for spec in specs]
    x_layout = _layout_of(x._spec)
    weight_layouts = tuple(_layout_of(weight._spec) for weight in weights)
    if cuts is None:
        free = Setting(setting.device_type, groups.DEFAULT, setting.device_mesh, gemm_model=setting.gemm_model)
        cuts = choose_cuts(axes, x_layout, weight_layouts[0], layouts[0], free)
    problem = Problem(
        (axes,) * len(weights),
        x_layout,
        weight_layouts,
        tuple(None if bias is None else _layout_of(bias._spec) for bias in biases),
        layouts,
        cuts,
        setting,
        _scaling_of(scaled),
    )
    product = product_of(problem)
    if shares and product.keeps_gathered:
        placements = tuple(Shard(cut_dim(p)) if p.startswith("S") else Replicate() for p in product.x.placements)
        specs = (*specs, _result_spec(x.device_mesh, tuple(x.shape), x.dtype, placements))
    if _stops():
        raise StoppedShort(product, [False] * len(weights), specs, scaled)
    if scaled is not None:
        return _multiply_scaled(product, specs, x, weights, biases, scaled)
    return list(_MultiplyDTensors.apply(product, specs, len(weights), x, *weights, *biases))  # type: ignore[no-untyped-call]


def _scaling_of(scaled: Scaled | None) -> str | None:
    return None if scaled is None else "row" if scaled.by_row else "tensor"


def given_layouts_of_scales(product: Product, scales: Sequence[torch.Tensor]) -> list[Layout | None]:
    """Of scales of rows that are DTensors, and may lie anywhere."""
    return [
        product.rows_of(i, _layout_of(scale._spec)) if isinstance(scale, DTensor) and scale.ndim > 1 else None
        for i, scale in enumerate(scales)
    ]


def scale_parts(
    product: Product, layouts: Sequence[Layout | None], locals_: Sequence[torch.Tensor], rank: int
) -> list[torch.Tensor]:
    """This rank's parts of scales, as `Product.forward` takes them."""
    parts = []
    for i, (given, local) in enumerate(zip(layouts, locals_, strict=True)):
        rows = product.given_rows(i)
        if given is not None:
            local = move(local.reshape(given.local_shape(rank)), given, rows, product.setting)
        parts.append(part_of_scale(local, product.problem.scaling == "row", rows, rank))
    return parts


def _multiply_scaled(
    product: Product,
    specs: Sequence[DTensorSpec],
    x: DTensor,
    weights: Sequence[Any],
    biases: Sequence[Any],
    scaled: Scaled,
) -> list[DTensor]:
    locals_ = [_local_of(scale) if isinstance(scale, DTensor) else scale for scale in scaled.all]
    scales = scale_parts(product, given_layouts_of_scales(product, scaled.all), locals_, dist.get_rank())
    local_biases = [None if bias is None else _local_of(bias) for bias in biases]
    outputs, _ = product.forward(_local_of(x), [_local_of(weight) for weight in weights], local_biases, scales)
    return [_new_dtensor(y, spec, requires_grad=False) for y, spec in zip(outputs, specs, strict=True)]


@_engine.kept
def _layout_of(spec: DTensorSpec) -> Layout:
    assert spec.tensor_meta is not None
    return layout_of_spec(spec, spec.shape, spec.tensor_meta.dtype)


def _result_specs(
    axes: str, x: DTensor, weights: Sequence[Any], placements: tuple[tuple[Placement, ...], ...], dtype: torch.dtype
) -> tuple[tuple[DTensorSpec, ...], tuple[Layout, ...]]:
    column = split_axes(axes)[1].index("n")
    specs = []
    for weight, asked in zip(weights, placements, strict=True):
        specs.append(_result_spec(x.device_mesh, (*x.shape[:-1], weight.shape[column]), dtype, asked))
    return tuple(specs), tuple(_layout_of(spec) for spec in specs)


@_engine.kept
def _result_spec(
    mesh: Any, shape: tuple[int, ...], dtype: torch.dtype, placements: tuple[Placement, ...]
) -> DTensorSpec:
    stride = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        stride[d] = stride[d + 1] * max(shape[d + 1], 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def _local_of(x: DTensor) -> torch.Tensor:
    """What this rank holds, waited for where it is still under way."""
    local = x._local_tensor
    waited: torch.Tensor = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return waited


class _MultiplyDTensors(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, product: Product, specs: tuple[DTensorSpec, ...], num_weights: int, x: DTensor, *others: Any
    ) -> tuple[DTensor, ...]:
        weights, biases = others[:num_weights], others[num_weights:]
        local = _local_of(x)
        local_weights = [_local_of(weight) for weight in weights]
        outputs, kept = product.forward(local, local_weights, [None if b is None else _local_of(b) for b in biases])
        ctx.product = product
        ctx.specs = (x._spec, [w._spec for w in weights], [None if b is None else b._spec for b in biases])
        ctx.has_kept = kept is not None
        ctx.save_for_backward(kept if kept is not None else local, *local_weights)
        ctx.result_specs = specs
        ctx.set_materialize_grads(False)
        if kept is not None and len(specs) > len(outputs):
            outputs.append(kept)
        requires_grad = any(t is not None and t.requires_grad for t in (x, *others))
        return tuple(
            _new_dtensor(output, spec, requires_grad=requires_grad) for output, spec in zip(outputs, specs, strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: DTensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        product: Product = ctx.product
        x_spec, weight_specs, bias_specs = ctx.specs
        count = len(weights)
        needed = ctx.needs_input_grad[3:]
        needs = (needed[0], list(needed[1 : 1 + count]), list(needed[1 + count :]))
        locals_, layouts = [], []
        for gradient, spec in zip(gradients, ctx.result_specs, strict=True):
            locals_.append(None if gradient is None else _local_of(gradient).contiguous())
            layouts.append(_layout_of(spec if gradient is None else gradient._spec))
        for j, missing in enumerate(locals_[:count]):
            if missing is None:  # nobody asked for this result
                shape = layouts[j].local_shape(dist.get_rank())
                locals_[j] = x.new_zeros(tuple(shape))
        dx_added = locals_[count] if len(locals_) > count else None
        if dx_added is not None:
            dx_added = move(dx_added, layouts[count], product.dx, product.setting)
        dx, dws, dbs = product.backward(
            x, x if ctx.has_kept else None, weights, locals_[:count], layouts[:count], needs, dx_added
        )
        operand_spec = _gradient_spec(x_spec, tuple(product.dx_result.placements))
        gradient_specs = [None if spec is None else _gradient_spec(spec) for spec in (*weight_specs, *bias_specs)]
        found = [
            None if local is None else _new_dtensor(local, spec, requires_grad=False)
            for local, spec in zip((dx, *dws, *dbs), (operand_spec, *gradient_specs), strict=True)
        ]
        return None, None, None, *found


def gradient_placements(placements: Sequence[Placement], names: Sequence[str] = ()) -> tuple[Placement, ...]:
    """Those of a gradient: R for sums that are due, but sums that are due where `names` have P."""
    found = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    if names:
        found = tuple(Partial() if name.startswith("P") else p for name, p in zip(names, found, strict=True))
    return found


@_engine.kept
def _gradient_spec(spec: DTensorSpec, names: tuple[str, ...] = ()) -> DTensorSpec:
    """Of a gradient that lies as `spec`, with R for sums that are due; with sums that are due where `names` have P."""
    assert spec.tensor_meta is not None
    placements = gradient_placements(spec.placements, names)
    if placements == spec.placements:
        return spec
    meta = spec.tensor_meta
    return _result_spec(spec.mesh, tuple(meta.shape), meta.dtype, placements)
