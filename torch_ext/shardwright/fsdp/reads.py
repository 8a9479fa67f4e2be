"""Reads of weights by backwards.

Hooks on the outputs of a unit gather its weights before its backward. A forward may also store tensors elsewhere, such
as in an attribute of a module or in an object that is not searched, and those have no hook. Therefore each weight, or
view of a weight, that autograd saves in a forward is packed as a `_SavedWeight`. A backward that unpacks it first
gathers the unit's weights if they are not gathered.

To *pack* is to replace a tensor that autograd saves, and to *unpack* is to return it to a backward. Versions are
PyTorch's counters of writes, by which an unpack detects a write since the pack.

Other hooks for saved tensors that are active around the forward, such as those of a checkpoint or of
`torch.autograd.graph.save_on_cpu`, get all saved tensors except weights. Hooks that become active within the forward,
such as those of torch's composable `checkpoint`, get weights too.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.tensor import DTensor

from ..runtime.executables import put_bounded
from . import extensions
from .moves import Version, versions_differ
from .units import Unit
from .weights import Weight, by_storage

_Pack = Callable[[torch.Tensor], Any]
_Unpack = Callable[[Any], torch.Tensor]

_CHECKPOINT = inspect.unwrap(checkpoint)  # key of `checkpoint` in a module's torch states


class _SavedWeight(NamedTuple):
    """A saved tensor in the storage of a weight."""

    tensor: torch.Tensor
    weight: Weight
    unit: Unit
    forward: int  # number of the forward that saved it; 0 outside of all forwards of its unit
    version: tuple[Any, ...]  # `_versions_of` when it was saved


class _SavedTensor(NamedTuple):
    """A saved tensor that is not in the storage of a weight."""

    tensor: torch.Tensor
    version: int
    owner: weakref.ref[torch.Tensor] | None  # the tensor that `version` belongs to; None: `tensor`


class SavedWeightHooks:
    """Hooks for saved tensors around a forward of a module: autograd saves weights as `_SavedWeight`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        """Pushes the hooks, unless outer hooks of this library already pack weights (attribute `_packs_weights`)."""
        self._is_pushed = False
        if self._is_recomputed_from_within or not torch._C._autograd._saved_tensors_hooks_is_enabled():
            return
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if around is not None and getattr(around[0], "_packs_weights", False):
            return
        self._pack: Any
        self._pack, unpack_all = (pack, unpack) if around is None else _combined(*around)
        if around is not None and getattr(around[0], "_checkpoint_internal", False):
            # A nested checkpoint looks for the hooks that are active around all checkpoints (torch 2.15).
            self._pack._checkpoint_internal = True  # type: ignore[attr-defined]
            self._pack._user_hooks = getattr(around[0], "_user_hooks", None)  # type: ignore[attr-defined]
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, unpack_all)
        self._is_pushed = True

    @property
    def _is_recomputed_from_within(self) -> bool:
        """True in a recomputation by torch's composable `checkpoint`.

        In the forward, its hooks became active within these hooks, so they got the weights. In the recomputation they
        must get the same number of tensors, so these hooks stay off.
        """
        state = self._module.__dict__.get(STATE_KEY, {}).get(_CHECKPOINT)
        return state is not None and not state.enable_hook

    def __exit__(self, *_: object) -> None:
        if self._is_pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if self._pack is not pack:
                self._pack._user_hooks = None  # the autograd graph keeps `_pack` alive, but need not keep the hooks


_MAX_FORWARDS = 64  # forwards of a unit whose versions are kept

# By unit and number of a forward that did not pack weights: versions of the parameters at that forward.
_versions_without_hooks: weakref.WeakKeyDictionary[Unit, dict[int, list[Version]]] = weakref.WeakKeyDictionary()


def note_forward(unit: Unit, forward: int, is_in_graph: bool = False) -> None:
    """Records the versions of a unit's parameters for `check_backward`, in a forward that does not pack weights.

    In a compiled graph, the backward reads weights again. Registered forward methods and forwards that compiled code
    calls run without `SavedWeightHooks`. Hooks for saved tensors may also be disabled.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    packs_weights = hooks is not None and getattr(hooks[0], "_packs_weights", False)
    if is_in_graph or not packs_weights or not torch._C._autograd._saved_tensors_hooks_is_enabled():
        put_bounded(_versions_without_hooks.setdefault(unit, {}), forward, unit.versions, _MAX_FORWARDS)


def check_backward(unit: Unit, forward: int) -> None:
    """Makes the backward fail at its end if parameters were replaced in a later forward, or written since a forward
    that could not pack them."""
    if forward <= unit.last_replaced_forward:
        unit.fail_backward(
            RuntimeError(
                f"a backward of {unit.name} must run before a later forward with gradients that has other parameters, "
                "got a backward after it"
            )
        )
    before = _versions_without_hooks.get(unit, {}).get(forward)
    if before is not None and versions_differ(before, unit.versions):
        unit.fail_backward(written_error(f"parameters of {unit.name} were"))


def written_error(subject: str) -> RuntimeError:
    """Returns the error for a write. `subject`: the parameters, with "was" or "were"."""
    needs = "which needs the old values. Write parameters after the backward"
    return RuntimeError(f"{subject} written between a forward and its backward, {needs}")


def _weight_of(tensor: torch.Tensor) -> Weight | None:
    """Returns the weight in whose storage a tensor is; None for other tensors."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    for storage in extensions.storages_of(local):
        weight = by_storage.get(storage._cdata)
        # A converted weight has a new storage, and its old address may belong to another tensor.
        if weight is not None and storage._cdata in weight.storages:
            return weight
    return None


@torch._disable_dynamo  # it would compile a hook by itself under the `compile()` of a module that it does not compile
def pack(tensor: torch.Tensor) -> Any:
    """Packs a tensor that autograd saves. Other hooks of this library call it for tensors that they do not handle."""
    weight = _weight_of(tensor)
    unit = None if weight is None or weight.unit is None else weight.unit()
    if weight is not None and unit is not None:
        forward = unit.forwards[-1] if unit.forwards else 0
        return _SavedWeight(_without_graph(tensor), weight, unit, forward, _versions_of(weight, tensor))
    # PyTorch does not check versions of tensors that a hook packs. A detached DTensor has a version counter of its own.
    owner = weakref.ref(tensor) if isinstance(tensor, DTensor) else None
    return _SavedTensor(_without_graph(tensor), tensor._version, owner)


def unpack(saved: Any) -> torch.Tensor:
    """Returns a tensor that `pack` has packed, and gathers its weight. Raises RuntimeError if it was written.

    Writes of weights raise at the end of the backward, because other ranks wait for this rank's transfers until then.
    """
    if type(saved) is _SavedWeight:
        if _versions_of(saved.weight, saved.tensor) != saved.version:
            saved.unit.fail_backward(written_error(f"{saved.weight.name} was"))
        saved.unit.read(saved.forward)
        return saved.tensor
    tensor: torch.Tensor = saved.tensor
    owner = tensor if saved.owner is None else saved.owner()
    if owner is not None and owner._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {owner._version}, expected version "
            f"{saved.version} instead; torch.autograd.set_detect_anomaly(True) finds the operation that saved it"
        )
    return tensor


def _versions_of(weight: Weight, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a value that changes with each write to a parameter or to a tensor in the storage of its weight, and with
    each replacement of the parameter. Gathers do not change it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return *weight.source, local._version


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without its autograd node. That node may be the one that saves it, which would be a cycle."""
    if tensor.grad_fn is None:
        return tensor
    if isinstance(tensor, DTensor):  # its own `detach` takes ten times as long
        return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)  # type: ignore[call-arg]
    return tensor.detach()


def _combined(outer_pack: _Pack, outer_unpack: _Unpack) -> tuple[_Pack, _Unpack]:
    """Returns hooks that pack weights, and pass other tensors to the hooks that are active around the forward."""

    def unpack_combined(saved: Any) -> torch.Tensor:
        return unpack(saved) if type(saved) is _SavedWeight else outer_unpack(saved)

    # A decorated function in place of the partial would be in a reference cycle with the graph of the outer hooks.
    pack_combined = functools.partial(_pack_combined, outer_pack)
    pack_combined._packs_weights = True  # type: ignore[attr-defined]
    return pack_combined, unpack_combined


@torch._disable_dynamo
def _pack_combined(outer_pack: _Pack, tensor: torch.Tensor) -> Any:
    """Packs a weight by `pack`, and another tensor by `outer_pack`."""
    return outer_pack(tensor) if _weight_of(tensor) is None else pack(tensor)


pack._packs_weights = True  # type: ignore[attr-defined]
