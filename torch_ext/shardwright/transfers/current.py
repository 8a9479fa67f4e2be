"""This rank's tensors of a transfer, which are read again at each start.

A module's tensors may be replaced after a transfer was planned: `model.to()` gives a DTensor another local tensor,
`load_state_dict(assign=True)` gives a module another parameter. Each start reads the tensors again:

    a DTensor                        its local tensor
    a function                       the state dict that it returns
    a weight under sw.fully_shard    the parameter that its module has (`owners`)

Two checks find tensors that no module has any more. Hooks on modules record the parameters that they replace. And a
storage that other tensors shared when the transfer was planned is stale once only the transfer uses it, because no
other code can read or write it any more.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from .._native import _planner
from ..layouts import argument_values
from ..versions.locations import local_of, location_of, storage_of
from .declared import PassedTensor, Reader

_REMEDY = (
    "plan the transfer again, or pass a function that returns the state dict at each start, such as model.state_dict"
)
_STALE_TEXT = (
    "other tensors used this memory when the transfer was planned, and none uses it now: a model got other parameters, "
    f"for example by model.to() or load_state_dict(assign=True), or was deleted; {_REMEDY}"
)


class Owner(Protocol):
    """A weight whose module may get another parameter."""

    @property
    def current(self) -> nn.Parameter:
        """The DTensor that the module has now."""
        ...


owners: weakref.WeakSet[Owner] = weakref.WeakSet()  # all weights under sw.fully_shard

# A function that returns the problems of tensors that share memory, from the tensors to read and those to write.
_Overlaps = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], list[str]]


class SideTensors:
    """This rank's tensors of one side of a transfer.

    Args:
        side: "source" or "destination".
        given: the tensors that this rank passed, by name.
        layouts: the layouts of the tensors that move, by name.
        reader: the reader of this rank's arguments.
        read_again: reads the state dict again, if a module or a function was passed; else None.
        device: the device of all tensors.
    """

    def __init__(
        self,
        side: str,
        given: dict[str, PassedTensor],
        layouts: Mapping[str, _planner.Layout],
        reader: Reader,
        read_again: Callable[[], dict[str, PassedTensor]] | None,
        device: torch.device,
    ) -> None:
        self.given = given
        self._side = side
        self._layouts = layouts
        self._reader = reader
        self._read_function = read_again
        self._device = device
        self._owners: dict[str, weakref.ref[Owner]] = {}
        self._storages = {storage_of(tensor.part) for _, tensor in self.moving()}
        # Modules in which a tensor was replaced, by (storage of the old tensor, id of the module, name in the module).
        self._replaced: dict[tuple[int, int, str], weakref.ref[nn.Module]] = {}
        if read_again is None:
            owned = {location_of(owner.current): owner for owner in owners}
            owner_by_name = ((name, owned.get(location_of(tensor.part))) for name, tensor in self.moving())
            self._owners = {name: weakref.ref(owner) for name, owner in owner_by_name if owner is not None}
            _observe(self)

    def moving(self) -> Iterator[tuple[str, PassedTensor]]:
        """Yields the tensors that move to or from this rank, with their names."""
        for name in self._layouts:
            tensor = self.given.get(name)
            if tensor is not None and tensor.local is not None:
                yield name, tensor

    def reread(self) -> list[str]:
        """Reads this side's tensors again. Returns the problems with them."""
        problems: list[str] = []
        read_again = None
        if self._read_function is not None:
            read_again, problems = self._read_again()
        for name, old in list(self.moving()):
            try:
                now = self._current_tensor(name, old, read_again)
                self._check(name, old, now)
            except ValueError as error:
                problems.append(self.problem_text(name, str(error)))
                continue
            self.given[name] = now
        self._storages = {storage_of(tensor.part) for _, tensor in self.moving()}
        return problems

    def problem_text(self, name: str, what: str) -> str:
        """Returns the text of a problem with the tensor `name`. `what` is the end of a sentence."""
        return self._reader.problem_text(self._side, name, what)

    def _read_again(self) -> tuple[dict[str, PassedTensor], list[str]]:
        """Reads the state dict again. Returns its tensors, and a problem for each name that it lost or got."""
        assert self._read_function is not None
        self._reader.problems.clear()
        found = self._read_function()
        problems = list(self._reader.problems)
        names = {name for name, _ in self.moving()}
        lost, added = sorted(names - found.keys()), sorted(found.keys() - self.given.keys())
        for changed, what in ((lost, "lacks this name now, and had it"), (added, "has this name now, and lacked it")):
            change = f"the state dict {what} when the transfer was planned; plan the transfer again"
            problems += [] if problems else [self.problem_text(name, change) for name in changed]
        return found, problems

    def _current_tensor(self, name: str, old: PassedTensor, read_again: dict[str, PassedTensor] | None) -> PassedTensor:
        """Returns the current tensor of a name.

        Args:
            name: the name.
            old: its tensor at the last start.
            read_again: the tensors of the state dict that was read again, or None without a function.
        """
        if read_again is not None:
            return read_again.get(name, old)
        value = old.value
        reference = self._owners.get(name)
        owner = None if reference is None else reference()
        if owner is not None:
            current = owner.current
            if not isinstance(current, DTensor):
                raise ValueError(f"its module must have a DTensor again, got a {type(current).__name__}; {_REMEDY}")
            if location_of(current) != location_of(old.part):
                value = current if isinstance(value, DTensor) else local_of(current)
        now = self._reader.read(value)
        return now if isinstance(value, DTensor) else now._replace(layout=old.layout)

    def _check(self, name: str, old: PassedTensor, now: PassedTensor) -> None:
        """Raises ValueError if a tensor does not match the plan, or no module has it any more."""
        layout, local = self._layouts[name], now.part
        if now.layout != old.layout:
            raise ValueError(f"the layout must be {old.layout}, as when planned, got {now.layout}; {_REMEDY}")
        self._reader.check(self._side, now)
        planned = f"{layout.dtype} of shape {tuple(layout.shape)}"
        got = f"{argument_values.dtype_text(local.dtype)} of shape {tuple(local.shape)}"
        if now.layout is None and planned != got:
            raise ValueError(f"must be {planned}, as when planned, got {got}; {_REMEDY}")
        if local.numel() and local.device != self._device:
            raise ValueError(f"the device must be {self._device}, as when planned, got {local.device}; {_REMEDY}")
        if name in self._owners:
            return
        storage = storage_of(local)
        for (watched, _, attribute), reference in self._replaced.items():
            module = reference()
            if watched == storage and module is not None and _uses_other_storage(module, attribute, storage):
                attribute = f"{type(module).__name__}.{attribute}"
                raise ValueError(f"{attribute} was replaced after the transfer was planned; {_REMEDY}")

    def note_replaced(self, storage: int, module: nn.Module, name: str) -> None:
        """Records that a module's tensor with this storage is replaced."""
        if storage in self._storages:
            self._replaced[storage, id(module), name] = weakref.ref(module)


class Tensors:
    """This rank's tensors of both sides of a transfer."""

    def __init__(self, source: SideTensors, destination: SideTensors, overlaps: _Overlaps) -> None:
        self.source = source
        self.destination = destination
        self._overlaps = overlaps
        self._was_shared: dict[int, bool] = {}  # by storage: True if tensors outside the transfer used it when planned
        self._locations = [location_of(tensor.part) for _, _, tensor in self._moving()]
        self._stale_problems({})

    def reread(self, num_own: Mapping[int, int]) -> list[str]:
        """Reads all tensors again. Returns the problems with them.

        Args:
            num_own: by storage, the number of further tensors of the transfer that use it (second_copy.py).
        """
        problems = [*self.source.reread(), *self.destination.reread()]
        locations = [location_of(tensor.part) for _, _, tensor in self._moving()]
        if locations != self._locations and not problems:
            sides = (self.source, self.destination)
            problems += self._overlaps(*({name: tensor.part for name, tensor in side.moving()} for side in sides))
            self._locations = [] if problems else locations
        return problems or self._stale_problems(num_own)

    def _moving(self) -> list[tuple[SideTensors, str, PassedTensor]]:
        """Returns the side, name and tensor of all tensors that move to or from this rank."""
        return [(side, name, x) for side in (self.source, self.destination) for name, x in side.moving()]

    def _stale_problems(self, num_own: Mapping[int, int]) -> list[str]:
        """Returns a problem for each tensor whose storage other tensors shared, and only the transfer uses now."""
        tensors = self._moving()
        own_ids: dict[int, set[int]] = {}
        for _, _, x in tensors:
            own_ids.setdefault(storage_of(x.part), set()).add(id(x.local))
        problems = []
        was_shared: dict[int, bool] = {}
        for side, name, x in tensors:
            storage = storage_of(x.part)
            is_shared = _num_tensors(x.part) > len(own_ids[storage]) + num_own.get(storage, 0)
            # Sharing is decided by the first check. Later, tensors of the previous run may still use the storage.
            was_shared[storage] = self._was_shared.get(storage, is_shared)
            is_stale = was_shared[storage] and not is_shared
            if is_stale and _uses_whole_storage(x) and not isinstance(x.value, nn.Parameter):
                problems.append(side.problem_text(name, _STALE_TEXT))
        self._was_shared = was_shared
        return problems


def _num_tensors(tensor: torch.Tensor) -> int:
    """Returns the number of tensors that use the storage of `tensor`."""
    return _use_count(tensor) - _use_count_of_one_tensor() + 1


def _use_count(tensor: torch.Tensor) -> int:
    """Returns the reference count of the tensor's storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _use_count_of_one_tensor() -> int:
    """Returns the reference count of a storage that one tensor uses."""
    return _use_count(torch.empty(1))


def _uses_whole_storage(tensor: PassedTensor) -> bool:
    """Returns True unless the tensor is a part of a larger storage, whose other parts may be freed without harm."""
    return isinstance(tensor.value, DTensor) or tensor.part.nbytes == tensor.part.untyped_storage().nbytes()


_observers: weakref.WeakSet[SideTensors] = weakref.WeakSet()  # notified of replaced tensors
_hooks: list[Any] = []  # the hooks on all modules, once they are registered


def _observe(side: SideTensors) -> None:
    """Makes the hooks on modules notify `side` of replaced tensors, as long as it is alive."""
    if not _hooks:
        _hooks.append(register_module_parameter_registration_hook(_on_registration))
        _hooks.append(register_module_buffer_registration_hook(_on_registration))
    _observers.add(side)


def _on_registration(module: nn.Module, name: str, new: torch.Tensor | None) -> None:
    """Hook that runs before a module gets a parameter or a buffer. Notifies observers of the replaced tensor."""
    old = _tensor_of(module, name)
    if old is None or old is new or not _observers:
        return
    for side in list(_observers):
        side.note_replaced(storage_of(local_of(old)), module, name)


def _tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Returns the parameter or buffer of this name in the module itself, or None."""
    found = (tensors.get(name) for tensors in (module._parameters, module._buffers))
    return next((tensor for tensor in found if tensor is not None), None)


def _uses_other_storage(module: nn.Module, name: str, storage: int) -> bool:
    """Returns True if the module's tensor of this name no longer uses this storage."""
    now = _tensor_of(module, name)
    return now is None or storage_of(local_of(now)) != storage
