"""Runs one rank on one GPU with emulated peers, and times it.

The programs are the same as on many ranks. Their process groups are "fake" ones whose transfers are replaced here: one
copy engine reads the peers' data from pinned host memory, while another one writes outgoing data there. So the link is
PCIe, copies take no SMs (NCCL's kernels would), peers are never late, and a separate kernel sums the received parts of
a reduce-scatter.

`AsyncTP` runs PyTorch's own decomposition of fused products on the same peers.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._C._distributed_c10d import FakeWork

import overlap_model
import shardwright as sw

RANK = 1  # this process's rank, neither the first nor the last
REPEATS, WARM_UPS = 9, 2
LINK_BYTES = 64 << 20

# Data of a peer in host memory; for 8-bit floats with the scales of its rows.
Held = Mapping[torch.dtype, torch.Tensor]


# ---- peers


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class EmulatedPeers:
    """Takes over the transfers of all "fake" process groups of this process, in which it is rank `RANK`.

    Data of a peer is read sequentially from `parts[rank]`, and from its beginning again after the end. Sent data is
    copied to host memory on a separate stream. State: `_at`, bytes read of each part; `_is_receiving`, true if the last
    message was a receive. The engine enqueues receives
    before sends, so a receive that follows a send begins a transfer.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.outgoing = torch.cuda.Stream() if self.is_cuda else None
        self.side = torch.cuda.Stream() if self.is_cuda else None  # for transfers concurrent with the current stream
        self.sink = torch.empty(most_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)
        self.parts: list[torch.Tensor] = []
        self._at: list[int] = []
        self._is_receiving = False
        self._library = torch.library.Library("c10d", "IMPL")
        kernels = {
            "recv_": self._receive,
            "send": self._send,
            "_allgather_base_": self._all_gather,
            "_reduce_scatter_base_": self._reduce_scatter,
            "alltoall_base_": self._all_to_all,
        }
        with warnings.catch_warnings():  # torch warns that kernels are replaced, which is intended
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in kernels.items():
                self._library.impl(name, kernel, "CUDA" if self.is_cuda else "CPU", allow_override=True)

    def hold(self, parts: Sequence[torch.Tensor]) -> None:
        """Sets the peers' data: contiguous host tensors by rank; that of `RANK` is not read."""
        self.parts = [bytes_of(part) for part in parts]
        self._at = [0] * len(parts)

    def exchange(self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[torch.Tensor]) -> None:
        """Receives messages from ranks while sending others, on the current stream."""
        self._fork()
        for peer, data in receives:
            self._take(peer, data)
        for data in sends:
            self._give(data)
        self.wait_for_outgoing()
        self._is_receiving = False

    def pull(self, data: torch.Tensor, held: torch.Tensor, leaving: torch.Tensor) -> torch.cuda.Event | None:
        """Copies a peer's data on the current stream, while as much of `leaving` is sent; returns its end."""
        self._fork()
        bytes_of(data).copy_(bytes_of(held), non_blocking=True)
        self._give(bytes_of(leaving)[: data.nbytes])
        return None if self.outgoing is None else self.outgoing.record_event()

    def _fork(self) -> None:
        if self.outgoing is not None:
            self.outgoing.wait_stream(torch.cuda.current_stream())

    def wait_for_outgoing(self) -> None:
        """Makes the current stream wait until outgoing data is sent."""
        if self.outgoing is not None:
            torch.cuda.current_stream().wait_stream(self.outgoing)

    def _take(self, peer: int, data: torch.Tensor) -> None:
        begin, size = self._at[peer], data.nbytes
        if begin + size > self.parts[peer].numel():
            raise RuntimeError(f"rank {peer} holds {self.parts[peer].numel()} bytes; {size} were asked for at {begin}")
        bytes_of(data).copy_(self.parts[peer][begin : begin + size], non_blocking=True)
        self._at[peer] = (begin + size) % self.parts[peer].numel()

    def _give(self, data: torch.Tensor) -> None:
        sink = self.sink[: data.nbytes]
        if self.outgoing is None:
            sink.copy_(bytes_of(data))
            return
        with torch.cuda.stream(self.outgoing):
            sink.copy_(bytes_of(data), non_blocking=True)

    # Kernels of c10d's operators; groups and works are passed boxed.

    def _receive(self, tensors: list[torch.Tensor], group: Any, src: int, tag: int) -> Any:
        if not self._is_receiving:
            self._fork()
        self._is_receiving = True
        self._take(src, tensors[0])
        return FakeWork().boxed()

    def _send(self, tensors: list[torch.Tensor], group: Any, dst: int, tag: int) -> Any:
        self._is_receiving = False
        self._give(tensors[0])
        self.wait_for_outgoing()
        return FakeWork().boxed()

    def _all_gather(self, output: torch.Tensor, data: torch.Tensor, *_: Any) -> Any:
        rows = output.view(len(self.parts), -1)
        self._exchange_rows(list(rows), [data.view(-1)] * len(rows))
        return output, FakeWork().boxed()

    def _all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, group: Any, output_counts: list, input_counts: list, *_: Any
    ) -> Any:
        self._exchange_rows(list(output.split(output_counts)), list(data.split(input_counts)))
        return FakeWork().boxed()

    def _reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, *_: Any) -> Any:
        """Reduces by sum; no other reduction occurs here."""
        rows = data.view(len(self.parts), -1)
        came = torch.empty_like(rows)
        self._exchange_rows(list(came), list(rows))
        torch.sum(came, 0, out=output.view(-1))
        return output, FakeWork().boxed()

    def _exchange_rows(self, receives: list[torch.Tensor], sends: list[torch.Tensor]) -> None:
        peers = [peer for peer in range(len(self.parts)) if peer != RANK]
        self.exchange(
            [(peer, receives[peer]) for peer in peers if receives[peer].numel()],
            [sends[peer] for peer in peers if sends[peer].numel()],
        )
        if receives[RANK].numel():
            receives[RANK].copy_(sends[RANK])


# ---- PyTorch's AsyncTP


class HeldTensor(torch.Tensor):
    """A host tensor that represents a peer's memory. PyTorch's code copies from it as if it were on the device, so the
    host must not wait for the copy."""

    plain: torch.Tensor
    pull: Callable[[torch.Tensor, torch.Tensor], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.copy_:
            data, held = args
            held.pull(data, held.plain)
            return data
        return super().__torch_function__(func, types, args, kwargs or {})


class NoStream(contextlib.nullcontext):
    """A stream for CPU, where everything is done at once."""

    def wait_stream(self, stream: NoStream) -> None:
        pass


class AsyncTP:
    """PyTorch's fused products, as torch.distributed._symmetric_memory decomposes them, on emulated peers.

    PyTorch's code runs unchanged: two streams alternate between copying a peer's part and multiplying it, or between
    multiplying for a peer and copying the peer's result for this rank; then the sum. Only the symmetric memory is
    replaced. This rank's memory is a buffer on the device. A peer's memory is its data in pinned host memory; in an
    exchange this is always its one partial result. While this rank copies from a peer, as many bytes are sent from its
    buffer, because a peer copies from it too.

    Barriers cost nothing: no peer is late, and no kernel is launched for them. A stream only waits there until peers
    have read this rank's buffer. This favors AsyncTP.

    State: `_buffer`, this rank's memory; `_leaving`, by stream, the time at which its last outgoing data was sent.
    """

    def __init__(self, peers: EmulatedPeers, group: dist.ProcessGroup, held: Sequence[Held]) -> None:
        self.world_size, self.rank = len(held), RANK
        self._peers, self._held, self._group_name = peers, held, group.group_name
        self._buffer = torch.empty(0, dtype=torch.uint8, device=peers.device)
        self._leaving: dict[int, torch.cuda.Event] = {}

    def all_gather_matmul(
        self, multiply: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
    ) -> torch.Tensor:
        """`multiply` is called as torch.ops.aten.mm.out is; with scales, of shapes (rows, 1) and (1, n), as
        torch.ops.aten._scaled_mm.out."""
        dtype, x_scale, more = self._scaling(weight, scales)
        with self._in_place():
            _, results = symmetric_memory._fused_all_gather_matmul_impl(
                multiply, x, [weight], x_scale, [more], [dtype], 0, self._group_name, False
            )
        return results[0]

    def matmul_reduce_scatter(
        self, multiply: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
    ) -> torch.Tensor:
        """`multiply` as in `all_gather_matmul`."""
        dtype, x_scale, more = self._scaling(weight, scales)
        with self._in_place():
            if x_scale is None:
                return symmetric_memory._fused_matmul_reduce_scatter_impl(
                    multiply, x, weight, more, dtype, "sum", 0, self._group_name
                )
            shape = [x.shape[0], weight.shape[1]]
            return symmetric_memory._fused_scaled_matmul_reduce_scatter_impl(
                multiply, x, weight, x_scale, more, dtype, "sum", 0, 0, self._group_name, shape
            )

    def _scaling(
        self, weight: torch.Tensor, scales: Sequence[torch.Tensor]
    ) -> tuple[torch.dtype, torch.Tensor | None, dict[str, Any]]:
        """Returns the dtype of results, the operand's scales, and the other arguments of `multiply`."""
        if not scales:
            return weight.dtype, None, {}
        x_scale, weight_scale = scales
        more = {"scale_b": weight_scale, "bias": None, "scale_result": None, "out_dtype": torch.bfloat16}
        return torch.bfloat16, x_scale, more | {"use_fast_accum": False}

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Replaces PyTorch's symmetric memory and, on CPU, its streams."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(symmetric_memory, "get_symm_mem_workspace", self._workspace))
            if not self._peers.is_cuda:
                stream = NoStream()
                for owner, name, result in (
                    (symmetric_memory, "_get_backend_stream", stream),
                    (torch.cuda, "current_stream", stream),
                    (torch.accelerator, "current_stream", stream),
                    (torch.cuda, "_sleep", None),
                ):
                    stack.enter_context(mock.patch.object(owner, name, lambda *_, result=result: result))
            yield
        self._peers.wait_for_outgoing()
        self._leaving.clear()

    # The interface of symmetric memory that PyTorch's code uses.

    def _workspace(self, group_name: str, min_size: int) -> AsyncTP:
        if self._buffer.numel() < min_size:
            self._buffer = torch.empty(-(-min_size // 16) * 16, dtype=torch.uint8, device=self._peers.device)
        return self

    def barrier(self, channel: int = 0) -> None:
        """Waits until peers have read the data that this stream released."""
        if self._peers.is_cuda:
            stream = torch.cuda.current_stream()
            left = self._leaving.pop(stream.cuda_stream, None)
            if left is not None:
                stream.wait_event(left)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        if rank == self.rank:
            shape = torch.Size(sizes)
            return self._buffer.view(dtype)[storage_offset : storage_offset + shape.numel()].view(shape)
        plain = self._held[rank][dtype].view(sizes)
        held = plain.as_subclass(HeldTensor)
        held.plain, held.pull = plain, self._pull
        return held

    def _pull(self, data: torch.Tensor, held: torch.Tensor) -> None:
        left = self._peers.pull(data, held, self._buffer)
        if left is not None:
            self._leaving[torch.cuda.current_stream().cuda_stream] = left


# ---- clocks


class Clock:
    """Returns the microseconds of calls, measured on the device or, on CPU, by the host."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._cycles_per_us = self._measure_spin() if self.is_cuda else 0.0

    def _measure_spin(self) -> float:
        cycles, times = 4_000_000, []
        for _ in range(4):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        return cycles / min(times)

    def us(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        """Returns the median."""
        for _ in range(WARM_UPS):
            call()
        return statistics.median(self._cuda_us(call, repeats) if self.is_cuda else self._cpu_us(call, repeats))

    def _cpu_us(self, call: Callable[[], object], repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return times

    def _cuda_us(self, call: Callable[[], object], repeats: int) -> list[float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        spin_us = 100 + 1.5e6 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        times: list[float] = []
        for _ in range(4 * repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(round(spin_us * self._cycles_per_us))
            start.record()
            call()
            end.record()
            was_ahead = not start.query()  # otherwise the device may have waited for the host
            end.synchronize()
            if was_ahead:
                times.append(1e3 * start.elapsed_time(end))
            else:
                spin_us *= 1.5
            if len(times) == repeats:
                return times
        raise RuntimeError(f"the host took longer than {spin_us:.0f} us to enqueue a call, {4 * repeats} times")


def measure_link(peers: EmulatedPeers, clock: Clock, arena: torch.Tensor) -> tuple[sw.Topology, dict]:
    """Measures a transfer's fixed time, and the rate in both directions at once, on a side stream as in real use."""
    size = min(LINK_BYTES, arena.nbytes // 2)
    peers.hold([arena.view(torch.uint8)[:size]] * 2)
    data_in = torch.empty(size, dtype=torch.uint8, device=peers.device)
    data_out = torch.empty(size, dtype=torch.uint8, device=peers.device)
    side = peers.side

    def transfer(num_bytes: int, messages_in: int, messages_out: int) -> float:
        def call() -> None:
            peers.hold(peers.parts)
            peers.exchange([(0, data_in[:num_bytes])] * messages_in, [data_out[:num_bytes]] * messages_out)

        def on_side_stream() -> None:
            assert side is not None
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream().wait_stream(side)

        return clock.us(call if side is None else on_side_stream)

    tiny = 4096
    one_message_us, seven_messages_us = transfer(tiny, 1, 1), transfer(tiny, 7, 7)
    message_us = max((seven_messages_us - one_message_us) / 6, 0.0)
    step_us = max(one_message_us - message_us, 0.0)

    def gb_per_second(messages_in: int, messages_out: int) -> float:
        return size / transfer(size, messages_in, messages_out) / 1e3

    link = {
        "emulated_step_us": round(step_us, 2),
        "emulated_message_us": round(message_us, 2),
        "emulated_gb_per_second_in": round(gb_per_second(1, 0), 2),
        "emulated_gb_per_second_out": round(gb_per_second(0, 1), 2),
        "emulated_gb_per_second_both": round(gb_per_second(1, 1), 2),
    }
    ps_per_kib = round(1024e3 / max(link["emulated_gb_per_second_both"], 0.01))
    wire = sw.planning.Link(round(1e6 * message_us), ps_per_kib)
    return sw.Topology("emulated", 0, round(1e6 * step_us), overlap_model.MEMORY_PS_PER_KIB, wire, wire), link
