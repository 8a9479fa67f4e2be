"""Products in graphs, as opaque operators of torch.compile.

When a call of a function of `functions.py` is compiled, its product is planned once, with fake tensors like its
arguments, and not traced further. The graph gets an operator with the plan as text:

    multiply(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] scales, str product, str group, int rank)
        -> Tensor[]
    multiply_backward(Tensor x, Tensor[] weights, Tensor[] gradients, bool[] needs, str product, str group, int rank)
        -> Tensor[]

All tensors are this rank's parts. `product` is the whole problem as text, `group` the name of the process group of its
mesh, `rank` this rank in it. So caches of graphs that compare their text do not confuse them, and a graph can run in a
process in which it was not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._library.effects import EffectType
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from .. import _planner, executables, groups
from ..graphs.stand_ins import constant, meta_of, on_stand_ins, uncompiled
from . import tensors
from .running import Product, Where
from .tensors import Planned, ask, autocast, gradient_placements, planned

# Text, name of the process group, rank in it. The rank is included because shapes differ between ranks.
_Name = tuple[str, str, int]
_products: executables.Kept[Product] = executables.Kept()
# Where products were traced: the meshes whose process groups they use.
_places: dict[_Name, Where] = {}
groups.when_gone.append(_places.clear)


def _name_of(product: Product) -> _Name:
    group = product.where.group or dist.group.WORLD
    assert group is not None
    name = product.plan.to_text(), group.group_name, product.rank
    executables.keep(_places, name, product.where, executables.MAX_EXECUTABLES)
    return name


def _product(name: _Name, x: torch.Tensor) -> Product:
    return _products.get_or_make(name, lambda: _parsed(name, x.device.type))


def _parsed(name: _Name, device_type: str) -> Product:
    plan = _planner.ProductPlan.parse(name[0])
    return Product(plan, _places.get(name) or Where(device_type, groups.weakly(_group(name[1]))))


def _group(name: str) -> dist.ProcessGroup | None:
    groups.check_initialised()
    group = _resolve_process_group(name)
    return None if group is dist.group.WORLD else group


# ---- the operators

_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define(
    "multiply(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] scales, str product, str group, int rank) -> "
    "Tensor[]"
)
_library.define(
    "multiply_backward(Tensor x, Tensor[] weights, Tensor[] gradients, bool[] needs, str product, str group, int rank) "
    "-> Tensor[]"
)
Tensors = Sequence[torch.Tensor]


def _multiply(x: torch.Tensor, weights: Tensors, biases: Tensors, scales: Tensors, *name: Any) -> list[torch.Tensor]:
    """Returns the results, then the gathered operand if the product keeps it."""
    outputs, kept = _product(name, x).forward([x, *weights, *biases], scales)
    return _apart([*outputs, *([] if kept is None else [kept])], [x, *weights, *biases])


def _multiply_backward(
    x: torch.Tensor, weights: Tensors, gradients: Tensors, needs: Sequence[bool], *name: Any
) -> list[torch.Tensor]:
    """Returns the gradients of operand, weights and biases that are needed."""
    dense = [gradient.contiguous() for gradient in gradients]
    found = _product(name, x).backward(x, *weights, dys=dense, layouts=[None] * len(dense), needs=needs)
    return _apart([gradient for gradient in found if gradient is not None], [x, *weights, *gradients])


def _apart(outputs: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """Clones outputs that share memory with an input, because operators must not return their inputs."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return [output.clone() if output.untyped_storage().data_ptr() in taken else output for output in outputs]


_library.impl("multiply", _multiply, "CompositeExplicitAutograd")
_library.impl("multiply_backward", _multiply_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("shardwright::multiply")
def _(x: torch.Tensor, weights: Tensors, biases: Tensors, scales: Tensors, *name: Any) -> list[torch.Tensor]:
    made = _product(name, x)
    return [made.empty(x, one) for one in (*made.plan.results, *([made.plan.moved_operand] * made.keeps_gathered))]


@torch.library.register_fake("shardwright::multiply_backward")
def _(x: torch.Tensor, weights: Tensors, gradients: Tensors, needs: Sequence[bool], *name: Any) -> list[torch.Tensor]:
    made = _product(name, x)
    layouts = [made.plan.operand, *made.plan.weights, *made.plan.biases]
    return [made.empty(x, one) for one, needed in zip(layouts, needs, strict=True) if needed and one is not None]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, _, scales, *name = inputs
    ctx.name = tuple(name)
    made = _product(ctx.name, x)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1] if made.keeps_gathered else x, *weights)
    ctx.num_scales = len(scales)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    made = _product(ctx.name, x)
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    given = iter(needs_biases)
    by_weight = [has_bias and next(given) for has_bias in made.has_bias]
    # After the results' gradients there may be one for the gathered operand, which graphs only save for the backward.
    dys = [
        made.empty(x, layout).zero_() if gradient is None else gradient
        for gradient, layout in zip(gradients, made.plan.result_gradients, strict=False)
    ]
    needs = [needs_x, *needs_weights, *by_weight]
    found = iter(torch.ops.shardwright.multiply_backward(x, weights, dys, needs, *ctx.name) if any(needs) else [])
    dx = next(found) if needs_x else None
    dws = [next(found) if needed else None for needed in needs_weights]
    dbs = [next(found) if needed else None for needed in needs_biases]
    return dx, dws, dbs, [None] * ctx.num_scales, None, None, None


def _backward_of_backward(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("shardwright: products are differentiable once")


torch.library.register_autograd("shardwright::multiply", _backward, setup_context=_keep_for_backward)
torch.library.register_autograd("shardwright::multiply_backward", _backward_of_backward)

# All ranks must run products in one order, even if a compiler would reorder independent ones.
for _name in ("shardwright::multiply", "shardwright::multiply_backward"):
    torch.library._register_effectful_op(_name, EffectType.ORDERED)


# ---- into graphs

_UNEVEN = "uneven"


@torch._dynamo.assume_constant_result
def _find_out(
    function: str,
    num_weights: int,
    metas: Sequence[tuple[Any, ...] | None],
    metas_of_scales: Sequence[tuple[Any, ...] | None],
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """Returns what a graph needs to know about a product of tensors with these descriptions, as four items.

    First, an error message if the arguments are wrong, else None. Second, the product's name: None on a rank that holds
    nothing of it, _UNEVEN if it stays out of graphs. Third, which weights are transposed, and for results that are
    DTensors their placements, shape, strides and dtype. Fourth, the placements of the operand's gradient, if the
    operand is a DTensor.
    """

    def plan(*given: Any) -> Planned:
        end = len(metas)
        return planned(ask(function, given[0], **options), num_weights, given[:end], given[end:])

    try:
        product, are_turned, specs = on_stand_ins([*metas, *metas_of_scales], plan)
    except ValueError as error:
        return str(error), None, ((), ()), ()
    name, operand = None, ()
    if product is not None and not product.plan.has_equal_parts:
        # Compilers see an ordinary operator, not a collective, and order it relative to collectives by size. If sizes
        # differ among ranks, the order would too, and ranks would wait for each other.
        return None, _UNEVEN, ((), ()), ()
    if product is not None:
        name = _name_of(product)
        if specs and product.operand_gradient:
            assert metas[0] is not None
            operand = gradient_placements(metas[0][-1], product.operand_gradient)
    results = [(spec.placements, spec.shape, spec.stride, spec.tensor_meta.dtype) for spec in specs if spec.tensor_meta]
    return None, name, (are_turned, tuple(results)), operand


def _multiply_uncompiled(function: str, x: Any, *operands: Sequence[Any], **options: Any) -> Any:
    return tensors.multiply(ask(function, x, **options), x, *operands)


_outside = torch._dynamo.disable(
    _multiply_uncompiled,
    reason="shardwright: parts that differ in size among ranks are not multiplied in graphs, whose collectives "
    "compilers order by sizes, nor is anything with a gemm_model",
)


def multiply(
    function: str, x: Any, weights: list[Any], biases: list[Any], scales: list[Any], **options: Any
) -> list[Any]:
    """As `tensors.multiply`, with the options that `tensors.ask` takes; in compiled code, one operator of the graph."""
    if not torch.compiler.is_compiling():
        return uncompiled(_multiply_uncompiled, _outside)(function, x, weights, biases, scales, **options)
    given = [x, *weights, *biases]
    if all(scale is None for scale in scales):
        given = autocast(given)
    metas, metas_of_scales = ([None if one is None else meta_of(one) for one in some] for some in (given, scales))
    constants = {name: constant(value) for name, value in options.items()}
    if options.get("gemm_model") is not None:
        return _outside(function, x, weights, biases, scales, **options)
    wrong, name, (are_turned, results), operand_gradient = _find_out(
        function, len(weights), metas, metas_of_scales, constants
    )
    if wrong is not None:
        raise ValueError(wrong)
    if name == _UNEVEN:
        return _outside(function, x, weights, biases, scales, **options)
    x, weights, biases = given[0], given[1 : 1 + len(weights)], given[1 + len(weights) :]
    if are_turned:
        weights = [weight.t() if turned else weight for weight, turned in zip(weights, are_turned, strict=True)]
    if name:
        part = x.to_local(grad_placements=operand_gradient) if operand_gradient else _local(x)
        parts = [[_local(one) for one in listed if one is not None] for listed in (weights, biases, scales)]
        outputs = torch.ops.shardwright.multiply(part, *parts, *name)
    else:
        nothing = x.to_local().reshape(-1)[:0]
        outputs = [nothing.to(dtype).reshape([0] * len(shape)) for _, shape, _, dtype in results]
    if results:
        outputs = [
            DTensor.from_local(y, x.device_mesh, placements, run_check=False, shape=shape, stride=stride)
            for y, (placements, shape, stride, _) in zip(outputs, results, strict=False)
        ]
    return list(outputs[: len(weights)])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
