"""Offload of sharded parameters to host memory: `offload_policy` of `fully_shard`, as in FSDP2.

Parameters, their gradients and optimizer states are on the host. Gathered weights and unreduced gradients are on the
device. Two streams of the device do the copies, so they overlap with compute and with each other:

    sharded parameter  -- H2D stream -->  staging buffer, which is gathered
    sharded gradient   <-- D2H stream --  reduced gradient

A copy starts after all work that was given to the caller's stream before. The caller's stream waits for a copy to the
device when it waits for the gather. The host waits for both streams when a sequence ends, and before an optimizer step.
After that wait, gradients may be read and parameters written.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._native import _runtime
from ..layouts.errors import argument_error


class CopyToHost(NamedTuple):
    """A copy to the host in progress."""

    on_host: torch.Tensor  # must not be read before `wait`
    end: torch.Event

    def wait(self) -> torch.Tensor:
        """Makes the host wait for the copy. Returns the tensor on the host."""
        self.end.synchronize()
        return self.on_host


class TimedCopy(NamedTuple):
    """The events around a copy that was timed."""

    to_host: bool  # False: to the device
    begin: torch.Event
    end: torch.Event

    @property
    def length_ps(self) -> int:
        """Duration in picoseconds, at least a nanosecond."""
        return max(1000, round(1e9 * self.begin.elapsed_time(self.end)))

    def seconds_since(self, origins: dict[str, Any]) -> tuple[float, float]:
        """Returns begin and end in seconds since an event. `origins`: an event of each device type."""
        origin = origins[self.begin.device.type]
        begin, end = (origin.elapsed_time(event) / 1e3 for event in (self.begin, self.end))
        return begin, end


class HostCopies:
    """The copies of one unit between the host and a device."""

    def __init__(self, device: torch.device, pins: bool) -> None:
        self.device = device
        self._pins = pins  # use pinned host memory
        self._h2d_stream, self._d2h_stream = _streams(device)
        self._h2d_end: torch.Event | None = None  # end of the latest copy to the device; None once the host has waited
        self._timed: list[TimedCopy] | None = None  # copies since `begin_timing`; None if copies are not timed
        _watch(self)

    def to_host_memory(self, part: torch.Tensor) -> torch.Tensor:
        """Returns a shard in host memory, pinned if the policy requires it."""
        part = part.to("cpu")
        return part.pin_memory() if self._pins and part.numel() > 0 and not part.is_pinned() else part

    @contextlib.contextmanager
    def on_h2d_stream(self) -> Iterator[None]:
        """Makes the H2D stream the current stream in the block. `make_stream_wait` waits for the work of the block."""
        self._h2d_stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._h2d_stream:
            try:
                yield
            finally:
                self._h2d_end = self._h2d_stream.record_event()

    def make_stream_wait(self) -> None:
        """Makes the current stream wait for the copies to the device."""
        if self._h2d_end is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._h2d_end)

    def make_host_wait(self) -> None:
        """Makes the host wait for the copies to the device. Then their sources on the host may be written."""
        if self._h2d_end is not None:
            self._h2d_end.synchronize()
            self._h2d_end = None

    def copy_to_device(self, part: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Copies a shard on the host to `memory` (bytes on the device), on the current stream. Returns the copy."""
        with self._timing(to_host=False):
            return memory[: part.nbytes].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)

    @contextlib.contextmanager
    def _timing(self, to_host: bool) -> Iterator[None]:
        """Times the copy that the block gives to the current stream, if copies are timed."""
        if self._timed is None:
            yield
            return
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        stream = torch.accelerator.current_stream(self.device)
        begin.record(stream)
        yield
        end.record(stream)
        self._timed.append(TimedCopy(to_host, begin, end))

    def begin_timing(self) -> None:
        """Starts timing copies."""
        self._timed = []

    def end_timing(self) -> list[TimedCopy]:
        """Stops timing copies. Waits for the copies since `begin_timing`, and returns them."""
        timed, self._timed = self._timed or [], None
        for copy in timed:
            copy.end.synchronize()
        return timed

    def start_copy_to_host(self, part: torch.Tensor) -> CopyToHost:
        """Starts to copy a shard to the host, after the work given to the current stream so far."""
        self._d2h_stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._d2h_stream:
            on_host = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pins and part.numel() > 0)
            with self._timing(to_host=True):
                on_host.copy_(part, non_blocking=True)
            end = self._d2h_stream.record_event()
        if part.numel() > 0:
            _runtime.record_use(part, self._d2h_stream)
        return CopyToHost(on_host, end)


def checked(offload_policy: Any) -> CPUOffloadPolicy | None:
    """Returns the policy; None if it offloads nothing. Raises ValueError if it is no policy."""
    if offload_policy is None or type(offload_policy) is OffloadPolicy:
        return None
    if not isinstance(offload_policy, CPUOffloadPolicy):
        allowed = "None, or OffloadPolicy() or CPUOffloadPolicy(pin_memory=...) of torch.distributed.fsdp"
        raise argument_error("offload_policy", allowed, f"a {type(offload_policy).__name__}")
    return offload_policy


def host_copies_of(policy: CPUOffloadPolicy | None, device_type: str, given: Iterable[Any]) -> HostCopies | None:
    """Returns the copies of a new unit; None without a policy, and on CPU, where all tensors are on the host.

    The device is that of the parameters (`given`); if all of them are on the host, the current one.
    """
    if policy is None or device_type == "cpu":
        return None
    device = next((each.device for each in given if each.device.type == device_type), current_device(device_type))
    return HostCopies(device, policy.pin_memory)


def current_device(device_type: str) -> torch.device:
    """Returns the current device of a type, with its index unless it is the CPU."""
    is_cpu = device_type == "cpu"
    return torch.device("cpu" if is_cpu else f"{device_type}:{torch.get_device_module(device_type).current_device()}")


@functools.cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Returns the H2D and the D2H stream of a device. All units share them."""
    return torch.Stream(device), torch.Stream(device)


_watched: weakref.WeakSet[HostCopies] = weakref.WeakSet()  # the copies that optimizer steps wait for
_is_registered = False  # `_wait_for_all` is a hook of all optimizers


def _watch(host_copies: HostCopies) -> None:
    """Makes every optimizer step wait for these copies."""
    global _is_registered
    _watched.add(host_copies)
    if not _is_registered:
        _is_registered = True
        register_optimizer_step_pre_hook(_wait_for_all)


def _wait_for_all(*_: Any) -> None:
    """Hook of optimizers: blocks the host until copies to the device end, so that their sources may be written."""
    for host_copies in _watched:
        host_copies.make_host_wait()
