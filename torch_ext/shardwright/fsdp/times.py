"""How long the uses of a step take, measured in one step and agreed on by all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _runtime


class Clock:
    """Measures stretches of compute: on CPU the host's time, elsewhere that of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # begin and end of each stretch, in turns: nanoseconds, or events

    def end(self) -> None:
        """Ends the stretch that has begun, if one has."""
        if len(self._marks) % 2:
            self.mark()

    def mark(self) -> None:
        """A stretch begins, or ends."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter_ns())
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append(event)

    def stretches_ps(self) -> list[int]:
        """Waits for the last one, and returns the length of each: at least a nanosecond."""
        begins, ends = self._marks[::2], self._marks[1::2]
        if self._device.type == "cpu":
            return [max(1, end - begin) * 1000 for begin, end in zip(begins, ends, strict=True)]
        if ends:
            ends[-1].synchronize()
        return [max(1000, round(1e9 * a.elapsed_time(b))) for a, b in zip(begins, ends, strict=True)]


def agreed(times_ps: Sequence[int], mesh: DeviceMesh, device: torch.device) -> list[int]:
    """Returns each time's largest value over the ranks of a mesh. All of them call this, with as many times."""
    times = torch.tensor(times_ps, dtype=torch.int64, device=device)
    _runtime.drain()  # ours that are under way start all they communicate before, on all ranks alike
    for dim in range(mesh.ndim):
        dist.all_reduce(times, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return [int(ps) for ps in times.tolist()]
