"""Events of a step of `fully_shard` as operators, for compiled graphs of a model.

    fsdp_begin_forward(Tensor[] inputs, int unit, bool records) -> Tensor
    fsdp_end_forward(Tensor[] outputs, int unit) -> Tensor
    fsdp_begin_backward(Tensor[] gradients, Tensor forward, int unit) -> Tensor
    fsdp_end_backward(Tensor[] gradients, Tensor[] of_weights, int[] indices, Tensor forward, int unit) -> ()
    fsdp_after(Tensor(a) tensor, Tensor event) -> Tensor(a)

Each of the first four does the work of a hook in eager code: it waits for the gathers that the next use needs, and
starts the gathers that the schedule has there. Effect tokens keep them in the order of the trace, so all ranks start
the same transfers in the same order, however a compiler reorders independent operators.

`fsdp_after` returns a tensor, such as a weight, that may be read only after an event: it is the same tensor, but its
readers depend on the event. The schema declares an alias, so compilers do not reuse its memory.

The first four operators are *events*. `unit` is a handle: an integer that stands for a unit in this process. An event
that returns a tensor returns the number of a forward, in a CPU tensor. It is `event` of `fsdp_after`, and `forward` of
later events. `records` is true if autograd records the forward.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch._functorch import partitioners
from torch._higher_order_ops.effects import with_effects
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from ..graph import order
from ..runtime import counters
from . import reads
from .calls import mapped
from .gradients import is_wanted
from .runner import Runner
from .units import Unit, is_in_backward


class UnitState(Protocol):
    """The state of a unit (api.py: _State), which operators find by its handle."""

    unit: Unit

    def ready_runner(self, outermost: Any = None, converts: bool = True) -> Runner:
        """Returns the model's runner. Makes it if there is none, or if `converts` and parameters were converted."""


_handles = itertools.count()
_known: weakref.WeakValueDictionary[int, UnitState] = weakref.WeakValueDictionary()  # states of units by handle


def handle_of(state: UnitState) -> int:
    """Returns a new handle (an integer), by which operators find the state while it exists."""
    handle = next(_handles)
    _known[handle] = state
    return handle


def _runner_and_unit(handle: int) -> tuple[Runner, Unit]:
    """Returns the runner and the unit of a handle. Raises RuntimeError if the model was freed."""
    if (known := _known.get(handle)) is None:
        raise RuntimeError(
            "a compiled graph of sw.fully_shard must run in the process that compiled it, while its model exists, got "
            f"module number {handle}, which does not exist. Keep the model, or compile again"
        )
    return known.ready_runner(converts=False), known.unit


def _begin_forward(inputs: Sequence[torch.Tensor], handle: int, records: bool) -> torch.Tensor:
    """Runs fsdp_begin_forward. `inputs` only order it after the operators that compute them."""
    runner, unit = _runner_and_unit(handle)
    if runner.is_chunked:
        raise RuntimeError(
            f"chunked must be False for {runner.units[0].name} if compiled graphs contain units, got True: units in "
            "graphs multiply by full weights. Set chunked=False, or compile only submodules of units"
        )
    if unit is runner.units[0] and unit.forwards and not is_in_backward():
        runner.abort()  # a graph has failed between unit events
    if any(weight.unsharded.requires_grad != weight.sharded.requires_grad for weight in unit.weights):
        raise RuntimeError(f"parameters of {unit.name} were frozen or unfrozen since this graph was compiled")
    with torch.set_grad_enabled(records), _abort_on_error(runner):
        forward = runner.begin_forward(unit)
    if records:
        reads.note_forward(unit, forward, is_in_graph=True)
    unit.is_in_graph = True
    return _as_tensor(forward)


def _end_forward(outputs: Sequence[torch.Tensor], handle: int) -> torch.Tensor:
    """Runs fsdp_end_forward. `outputs` only order it after the forward."""
    runner, unit = _runner_and_unit(handle)
    forward = unit.forwards[-1]
    with _abort_on_error(runner):
        runner.end_forward(unit)
    unit.is_in_graph = False
    return _as_tensor(forward)


def _begin_backward(gradients: Sequence[torch.Tensor], forward: torch.Tensor, handle: int) -> torch.Tensor:
    """Runs fsdp_begin_backward. `gradients`, of the outputs, only order it."""
    runner, unit = _runner_and_unit(handle)
    with _abort_on_error(runner):
        reads.check_backward(unit, int(forward))
        runner.begin_backward(unit, int(forward))
    return _as_tensor(int(forward))


def _end_backward(
    gradients: Sequence[torch.Tensor],
    of_weights: Sequence[torch.Tensor],
    indices: Sequence[int],
    forward: torch.Tensor,
    handle: int,
) -> None:
    """Runs fsdp_end_backward: adds the gradients `of_weights` to the weights with these indices in the unit."""
    runner, unit = _runner_and_unit(handle)
    with _abort_on_error(runner):
        for index, gradient in zip(indices, of_weights, strict=True):
            if is_wanted(unit.weights[index].unsharded):
                unit.weights[index].add_graph_gradient(gradient)
        runner.note_gradient(unit)
        runner.end_backward(unit, int(forward))


@contextlib.contextmanager
def _abort_on_error(runner: Runner) -> Iterator[None]:
    """Aborts the step if the block raises."""
    try:
        yield
    except BaseException:
        runner.abort()
        raise


def _as_tensor(forward: int) -> torch.Tensor:
    """Returns the result of an event: the number of a forward."""
    return torch.tensor([forward], device="cpu")


def _after(tensor: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """Runs fsdp_after."""
    return torch.ops.aten.alias(tensor)


def _fake_event(*_: Any) -> torch.Tensor:
    """Returns the result of an event for tracing, without running it."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


_library = torch.library.Library("shardwright", "FRAGMENT")
_EVENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fsdp_begin_forward(Tensor[] inputs, int unit, bool records) -> Tensor": (_begin_forward, _fake_event),
    "fsdp_end_forward(Tensor[] outputs, int unit) -> Tensor": (_end_forward, _fake_event),
    "fsdp_begin_backward(Tensor[] gradients, Tensor forward, int unit) -> Tensor": (_begin_backward, _fake_event),
    "fsdp_end_backward(Tensor[] gradients, Tensor[] of_weights, int[] indices, Tensor forward, int unit) -> ()": (
        _end_backward,
        lambda *_: None,
    ),
}
for _schema, (_run, _fake) in _EVENTS.items():
    _library.define(_schema, tags=torch.Tag.cudagraph_unsafe)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwright::{_name}", _fake)
    order.register(f"shardwright::{_name}")

_library.define("fsdp_after(Tensor(a) tensor, Tensor event) -> Tensor(a)", tags=torch.Tag.cudagraph_unsafe)
_library.impl("fsdp_after", _after, "CompositeExplicitAutograd")
torch.library.register_fake("shardwright::fsdp_after", _after)


@torch.ops.shardwright.fsdp_after.default.py_functionalize_impl
def _(ctx: Any, tensor: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """Hides the alias from functionalization, which is safe because graphs write neither tensor."""
    inputs = ctx.unwrap_tensors((tensor, event))
    with ctx.redispatch_to_next():
        output: torch.Tensor = ctx.wrap_tensors(torch.ops.shardwright.fsdp_after.default(*inputs))
    return output


# ---- the hooks of units in compiled code
#
# Compilers trace `begin_forward` and `end_forward` instead of the eager code of hooks. These record the operators:
#
#     forward     begin_forward(unit)    weights = after(unsharded, begin)    ...    end_forward(outputs)
#     backward    begin_backward(gradients of outputs)    ...    end_backward(gradients of inputs and weights)
#
# A graph reads weights only through `after`, so after the event that gathers them. `end_forward` and `end_backward`
# depend on their inputs, so they run after all reads. A backward does not save weights: it reads them again, after its
# own `begin_backward` (`_reread_weights_in_backward`).
_ops = torch.ops.shardwright
_AFTER = _ops.fsdp_after.default


def why_not(unit: Unit) -> str | None:
    """Returns why the events of a unit cannot be in graphs, or None. Graphs need weights that are plain in use."""
    if any(isinstance(weight.unsharded, DTensor) for weight in unit.weights):
        return "gathered weights are DTensors"
    if any(weight.product is not None for weight in unit.weights):
        return "weights are multiplied in their message format (matmul_format)"
    if any(weight.extension is not None for weight in unit.weights):
        return "weights are tensor subclasses with fsdp_pre_all_gather"
    return None


Function = TypeVar("Function", bound=Callable[..., Any])


def traced_by_callers(function: Function) -> Function:
    """Makes Dynamo trace a function only as a part of its caller, and never compile it by itself.

    Hooks need this after ``module.compile()``, which compiles the forward but not PyTorch's code that calls the hooks:
    Dynamo would otherwise compile each hook by itself.
    """
    skip_code(function.__code__)
    return function


@traced_by_callers
def is_called_by_compiled_code(module: nn.Module) -> bool:
    """Returns True if eager code was called by compiled code, or by code that Dynamo failed to compile.

    Returns false for a module that compiles its own forward (``module.compile()``), whose hooks have eager callers.
    """
    return get_eval_frame_callback() is not None and module._compiled_call_impl is None


def note_eager(unit: Unit, open_units: Iterable[Unit], is_compiled: bool, why: str | None) -> None:
    """Sets the flags of a forward whose hooks run as eager code, and counts it if its caller is compiled.

    Args:
        unit: the unit whose forward begins.
        open_units: the units whose forwards contain it.
        is_compiled: the compiler is on. It is off in a part of a compiled model that PyTorch does not compile, such as
            a checkpoint; then an open unit is in a graph, or was called by compiled code.
        why: the result of `why_not` for the unit.
    """
    unit.is_in_graph = False
    unit.is_called_by_compiled_code = is_compiled or any(
        each.is_in_graph or each.is_called_by_compiled_code for each in open_units
    )
    if unit.is_called_by_compiled_code:
        known = "hooks run as eager code because the compiler left out code around them"
        reasons = "; ".join(text.partition("\n")[0] for text in torch._dynamo.utils.counters["graph_break"])
        counters.count_graph_break(why or known, f"{unit.name} (Dynamo's graph breaks: {reasons or 'none'})")


class _Begin(torch.autograd.Function):
    """Records fsdp_begin_forward, and fsdp_end_backward in its backward.

    Returns the inputs, and aliases of the full weights that depend on fsdp_begin_forward.
    """

    @staticmethod
    def forward(ctx: Any, handle: int, records: bool, num_inputs: int, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.handle, ctx.num_inputs = handle, num_inputs
        inputs, weights = tensors[:num_inputs], tensors[num_inputs:]
        begin = _ops.fsdp_begin_forward(inputs, handle, records)
        ctx.save_for_backward(begin)
        ctx.set_materialize_grads(False)
        return *inputs, *(_ops.fsdp_after(full, begin) for full in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        of_inputs, of_weights = gradients[: ctx.num_inputs], gradients[ctx.num_inputs :]
        indices = [i for i, gradient in enumerate(of_weights) if gradient is not None]
        present = [gradient for gradient in of_inputs if gradient is not None]
        (begin,) = ctx.saved_tensors
        _ops.fsdp_end_backward(present, [of_weights[i] for i in indices], indices, begin, ctx.handle)
        return None, None, None, *of_inputs, *(None for _ in of_weights)


class _End(torch.autograd.Function):
    """Records fsdp_end_forward, and fsdp_begin_backward in its backward. Returns the outputs."""

    @staticmethod
    def forward(ctx: Any, handle: int, *outputs: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.handle = handle
        ctx.save_for_backward(_ops.fsdp_end_forward(outputs, handle))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (forward,) = ctx.saved_tensors
        begin = _ops.fsdp_begin_backward([each for each in gradients if each is not None], forward, ctx.handle)
        return None, *(None if gradient is None else _ops.fsdp_after(gradient, begin) for gradient in gradients)


@torch._dynamo.allow_in_graph
def _begin(handle: int, records: bool, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _Begin.apply(handle, records, num_inputs, *tensors)  # type: ignore[no-untyped-call]


@torch._dynamo.allow_in_graph
def _end(handle: int, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _End.apply(handle, *outputs)  # type: ignore[no-untyped-call]


@torch._dynamo.assume_constant_result
def _adopt_changes(handle: int, requires_grad: Sequence[bool]) -> None:
    """Adopts parameters that users have frozen or unfrozen, when a graph is traced. Graphs are for these flags only."""
    for weight in _known[handle].unit.weights:
        weight.adopt_changes()


def begin_forward(handle: int, unit: Unit, arguments: Any) -> Any:
    """Records the beginning of a forward, and gives the modules their full weights.

    Returns the arguments. Those that require gradients, and the weights, are results of `_Begin`.
    """
    flat, spec = tree_flatten(arguments)
    where = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor) and value.requires_grad]
    inputs = [flat[i] for i in where]
    _adopt_changes(handle, [each.sharded.requires_grad for each in unit.weights])
    found = _begin(handle, torch.is_grad_enabled(), len(where), *inputs, *[each.unsharded for each in unit.weights])
    for i, tensor in zip(where, found[: len(where)]):
        flat[i] = tensor
    for weight, tensor in zip(unit.weights, found[len(where) :]):
        weight.registrations.set(tensor)
    return tree_unflatten(flat, spec)


def end_forward(handle: int, unit: Unit, output: Any) -> Any:
    """Records the end of a forward. Returns its output, and gives the modules their sharded parameters back."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    flat, spec = tree_flatten(output)
    for leaf in flat:
        mapped(collect, leaf)
    passed = iter(_end(handle, *tensors))
    flat = [mapped(lambda _: next(passed), leaf) for leaf in flat]
    for weight in unit.weights:
        weight.registrations.set(weight.sharded)
    return tree_unflatten(flat, spec)


# ---- joint graphs: forward and backward in one graph, before a partitioner makes two of it


def _event(node: Node) -> Any:
    """Returns the operator of an event; None for other nodes."""
    is_event = node.target is with_effects and str(node.args[1]).startswith("shardwright.fsdp_")
    return node.args[1] if is_event else None


def _result_of(node: Node) -> Node:
    """Returns the node of an event's result, without its token."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 1:
            return user
    with node.graph.inserting_after(node):
        result = node.graph.call_function(operator.getitem, (node, 1))
    result.meta["val"] = node.meta["val"][1]
    return result


def _backward_events(nodes: list[Node]) -> dict[Node, Node]:
    """Returns the result of the `begin_backward` of each forward in the graph, by the result of its `begin_forward`."""
    running: dict[Any, list[Node]] = {}  # by unit: `begin_forward` nodes without an end
    ended: dict[Node, Node] = {}  # by result of `end_forward`: its `begin_forward` node
    found: dict[Node, Node] = {}
    for node in nodes:
        event = _event(node)
        if event is _ops.fsdp_begin_forward.default:
            running.setdefault(node.args[3], []).append(node)
        elif event is _ops.fsdp_end_forward.default and running.get(node.args[3]):
            ended[_result_of(node)] = running[node.args[3]].pop()
        elif event is _ops.fsdp_begin_backward.default and node.args[3] in ended:
            found[_result_of(ended[node.args[3]])] = _result_of(node)  # type: ignore[index]
    return found


def _is_backward(node: Node) -> bool:
    """Returns true for nodes that AOTAutograd has marked as a part of the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _is_random(node: Node) -> bool:
    """Returns true for operators whose result depends on a random seed."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _reread_weights_in_backward(joint_module: GraphModule) -> None:
    """Makes the backward read weights after its own event, and repeat nodes that depend on weights alone.

    Joint graphs are changed before they are partitioned. Example: the forward casts a weight, and both parts multiply
    by the result:

        before    a = after(w, begin_forward)    c = cast(a)    y = x @ c    ...    dx = dy @ c.T
        after     a = after(w, begin_forward)    c = cast(a)    y = x @ c    ...
                  a2 = after(w, begin_backward)  c2 = cast(a2)  dx = dy @ c2.T

    Nodes that checkpoints recompute are repeated here too if they depend on weights: the partitioner would not place
    them after the event. Random nodes, and others that depend on repeated ones, are saved.
    """
    nodes = list(joint_module.graph.nodes)
    if not any(node.target is _AFTER for node in nodes):
        return
    backward_of = _backward_events(nodes)
    copies: dict[Node, Node] = {}  # by node of the forward: its copy in the backward
    begin_of: dict[Node, Node] = {}  # by repeated node: the result of the `begin_forward` that gathers its weights
    only_weights: set[Node] = set()  # nodes that depend on weights alone
    latest_copy: dict[Node, Node] = {}  # by result of `begin_backward`: the latest copy that was added after it
    for node in nodes:
        if _is_backward(node) or node.op != "call_function" or node.target is with_effects:
            continue
        known = {begin_of[source] for source in node.all_input_nodes if source in begin_of}
        reads_only_weights = len(known) == 1 and only_weights.issuperset(node.all_input_nodes)
        may_repeat = not _is_random(node) and (reads_only_weights or partitioners.must_recompute(node))
        if node.target is _AFTER or (reads_only_weights and may_repeat):
            only_weights.add(node)
        if node.target is _AFTER:
            begin_of[node] = node.args[1]  # type: ignore[assignment]
        elif len(known) == 1 and may_repeat:
            begin_of[node] = known.pop()
        elif known:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if begin_of.get(node) in backward_of:
            _copy_to_backward(node, backward_of[begin_of[node]], copies, latest_copy)
    joint_module.graph.lint()
    joint_module.recompile()


def _copy_to_backward(node: Node, event: Node, copies: dict[Node, Node], latest_copy: dict[Node, Node]) -> None:
    """Copies a node into the backward, after an event, and makes nodes of the backward use the copy."""
    with node.graph.inserting_after(latest_copy.get(event, event)):
        if node.target is _AFTER:
            copy = node.graph.call_function(_AFTER, (node.args[0], event))
            copy.meta = dict(node.meta)
        else:
            copy = node.graph.node_copy(node, lambda source: copies.get(source, source))
    copy.meta["partitioner_tag"] = "is_backward"
    copy.meta.pop("recompute", None)
    node.meta.pop("recompute", None)
    copies[node] = latest_copy[event] = copy
    for user in list(node.users):
        if _is_backward(user) and user is not copy:
            user.replace_input_with(node, copy)


order.before_partitioning.append(_reread_weights_in_backward)
