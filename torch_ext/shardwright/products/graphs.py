"""Products in graphs, as opaque operators of torch.compile.

When a call of a function of `functions.py` is compiled, the function is not traced. It is run once, on fake tensors
like its arguments, up to the point where the product would be computed. The graph gets an operator with the plan as
text:

    multiply(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] scales, str product, str group, int rank)
        -> Tensor[]
    multiply_backward(Tensor x, Tensor[] weights, Tensor[] gradients, bool[] needs, str product, str group, int rank)
        -> Tensor[]

All tensors are this rank's parts. `product` is the whole problem as text, `group` the name of the process group of its
mesh, `rank` this rank in it. So caches of graphs that compare their text do not confuse them, and a graph can run in a
process in which it was not made.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .. import _planner, executables, groups
from .running import Product, Setting
from .tensors import StoppedShort, autocast, gradient_placements, stopping_short

# Text, name of the process group, rank in it. The rank is included because shapes differ between ranks.
_Name = tuple[str, str, int]
_products: executables.Kept[Product] = executables.Kept()
# The settings with which products were traced, used to find the process groups of their meshes. Bounded.
_settings: dict[_Name, Setting] = {}
groups.when_gone.append(_settings.clear)


def _name_of(product: Product) -> _Name:
    setting = product.setting
    group = setting.group or dist.group.WORLD
    assert group is not None
    name = product.plan.to_text(), group.group_name, product.rank
    while len(_settings) >= executables.MAX_EXECUTABLES:
        del _settings[next(iter(_settings))]
    _settings[name] = setting
    return name


def _product(name: _Name, x: torch.Tensor) -> Product:
    return _products.get_or_make(name, lambda: _parsed(name, x.device.type))


def _parsed(name: _Name, device_type: str) -> Product:
    plan = _planner.ProductPlan.parse(name[0])
    return Product(plan, _settings.get(name) or Setting(device_type, groups.weakly(_group(name[1]))))


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


def meta_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns constants that describe a tensor without its elements, and for a DTensor its mesh and placements."""
    index = operator.index
    plain = (tuple(map(index, tensor.shape)), tuple(map(index, tensor.stride())), tensor.dtype, tensor.device)
    if not isinstance(tensor, DTensor):
        return (*plain, tensor.requires_grad)
    local_shape = tuple(map(index, tensor.to_local().shape))
    return (*plain, tensor.requires_grad, local_shape, tensor.device_mesh, tuple(tensor.placements))


def stand_in(meta: tuple[Any, ...]) -> torch.Tensor:
    """Returns a fake tensor with this description."""
    shape, stride, dtype, device, requires_grad, *placed = meta
    if not placed:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=requires_grad)
    local_shape, mesh, placements = placed
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))
    return DTensor(torch.empty(local_shape, dtype=dtype, device=device), spec, requires_grad=requires_grad)


def _each(function: Callable[[Any], Any], given: Any) -> Any:
    """Returns `function` of a value, or the list of its results for a list of values and Nones."""
    return [None if one is None else function(one) for one in given] if isinstance(given, list) else function(given)


_UNEVEN = "uneven"


@torch._dynamo.assume_constant_result
def _find_out(function: Callable[..., Any], metas: dict[str, Any], others: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what a graph needs to know about a product, as four items.

    First, an error message if the arguments are wrong, else None. Second, the product's name: None on a rank that holds
    nothing of it, _UNEVEN if it stays out of graphs. Third, which weights are transposed, and for results that are
    DTensors their placements, shape, strides and dtype. Fourth, the placements of the operand's gradient, if the
    operand is a DTensor.
    """
    # Only the operands are fake; everything else that is read, such as meshes, has real values.
    with unset_fake_temporarily(), stopping_short():
        with FakeTensorMode():
            stand_ins = {name: _each(stand_in, meta) for name, meta in metas.items()}
        try:
            function(**stand_ins, **others)
        except StoppedShort as stopped:
            product, are_turned, specs = stopped.planned
        except ValueError as error:
            return str(error), None, ((), ()), ()
        else:
            raise RuntimeError(f"{function.__name__} came to an end without a product")
    name, operand = None, ()
    if product is not None and not product.plan.has_equal_parts:
        # Compilers see an ordinary operator, not a collective, and order it relative to collectives by size. If sizes
        # differ among ranks, the order would too, and ranks would wait for each other.
        return None, _UNEVEN, ((), ()), ()
    if product is not None:
        name = _name_of(product)
        if specs and product.operand_gradient:
            operand = gradient_placements(metas["x"][-1], product.operand_gradient)
    metas_of_specs = [(spec.placements, spec.tensor_meta) for spec in specs]
    results = [(placed, tuple(meta.shape), tuple(meta.stride), meta.dtype) for placed, meta in metas_of_specs if meta]
    return None, name, (are_turned, tuple(results)), operand


F = TypeVar("F", bound=Callable[..., Any])
_TENSORS = ("x", "weight", "weights", "bias", "biases", "x_scale", "weight_scale", "weight_scales")


def goes_into_graphs(function: F) -> F:
    """A decorator for functions of `functions.py`: in compiled code, a call becomes one operator in the graph."""
    parameters = inspect.signature(function).parameters.values()
    outside = torch._dynamo.disable(
        function,
        reason="shardwright: parts that differ in size among ranks are not multiplied in graphs, whose collectives "
        "compilers order by sizes, nor is anything with a gemm_model",
    )
    names = tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            # Compilers that gave up on a caller try to compile each function it calls, this one too.
            runs = function if get_eval_frame_callback() is None else outside
            return runs(*args, **kwargs)
        positional = names[: len(args)]
        if len(args) > len(names) or any(name in kwargs for name in positional):
            raise TypeError(f"{function.__name__}: got {len(args)} arguments by position; allowed are {names}, once")
        if kwargs.get("gemm_model") is not None:
            return outside(*args, **kwargs)
        return _call(function, outside, {**dict(zip(positional, args, strict=True)), **kwargs})

    return call  # type: ignore[return-value]


def _listed(given: Any) -> list[Any]:
    return [] if given is None else given if isinstance(given, list) else [given]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _call(function: Callable[..., Any], outside: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    tensors = {name: arguments[name] for name in _TENSORS if arguments.get(name) is not None}
    others = {name: _constant(value) for name, value in arguments.items() if name not in _TENSORS}
    is_list = not isinstance(tensors.get("weights", tensors["x"]), torch.Tensor)
    tensors = {name: one if isinstance(one, torch.Tensor) else list(one) for name, one in tensors.items()}
    if "x_scale" not in tensors:
        tensors = {name: _each(lambda tensor: autocast([tensor])[0], one) for name, one in tensors.items()}
    metas = {name: _each(meta_of, one) for name, one in tensors.items()}
    wrong, name, (are_turned, results), operand_gradient = _find_out(function, metas, others)
    if wrong is not None:
        raise ValueError(wrong)
    if name == _UNEVEN:
        return outside(**arguments)
    x = tensors["x"]
    weights = _listed(tensors.get("weight", tensors.get("weights")))
    biases = [bias for bias in _listed(tensors.get("bias", tensors.get("biases"))) if bias is not None]
    scales = [*_listed(tensors.get("x_scale")), *_listed(tensors.get("weight_scale", tensors.get("weight_scales")))]
    if are_turned:
        weights = [weight.t() if turned else weight for weight, turned in zip(weights, are_turned, strict=True)]
    if name:
        part = x.to_local(grad_placements=operand_gradient) if operand_gradient else _local(x)
        parts = [[_local(one) for one in listed] for listed in (weights, biases, scales)]
        outputs = torch.ops.shardwright.multiply(part, *parts, *name)
    else:
        nothing = x.to_local().reshape(-1)[:0]
        outputs = [nothing.to(dtype).reshape([0] * len(shape)) for _, shape, _, dtype in results]
    if results:
        outputs = [
            DTensor.from_local(y, x.device_mesh, placements, run_check=False, shape=shape, stride=stride)
            for y, (placements, shape, stride, _) in zip(outputs, results, strict=False)
        ]
    return list(outputs[: len(weights)]) if is_list else outputs[0]


def _constant(value: Any) -> Any:
    """Returns the value with symbolic sizes replaced by their values."""
    if isinstance(value, int):
        return operator.index(value)
    return [_constant(one) for one in value] if isinstance(value, (list, tuple)) else value
