"""Forwards and backwards of a case's steps, sharded or not, as a user's program runs them on one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hunt_cases import Case, Step
from hunt_models import CONTAINERS, WIDTH, Injected, Interrupt

ROWS = {"equal": (3, 3), "uneven": (2, 4), "empty": (3, 0)}

# Context managers around the passes of a step, by name.
CONTEXTS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "cpu": graph.save_on_cpu,
    "clones": lambda: graph.saved_tensors_hooks(torch.clone, torch.clone),
    "no_hooks": lambda: graph.disable_saved_tensors_hooks("hooks of saved tensors are disabled"),
    "anomaly": torch.autograd.detect_anomaly,
    "flops": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}

Losses = dict[str, torch.Tensor]


@dataclasses.dataclass
class Pass:
    """One forward on the batch of a rank, and its losses."""

    index: int  # index of the step
    step: Step
    rank: int
    scale: float  # factor of the losses
    x: torch.Tensor
    y: torch.Tensor
    aux: torch.Tensor
    losses: Losses
    records: list[tuple[str, Any]]  # (name, value) pairs to compare besides gradients

    @property
    def total(self) -> Any:
        return sum(self.losses.values())


class Passes:
    """A model and its parameters."""

    model: Any
    parameters: dict[str, Any]
    case: Case
    is_sharded: bool

    def syncs(self, flag: bool) -> None:
        """Sets whether the next backward reduces gradients."""

    def one_pass(self, index: int, step: Step, rank: int, number: int, scale: float) -> Pass:
        case, model = self.case, self.model
        generator = torch.Generator().manual_seed(case.seed * 1009 + index * 131 + number * 17 + rank)
        x = torch.randn(ROWS[case.rows][rank % 2], WIDTH, generator=generator)
        x.requires_grad_(case.input_gradient and torch.is_grad_enabled())
        expert = {"same": index % 2, "by_rank": rank % 2, "none": None}[step.expert]
        model.catches = step.fails == "caught"
        if model.catches:
            model.blocks[-1].fails = "caught"
        try:
            y, aux = self._call(step.entry, x, expert)
        finally:
            model.catches = False
            if model.blocks[-1].fails == "caught":
                model.blocks[-1].fails = ""
        losses = {name: loss * scale for name, loss in _chosen(model.losses(y, aux), step, rank).items()}
        losses = {name: loss for name, loss in losses.items() if loss.requires_grad}
        return Pass(index, step, rank, scale, x, y, aux, losses, [])

    def _call(self, entry: str, x: torch.Tensor, expert: int | None) -> tuple[Any, Any]:
        """Runs a forward and returns the two tensors of its output."""
        model, case = self.model, self.case
        for block in model.blocks:
            block.hidden = None
        if entry == "part":
            spec = model.blocks[0].spec
            given = CONTAINERS[spec.input][0](x, x.new_zeros(x.shape[0]))
            return CONTAINERS[spec.output][1](model.blocks[0](given, expert))
        given = CONTAINERS[case.input][0](x, x.new_zeros(x.shape[0]))
        if entry == "checkpoint":
            return CONTAINERS[case.output][1](checkpoint(model, given, expert, use_reentrant=False))
        call = {"forward": model, "method": model.encode, "unsharded": model.forward}[entry]
        return CONTAINERS[case.output][1](call(given, expert))

    def passes(self, index: int, step: Step, rank: int, scale: float) -> list[tuple[str, Any]]:
        """Runs the passes of a step. Returns (name, value) pairs to compare besides gradients."""
        with CONTEXTS[step.context]():
            for number in range(step.accumulates):
                self.syncs(False)
                loss = self.one_pass(index, step, rank, 10 + number, scale).total
                if isinstance(loss, torch.Tensor):
                    loss.backward()
            self.syncs(not step.defers)
            records: list[tuple[str, Any]] = []
            differs = step.differs if self.is_sharded and rank % 2 == 1 else ""
            if step.evaluates == "before" or step.differs == "evaluate":
                self.model.differs = "skip" if differs == "evaluate" else ""
                self._evaluate(index, step, rank, records)
            self.model.differs = differs
            found = self.one_pass(index, step, rank, 0, scale)
            self.model.differs = ""
            if differs == "write":
                with torch.no_grad():
                    for p in self.parameters.values():
                        p.mul_(0.9)
            records += [("y", found.y), ("aux", found.aux)]
            if step.evaluates in ("between", "inference"):
                self._evaluate(index, step, rank, records)
            if found.losses:
                getattr(self, f"_{step.backward}")(found)
        gradient = found.x.grad
        records.append(("gradient of the input", None if gradient is None else gradient / scale))
        return records + found.records

    def fails(self, index: int, step: Step, rank: int) -> None:
        """Runs a pass that ends with an exception."""
        failing = self.model.blocks[index % len(self.model.blocks)]
        if step.entry == "part":
            failing = self.model.blocks[0]
        failing.fails = step.fails
        try:
            loss = self.one_pass(index, step, rank, 90, 1).total
            if isinstance(loss, torch.Tensor):
                loss.backward()
        except (Injected, Interrupt):
            return
        finally:
            failing.fails = ""
        if step.fails != "backward":
            raise AssertionError("the exception of a forward was lost")

    def _evaluate(self, index: int, step: Step, rank: int, records: list[tuple[str, Any]]) -> None:
        with torch.inference_mode() if step.evaluates == "inference" else torch.no_grad():
            found = self.one_pass(index, step, rank, 50, 1)
        records += [("y without gradients", found.y), ("aux without gradients", found.aux)]

    def _other(self, found: Pass) -> Any:
        """Runs another forward and returns its loss."""
        return self.one_pass(found.index, found.step, found.rank, 20, found.scale).total

    # Backwards: the method `_name` is the backward `name` of a case.

    def _once(self, found: Pass) -> None:
        found.total.backward()

    def _separate(self, found: Pass) -> None:
        for count, loss in enumerate(found.losses.values(), 1):
            loss.backward(retain_graph=count < len(found.losses))

    def _retained(self, found: Pass) -> None:
        found.total.backward(retain_graph=True)
        found.total.backward()

    def _two_forwards(self, found: Pass) -> None:
        (found.total + self._other(found)).backward()

    def _swapped(self, found: Pass) -> None:
        self._other(found).backward()
        found.total.backward()

    def _in_order(self, found: Pass) -> None:
        other = self._other(found)
        found.total.backward()
        other.backward()

    def _input_gradient(self, found: Pass) -> None:
        total = found.total
        (gradient,) = torch.autograd.grad(total, found.x, retain_graph=True, allow_unused=True)
        gradient = None if gradient is None else gradient / found.scale
        found.records.append(("gradient that autograd.grad returns", gradient))
        total.backward()

    def _parameter_gradients(self, found: Pass) -> None:
        trainable = [p for p in self.parameters.values() if p.requires_grad]
        given = torch.autograd.grad(found.total, trainable, allow_unused=not self.is_sharded)
        for p, gradient in zip(trainable, given, strict=True):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad + gradient

    def _regularised(self, found: Pass) -> None:
        total = found.total
        for p in self.parameters.values():
            if p.requires_grad:
                square = p.square().sum()
                total = total + 0.01 * found.scale * (square.full_tensor() if isinstance(square, DTensor) else square)
        total.backward()

    def _none(self, found: Pass) -> None:
        pass

    def _stale(self, found: Pass) -> None:
        """Writes weights between forward and backward. PyTorch then refuses the backward."""
        with torch.no_grad():
            for p in self.parameters.values():
                p.mul_(0.9)
        found.total.backward()

    def _gradient_argument(self, found: Pass) -> None:
        values = list(found.losses.values())
        torch.autograd.backward(values, [torch.full_like(value, 2) for value in values])

    def _inputs_argument(self, found: Pass) -> None:
        found.total.backward(inputs=[found.x])

    def _thread(self, found: Pass) -> None:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.total.backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]


def _chosen(losses: Losses, step: Step, rank: int) -> Losses:
    wanted = {"main": ["main"], "aux": ["aux"], "by_rank": [("main", "aux")[rank % 2]]}.get(step.losses)
    if step.losses == "hidden":
        wanted = [name for name in losses if name.startswith("hidden")]
    return {name: losses[name] for name in wanted} if wanted else losses
