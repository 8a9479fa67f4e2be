# Written by `make stubs` from the bindings in csrc/bindings.
"""The extension module that runs programs over c10d process groups. Import torch before it."""

from collections.abc import Sequence

import torch
import torch.distributed.distributed_c10d

torch_version: str
has_cuda: bool

def use_peer_copies(group_name: str, device: str, arena_bytes: int, min_bytes: int) -> None:
    """Gives the group an arena; see csrc/runtime/peers/peer_transport.h. Collective among its ranks."""

def connect_group(group_name: str, device: str) -> None:
    """Makes the group's communicator on a device; see csrc/runtime/transport.h. Collective among its ranks."""

def record_use(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Keeps the tensor's memory until a stream is done with it; see csrc/runtime/borrow.h."""

def borrow_memory(tensor: torch.Tensor, arena: torch.Tensor, offset_bytes: int) -> None:
    """Makes the memory of `arena` from a byte on that of `tensor` and of all its views; see csrc/runtime/borrow.h."""

def give_back_memory(tensor: torch.Tensor, when_read: str) -> None:
    """Takes the memory away. An operator that reads the tensor, or a view of it, before it borrows again raises
    RuntimeError with the text `when_read`."""

def fingerprint_of(tensor: torch.Tensor) -> int:
    """Returns a number that differs, but for chance, between contents of a tensor; see csrc/runtime/writes.h."""

class Executable:
    """A program bound to process groups, which it does not keep alive."""

    @property
    def groups(self) -> list[tuple[list[int], list[int]]]:
        """(mesh dims, ranks ascending) of each group the program communicates in."""

    @property
    def input_shape(self) -> list[int]: ...
    @property
    def input_shapes(self) -> list[list[int]]: ...
    @property
    def output_shape(self) -> list[int]: ...
    @property
    def is_identity(self) -> bool:
        """Returns whether the result is the input itself."""

    @property
    def communications(self) -> list[tuple[str, str, list[int], list[int], int, int, int]]:
        """For each step that communicates: op, reduce op, mesh dims, group size, gather dim, shard dim."""

    @property
    def group_names(self) -> list[str]:
        """Registered names of the process groups that it is bound to."""

    @property
    def communicates(self) -> bool: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def mesh_ranks(self) -> list[int]: ...
    @property
    def signature(self) -> dict[str, str]:
        """The fields that must be equal on all ranks that run the same redistribute, by name."""

    def run(self, input: torch.Tensor) -> torch.Tensor: ...
    def run_into(self, input: torch.Tensor, out: torch.Tensor) -> None: ...
    def check_out(self, input: torch.Tensor, out: torch.Tensor) -> None:
        """Raises what `run_into` would raise because of `out`."""

    def start(self, input: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Returns the result and whether it is still being computed; if so it is registered for `wait_tensor`."""

    def start_into(self, input: torch.Tensor, out: torch.Tensor) -> torch.distributed.distributed_c10d.Work | None:
        """Starts to write the result to `out`; returns what to wait for, or None if nothing is pending."""

    def run_all(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

class CompiledProgram:
    """One rank's program for a plan, or for what `compiled` is given."""

    def __init__(self, plan_bytes: bytes, rank: int) -> None: ...
    @property
    def groups(self) -> list[tuple[list[int], list[int]]]:
        """(mesh dims, ranks ascending) of each group the program communicates in."""

    def bind(self, group_names: Sequence[str]) -> Executable:
        """Binds the program to process groups; `group_names` has the registered name of one for each of `groups`."""

def compiled(text: str, rank: int) -> CompiledProgram:
    """Compiles an operator's text for a rank, once: later calls, and those of `executable`, find the program."""

def executable(text: str, group_names: Sequence[str], rank: int) -> Executable:
    """Returns the cached executable for an operator's text, bound to these groups."""

class StridedCopy:
    """The copy that packs and unpacks, for tests and benchmarks.

    Boxes are ``(src_offset, dst_offset, sizes, src_strides, dst_strides)``, in elements of `item_bytes`, outermost dim
    first. Nothing is checked.
    """

    def __init__(
        self, boxes: Sequence[tuple[int, int, Sequence[int], Sequence[int], Sequence[int]]], item_bytes: int
    ) -> None: ...
    def run(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies between flat tensors on one device, which must not overlap."""

def reduce_parts(
    op: str, parts: Sequence[torch.Tensor], divisor: float, dst: torch.Tensor, with_aten: bool = False
) -> None:
    """Computes dst = (op over the parts, in order) / divisor, for tests and benchmarks.

    All tensors are flat, of one size, dtype and device. `with_aten` uses ATen, as on devices for which shardwright has
    no reduction of its own. Nothing is checked.
    """

class Gemm:
    """A product of matrices in flat tensors, or a batch of products, for tests and benchmarks: dst = lhs x rhs.

    `sizes` are (m, n, k). A place is ``(offset, row_stride, column_stride)`` in elements; `batch_strides` are those of
    lhs, rhs and dst. With `accumulates` the product is added to dst; else the matrix at `bias` is added to every
    product. Nothing is checked.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        lhs: tuple[int, int, int],
        rhs: tuple[int, int, int],
        dst: tuple[int, int, int],
        count: int = 1,
        batch_strides: tuple[int, int, int] = (0, 0, 0),
        accumulates: bool = False,
        bias: tuple[int, int, int] | None = None,
    ) -> None: ...
    def multiply(
        self,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        dst: torch.Tensor,
        bias: torch.Tensor | None = None,
        sms_left: int = 0,
    ) -> None:
        """lhs and rhs have one floating dtype; dst has it too, or float32. `sms_left` multiprocessors stay unused."""

    def multiply_scaled(
        self,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        lhs_scale: torch.Tensor,
        rhs_scale: torch.Tensor,
        dst: torch.Tensor,
        sms_left: int = 0,
        fast_accumulation: bool = False,
    ) -> None:
        """Multiplies 8-bit floats with float32 scales into bfloat16 or float32.

        Scales have no dims, or one of length m (lhs) or n (rhs). Raises ValueError on other dtypes.
        """

    def why_not_scaled(self, lhs: torch.Tensor, rhs: torch.Tensor, dst: torch.Tensor) -> str | None:
        """Returns why the device's units for 8-bit floats cannot do a scaled product of these; None if they can."""

    def waves(self, lhs: torch.Tensor, dst: torch.Tensor, sms_left: int = 0) -> float | None:
        """Returns in how many waves dst's device computes the product, given the dtypes; None if that is not known."""

class ExpertPlacement:
    """The ranks that hold each expert. A replica is one expert on one rank; they are numbered by rank. A code is the
    number of a replica plus 1, or 0 for none."""

    def __init__(self, num_experts: int, experts_of_rank: Sequence[Sequence[int]]) -> None:
        """Raises ValueError where an expert is on no rank, out of range or twice on one rank."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def first_replica(self) -> list[int]:
        """By rank, and one more after the last."""

    @property
    def rank_of_replica(self) -> list[int]: ...
    @property
    def hash(self) -> int: ...
    def choose(self, expert_ids: torch.Tensor, rank: int, node_of_rank: Sequence[int]) -> torch.Tensor:
        """Codes, int32, for the int64 ids of `rank`, in host memory. Raises ValueError on ids out of range."""

def count_by_replica(codes: torch.Tensor, num_replicas: int) -> torch.Tensor: ...
def drop_beyond(codes: torch.Tensor, taken: torch.Tensor, capacity: int) -> tuple[torch.Tensor, int]:
    """The codes that are left where replicas have `taken` so many and take `capacity` in all, and how many are not."""

def route_rows(
    codes: torch.Tensor, target_of_replica: Sequence[int], num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """send_rows and returns of a `RowExchange`, and rows and codes for each rank. -1 is no rank."""

def expand_rows(
    codes: torch.Tensor, first_replica: int, num_local: int, origins: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of a row and a code by expert, then by origin; places of pairs by row; pairs of each expert."""

class DevicePlacement:
    """The same as tables on a device, whose functions do not wait for it."""

    def __init__(self, placement: ExpertPlacement, device: str) -> None: ...
    def choose(self, expert_ids: torch.Tensor, rank: int) -> torch.Tensor: ...
    def route(self, codes: torch.Tensor, rows_per_rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """send_rows and returns of a `RowExchange`, and how many codes have no row."""

def expand_rows_on_device(
    codes: torch.Tensor,
    first_replica: int,
    num_local: int,
    origins: torch.Tensor | None,
    capacity: int,
    num_places: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for `num_places` pairs at most and `capacity` of each expert, and how many are too many."""

class RowExchange:
    """The rows that travel between the ranks of a group, and the places where their answers are summed.

    `wire`: the kind of device whose tensors the group takes.
    """

    def __init__(
        self,
        group_name: str,
        wire: str,
        send_rows: torch.Tensor,
        returns: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_received(self) -> int: ...
    @property
    def num_sent_to_others(self) -> int: ...
    @property
    def num_received_from_others(self) -> int: ...
    def send(self, step: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def send_back(self, step: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

def exchange_words(group_name: str, step: str, words: torch.Tensor, device: str) -> torch.Tensor:
    """An all-to-all of rows of int64 from and to host memory, by way of a device."""

def record_bytes(parts: Sequence[torch.Tensor]) -> int:
    """Bytes of a row whose parts travel together."""

def take_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row index[i] as row i; zeros for -1."""

def sum_rows(rows: torch.Tensor, table: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sums of the rows that each row of a table names, in the order of its columns."""

def take_weighted_rows(rows: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
def dot_rows(rows: torch.Tensor, table: torch.Tensor, others: torch.Tensor, like: torch.Tensor) -> torch.Tensor: ...

class BatchHandle:
    """A batch under way. On devices with streams, waiting makes the current stream wait."""

    def wait_for_sources(self) -> None: ...
    def wait_for_destination(self, destination: int) -> None: ...
    def wait_for_departure(self, destination: int) -> None:
        """Waits until a destination is complete here, and until what other ranks get of the same has left."""

    def wait(self) -> None: ...
    def is_done(self) -> bool: ...
    @property
    def departures(self) -> list[int]:
        """The destinations, by number, in the order in which `wait_for_departure` ends."""

class BoundBatch:
    """A rank's part in a batch, bound to the group whose ranks the batch names. It does not keep the group alive.

    `wire` is the type of device whose tensors the group takes.
    """

    def __init__(self, batch_bytes: bytes, rank: int, group_name: str, wire: str) -> None: ...
    def run(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None: ...
    def start(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> BatchHandle: ...

def nothing_watches(in_backward: bool) -> bool:
    """Returns whether no mode, trace or transform watches this thread, and, unless `in_backward`, no backward runs."""

def thread_id() -> int:
    """Returns autograd's number of this thread."""

def thread_of_current_node() -> int:
    """Returns autograd's number of the thread that made the node whose backward is running. It is not this thread for
    devices other than CPU, whose backwards run on threads of autograd."""

def as_view(base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Makes `part`, which must be new and not require a gradient, a view of `base` for autograd. Autograd cannot follow
    writes in place to such a view: they raise where the gradient of the other tensor would be wrong."""

def exchange_memory(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges the memory of two storages of as many bytes, whatever other tensors read it."""

def begin_trace() -> None: ...
def end_trace() -> list[tuple[str, str, int, int, float, float]]:
    """Returns lane, instruction, chunk, run, start and end in seconds of everything since `begin_trace`."""

def register_capture_query(device_type: str, address: int) -> None:
    """Registers a CaptureQuery by its address, for torch before 2.15."""

def register_open_groups_query(device_type: str, address: int) -> None:
    """Registers an OpenGroupsQuery by its address."""

def check_no_open_group(device: str) -> None: ...
def num_stream_events_made() -> int: ...
def register_device_copy(device_type: str, address: int) -> None:
    """Registers a DeviceCopy by its address."""

def is_capturing(device: str) -> bool: ...
def set_sm_carveout(sms: int) -> None:
    """Sets how many multiprocessors products leave to the kernels of transfers that are under way.

    This applies to products that cuBLASLt computes on CUDA. It is a hint, whose effect depends on the kernel. With 0,
    the initial value, the library decides. The setting is per process; ranks may differ. Raises ValueError if negative.
    """

def set_fast_accumulation(enabled: bool) -> bool:
    """Sets whether scaled products of 8-bit floats accumulate fast, like ``use_fast_accum=True`` of torch's scaled_mm.

    This applies to products that cuBLASLt computes on CUDA. Sums then keep the precision of the tensor cores, about 14
    bits, instead of being added to float32 accumulators at intervals, which is faster on Hopper. The setting is per
    process and initially False, as in torch; if ranks differ, so may the bits of their results. Returns the previous
    setting. Raises ValueError for anything but a bool.
    """

def note_changed_tables() -> None:
    """Must be called when `tables.current` has changed. Operators with sizes then ask for plans again."""

def compare_ranks(on: bool) -> None:
    """Makes operators compare between ranks what they run (`check_ranks`)."""

def kept_staging_bytes() -> int: ...
def release_staging() -> None:
    """Frees the memory of temporaries that is kept for the next run (on CPU, at most 256 MiB)."""

def finish_programs(timeout_seconds: float) -> bool:
    """Waits at most this long for asynchronous programs, at the end of the process. True if all are finished."""

def drain(groups: Sequence[str]) -> None:
    """Makes every program on CPU that uses one of these process groups start all its communications."""

def counters() -> dict[str, int]: ...
def cast_products() -> dict[str, int]:
    """Counts products of 8-bit floats, on devices other than CPU, that were cast to float32, by reason."""

def reset_counters() -> None: ...
