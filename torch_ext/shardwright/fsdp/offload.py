"""Offload of sharded parameters to host memory: `offload_policy` of `fully_shard`, as in FSDP2.

Parameters, their gradients and optimizer states are on the host. Gathered weights and unreduced gradients are on the
device. Two streams of the device do the copies, so they overlap with compute and with each other:

    sharded parameter  -- inward -->   staging, which is gathered
    sharded gradient   <-- outward --  reduced gradient

A copy starts after all work that was given to the caller's stream before. The caller's stream waits for an inward copy
when it waits for the gather. The host waits for both streams when a sequence ends, and before an optimizer step; then
gradients may be read and parameters written.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._native import _runtime
from ..layouts.errors import argument_error


class Leaving(NamedTuple):
    """A copy to the host in progress."""

    on_host: torch.Tensor  # must not be read before `wait`
    copied: torch.Event  # end of the copy

    def wait(self) -> torch.Tensor:
        """Makes the host wait for the copy. Returns the tensor on the host."""
        self.copied.synchronize()
        return self.on_host


class Copy(NamedTuple):
    """The events around a copy that was timed."""

    is_outward: bool  # to the host
    begin: torch.Event
    end: torch.Event

    @property
    def length_ps(self) -> int:
        """Duration in picoseconds, at least a nanosecond."""
        return max(1000, round(1e9 * self.begin.elapsed_time(self.end)))

    def seconds_since(self, origins: dict[str, Any]) -> tuple[float, float]:
        """Returns begin and end in seconds since the event of the device type in `origins`."""
        origin = origins[self.begin.device.type]
        begin, end = (origin.elapsed_time(event) / 1e3 for event in (self.begin, self.end))
        return begin, end


class Host:
    """The copies of one unit between the host and a device."""

    def __init__(self, device: torch.device, pins: bool) -> None:
        self.device = device
        self._pins = pins  # use pinned host memory
        self._inward, self._outward = _streams(device)
        self._fetched: torch.Event | None = None  # end of the latest inward copy, if the host has not waited for it
        self._timed: list[Copy] | None = None  # copies since `begin_timing`; None if copies are not timed
        _watch(self)

    def hold(self, part: torch.Tensor) -> torch.Tensor:
        """Returns a shard in host memory, pinned if the policy requires it."""
        part = part.to("cpu")
        return part.pin_memory() if self._pins and part.numel() > 0 and not part.is_pinned() else part

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """In this block the inward stream is the current stream. `join` waits for the work of the block."""
        self._inward.wait_stream(torch.accelerator.current_stream(self.device))
        with self._inward:
            try:
                yield
            finally:
                self._fetched = self._inward.record_event()

    def join(self) -> None:
        """Makes the current stream wait for the inward copies."""
        if self._fetched is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._fetched)

    def wait(self) -> None:
        """Makes the host wait for the inward copies. Then their sources on the host may be written."""
        if self._fetched is not None:
            self._fetched.synchronize()
            self._fetched = None

    def fetch(self, part: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Copies a shard on the host to `memory` (bytes on the device), on the current stream."""
        with self._timing(False):
            return memory[: part.nbytes].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)

    @contextlib.contextmanager
    def _timing(self, is_outward: bool) -> Iterator[None]:
        """Times the copy that the block gives to the current stream, if copies are timed."""
        if self._timed is None:
            yield
            return
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        stream = torch.accelerator.current_stream(self.device)
        begin.record(stream)
        yield
        end.record(stream)
        self._timed.append(Copy(is_outward, begin, end))

    def begin_timing(self) -> None:
        """Starts timing copies."""
        self._timed = []

    def end_timing(self) -> list[Copy]:
        """Stops timing copies. Waits for the copies since `begin_timing`, and returns them."""
        timed, self._timed = self._timed or [], None
        for copy in timed:
            copy.end.synchronize()
        return timed

    def send(self, part: torch.Tensor) -> Leaving:
        """Starts to copy a shard to the host, after the work given to the current stream so far."""
        self._outward.wait_stream(torch.accelerator.current_stream(self.device))
        with self._outward:
            on_host = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pins and part.numel() > 0)
            with self._timing(True):
                on_host.copy_(part, non_blocking=True)
            copied = self._outward.record_event()
        if part.numel() > 0:
            _runtime.record_use(part, self._outward)
        return Leaving(on_host, copied)


def checked(offload_policy: Any) -> CPUOffloadPolicy | None:
    """Returns the policy; None if it offloads nothing. Raises ValueError if it is no policy."""
    if offload_policy is None or type(offload_policy) is OffloadPolicy:
        return None
    if not isinstance(offload_policy, CPUOffloadPolicy):
        allowed = "None, or OffloadPolicy() or CPUOffloadPolicy(pin_memory=...) of torch.distributed.fsdp"
        raise argument_error("offload_policy", allowed, f"a {type(offload_policy).__name__}")
    return offload_policy


def host_of(policy: CPUOffloadPolicy | None, device_type: str) -> Host | None:
    """Returns the copies of a new unit; None without a policy, and on CPU, where all tensors are on the host."""
    if policy is None or device_type == "cpu":
        return None
    return Host(current_device(device_type), policy.pin_memory)


def current_device(device_type: str) -> torch.device:
    """Returns the current device of a type, with its index."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


@functools.cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Returns the inward and the outward stream of a device. All units share them."""
    return torch.Stream(device), torch.Stream(device)


_hosts: weakref.WeakSet[Host] = weakref.WeakSet()
_is_registered = False


def _watch(host: Host) -> None:
    """Makes every optimizer wait for the host's copies before it steps."""
    global _is_registered
    _hosts.add(host)
    if not _is_registered:
        _is_registered = True
        register_optimizer_step_pre_hook(_wait_for_all)


def _wait_for_all(*_: Any) -> None:
    """Hook of optimizers: blocks the host until inward copies end, so that their sources may be written."""
    for host in _hosts:
        host.wait()
