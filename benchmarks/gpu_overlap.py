"""How much communication products hide on one GPU, whose peers are emulated: one rank's schedules of Llama-3's layers.

    make gpu                                              # with everything else that needs a GPU; below three minutes
    python benchmarks/gpu_overlap.py --device cpu --quick # the same code on tiny tensors, to see that it works

The programs are the ones that run on many ranks. Their process groups are "fake" ones, whose transfers are taken over
here: what a peer would send is read from pinned host memory by a copy engine, and what is sent is written there by
another one, at the same time. So the link is PCIe, copies take no SMs as NCCL's kernels would, peers are never late,
and what a reduce-scatter receives is summed by a kernel of its own afterwards. All results are compared with products
of what the peers hold.

The link is measured first and predictions go by it; products are predicted by the table "h100". Times are medians of
device times: the device is kept busy until the host has enqueued a call, so that host time does not count. Operands may
lie in the L2 cache. E and its bound are explained in overlap_model.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine  # noqa: E402
import overlap_model  # noqa: E402
import shardwright as sw  # noqa: E402
from overlap_model import GATHER, KINDS, RANKS, SHAPES, TOKENS, Shape, hidden, matmul_of, schedule_name  # noqa: E402
from shardwright import operators  # noqa: E402, F401  registers torch.ops.shardwright
from shardwright._planner import Matmul  # noqa: E402

MODEL = overlap_model.MODEL
RANK = 1  # of this process: neither the first nor the last
REPEATS, WARM_UPS = 9, 2
CONTENTION_TOKENS, CONTENTION_PRODUCTS = 8192, 10
LINK_BYTES = 64 << 20
SCHEDULE_FIGURES = ("emulated_us", "predicted_us", "emulated_e", "predicted_e")
CLOSE = 1.05  # times within this of each other count as equal
MOST_ERROR = {"bfloat16": 1e-2, "float32": 1e-5}  # of the norm

QUICK_SHAPES = tuple(dataclasses.replace(shape, k=shape.k // 64, n=shape.n // 64) for shape in SHAPES[::3])
QUICK_TOKENS = (128, 256)


# ---- peers


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class EmulatedPeers:
    """Takes over the transfers of all "fake" process groups of this process, in which it is rank `RANK`.

    What comes from a peer is the next of that peer's bytes in `parts`, by rank, and the first again after the last:
    tensors whose rows go one after another. What is sent goes to host memory, by a stream of its own. State: `_at`,
    bytes taken of each part; `_is_receiving`, whether the last message was a receive. The engine enqueues receives
    before sends, so a receive behind a send begins a transfer.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.outgoing = torch.cuda.Stream() if self.is_cuda else None
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
        with warnings.catch_warnings():  # torch says that kernels are replaced, which is the purpose
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in kernels.items():
                self._library.impl(name, kernel, "CUDA" if self.is_cuda else "CPU", allow_override=True)

    def hold(self, parts: Sequence[torch.Tensor]) -> None:
        """Host tensors by rank; that of `RANK` is not read."""
        self.parts = [bytes_of(part) for part in parts]
        self._at = [0] * len(parts)

    def exchange(self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[torch.Tensor]) -> None:
        """Messages by rank in, and messages out meanwhile; on the current stream."""
        self._fork()
        for peer, data in receives:
            self._take(peer, data)
        for data in sends:
            self._give(data)
        self._join()
        self._is_receiving = False

    def _fork(self) -> None:
        if self.outgoing is not None:
            self.outgoing.wait_stream(torch.cuda.current_stream())

    def _join(self) -> None:
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

    # Kernels of c10d's operators; groups and works travel boxed.

    def _receive(self, tensors: list[torch.Tensor], group: Any, src: int, tag: int) -> Any:
        if not self._is_receiving:
            self._fork()
        self._is_receiving = True
        self._take(src, tensors[0])
        return FakeWork().boxed()

    def _send(self, tensors: list[torch.Tensor], group: Any, dst: int, tag: int) -> Any:
        self._is_receiving = False
        self._give(tensors[0])
        self._join()
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
        """The sum: no other reduction occurs here."""
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


# ---- clocks


class Clock:
    """Microseconds of calls, on the device or, on CPU, of the host."""

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
        """The median."""
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
            was_ahead = not start.query()  # else the device may have waited for the host
            end.synchronize()
            if was_ahead:
                times.append(1e3 * start.elapsed_time(end))
            else:
                spin_us *= 1.5
            if len(times) == repeats:
                return times
        raise RuntimeError(f"the host took longer than {spin_us:.0f} us to enqueue a call, {4 * repeats} times")


def measure_link(peers: EmulatedPeers, clock: Clock, arena: torch.Tensor) -> tuple[sw.Topology, dict]:
    """What a transfer costs beside its bytes, and bytes in both directions at once; by a side stream, as in use."""
    size = min(LINK_BYTES, arena.nbytes // 2)
    peers.hold([arena.view(torch.uint8)[:size]] * 2)
    data_in = torch.empty(size, dtype=torch.uint8, device=peers.device)
    data_out = torch.empty(size, dtype=torch.uint8, device=peers.device)
    side = torch.cuda.Stream() if peers.is_cuda else None

    def transfer(num_bytes: int, messages_in: int, messages_out: int) -> float:
        def call() -> None:
            peers.hold(peers.parts)
            peers.exchange([(0, data_in[:num_bytes])] * messages_in, [data_out[:num_bytes]] * messages_out)

        def beside() -> None:
            assert side is not None
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream().wait_stream(side)

        return clock.us(call if side is None else beside)

    tiny = 4096
    one, seven = transfer(tiny, 1, 1), transfer(tiny, 7, 7)
    message_us = max((seven - one) / 6, 0.0)
    step_us = max(one - message_us, 0.0)

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
    wire = sw.Link(round(1e6 * message_us), ps_per_kib)
    return sw.Topology("emulated", 0, round(1e6 * step_us), overlap_model.MEMORY_PS_PER_KIB, wire, wire), link


# ---- one case


@dataclasses.dataclass
class Bench:
    device: torch.device
    dtype: str
    peers: EmulatedPeers
    clock: Clock
    arena: torch.Tensor  # what peers hold, on the host
    groups: dict[int, dist.ProcessGroup]  # by number of ranks
    topology: sw.Topology

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, device=self.device)).to(getattr(torch, self.dtype))

    def hold(self, num_ranks: int, shape: tuple[int, int]) -> list[torch.Tensor]:
        """Gives every peer a tensor of this shape; returns them, as they are on the host."""
        count = shape[0] * shape[1]
        parts = [self.arena[r * count : (r + 1) * count].view(shape) for r in range(num_ranks)]
        self.peers.hold(parts)
        return parts


@dataclasses.dataclass
class Case:
    """Operands of this rank, and what comes of them."""

    x: torch.Tensor
    weight: torch.Tensor
    whole: torch.Tensor  # the operand of the unsplit product
    expected: torch.Tensor
    communicate: Callable[[], object]  # alone


def make_case(bench: Bench, shape: Shape, num_ranks: int, tokens: int) -> Case:
    m, n, k = shape.product(num_ranks, tokens)
    rows = tokens // num_ranks
    weight = bench.random(k, n, scale=k**-0.5)
    group = bench.groups[num_ranks]
    if shape.kind == GATHER:
        held = bench.hold(num_ranks, (rows, k))
        x = bench.random(rows, k)
        whole = torch.cat([x if r == RANK else part.to(bench.device) for r, part in enumerate(held)])
        gathered = torch.empty_like(whole)
        return Case(x, weight, whole, whole @ weight, lambda: dist.all_gather_into_tensor(gathered, x, group=group))
    held = bench.hold(num_ranks, (rows, n))
    x = bench.random(m, k)
    product = x @ weight
    expected = product[RANK * rows : (RANK + 1) * rows].float()
    for r, part in enumerate(held):
        if r != RANK:
            expected += part.to(bench.device)
    scattered = torch.empty(rows, n, dtype=product.dtype, device=bench.device)
    return Case(
        x,
        weight,
        x,
        expected.to(product.dtype),
        lambda: dist.reduce_scatter_tensor(scattered, product, group=group),
    )


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def gemm_us(bench: Bench, case: Case) -> float:
    """The faster one of both ways that the weight may lie."""
    turned = case.weight.t().contiguous().t()
    return min(bench.clock.us(lambda w=w: torch.mm(case.whole, w)) for w in (case.weight, turned))


def e_of(total: float, gemm: float, serial: float) -> float | None:
    return round(hidden(total, gemm, serial), 3) if serial > gemm else None


def time_schedules(bench: Bench, matmul: Matmul, case: Case, num_ranks: int, gemm: float) -> list[dict]:
    """Every schedule there is a prediction for, serial first; `gemm` is the unsplit product's time."""
    model = sw.GemmModel.named(MODEL)
    forecasts = matmul.predictions(model)
    predicted_gemm, predicted_serial = matmul.timeline("serial", 1, model)["gemm_ps"], forecasts[0][2]
    schedules: list[dict] = []
    for method, chunks, predicted in forecasts:
        text = matmul.to_text(method, chunks)
        names = [bench.groups[num_ranks].group_name for _ in matmul.groups(method, chunks, RANK)]

        def call(text: str = text, names: list[str] = names) -> list[torch.Tensor]:
            return torch.ops.shardwright.matmul([case.x, case.weight], text, names, RANK)

        error = error_of(call()[0], case.expected)
        us = round(bench.clock.us(call), 1)
        schedules.append(
            {
                "schedule": schedule_name(method, chunks),
                "emulated_us": us,
                "predicted_us": round(predicted / 1e6, 1),
                "emulated_e": e_of(us, gemm, schedules[0]["emulated_us"] if schedules else us),
                "predicted_e": round(hidden(predicted, predicted_gemm, predicted_serial), 3),
                "error": float(f"{error:.2g}"),
                "right": error <= MOST_ERROR[bench.dtype],
            }
        )
    return schedules


def measure(bench: Bench, shape: Shape, num_ranks: int, tokens: int) -> dict:
    """A row of the results; times in microseconds."""
    model = sw.GemmModel.named(MODEL)
    matmul = matmul_of(shape, num_ranks, tokens, bench.topology, bench.dtype)
    case = make_case(bench, shape, num_ranks, tokens)
    gemm, transfer = gemm_us(bench, case), bench.clock.us(case.communicate)
    schedules = time_schedules(bench, matmul, case, num_ranks, gemm)
    serial = schedules[0]
    chosen_name = schedule_name(*matmul.choose(model))
    chosen = next(row for row in schedules if row["schedule"] == chosen_name)
    fastest = min(schedules, key=lambda row: row["emulated_us"])
    forecast = matmul.timeline("serial", 1, model)
    m, n, k = shape.product(num_ranks, tokens)
    return {
        "kind": shape.kind,
        "shape": shape.name,
        "ranks": num_ranks,
        "tokens": tokens,
        "product": f"{m}x{k} by {k}x{n}",
        "gemm_us": round(gemm, 1),
        "predicted_gemm_us": round(forecast["gemm_ps"] / 1e6, 1),
        "emulated_communication_us": round(transfer, 1),
        "predicted_communication_us": round(forecast["communication_ps"] / 1e6, 1),
        "emulated_serial_us": serial["emulated_us"],
        "predicted_serial_us": serial["predicted_us"],
        "bound_of_emulated_e": e_of(max(gemm, transfer), gemm, serial["emulated_us"]),
        "chosen": chosen["schedule"],
        "fastest": fastest["schedule"],
        **{f"{key}_chosen": chosen[key] for key in SCHEDULE_FIGURES},
        **{f"{key}_fastest": fastest[key] for key in SCHEDULE_FIGURES},
        "schedules": schedules,
    }


def slow_down(bench: Bench, shape: Shape, num_ranks: int, tokens: int) -> dict:
    """By how much unsplit products take longer while copy engines are busy in both directions; CUDA only."""
    m, n, k = shape.product(num_ranks, tokens)
    x, weight, out = bench.random(m, k), bench.random(k, n), bench.random(m, n)
    size = min(LINK_BYTES, bench.arena.nbytes // 2)
    data_in, data_out = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    side = torch.cuda.Stream()

    def multiply() -> None:
        for _ in range(CONTENTION_PRODUCTS):
            torch.mm(x, weight, out=out)

    alone = bench.clock.us(multiply)
    copy_us = size * bench.topology.inside.ps_per_kib / 1024e6
    copies = 2 + round(1.5 * alone / copy_us)

    def beside() -> float:
        torch.cuda.synchronize()
        bench.peers.hold([bench.arena.view(torch.uint8)[:size]] * num_ranks)
        with torch.cuda.stream(side):
            for _ in range(copies):
                bench.peers.exchange([(0, data_in)], [data_out])
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        multiply()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    times = [beside() for _ in range(REPEATS)]
    return {
        "product": f"{m}x{k} by {k}x{n}",
        "gemm_us": round(alone / CONTENTION_PRODUCTS, 1),
        "gemm_beside_emulated_copies_us": round(statistics.median(times) / CONTENTION_PRODUCTS, 1),
        "slow_down_beside_emulated_copies_percent": round(100 * (statistics.median(times) / alone - 1), 1),
        "assumed_percent": sw.GemmModel.named(MODEL).contention_percent,
    }


def slow_downs(bench: Bench, shapes: Sequence[Shape], tokens: int) -> list[dict]:
    found = []
    for shape in shapes:
        for num_ranks in RANKS:
            found.append({"shape": shape.name, "ranks": num_ranks, **slow_down(bench, shape, num_ranks, tokens)})
            print(found[-1], flush=True)
    return found


def check_public_functions(bench: Bench) -> None:
    """The functions for plain tensors, in every method. Raises AssertionError where a result is wrong."""
    for num_ranks, group in bench.groups.items():
        for kind in KINDS:
            shape = Shape(kind, "small", 64 * num_ranks, 32 * num_ranks)
            for method in ("serial", "ring", "collective"):
                case = make_case(bench, shape, num_ranks, 16 * num_ranks)
                function = sw.all_gather_matmul if kind == GATHER else sw.matmul_reduce_scatter
                sizes = {"size": case.x.shape[0 if kind == GATHER else 1] * num_ranks}
                sizes |= {"columns": case.weight.shape[1] * num_ranks} if kind == GATHER else {}
                result = function(case.x, case.weight, group=group, method=method, **sizes)
                error = error_of(result, case.expected)
                assert error <= MOST_ERROR[bench.dtype], f"{kind} by {method} on {num_ranks} ranks: error {error:.2g}"


# ---- all of them


def summarise(rows: list[dict]) -> list[dict]:
    """By kind and number of ranks."""

    def median_of(here: list[dict], key: str) -> float | None:
        values = [row[key] for row in here if row[key] is not None]
        return round(statistics.median(values), 3) if values else None

    summary = []
    for kind in KINDS:
        for num_ranks in sorted({row["ranks"] for row in rows}):
            here = [row for row in rows if (row["kind"], row["ranks"]) == (kind, num_ranks)]
            if not here:
                continue
            every = [schedule for row in here for schedule in row["schedules"]]
            summary.append(
                {
                    "kind": kind,
                    "ranks": num_ranks,
                    "rows": len(here),
                    "median_emulated_e_chosen": median_of(here, "emulated_e_chosen"),
                    "median_predicted_e_chosen": median_of(here, "predicted_e_chosen"),
                    "median_emulated_e_fastest": median_of(here, "emulated_e_fastest"),
                    "median_bound_of_emulated_e": median_of(here, "bound_of_emulated_e"),
                    "chosen_within_5_percent_of_fastest": sum(
                        row["emulated_us_chosen"] <= CLOSE * row["emulated_us_fastest"] for row in here
                    ),
                    "median_predicted_over_emulated_us": round(
                        statistics.median(s["predicted_us"] / s["emulated_us"] for s in every), 3
                    ),
                    "median_predicted_over_measured_gemm_us": round(
                        statistics.median(row["predicted_gemm_us"] / row["gemm_us"] for row in here), 3
                    ),
                    "wrong_results": sum(not schedule["right"] for schedule in every),
                }
            )
    return summary


COLUMNS = (
    *("shape", "ranks", "tokens", "gemm_us", "emulated_communication_us", "emulated_serial_us", "bound_of_emulated_e"),
    *("chosen", "emulated_us_chosen", "predicted_us_chosen", "emulated_e_chosen", "predicted_e_chosen"),
    *("fastest", "emulated_us_fastest", "emulated_e_fastest"),
)


def say_row(row: dict) -> None:
    """As a line of a Markdown table."""
    wrong = "" if all(schedule["right"] for schedule in row["schedules"]) else " WRONG"
    print("| " + " | ".join(str(row[key]) for key in COLUMNS) + wrong + " |", flush=True)


def make_bench(device: torch.device, dtype: str, shapes: Sequence[Shape], tokens: Sequence[int]) -> tuple[Bench, dict]:
    """The groups, what peers hold, and the measured link."""
    dist.init_process_group("fake", rank=RANK, world_size=max(RANKS), store=FakeStore())
    groups = {n: dist.new_group(list(range(n))) for n in RANKS}
    most = max(max(tokens) * (shape.k if shape.kind == GATHER else shape.n) for shape in shapes)
    arena = torch.empty(max(most, 1 << 18), dtype=getattr(torch, dtype), pin_memory=device.type == "cuda")
    arena.copy_(torch.randn(arena.shape, device=device))
    peers = EmulatedPeers(device, arena.nbytes)
    clock = Clock(device)
    topology, link = measure_link(peers, clock, arena)
    return Bench(device, dtype, peers, clock, arena, groups, topology), link


def run(bench: Bench, shapes: Sequence[Shape], tokens: Sequence[int], until: float) -> tuple[list[dict], int]:
    """Rows, and how many cases are left out because `until` has come; those of most tokens come first."""
    print("\nPeers are emulated.\n\n| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    rows, left_out = [], 0
    for shape, num_ranks, count in [(s, n, t) for t in reversed(tokens) for s in shapes for n in RANKS]:
        if time.perf_counter() > until:
            left_out += 1
            continue
        rows.append(measure(bench, shape, num_ranks, count))
        say_row(rows[-1])
    return rows, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, no file of results unless --json is given")
    parser.add_argument("--seconds", type=float, default=160, help="after which no case is begun (%(default)s)")
    parser.add_argument("--json", help="default: results/gpu_overlap.json")
    options = parser.parse_args()
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu: times there say nothing; allowed is --device cpu --quick")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_overlap: no GPU here. Nothing was run.")
        return
    if options.device == "cpu":
        torch.set_num_threads(1)  # for tensors as small as these
    begin = time.perf_counter()
    device = torch.device(options.device)
    shapes, tokens = (QUICK_SHAPES, QUICK_TOKENS) if options.quick else (SHAPES, TOKENS)
    torch.manual_seed(0)
    bench, link = make_bench(device, "bfloat16" if device.type == "cuda" else "float32", shapes, tokens)
    print(link)
    check_public_functions(bench)
    contention = slow_downs(bench, shapes, min(CONTENTION_TOKENS, max(tokens))) if device.type == "cuda" else []
    rows, left_out = run(bench, shapes, tokens, begin + options.seconds)
    summary = summarise(rows)
    print("\n" + "\n".join(map(str, summary)))
    if left_out:
        print(f"! {left_out} cases left out after {options.seconds:.0f} s")
    if options.json or not options.quick:
        head = machine.describe("torch")
        head["machine"]["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else None
        head["note"] = "one rank alone; its peers are emulated by copies from and to host memory"
        parts = {"summary": summary, "contention": contention, "rows": rows}
        results = {**head, "gemm_model": MODEL, "emulated_link": link, "left_out": left_out, **parts}
        machine.write(options.json or machine.RESULTS / "gpu_overlap.json", results)
    dist.destroy_process_group()
    print(f"took {time.perf_counter() - begin:.0f} s")
    sys.exit(1 if any(line["wrong_results"] for line in summary) else 0)


if __name__ == "__main__":
    main()
