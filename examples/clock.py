"""Times and counts what DTensor spends in redistributes, whoever does them."""

import time
from collections.abc import Callable
from types import ModuleType

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import _api, _dispatch, _redistribute

_FUNCTION = "redistribute_local_tensor"


class RedistributeClock:
    """While entered, sits on top of the function through which every DTensor redistribute goes.

    Enter it after `shardwright.enable()` and leave it before `shardwright.disable()`. A result that DTensor would
    wait for later is waited for at once, so that `seconds` includes all of the communication.
    """

    def __init__(self):
        self.calls = 0
        self.calls_over_several_mesh_dims = 0
        self.seconds = 0.0
        self._running = False
        self._replaced: list[tuple[ModuleType, Callable]] = []

    def __enter__(self) -> "RedistributeClock":
        for module in (_redistribute, _dispatch, _api):
            function = getattr(module, _FUNCTION)
            self._replaced.append((module, function))
            setattr(module, _FUNCTION, self._timed(function))
        return self

    def __exit__(self, *exc_info) -> None:
        while self._replaced:
            module, function = self._replaced.pop()
            setattr(module, _FUNCTION, function)

    def _timed(self, function: Callable) -> Callable:
        def redistribute_local_tensor(local_tensor, current_spec, target_spec, **options):
            if self._running:
                return function(local_tensor, current_spec, target_spec, **options)
            self._running = True
            start = time.perf_counter()
            try:
                result = function(local_tensor, current_spec, target_spec, **options)
                return result.wait() if isinstance(result, AsyncCollectiveTensor) else result
            finally:
                self.seconds += time.perf_counter() - start
                self._running = False
                changes = sum(a != b for a, b in zip(current_spec.placements, target_spec.placements, strict=True))
                self.calls += 1
                self.calls_over_several_mesh_dims += changes > 1

        return redistribute_local_tensor
