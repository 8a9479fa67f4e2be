"""Times and counts DTensor's redistributes, whichever engine runs them."""

import time
from collections.abc import Callable
from types import ModuleType

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute

_FUNCTION = "redistribute_local_tensor"


class RedistributeClock:
    """While entered, wraps the method and the function through which every DTensor redistribute goes.

    Enter it after `shardwright.enable()` and leave it before `shardwright.disable()`. A result that DTensor would
    wait for later is waited for at once, so that `seconds` includes all of the communication.
    """

    def __init__(self):
        self.calls = 0
        self.calls_over_several_mesh_dims = 0
        self.seconds = 0.0
        self._running = False
        self._replaced: list[tuple[ModuleType | type, str, Callable]] = []

    def __enter__(self) -> "RedistributeClock":
        self._replace(DTensor, "redistribute", self._timed_method)
        for module in (_redistribute, _dispatch, _api):
            self._replace(module, _FUNCTION, self._timed_function)
        return self

    def __exit__(self, *exc_info) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _replace(self, owner: ModuleType | type, name: str, timed: Callable[[Callable], Callable]) -> None:
        function = getattr(owner, name)
        self._replaced.append((owner, name, function))
        setattr(owner, name, timed(function))

    def _timed_method(self, method: Callable) -> Callable:
        def redistribute(tensor, *args, **options):
            before = tensor.placements
            return self._time(lambda: method(tensor, *args, **options), lambda result: (before, result.placements))

        return redistribute

    def _timed_function(self, function: Callable) -> Callable:
        def redistribute_local_tensor(local_tensor, current_spec, target_spec, **options):
            placements = current_spec.placements, target_spec.placements
            return self._time(
                lambda: function(local_tensor, current_spec, target_spec, **options), lambda _: placements
            )

        return redistribute_local_tensor

    def _time(self, call: Callable, placements: Callable) -> torch.Tensor:
        """Counts only the outermost call, because the method calls the function."""
        if self._running:
            return call()
        self._running = True
        start = time.perf_counter()
        try:
            result = call()
            if isinstance(result, AsyncCollectiveTensor):
                result = result.wait()
        finally:
            self._running = False
            self.seconds += time.perf_counter() - start
        changes = sum(a != b for a, b in zip(*placements(result), strict=True))
        self.calls += 1
        self.calls_over_several_mesh_dims += changes > 1
        return result
