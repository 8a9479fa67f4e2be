"""This rank's tensors of a transfer, which are read again at each start.

A module's tensors may be replaced after a transfer was planned: `model.to()` gives a DTensor another local tensor,
`load_state_dict(assign=True)` gives a module another parameter. Each start reads the tensors again:

    a DTensor                        its local tensor
    a function                       the state dict that it returns
    a weight under sw.fully_shard    the parameter that its module has (`owners`)

Two checks find tensors that no module has any more. Hooks on modules record replaced parameters. And a storage that
other tensors used when the transfer was planned is stale once only the transfer uses it: nobody else can read or write
it.
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
from ..versions.locations import local_of, location_of, storage_of
from .declared import Given, Reader

_REMEDY = (
    "plan the transfer again, or pass a function that returns the state dict at each start, such as model.state_dict"
)
_STALE = (
    "other tensors used this memory when the transfer was planned, and none uses it now: a model got other parameters, "
    f"for example by model.to() or load_state_dict(assign=True), or was deleted; {_REMEDY}"
)


class Owner(Protocol):
    """A weight whose module may get another parameter."""

    @property
    def current(self) -> nn.Parameter:
        """The DTensor that the module has now."""
        ...


owners: weakref.WeakSet[Owner] = weakref.WeakSet()

_Overlaps = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], list[str]]  # of tensors to read, to write


class Passed:
    """This rank's tensors of one side of a transfer, source or destination, by name.

    `layouts` are the layouts of the tensors that move. `again` reads the tensors again if a function returned them.
    """

    def __init__(
        self,
        side: str,
        given: dict[str, Given],
        layouts: Mapping[str, _planner.Layout],
        reader: Reader,
        again: Callable[[], dict[str, Given]] | None,
        device: torch.device,
    ) -> None:
        self.given = given
        self._side = side
        self._layouts = layouts
        self._reader = reader
        self._again = again
        self._device = device
        self._owners: dict[str, weakref.ref[Owner]] = {}
        self._storages = {storage_of(tensor.plain) for _, tensor in self.moving()}
        # Modules in which a tensor was replaced, by its storage, the id of the module and the tensor's name in it.
        self._replaced: dict[tuple[int, int, str], weakref.ref[nn.Module]] = {}
        if again is None:
            owned = {location_of(owner.current): owner for owner in owners}
            owner_by_name = ((name, owned.get(location_of(tensor.plain))) for name, tensor in self.moving())
            self._owners = {name: weakref.ref(owner) for name, owner in owner_by_name if owner is not None}
            _watch(self)

    def moving(self) -> Iterator[tuple[str, Given]]:
        """Yields the tensors that move to or from this rank, with their names."""
        for name in self._layouts:
            tensor = self.given.get(name)
            if tensor is not None and tensor.local is not None:
                yield name, tensor

    def renew(self) -> list[str]:
        """Reads the tensors again. Returns the problems."""
        problems: list[str] = []
        again = None
        if self._again is not None:
            again, problems = self._read_again()
        for name, old in list(self.moving()):
            try:
                now = self._now(name, old, again)
                self._check(name, old, now)
            except ValueError as error:
                problems.append(self.problem_with(name, str(error)))
                continue
            self.given[name] = now
        self._storages = {storage_of(tensor.plain) for _, tensor in self.moving()}
        return problems

    def problem_with(self, name: str, what: str) -> str:
        """Returns a problem with the tensor `name`."""
        return self._reader.problem_with(self._side, name, what)

    def _read_again(self) -> tuple[dict[str, Given], list[str]]:
        """Calls the function that returns the state dict. Returns its tensors, and problems with changed names."""
        assert self._again is not None
        self._reader.problems.clear()
        again = self._again()
        problems = list(self._reader.problems)
        names = {name for name, _ in self.moving()}
        lost, new = (sorted(those) for those in (names - again.keys(), again.keys() - self.given.keys()))
        for those, what in ((lost, "lacks this name now, and had it"), (new, "has this name now, and lacked it")):
            change = f"the state dict {what} when the transfer was planned; plan the transfer again"
            problems += [] if problems else [self.problem_with(name, change) for name in those]
        return again, problems

    def _now(self, name: str, old: Given, again: dict[str, Given] | None) -> Given:
        """Returns the tensor that `name` has now. `again` is the state dict that was read again, if any."""
        if again is not None:
            return again.get(name, old)
        value = old.value
        reference = self._owners.get(name)
        owner = None if reference is None else reference()
        if owner is not None:
            current = owner.current
            if not isinstance(current, DTensor):
                raise ValueError(f"its module must have a DTensor again, got a {type(current).__name__}; {_REMEDY}")
            if location_of(current) != location_of(old.plain):
                value = current if isinstance(value, DTensor) else local_of(current)
        now = self._reader.read(value)
        return now if isinstance(value, DTensor) else now._replace(layout=old.layout)

    def _check(self, name: str, old: Given, now: Given) -> None:
        """Raises ValueError if a tensor does not match the plan, or no module has it any more."""
        layout, local = self._layouts[name], now.plain
        if now.layout != old.layout:
            raise ValueError(f"the layout must be {old.layout}, as when planned, got {now.layout}; {_REMEDY}")
        self._reader.check(self._side, now)
        had, has = (tuple(layout.shape), layout.dtype), (tuple(local.shape), str(local.dtype).removeprefix("torch."))
        if now.layout is None and had != has:
            raise ValueError(
                f"must be {had[1]} of shape {had[0]}, as when planned, got {has[1]} of shape {has[0]}; {_REMEDY}"
            )
        if local.numel() and local.device != self._device:
            raise ValueError(f"the device must be {self._device}, as when planned, got {local.device}; {_REMEDY}")
        if name in self._owners:
            return
        storage = storage_of(local)
        for (watched, _, attribute), reference in self._replaced.items():
            module = reference()
            if watched == storage and module is not None and _has_other(module, attribute, storage):
                attribute = f"{type(module).__name__}.{attribute}"
                raise ValueError(f"{attribute} was replaced after the transfer was planned; {_REMEDY}")

    def note_replaced(self, storage: int, module: nn.Module, name: str) -> None:
        """Records that a module's tensor with this storage is replaced."""
        if storage in self._storages:
            self._replaced[storage, id(module), name] = weakref.ref(module)


class Tensors:
    """This rank's tensors of both sides."""

    def __init__(self, source: Passed, destination: Passed, overlaps: _Overlaps) -> None:
        self.source = source
        self.destination = destination
        self._overlaps = overlaps
        self._had_others: dict[int, bool] = {}  # by storage: true if other tensors used it at planning
        self._locations = [location_of(tensor.plain) for _, _, tensor in self._moving()]
        self._stale({})

    def renew(self, num_own: Mapping[int, int]) -> list[str]:
        """Reads the tensors again, and returns the problems.

        Args:
            num_own: the number of further tensors of the transfer itself, by storage.
        """
        problems = [*self.source.renew(), *self.destination.renew()]
        locations = [location_of(tensor.plain) for _, _, tensor in self._moving()]
        if locations != self._locations and not problems:
            sides = (self.source, self.destination)
            problems += self._overlaps(*({name: tensor.plain for name, tensor in side.moving()} for side in sides))
            self._locations = [] if problems else locations
        return problems or self._stale(num_own)

    def _moving(self) -> list[tuple[Passed, str, Given]]:
        """Returns the side, name and tensor of all tensors that move to or from this rank."""
        return [(passed, name, x) for passed in (self.source, self.destination) for name, x in passed.moving()]

    def _stale(self, num_own: Mapping[int, int]) -> list[str]:
        """Reports storages that other tensors used, and that only the transfer uses now."""
        tensors = self._moving()
        own: dict[int, set[int]] = {}
        for _, _, x in tensors:
            own.setdefault(storage_of(x.plain), set()).add(id(x.local))
        problems = []
        had_others: dict[int, bool] = {}
        for passed, name, x in tensors:
            storage = storage_of(x.plain)
            has_others = _num_tensors(x.plain) > len(own[storage]) + num_own.get(storage, 0)
            # Only the first check counts: later, the previous run may still have tensors of its own.
            had_others[storage] = self._had_others.get(storage, has_others)
            if had_others[storage] and not has_others and _is_whole(x) and not isinstance(x.value, nn.Parameter):
                problems.append(passed.problem_with(name, _STALE))
        self._had_others = had_others
        return problems


def _num_tensors(tensor: torch.Tensor) -> int:
    """Returns the number of tensors that use the storage of `tensor`."""
    return _use_count(tensor) - _uses_of_one() + 1


def _use_count(tensor: torch.Tensor) -> int:
    """Returns the reference count of the tensor's storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _uses_of_one() -> int:
    """Returns the reference count of a storage that one tensor uses."""
    return _use_count(torch.empty(1))


def _is_whole(tensor: Given) -> bool:
    """False for a part of a larger storage, such as rows: tensors of its other parts may be freed without harm."""
    return isinstance(tensor.value, DTensor) or tensor.plain.nbytes == tensor.plain.untyped_storage().nbytes()


# The objects to notify of replaced tensors.
_watching: weakref.WeakSet[Passed] = weakref.WeakSet()
_hooks: list[Any] = []


def _watch(passed: Passed) -> None:
    """Makes the hooks on modules notify `passed` of replaced tensors, as long as it is alive."""
    if not _hooks:
        _hooks.append(register_module_parameter_registration_hook(_note))
        _hooks.append(register_module_buffer_registration_hook(_note))
    _watching.add(passed)


def _note(module: nn.Module, name: str, new: torch.Tensor | None) -> None:
    """Hook that runs before a module gets a parameter or a buffer."""
    old = _tensor_of(module, name)
    if old is None or old is new or not _watching:
        return
    for passed in list(_watching):
        passed.note_replaced(storage_of(local_of(old)), module, name)


def _tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Returns the parameter or buffer of this name in the module itself, or None."""
    found = (tensors.get(name) for tensors in (module._parameters, module._buffers))
    return next((tensor for tensor in found if tensor is not None), None)


def _has_other(module: nn.Module, name: str, storage: int) -> bool:
    """Returns True if the module's tensor of this name no longer uses this storage."""
    now = _tensor_of(module, name)
    return now is None or storage_of(local_of(now)) != storage
