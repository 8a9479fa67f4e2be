"""Products in graphs, as opaque operators of torch.compile.

When a call of a function of `functions.py` is compiled, its product is planned once, on fake tensors like its
arguments, and not traced further. The graph gets the operator `multiply`, and for the backward `multiply_backward`.
Their tensors are this rank's parts. Their argument `product` is the plan as text, `group` the name of the process group
or the names of the mesh's groups, `rank` this rank in the group. So a graph can run in a process that has not made it,
and caches that compare these texts do not confuse products.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from .._native import _planner
from ..dtensor import guards
from ..dtensor.specs import has_default_order
from ..graph import order
from ..graph.fakes import constant, meta_of, on_fakes, uncompiled
from ..runtime import executables, groups
from . import tensors
from .running import Product, ProductRanks
from .tensors import Planned, autocast, find_planned, gradient_placements, product_key

# A product's text, the name of its process group or names of its mesh's groups, and the rank, because shapes differ
# between ranks.
_Name = tuple[str, str, int]
_MESH_PREFIX = "[["  # beginning of the second text if it has the names of a mesh's groups, as JSON
_products: executables.PlanningCache[Product] = executables.PlanningCache(is_local=True)
# The mesh or process group of each traced product.
_groups_by_name: dict[_Name, ProductRanks] = {}
groups.default_group_gone_hooks.append(_groups_by_name.clear)


def _register_product(product: Product) -> _Name:
    """Returns the name of a product, and stores the product's mesh or group under it for `_parse_product`."""
    mesh, group = product.ranks.device_mesh, product.ranks.group or dist.group.WORLD
    assert group is not None
    owner = groups.owner_of(mesh)
    mesh_groups = json.dumps([owner.names, owner.flattened])
    name = product.plan.to_text(), mesh_groups if owner.grid is not None else group.group_name, product.rank
    executables.put_bounded(_groups_by_name, name, product.ranks, executables.MAX_EXECUTABLES)
    return name


def _product_of_name(name: _Name, x: torch.Tensor) -> Product:
    """Returns the product with this name, from a cache. `x` is an operand on its device."""
    return _products.get_or_make(name, lambda: _parse_product(name, x.device.type))


def _parse_product(name: _Name, device_type: str) -> Product:
    """Returns a new product with this name: its plan is parsed, and its groups are found by their names."""
    ranks, plan = _groups_by_name.get(name), _planner.ProductPlan.parse(name[0])
    if ranks is None:
        groups.check_initialized()
        if name[1].startswith(_MESH_PREFIX):
            names, flattened = map(tuple, json.loads(name[1]))
            owner = groups.Owner(names, flattened, plan.operand.mesh)
            return Product(plan, ProductRanks(device_type, device_mesh=owner))
        group = _resolve_process_group(name[1])
        ranks = ProductRanks(device_type, groups.weakly(None if group is dist.group.WORLD else group))
    return Product(plan, ranks)


# ---- the operators

Tensors = Sequence[torch.Tensor]
Flags = Sequence[bool]


@torch.library.impl("shardwright::multiply", "CompositeExplicitAutograd")
def _multiply(x: torch.Tensor, weights: Tensors, biases: Tensors, scales: Tensors, *name: Any) -> list[torch.Tensor]:
    """Returns the results, then the gathered operand if the product keeps it."""
    return _cloned_aliases(_product_of_name(name, x).forward([x, *weights, *biases], scales), [x, *weights, *biases])


@torch.library.impl("shardwright::multiply_backward", "CompositeExplicitAutograd")
def _multiply_backward(x: torch.Tensor, weights: Tensors, dys: Tensors, needs: Flags, *name: Any) -> list[torch.Tensor]:
    """Returns the gradients of operand, weights and biases that are needed."""
    dense = [dy.contiguous() for dy in dys]
    gradients = _product_of_name(name, x).backward(x, *weights, dys=dense, layouts=[None] * len(dense), needs=needs)
    return _cloned_aliases([gradient for gradient in gradients if gradient is not None], [x, *weights, *dys])


def _cloned_aliases(outputs: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """Returns the outputs, with clones of those that share memory with an input. Operators must not return inputs."""
    input_addresses = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return [output.clone() if output.untyped_storage().data_ptr() in input_addresses else output for output in outputs]


@torch.library.register_fake("shardwright::multiply")
def _(x: torch.Tensor, weights: Tensors, biases: Tensors, scales: Tensors, *name: Any) -> list[torch.Tensor]:
    product = _product_of_name(name, x)
    layouts = [*product.plan.results, *([product.plan.moved_operand] * product.keeps_gathered)]
    return [product.empty(x, layout) for layout in layouts]


@torch.library.register_fake("shardwright::multiply_backward")
def _(x: torch.Tensor, weights: Tensors, dys: Tensors, needs: Flags, *name: Any) -> list[torch.Tensor]:
    product = _product_of_name(name, x)
    layouts = [product.plan.operand, *product.plan.weights, *product.plan.biases]
    return [product.empty(x, each) for each, need in zip(layouts, needs, strict=True) if need and each is not None]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Saves the operand (gathered if the product keeps it) and the weights, for `_backward`."""
    x, weights, _, _, *name = inputs
    ctx.name = tuple(name)
    product = _product_of_name(ctx.name, x)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1] if product.keeps_gathered else x, *weights)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Returns the gradients of operand, weights and biases: the backward of the operator `multiply`."""
    x, *weights = ctx.saved_tensors
    product = _product_of_name(ctx.name, x)
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    needed_biases = iter(needs_biases)
    by_weight = [has_bias and next(needed_biases) for has_bias in product.has_bias]
    # A last gradient may belong to the gathered operand, which graphs only save for the backward.
    dys = [
        product.empty(x, layout).zero_() if gradient is None else gradient
        for gradient, layout in zip(gradients, product.plan.result_gradients, strict=False)
    ]
    needs = [needs_x, *needs_weights, *by_weight]
    computed = iter(torch.ops.shardwright.multiply_backward(x, weights, dys, needs, *ctx.name) if any(needs) else [])
    dx = next(computed) if needs_x else None
    dws = [next(computed) if needed else None for needed in needs_weights]
    dbs = [next(computed) if needed else None for needed in needs_biases]
    return dx, dws, dbs, [], None, None, None  # there are no scales, because scaled products have no gradients


def _backward_of_backward(ctx: Any, *gradients: Any) -> Any:
    """Raises NotImplementedError: products have no second-order gradients."""
    raise NotImplementedError("shardwright: products are differentiable once")


torch.library.register_autograd("shardwright::multiply", _backward, setup_context=_save_for_backward)
torch.library.register_autograd("shardwright::multiply_backward", _backward_of_backward)

# All ranks must run products in one order, even if a compiler would reorder independent ones.
for _name in ("shardwright::multiply", "shardwright::multiply_backward"):
    order.register(_name)


# ---- calls in compiled code

_OUTSIDE = "outside"  # in place of a name: the product must run outside the graph


@torch._dynamo.assume_constant_result
def _plan_in_graph(function: str, weights: int, scales: int, metas: Sequence[Any], options: dict[str, Any]) -> Any:
    """Plans a product from the descriptions of operand, weights, biases and scales. Returns five items for the graph:

    - an error message if the arguments are wrong, else None
    - the product's name; None on a rank that holds no part of it, _OUTSIDE if it stays out of graphs
    - for each weight, True if it is transposed
    - for each result that is a DTensor, its placements, shape, strides and dtype
    - the placements of the operand's gradient, if the operand is a DTensor
    """

    guards.mark_graph()

    def plan(x: Any, *others: Any) -> Planned | None:
        end = len(others) - scales
        if any(isinstance(each, DTensor) and not has_default_order(each._spec) for each in (x, *others)):
            return None  # `DTensor.from_local` takes no shard order
        return find_planned(product_key(function, x, **options), weights, (x, *others[:end]), others[end:])

    try:
        planned = on_fakes(metas, plan)
    except ValueError as error:
        return str(error), None, (), (), ()
    if planned is None:
        return None, _OUTSIDE, (), (), ()
    product, transposed, specs = planned
    results = tuple((s.placements, s.shape, s.stride, s.tensor_meta.dtype) for s in specs if s.tensor_meta)
    if product is None:
        return None, None, transposed, results, ()
    if not product.plan.has_equal_parts:
        # Compilers treat it as an ordinary operator, not a collective, and order it relative to collectives by size. If
        # sizes differ among ranks, the order would too, and ranks would wait for each other.
        return None, _OUTSIDE, (), (), ()
    operand_gradient = specs and product.operand_gradient
    placements = gradient_placements(metas[0][-1], operand_gradient) if operand_gradient else ()
    return None, _register_product(product), transposed, results, placements


_run_outside_graph = torch._dynamo.disable(
    tensors.multiply,
    reason="shardwright: parts that differ in size among ranks are not multiplied in graphs, whose collectives "
    "compilers order by sizes, nor are tensors with an explicit shard order, nor anything with a gemm_model",
)


def multiply(
    function: str, x: Any, weights: list[Any], biases: list[Any], scales: list[Any], **options: Any
) -> list[Any]:
    """Like `tensors.multiply`; in compiled code, one operator of the graph."""
    if not torch.compiler.is_compiling():
        return uncompiled(tensors.multiply, _run_outside_graph)(function, x, weights, biases, scales, **options)
    if options.get("gemm_model") is not None:
        return _run_outside_graph(function, x, weights, biases, scales, **options)
    operands = [x, *weights, *biases]
    if all(scale is None for scale in scales):
        operands = autocast(operands)
    metas = [None if tensor is None else meta_of(tensor) for tensor in (*operands, *scales)]
    constants = {name: constant(value) for name, value in options.items()}
    error, name, transposed, results, operand = _plan_in_graph(function, len(weights), len(scales), metas, constants)
    if error is not None:
        raise ValueError(error)
    if name == _OUTSIDE:
        return _run_outside_graph(function, x, weights, biases, scales, **options)
    x, weights, biases = operands[0], operands[1 : 1 + len(weights)], operands[1 + len(weights) :]
    if transposed:
        weights = [weight.t() if transpose else weight for weight, transpose in zip(weights, transposed, strict=True)]
    if name:
        part = x.to_local(grad_placements=operand) if operand else _local(x)
        parts = [[_local(tensor) for tensor in listed if tensor is not None] for listed in (weights, biases, scales)]
        outputs = torch.ops.shardwright.multiply(part, *parts, *name)
    else:
        empty = x.to_local().reshape(-1)[:0]
        outputs = [empty.to(dtype).reshape([0] * len(shape)) for _, shape, _, dtype in results]
    if results:
        outputs = [
            DTensor.from_local(y, x.device_mesh, placements, run_check=False, shape=shape, stride=stride)
            for y, (placements, shape, stride, _) in zip(outputs, results, strict=False)
        ]
    return list(outputs[: len(weights)])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
