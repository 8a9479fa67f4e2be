"""`torch.compile` of models under `sw.fully_shard`: its graphs, and results, which equal those of eager code."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel as Colwise
from torch.distributed.tensor.parallel import RowwiseParallel as Rowwise
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from fsdp_models import Mlp, batch, flat_fully_shard, full, loss_of, part, shard
from meshes import IS_BEFORE_2_14, get_mesh
from pool import Pool
from test_fully_shard_streams import poisoned


def train(model: nn.Module, run: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        loss = loss_of(run, batch(step))
        loss.backward()
        found += [loss.detach(), *(part(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(run, batch(100 + step)))
    return found


def _assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


LEFT_OUT = "hooks run as eager code because the compiler left out code around them"


# ---------------------------------------------------------------------------------------------- inside of units


def _inside(in_place: bool) -> None:
    mesh = get_mesh((2,))
    eager = shard(Mlp(), flat_fully_shard, mesh)
    expected = train(eager, eager, 4)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = Mlp()
    # Before torch 2.14, `compile()` of an nn.Sequential makes no graph, and raises an error if one is demanded.
    is_eager = in_place and IS_BEFORE_2_14
    for i, layer in enumerate(model.layers):
        if in_place:
            layer.compile(backend=counter, fullgraph=not is_eager)
        else:
            model.layers[i] = torch.compile(layer, backend=counter, fullgraph=True)
    shard(model, flat_fully_shard, mesh)
    sw.reset_stats()
    _assert_close(train(model, model, 4), expected)
    assert sw.stats()["unplanned_steps"] == sw.stats()["graph_breaks"] == 0, "units are around compiled code"
    # At most one graph for each layer with gradients and one without: weights are the same tensors in every step.
    assert counter.frame_count == 0 if is_eager else 0 < counter.frame_count <= 2 * len(model.layers)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


def _in_place_shared() -> None:
    """Hooks are not part of the graphs of modules that compile themselves, so equal modules share graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(*(Block() for _ in range(6)))
    for block in model:
        block.compile(backend=counter, fullgraph=True)
        sw.fully_shard(block, mesh=get_mesh((2,)))
    loss_of(sw.fully_shard(model, mesh=get_mesh((2,))), batch(0)).backward()
    assert counter.frame_count == 2, "one for the first block, whose input needs no gradient, and one for the others"


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_inside_of_units(pool: Pool, in_place: bool) -> None:
    pool.run(_inside, 2, in_place)


def test_equal_units_share_graphs(pool: Pool) -> None:
    pool.run(_in_place_shared, 2)


# ----------------------------------------------------------------------------------------------- around units


class Graphs:
    """A backend that counts the events in forward and backward graphs."""

    def __init__(self, **options: Any) -> None:
        self.events: list[list[tuple[str, int]]] = []
        compilers: dict[str, Any] = {"fw_compiler": self._compile, "bw_compiler": self._compile}
        self.backend = aot_autograd(**compilers, **options)

    def _compile(self, graph_module: Any, _: Any) -> Callable[..., Any]:
        events = []
        for node in graph_module.graph.nodes:
            for argument in (node.target, *node.args[1:2]):
                if isinstance(argument, torch._ops.OpOverload) and argument.namespace == "shardwright":
                    unit = next((value for value in reversed(node.args) if type(value) is int), -1)
                    events.append((argument._schema.name.partition("::fsdp_")[2], unit))
        self.events.append([event for event in events if event[0] != "after"])
        return make_boxed_func(graph_module.forward)


def _one_graph(backend: str) -> None:
    """The model is one graph that contains all events. Weights that are read too early or too late hold NaN."""
    mesh = get_mesh((dist.get_world_size(),))
    eager = shard(Mlp(), flat_fully_shard, mesh)
    expected = train(eager, eager, 4)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend(backend)
    model = shard(Mlp(), flat_fully_shard, mesh)
    sw.reset_stats()
    with poisoned():
        _assert_close(train(model, torch.compile(model, backend=counter, fullgraph=True), 4), expected)
    assert counter.frame_count == 2, "with gradients, and without"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert sw.stats()["unplanned_steps"] == sw.stats()["graph_breaks"] == 0
    compiled_schedules, eager_schedules = (
        sorted(sw.fsdp.schedules(each), key=lambda schedule: len(schedule.uses)) for each in (model, eager)
    )
    for compiled_schedule, eager_schedule in zip(compiled_schedules, eager_schedules, strict=True):
        if backend == "inductor" and torch.__version__ < "2.15":
            continue  # it may begin a backward before it ends the previous one, so reductions start a use later
        assert len(compiled_schedule.gathers) == len(eager_schedule.gathers) and len(
            compiled_schedule.reductions
        ) == len(eager_schedule.reductions)
        assert compiled_schedule.arena_bytes == eager_schedule.arena_bytes
    # Afterwards the module can be saved, and runs without a compiler.
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    before = [part(p.detach()).clone() for p in model.parameters()]
    model.load_state_dict(model.state_dict())
    assert all(map(torch.equal, before, (part(p.detach()) for p in model.parameters())))
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, batch(7)), loss_of(eager, batch(7)))


# Inductor takes long and so runs on one rank, which gathers and releases memory too.
@pytest.mark.parametrize(("backend", "world"), [("aot_eager", 2), ("inductor", 1)])
def test_compiled_as_one_graph(pool: Pool, backend: str, world: int) -> None:
    pool.run(_one_graph, world, backend)


def _events(partition: Callable[..., Any] | None) -> None:
    """Graphs have two events for each forward and backward of a unit, in the order of units, equal on all ranks."""
    torch._dynamo.reset()
    graphs = Graphs(**({} if partition is None else {"partition_fn": partition}))
    model = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    loss_of(torch.compile(model, backend=graphs.backend, fullgraph=True), batch(0)).backward()
    forward, backward = graphs.events
    number = {unit: place for place, unit in enumerate(dict.fromkeys(unit for _, unit in forward))}  # 0: the model
    layers = range(1, len(model.layers) + 1)
    expected = [("begin_forward", 0), ("end_forward", 0)]
    expected[1:1] = [(name, unit) for unit in layers for name in ("begin_forward", "end_forward")]
    assert [(name, number[unit]) for name, unit in forward] == expected
    expected = [("begin_backward", 0), ("end_backward", 0)]
    expected[1:1] = [(name, unit) for unit in reversed(layers) for name in ("begin_backward", "end_backward")]
    assert [(name, number[unit]) for name, unit in backward] == expected


@pytest.mark.parametrize("partition", [None, min_cut_rematerialization_partition])
def test_graphs_contain_the_events_of_units(pool: Pool, partition: Callable[..., Any] | None) -> None:
    pool.run(_events, 2, partition)


class Computed(nn.Module):
    """A layer that transforms its weight before the product, with keyword arguments and several outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = torch.tanh(self.weight) * self.gain
        return {"y": F.gelu(x @ weight + shift) * self.gain, "unused": x.sum()}


class Deep(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Computed(width) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = x + layer(x, shift=self.shift)["y"]
        return x


def _computed(backend: str) -> None:
    """The only saved tensors of a weight's size are the weights, which the backward gathers again."""
    mesh = get_mesh((2,))
    for frozen in (False, True):
        models = [Deep(), Deep()]
        for each in models:
            each.layers[1].requires_grad_(not frozen)
            shard(each, flat_fully_shard, mesh, {"memory_limit": 2900})  # type: ignore[arg-type]
        torch._dynamo.reset()
        run = torch.compile(models[1], backend=backend, fullgraph=True)
        saved: list[torch.Tensor] = []

        def note(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        for step in range(4):
            expected = loss_of(models[0], batch(step))
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                actual = loss_of(run, batch(step))
            with poisoned():
                actual.backward()
            expected.backward()
            torch.testing.assert_close(actual, expected)
            for parameter, right in zip(models[1].parameters(), models[0].parameters(), strict=True):
                assert (parameter.grad is None) == (right.grad is None)
                if parameter.grad is not None:
                    torch.testing.assert_close(part(parameter.grad), part(right.grad))
        units = [layer._shardwright_unit.unit for layer in models[1].layers]
        storages = {weight.memory.untyped_storage()._cdata for unit in units for weight in unit.weights}
        assert all(each.untyped_storage()._cdata in storages for each in saved if each.numel() == 100)
        assert saved


def test_tensors_computed_from_weights_are_not_saved(pool: Pool) -> None:
    pool.run(_computed, 2, "aot_eager")


class DroppedWeights(nn.Module):
    """A product with a random half of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ nn.functional.dropout(self.weight, training=True).t()


def _dropped_weights() -> None:
    mesh = get_mesh((2,))
    torch.manual_seed(0)
    model = nn.Sequential(flat_fully_shard(DroppedWeights(), mesh=mesh))
    sw.fully_shard(model, mesh=mesh)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        y = run(torch.ones(1, 32))
        y.sum().backward()
        # For weights and inputs of 1, the sum of a row of the gradient is the result, if both have one mask.
        torch.testing.assert_close(model[0].weight.grad.full_tensor().sum(1), y[0].detach())
        model.zero_grad()


def test_masks_of_weights_are_saved(pool: Pool) -> None:
    pool.run(_dropped_weights, 2)


def linear_units(width: int, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """Returns two equal models whose units are Linear modules."""
    mesh = get_mesh((2,))
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    model = copy.deepcopy(eager)
    for each in (eager, model):
        for layer in each:
            flat_fully_shard(layer, mesh=mesh, **options)
        sw.fully_shard(each, mesh=mesh)
    torch._dynamo.reset()
    return eager, model


def _linear_units() -> None:
    eager, model = linear_units(10)
    expected = train(eager, eager, 3)
    _assert_close(train(model, torch.compile(model, backend="aot_eager", fullgraph=True), 3), expected)


def test_linear_units_in_graphs(pool: Pool) -> None:
    pool.run(_linear_units, 2)


def _linear_units_in_float8() -> None:
    """Linear units multiply by received codes: nothing may read their full weights."""
    eager, model = linear_units(32, message_format="float8", matmul_format="float8")
    given = torch.randn(8, 32)
    expected = eager(given)
    expected.square().sum().backward()
    actual = torch.compile(model, backend="aot_eager")(given)
    actual.square().sum().backward()
    assert torch.equal(actual, expected)
    for layer, eager_layer in zip(model, eager, strict=True):
        assert torch.equal(full(layer.weight.grad), full(eager_layer.weight.grad))
        weight = next(w for w in layer._shardwright_unit.unit.weights if w.name.endswith("weight"))
        assert weight.product is not None and not weight._is_read


def test_linear_units_in_float8(pool: Pool) -> None:
    pool.run(_linear_units_in_float8, 2)


def _mixed_precision() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    outermost = {"mp_policy": dataclasses.replace(policy, output_dtype=torch.float32)}
    mesh = get_mesh((2,))
    torch._dynamo.reset()
    eager, model = (shard(Mlp(), flat_fully_shard, mesh, outermost, mp_policy=policy) for _ in range(2))
    expected = train(eager, eager, 3)
    found = train(model, torch.compile(model, backend="aot_eager", fullgraph=True), 3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.01)


def test_compiled_with_mixed_precision(pool: Pool) -> None:
    pool.run(_mixed_precision, 2)


class Recomputed(nn.Module):
    """Recomputes its inner module in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


class RecomputesUnits(Mlp):
    """Recomputes its units in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.leave(x)


def _checkpointed() -> None:
    """Checkpoints within units are in the graph; checkpoints around units break graphs. Both train as eager code."""
    mesh = get_mesh((2,))
    plain = shard(Mlp(), flat_fully_shard, mesh)
    expected = train(plain, plain, 3)
    for is_within in (True, False):
        eager, model = Mlp() if is_within else RecomputesUnits(), Mlp() if is_within else RecomputesUnits()
        for each in (eager, model):
            if is_within:
                each.layers = nn.ModuleList(Recomputed(layer) for layer in each.layers)
            shard(each, flat_fully_shard, mesh)
        _assert_close(train(eager, eager, 3), expected)
        torch._dynamo.reset()
        with poisoned():
            run = torch.compile(model, backend="aot_eager", fullgraph=is_within)
            sw.reset_stats()
            _assert_close(train(model, run, 3), expected)
        # All units, in a forward with gradients and one without of each of three steps; recomputations do not count.
        broken = 0 if is_within else 3 * 2 * (1 + len(model.layers))
        assert sw.stats()["graph_break_reasons"] == ({LEFT_OUT: broken} if broken else {})


def test_checkpoints_within_and_around_units(pool: Pool) -> None:
    pool.run(_checkpointed, 2)


def _chunked_in_graph() -> None:
    torch._dynamo.reset()
    model = shard(Mlp(), flat_fully_shard, get_mesh((2,)), {"chunked": True})
    with pytest.raises(RuntimeError, match="chunked must be False for Mlp .*, got True"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch(0))


def test_chunked_is_rejected_in_graphs(pool: Pool) -> None:
    pool.run(_chunked_in_graph, 2)


def _float8_units() -> None:
    """Units that multiply by received codes break graphs. Results equal those of eager code."""
    mesh = get_mesh((2,))
    eager, model = (
        shard(Mlp(), flat_fully_shard, mesh, message_format="float8", matmul_format="float8") for _ in range(2)
    )
    expected = train(eager, eager, 3)
    torch._dynamo.reset()
    sw.reset_stats()
    _assert_close(train(model, torch.compile(model, backend="aot_eager"), 3), expected)
    # Each of three steps has a forward with gradients and one without. The model's own weight is tied, not in float8.
    reason = "weights are multiplied in their message format (matmul_format)"
    assert sw.stats()["graph_break_reasons"] == {reason: 3 * 2 * len(model.layers), LEFT_OUT: 3 * 2}
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        loss_of(torch.compile(model, backend="aot_eager", fullgraph=True), batch(0))


def test_units_with_matmul_format_break_graphs(pool: Pool) -> None:
    pool.run(_float8_units, 2)


class _Interrupted(RuntimeError):
    pass


def _after_an_error() -> None:
    """An event that raises leaves no state behind."""
    mesh = get_mesh((2,))
    eager, model = (shard(Mlp(), flat_fully_shard, mesh) for _ in range(2))
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss_of(run, batch(0)).backward()
    model.zero_grad()
    unit = model.layers[1]._shardwright_unit.unit
    gather = unit.adopt_changes

    def fail(*_: Any) -> None:
        raise _Interrupted

    unit.adopt_changes = fail
    with pytest.raises(_Interrupted):
        loss_of(run, batch(0))
    unit.adopt_changes = gather
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    _assert_close(train(model, run, 3), train(eager, eager, 3))


def test_training_continues_after_an_error_in_a_graph(pool: Pool) -> None:
    pool.run(_after_an_error, 2)


def _broken() -> None:
    """If a model's code breaks graphs, each piece is compiled. Results equal those of eager code."""

    class Breaks(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for layer in self.layers:
                x = x + layer(x)
                torch._dynamo.graph_break()
            return self.leave(x)

    mesh = get_mesh((2,))
    eager = shard(Mlp(), flat_fully_shard, mesh)
    expected = train(eager, eager, 4)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = shard(Breaks(), flat_fully_shard, mesh)
    with poisoned():
        sw.reset_stats()
        _assert_close(train(model, torch.compile(model, backend=counter), 4), expected)
    assert counter.frame_count >= 2 * 3
    assert sw.stats()["graph_break_reasons"] == {LEFT_OUT: 4 * 2}, "the outermost unit; the others are in the graphs"
    assert Counter(type(p) for p in model.parameters()) == Counter(type(p) for p in eager.parameters())


def test_models_with_graph_breaks(pool: Pool) -> None:
    pool.run(_broken, 2)


def _given_up() -> None:
    """Once Dynamo has given up on a model, its units run as eager code and are counted. Results do not change."""
    mesh = get_mesh((2,))
    eager, model = (shard(Mlp(), flat_fully_shard, mesh) for _ in range(2))
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", dynamic=False)
    sw.reset_stats()
    with torch._dynamo.config.patch(recompile_limit=1):
        for rows in (3, 4, 5):
            x = torch.randn(rows, 10, generator=torch.Generator().manual_seed(rows))
            torch.testing.assert_close(loss_of(run, x), loss_of(eager, x))
            assert sw.stats()["graph_breaks"] == (rows - 3) * (1 + len(model.layers))
    assert set(sw.stats()["graph_break_reasons"]) == {LEFT_OUT}
    loss_of(model, batch(0)).backward()
    assert sw.stats()["graph_breaks"] == 2 * (1 + len(model.layers)), "without a compiler nothing is counted"


def test_units_run_eagerly_after_the_recompile_limit(pool: Pool) -> None:
    pool.run(_given_up, 2)


def _parallel() -> None:
    """Units whose unsharded weights are DTensors break graphs."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 10)) for _ in range(3)))
    plan = {f"{i}.{name}": style for i in range(3) for name, style in (("0", Colwise()), ("2", Rowwise()))}
    for layer in parallelize_module(model, mesh["tp"], plan):
        sw.fully_shard(layer, mesh=mesh["dp"])
    sw.fully_shard(model, mesh=mesh["dp"])
    with torch.no_grad():
        expected = loss_of(model, batch(0, 0))
        torch._dynamo.reset()
        sw.reset_stats()
        torch.testing.assert_close(loss_of(torch.compile(model, backend="aot_eager"), batch(0, 0)), expected)
    assert sw.stats()["graph_break_reasons"] == {"gathered weights are DTensors": len(model), LEFT_OUT: 1}


def test_units_with_tensor_parallelism_break_graphs(pool: Pool) -> None:
    pool.run(_parallel, 2)
