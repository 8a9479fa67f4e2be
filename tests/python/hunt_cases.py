"""Random cases of `hunt`: the blocks of a model, and the operations on it in each training step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import torch

import hunt_models
from hunt_models import CONTAINERS, INPUTS, KINDS


def _text(value: Any) -> str:
    """Returns a constructor call with the fields that differ from the default."""
    changed = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
    shown = ", ".join(f"{f.name}={given!r}" for f, given in changed if given != f.default)
    return f"{type(value).__name__}({shown})"


@dataclasses.dataclass(frozen=True, repr=False)
class Block:
    """A block of a model. hunt_models.py defines the kinds and containers."""

    kind: str = "linear"
    output: str = "tuple"
    input: str = "tuple"
    unit: str = "own"  # "none": in the model's unit; "nested": unit in a unit; "list": shared with the next block
    reshard: bool | int | None = None  # the argument reshard_after_forward
    checkpoint: str = ""  # "inside" the unit, "around" it, or "reentrant" (around it)
    calls: int = 1  # number of calls in each forward
    method: bool = False  # the model calls a method other than forward
    # Attribute that a later loss reads: a tensor "inside" the graph of the output or "aside" from it, a "weight", or a
    # "view" of one.
    stores: str = ""
    frozen: str = ""  # "all" or "some" of the weights
    tied: bool = False  # two layers of the core share a weight
    hook: str = ""  # of gradients "inside" or "outside" the block; or a "module", "pre", "backward" or "parameter" hook
    compiled: bool = False

    __repr__ = _text


@dataclasses.dataclass(frozen=True, repr=False)
class Step:
    """One training step. Its operations run in the order of the fields."""

    toggles: int = -1  # index of the block whose weights are frozen, or unfrozen, from this step on
    unshards: str = ""  # call before the forward: "unshard", "async" or "reshard"
    stays: str = ""  # from this step on: "stay" (unsharded after backward), "leave", "stay_forward", "leave_forward"
    fails: str = ""  # a first pass that raises in "forward", in "backward", by an "interrupt", or is "caught" inside
    evaluates: str = ""  # an evaluation "before" the forward, "between" it and the backward, or in "inference" mode
    accumulates: int = 0  # number of backwards without reductions before the last one
    defers: bool = False  # gradients are not reduced or compared until a later step
    context: str = ""  # context manager around the passes: a key of hunt_passes.CONTEXTS
    # "method": a method registered with FSDP; "unsharded": forward without hooks, after `unshard`; "checkpoint": the
    # whole model in one checkpoint; "part": only the first block.
    entry: str = "forward"
    expert: str = "same"  # the expert that runs: the "same" on all ranks, one "by_rank", or "none"
    losses: str = "all"  # "main", "aux" or "hidden"; "by_rank": main on even ranks, aux on odd ranks
    # Units that only odd ranks run in another way: they "skip" the first block, "repeat" it, or run the blocks in
    # "reverse" order; "evaluate": skip it in an evaluation; "write": they alone write weights after the forward.
    differs: str = ""
    backward: str = "once"
    clips: str = ""  # gradients by "norm" or "value"; "scale": multiplies them by a factor
    optimizes: bool = True
    writes: str = ""  # a write to the weights after the optimizer's step: one of WRITES
    zero: str = "none"  # gradients at the end: "zeros", "by_hand", "keep", or "model" (model.zero_grad())
    reads_state: bool = False
    remakes: bool = False  # makes a new optimizer of the model's current parameters

    __repr__ = _text


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """One model and its steps. Its repr is a constructor call that makes an equal case."""

    seed: int
    blocks: tuple[Block, ...] = (Block(),)
    steps: tuple[Step, ...] = (Step(), Step(), Step())
    input: str = "tuple"
    output: str = "tuple"
    root: bool = True  # the model itself is a unit and has weights
    tied: str = ""  # a shared weight of the "root" or of the "blocks"
    rows: str = "equal"  # "uneven" over ranks, or "empty" on some
    input_gradient: bool = False
    policy: str = ""  # param_dtype: "float64", "float64_out" (with float32 outputs) or "bfloat16"
    layout: str = ""  # of weights under sw.fully_shard: "store", "last" (dim), "chunks" or "offload"
    optimizer: str = "sgd"
    compiled: bool = False

    __repr__ = _text


BACKWARDS = (
    *("separate", "retained", "two_forwards", "swapped", "in_order", "input_gradient", "parameter_gradients"),
    *("regularised", "none", "gradient_argument", "inputs_argument", "thread", "stale"),
)
NOT_REDUCING = ("none", "inputs_argument", "parameter_gradients", "stale")  # backwards that keep gradients deferred
WRITES = (
    *("load_state_dict", "assign", "local_copy", "copy", "multiply", "data", "foreach", "foreach_local"),
    *("set_model_state_dict", "dcp"),
)
DIFFERENCES = ("skip", "repeat", "reverse", "evaluate", "write")
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw_foreach", "adamw_loop")


class _Chance:
    """Draws options that are mostly the default, so that known failures do not hide new ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, default: Any, others: Any, probability: float) -> Any:
        return self.random.choice(others) if self.random.random() < probability else default

    def true(self, probability: float) -> bool:
        return self.random.random() < probability


def draw(seed: int) -> Case:
    """Returns the case of a seed, the same on every rank and machine."""
    chance = _Chance(seed)
    root = chance.true(0.85)
    blocks = tuple(_draw_block(chance, root) for _ in range(chance.random.choice((1, 1, 2, 2, 3))))
    is_called = chance.true(0.2)  # by entries other than its forward
    steps = tuple(_draw_step(chance, len(blocks), is_called, i == 2) for i in range(3))
    case = Case(
        seed=seed,
        blocks=blocks,
        steps=steps,
        input=chance.one("tuple", INPUTS, 0.3),
        output=chance.one("tuple", tuple(CONTAINERS), 0.4),
        root=root,
        tied=chance.one("", ("root", "blocks"), 0.1),
        rows=chance.one("equal", ("uneven", "empty"), 0.2),
        input_gradient=chance.true(0.3),
        policy=chance.one("", ("float64", "float64_out", "bfloat16"), 0.15),
        layout=chance.one("", ("store", "last", "chunks", "offload"), 0.2),
        optimizer=chance.one("sgd", OPTIMIZERS, 0.7),
        compiled=chance.true(0.01),
    )
    return valid(case)


def _draw_block(chance: _Chance, root: bool) -> Block:
    return Block(
        kind=chance.random.choice(KINDS),
        output=chance.one("tuple", tuple(CONTAINERS), 0.6),
        input=chance.one("tuple", INPUTS, 0.2),
        unit=chance.one("own", ("none", "nested", "list") if root else ("nested", "list"), 0.35),
        reshard=chance.one(None, (True, False, 1, 2), 0.4),
        checkpoint=chance.one("", ("inside", "around", "reentrant"), 0.15),
        calls=chance.one(1, (2,), 0.12),
        method=chance.true(0.05),
        stores=chance.one("", ("inside", "inside", "aside", "aside", "weight", "view"), 0.15),
        frozen=chance.one("", ("all", "some"), 0.15),
        tied=chance.true(0.08),
        hook=chance.one("", ("inside", "outside", "module", "pre", "backward", "parameter"), 0.12),
        compiled=chance.true(0.01),
    )


def _draw_step(chance: _Chance, blocks: int, is_called: bool, is_last: bool) -> Step:
    defers = not is_last and chance.true(0.08)
    return Step(
        toggles=chance.one(-1, range(blocks), 0.06),
        unshards=chance.one("", ("unshard", "async", "reshard"), 0.08),
        stays=chance.one("", ("stay", "leave", "stay_forward", "leave_forward", "prefetch"), 0.12),
        fails=chance.one("", ("forward", "backward", "interrupt", "caught"), 0.08),
        evaluates=chance.one("", ("before", "between", "inference"), 0.15),
        accumulates=chance.one(0, (1, 2), 0.1),
        defers=defers,
        context=chance.one("", ("cpu", "clones", "no_hooks", "anomaly", "flops", "autocast"), 0.1),
        entry=chance.one("forward", ("method", "method", "unsharded", "checkpoint", "part"), 0.6 if is_called else 0),
        expert=chance.one("same", ("by_rank", "none"), 0.15),
        losses=chance.one("all", ("main", "aux", "hidden", "by_rank"), 0.15),
        differs=chance.one("", DIFFERENCES, 0.05),
        backward=chance.one("once", BACKWARDS, 0.3),
        clips="" if defers else chance.one("", ("norm", "norm", "value", "scale"), 0.15),
        optimizes=not defers and chance.true(0.85),
        writes=chance.one("", WRITES, 0.15),
        zero="keep" if defers else chance.one("none", ("zeros", "by_hand", "keep", "model"), 0.25),
        reads_state=chance.true(0.1),
        remakes=chance.true(0.05),
    )


def valid(case: Case) -> Case:
    """Replaces options that PyTorch refuses, or with which a sharded model cannot be compared."""
    blocks = []
    for i, block in enumerate(case.blocks):
        if block.checkpoint == "reentrant":  # accepts only tensors, and does not select which inputs get gradients
            block = dataclasses.replace(
                block, input="tensor", output=block.output if block.output in ("tensor", "tuple") else "tuple"
            )
        if not case.root and block.unit == "none":
            block = dataclasses.replace(block, unit="own")
        if block.unit == "list" and (i + 1 == len(case.blocks) or case.blocks[i + 1].unit == "list"):
            block = dataclasses.replace(block, unit="own")
        if block.kind == "gru" and (case.policy or case.rows == "empty" or block.compiled or case.compiled):
            block = dataclasses.replace(block, kind="two")
        if block.kind == "remembers" and case.rows == "empty":  # nothing may gather before `ctx.weight` is read
            block = dataclasses.replace(block, kind="two")
        # Without an expert the hook is on the input, which FSDP passes through a node of its own.
        if block.kind == "experts" and block.hook == "inside" and any(step.expert == "none" for step in case.steps):
            block = dataclasses.replace(block, hook="")
        if block.tied and block.kind not in hunt_models.TIEABLE:
            block = dataclasses.replace(block, tied=False)
        blocks.append(block)
    reentrant = any(block.checkpoint == "reentrant" for block in blocks)
    steps = []
    has_checkpoint = any(block.checkpoint or block.kind == "inner_checkpoint" for block in blocks)
    for index, step in enumerate(case.steps):
        if step.toggles >= len(blocks):
            step = dataclasses.replace(step, toggles=-1)
        if reentrant and step.backward in ("input_gradient", "parameter_gradients", "inputs_argument"):
            step = dataclasses.replace(step, backward="once")
        if step.backward in ("input_gradient", "inputs_argument") and not case.input_gradient:
            step = dataclasses.replace(step, backward="once")
        if step.fails and (case.compiled or any(block.compiled for block in blocks)):
            step = dataclasses.replace(step, fails="")
        if step.fails == "caught" and step.entry == "checkpoint":  # it would compute again without the error
            step = dataclasses.replace(step, fails="")
        # Ranks that run no unit at all compare nothing. Nor does a rank that has ended its step, while another one runs
        # one of several models again, or its backward. Ranks may leave a schedule with chunks in different ways.
        has_no_event = not case.root and (len(blocks) == 1 or step.differs == "repeat")
        if has_no_event or case.layout == "chunks":
            step = dataclasses.replace(step, differs="")
        if step.losses == "by_rank" and not case.root and any(block.kind == "nothing" for block in blocks):
            step = dataclasses.replace(step, losses="all")
        # A graph computes gradients of all its outputs, so that they are zeros where others are None.
        if case.compiled or any(block.compiled for block in blocks):
            step = dataclasses.replace(step, losses="all")
        # A method that is not registered may move DTensors, on one rank.
        if any(block.method and block.unit == "none" for block in blocks):
            step = dataclasses.replace(step, differs="")
        if step.differs:  # some ranks leave the step early, so it has no other errors
            step = dataclasses.replace(step, fails="", backward="once", accumulates=0, defers=False, zero="none")
        # A rank may raise alone if it recomputes other units, or reads a weight that only it has released.
        if step.differs and step.entry in ("checkpoint", "unsharded"):
            step = dataclasses.replace(step, entry="forward")
        # A stored weight that is read outside of the forward raises on its own, or has the values of the forward.
        if any(block.stores in ("weight", "view") for block in blocks):
            step = dataclasses.replace(step, backward="once" if step.backward == "stale" else step.backward)
            step = dataclasses.replace(step, losses="all" if step.losses == "by_rank" else step.losses)
        if step.context == "no_hooks" and (has_checkpoint or step.entry == "checkpoint"):
            step = dataclasses.replace(step, context="")
        if step.context == "flops" and step.backward in ("input_gradient", "parameter_gradients", "inputs_argument"):
            step = dataclasses.replace(step, context="")
        if step.clips == "value" and any(block.kind == "complex" for block in blocks):
            step = dataclasses.replace(step, clips="norm")
        if step.entry == "part" and (blocks[0].unit == "none" or blocks[0].compiled):
            step = dataclasses.replace(step, entry="forward")
        if step.defers and (index + 1 == len(case.steps) or step.zero != "keep" or step.optimizes or step.clips):
            step = dataclasses.replace(step, defers=False)
        if step.accumulates and step.backward in NOT_REDUCING:
            step = dataclasses.replace(step, accumulates=0)
        if steps and steps[-1].defers:  # all deferred gradients are reduced in this step
            step = dataclasses.replace(step, toggles=-1, fails="", entry="forward", expert="same", losses="all")
            step = dataclasses.replace(step, backward="once" if step.backward in NOT_REDUCING else step.backward)
        steps.append(step)
    return dataclasses.replace(case, blocks=tuple(blocks), steps=tuple(steps))


def simpler(case: Case) -> Iterator[Case]:
    """Yields cases with one feature less, for the search for the smallest failing case."""
    for i in range(len(case.steps)):
        if len(case.steps) > 1:
            yield valid(dataclasses.replace(case, steps=case.steps[:i] + case.steps[i + 1 :]))
    for i in range(len(case.blocks)):
        if len(case.blocks) > 1:
            yield valid(dataclasses.replace(case, blocks=case.blocks[:i] + case.blocks[i + 1 :]))
    for value in _plainer(case):
        yield valid(value)
    for i, block in enumerate(case.blocks):
        for plainer in _plainer(block):
            yield valid(dataclasses.replace(case, blocks=(*case.blocks[:i], plainer, *case.blocks[i + 1 :])))
    for i, step in enumerate(case.steps):
        for plainer in _plainer(step):
            yield valid(dataclasses.replace(case, steps=(*case.steps[:i], plainer, *case.steps[i + 1 :])))


def _plainer(value: Any) -> Iterator[Any]:
    for field in dataclasses.fields(value):
        if field.name in ("seed", "blocks", "steps") or getattr(value, field.name) == field.default:
            continue
        yield dataclasses.replace(value, **{field.name: field.default})


def parse(text: str) -> Case:
    """Returns the case of a repr."""
    found: Case = eval(text, {"Case": Case, "Block": Block, "Step": Step, "torch": torch})
    return found
