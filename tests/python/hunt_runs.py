"""Runs the steps of a case on a model that is unsharded ("whole"), or under FSDP2 or `sw.fully_shard`, and compares.

The unsharded model runs the batches of all ranks one after the other. Its losses are divided by the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_models import flat_fully_shard
from hunt_cases import Block, Case, Step
from hunt_models import Model
from hunt_passes import Passes


def part_of(full: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns this rank's part of `full`, cut as the DTensor `like`."""
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    for size, where, placement in zip(mesh.shape, mesh.get_coordinate() or (), like.placements, strict=True):
        if isinstance(placement, Shard):
            chunks = full.chunk(size, placement.dim)
            full = chunks[where] if where < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def local_of(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _to_local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


class Tolerance(NamedTuple):
    """The largest error: its norm as a part of the norm of the right tensor, plus a constant; and each element as a
    part of the largest right element, at least 1."""

    relative: float
    absolute: float
    of_largest: float


EXACT = Tolerance(2e-4, 1e-5, 2e-4)
# Rounding to bfloat16 is off by up to half of a norm in 36 cases. Missing or doubled gradients are off by all of it.
# Elements are off by up to 0.31, as much as with FSDP2.
ROUGH = Tolerance(0.8, 0.02, 0.4)


def difference(what: str, got: Any, right: Any, tolerance: Tolerance) -> str | None:
    """Describes how a local tensor differs from its part of the unsharded tensor `right`. Returns None if equal."""
    if got is None or right is None:
        if got is None and right is None:
            return None
        return f"{what} is {'None' if got is None else 'there'}, not {'None' if right is None else 'there'}"
    right = _real(part_of(right.detach(), got))
    local = _real(local_of(got))
    if local.shape != right.shape:
        return f"{what} has shape {tuple(local.shape)}, not {tuple(right.shape)}"
    if local.numel() == 0:
        return None
    error, norm = float((local - right).norm()), float(right.norm())
    most, largest = float((local - right).abs().max()), max(1.0, float(right.abs().max()))
    if error <= tolerance.relative * norm + tolerance.absolute and most <= tolerance.of_largest * largest:
        return None
    return f"{what} is off by {error:.3g} of {norm:.3g}, an element by {most:.3g} of {largest:.3g}"


class Run(Passes):
    """A model and its optimizer, with the operations of a user's program on them in each step."""

    def __init__(self, case: Case, engine: str, folder: str = "") -> None:
        self.case, self.engine, self.folder = case, engine, folder
        self.is_sharded = engine in ("shardwright", "FSDP2")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(case.seed)
        self.model: Any = Model(case)
        _freeze(self.model)
        first: dict[int, str] = {}
        self.aliases = {
            name: first.setdefault(id(p), name) for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        for block in self.model.blocks:
            if block.spec.compiled:
                block.compile(backend="aot_eager")
        if self.is_sharded:
            self._shard()
        if case.compiled:
            self.model.compile(backend="aot_eager")
        self._add_hooks()
        self.take_parameters()

    @property
    def units(self) -> list[Any]:
        return [module for module in self.model.modules() if hasattr(module, "set_requires_gradient_sync")]

    def take_parameters(self) -> None:
        self.parameters: dict[str, Any] = dict(self.model.named_parameters())
        trained, name = list(self.parameters.values()), self.case.optimizer
        if name.startswith("adamw"):
            foreach = {"adamw": None, "adamw_foreach": True, "adamw_loop": False}[name]
            self.optimizer: Any = torch.optim.AdamW(trained, lr=0.05, eps=0.1, foreach=foreach)
        else:
            self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9 if name == "momentum" else 0.0)

    def _shard(self) -> None:
        case, is_ours = self.case, self.engine == "shardwright"
        wrap: Callable[..., Any] = flat_fully_shard if is_ours else fsdp.fully_shard
        is_two_dims = self.world == 4 and case.seed % 2 == 0
        mesh = DeviceMesh("cpu", torch.arange(self.world).reshape((2, 2) if is_two_dims else (-1,)))
        options: dict[str, Any] = {"mesh": mesh, **_policy_of(case)}
        outermost: dict[str, Any] = {}
        if is_ours and case.layout == "store" and not is_two_dims:
            options |= {
                "placements": lambda p: [Replicate()],
                "store_placements": lambda p: [Shard(0) if p.ndim else Replicate()],
            }
        elif case.layout == "last" and is_ours:
            options["shard_placement_fn"] = lambda p: Shard(max(p.ndim - 1, 0))
        elif case.layout == "chunks" and is_ours:
            outermost["chunked"] = True
        elif case.layout == "offload":
            options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
        taken: Any = None
        for block in self.model.blocks:
            spec: Block = block.spec
            own = {**options, "reshard_after_forward": spec.reshard}
            if isinstance(spec.reshard, int) and not isinstance(spec.reshard, bool):
                own["reshard_after_forward"] = min(spec.reshard, mesh.size(mesh.ndim - 1))
                if "placements" in own:
                    own["reshard_after_forward"] = True
            if spec.unit == "nested":
                wrap(block.core, **own)
            if taken is not None:
                wrap([taken, block], **own)
                taken = None
            elif spec.unit == "list":
                taken = block
            elif spec.unit != "none":
                wrap(block, **own, **({} if case.root else outermost))
            if spec.method and spec.unit != "none":
                fsdp.register_fsdp_forward_method(block, "encode")
        if case.root:
            wrap(self.model, **options, **outermost)
            if any(step.entry == "method" for step in case.steps):
                fsdp.register_fsdp_forward_method(self.model, "encode")

    def _add_hooks(self) -> None:
        for block in self.model.blocks:
            hook = block.spec.hook
            if hook == "module":
                block.register_forward_hook(lambda module, args, out: None)
            elif hook == "pre":
                block.register_forward_pre_hook(lambda module, args: None)
            elif hook == "backward":
                block.register_full_backward_hook(lambda module, inner, outer: None)
            elif hook == "parameter":
                for parameter in block.parameters():
                    if parameter.requires_grad:
                        parameter.register_hook(lambda gradient: gradient * 2)

    def of_block(self, index: int) -> list[Any]:
        return [p for name, p in self.parameters.items() if name.startswith(f"blocks.{index}.")]

    def prepare(self, step: Step) -> None:
        """Runs the operations before the passes of a step."""
        if step.toggles >= 0:
            for parameter in self.of_block(step.toggles):
                parameter.requires_grad_(not parameter.requires_grad)
        if not self.is_sharded:
            return
        for unit in self.units:
            if step.stays in ("stay", "leave"):
                unit.set_reshard_after_backward(step.stays == "leave", recurse=False)
            elif step.stays in ("stay_forward", "leave_forward"):
                unit.set_reshard_after_forward(step.stays == "leave_forward", recurse=False)
            elif step.stays == "prefetch" and unit is self.model:
                unit.set_modules_to_forward_prefetch([each for each in self.units if each is not unit])
            if step.unshards == "unshard" or (step.entry == "unsharded" and unit is self.model):
                unit.unshard()
            elif step.unshards == "async":
                unit.unshard(async_op=True)
            elif step.unshards == "reshard":
                unit.reshard()

    def fail(self, index: int, step: Step) -> None:
        """Runs a pass that raises on all ranks, and the user's cleanup after it."""
        if step.fails in ("", "caught"):
            return
        if self.engine != "whole":
            self.fails(index, step, self.rank)
        for parameter in self.parameters.values():
            parameter.grad = None

    def compute(self, index: int, step: Step) -> list[tuple[str, Any]]:
        """Runs the passes of a step, or of all ranks if unsharded. Returns pairs to compare besides gradients."""
        if self.engine != "whole":
            return self.passes(index, step, self.rank, 1)
        return [self.passes(index, step, rank, 1 / self.world) for rank in range(self.world)][self.rank]

    def syncs(self, flag: bool) -> None:
        for unit in self.units if self.is_sharded else ():
            unit.set_requires_gradient_sync(flag, recurse=False)

    def clip(self, step: Step) -> Any:
        """Clips or scales gradients. Returns their norm if it was computed."""
        trained = list(self.parameters.values())
        if step.clips == "norm":
            norm: Any = nn.utils.clip_grad_norm_(trained, 0.5)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        if step.clips == "value":
            nn.utils.clip_grad_value_(trained, 0.1)
        elif step.clips == "scale":
            for p in trained:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return None

    def finish(self, index: int, step: Step) -> None:
        """Runs the optimizer's step, writes weights, and clears gradients."""
        if step.entry == "unsharded" and self.is_sharded and self.case.root:
            self.model.reshard()
        if step.optimizes:
            self.optimizer.step()
        if step.writes:
            self._write(index, step.writes)
        if step.zero in ("none", "zeros"):
            self.optimizer.zero_grad(set_to_none=step.zero == "none")
        elif step.zero == "model":
            self.model.zero_grad()
        elif step.zero == "by_hand":
            for parameter in self.parameters.values():
                parameter.grad = None
        if step.remakes:
            before = {name: type(p) for name, p in self.parameters.items()}
            self.take_parameters()
            if self.engine == "shardwright" and before != {name: type(p) for name, p in self.parameters.items()}:
                self.optimizer.step()  # must raise, because modules have unsharded weights after this step

    def _new(self, index: int, name: str) -> torch.Tensor:
        """Returns a new random value of a weight."""
        place = list(self.parameters).index(name)
        generator = torch.Generator().manual_seed(self.case.seed * 1013 + index * 137 + place)
        p = self.parameters[name]
        return torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3

    def _like(self, name: str, full: torch.Tensor) -> Any:
        p = self.parameters[name]
        if not isinstance(p, DTensor):
            return full.clone()
        part = part_of(full, p).clone(memory_format=torch.contiguous_format)
        return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    @torch.no_grad()
    def _write(self, index: int, way: str) -> None:
        parameters = self.parameters
        if way in ("load_state_dict", "assign", "set_model_state_dict", "dcp"):
            self._load(index, way)
        elif way in ("foreach", "foreach_local"):
            values = list(parameters.values())
            torch._foreach_mul_([_to_local(p) for p in values] if way == "foreach_local" else values, 0.9)
        for name, p in parameters.items():
            if way == "local_copy":
                _to_local(p).copy_(part_of(self._new(index, name), p))
            elif way == "copy":
                p.copy_(self._like(name, self._new(index, name)))
            elif way == "multiply":
                p.mul_(0.9)
            elif way == "data":
                p.data.mul_(0.9)

    def _load(self, index: int, way: str) -> None:
        whole = {name: self._new(index, name) for name in self.parameters}
        parts: dict[str, Any] = {name: self._like(name, value) for name, value in whole.items()}
        if way == "assign":
            parts = {name: nn.Parameter(value, self.parameters[name].requires_grad) for name, value in parts.items()}
        state = {alias: parts[name] for alias, name in self.aliases.items()}
        if way == "set_model_state_dict" and self.is_sharded:
            given = {alias: whole[name].clone() for alias, name in self.aliases.items()}
            set_model_state_dict(self.model, given, options=StateDictOptions(full_state_dict=True))
        elif way == "dcp" and self.is_sharded:
            path = os.path.join(self.folder, f"{self.case.seed}_{index}_{self.engine}")
            dcp.save({alias: parts[name] for alias, name in self.aliases.items()}, checkpoint_id=path)
            dcp.load(self.model.state_dict(), checkpoint_id=path)
        else:
            self.model.load_state_dict(state, assign=way == "assign")
        if way == "assign":
            for unit in self.units if self.is_sharded else ():
                unit.reshard()
            self.take_parameters()


def _policy_of(case: Case) -> dict[str, Any]:
    policies = {
        "float64": fsdp.MixedPrecisionPolicy(param_dtype=torch.float64),
        "float64_out": fsdp.MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32),
        "bfloat16": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    return {"mp_policy": policies[case.policy]} if case.policy else {}


def _freeze(model: Any) -> None:
    for block in model.blocks:
        for i, parameter in enumerate(block.parameters()):
            if block.spec.frozen == "all" or (block.spec.frozen == "some" and i % 2 == 0):
                parameter.requires_grad_(False)
