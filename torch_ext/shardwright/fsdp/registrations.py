"""The entries of modules for the parameter of one weight: the sharded one between uses, the unsharded one in use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Registrations:
    """The modules that have a weight's parameter, and its name in each."""

    def __init__(self, owners: Sequence[tuple[nn.Module, str]]) -> None:
        # References to modules are weak, because modules refer to weights. So a model is freed without a cycle.
        self._owners = [(weakref.ref(module), name) for module, name in owners]
        self.entries = [(module._parameters, name) for module, name in owners]  # where modules look it up
        self._replaced: dict[int, Any] = {}  # by index: an entry in whose place `set_unsharded` put another one

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """The modules, and the name of the parameter in each."""
        return [(module, name) for reference, name in self._owners if (module := reference()) is not None]

    @property
    def first(self) -> Any:
        """The parameter that the first module has now; None if it has none any more."""
        parameters, name = self.entries[0]
        return parameters.get(name)

    def check(self, name: str, found: Any, unsharded: nn.Parameter, sharded: nn.Parameter, is_trained: bool) -> None:
        """Checks the parameter of the first module, `found`, and those of the others.

        Args:
            name: the weight's name.
            is_trained: `found` must be a leaf of the autograd graph, because the graph behind it would get no gradient.

        Raises:
            RuntimeError: its layout differs from that of `sharded`, or another module has a parameter of its own.
        """
        is_cut = is_trained and isinstance(found, DTensor) and not found.is_leaf
        if is_cut or found is not sharded:
            spec: Any = sharded._spec  # type: ignore[attr-defined]
            fits = isinstance(found, DTensor) and found.shape == spec.shape and found.device_mesh == spec.mesh
            if not fits or is_cut or found.placements != spec.placements:
                raise RuntimeError(
                    f"{name} must stay a DTensor parameter of shape {tuple(spec.shape)} with {spec.placements} on the "
                    f"mesh of sw.fully_shard, got another parameter, a {type(found).__name__}"
                    + (" that is not a leaf of the autograd graph" if is_cut else "")
                )
            return
        others = [parameters.get(key) for parameters, key in self.entries[1:]]
        if any(other is not sharded and other is not unsharded for other in others):
            raise RuntimeError(
                f"{name} must stay tied in all modules that shared it in sw.fully_shard, got another parameter in one "
                "module. Untie parameters before sw.fully_shard"
            )

    def set(self, parameter: nn.Parameter) -> None:
        """Gives all modules this parameter."""
        for parameters, name in self.entries:
            parameters[name] = parameter

    def set_unsharded(self, unsharded: nn.Parameter, sharded: nn.Parameter) -> None:
        """Gives the modules the unsharded parameter. `set_sharded` restores entries that are not the sharded one."""
        for index, (parameters, name) in enumerate(self.entries):
            found = parameters.get(name, unsharded)  # users may have deleted an entry since the forward
            if found is not unsharded:
                parameters[name] = unsharded
                if found is not sharded:
                    self._replaced[index] = found

    def set_sharded(self, unsharded: nn.Parameter, sharded: nn.Parameter, is_in_graph: bool) -> None:
        """Gives the modules the sharded parameter, unless users have replaced it.

        `is_in_graph`: a compiled graph may have given them its own tensors, which are no parameters (graphs.py).
        """
        for index, (parameters, name) in enumerate(self.entries):
            found = parameters.get(name)
            if found is unsharded or (is_in_graph and type(found) is torch.Tensor):
                parameters[name] = self._replaced.get(index, sharded)
        self._replaced.clear()
