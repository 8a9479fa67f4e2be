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
    """Creates the group's communicator on a device; see csrc/runtime/transport.h. Collective among its ranks."""

def record_use(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Keeps the tensor's memory until a stream has finished with it; see csrc/runtime/arena_view.h."""

def view_arena(tensor: torch.Tensor, arena: torch.Tensor, offset_bytes: int) -> None:
    """Makes `tensor` and all its views use the memory of `arena` from `offset_bytes` on; see
    csrc/runtime/arena_view.h."""

def release_memory(tensor: torch.Tensor, when_read: str) -> None:
    """Takes the memory of the arena away from `tensor`. An operator that reads the tensor or a view of it before the
    next `view_arena` raises RuntimeError with the message `when_read`."""

def fingerprint_of(tensor: torch.Tensor) -> int:
    """Returns a hash of a tensor's contents; see csrc/runtime/writes.h."""

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
        """True if the result is the input itself."""

    @property
    def communications(self) -> list[tuple[str, str, list[int], list[int], int, int, int]]:
        """For each step that communicates: op, reduce op, mesh dims, group size, gather dim, shard dim."""

    @property
    def group_names(self) -> list[str]:
        """Registered names of the process groups."""

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
        """The fields that must be equal on all ranks of a redistribute, by name."""

    def run(self, input: torch.Tensor) -> torch.Tensor: ...
    def run_into(self, input: torch.Tensor, out: torch.Tensor) -> None: ...
    def check_out(self, input: torch.Tensor, out: torch.Tensor) -> None:
        """Raises the error that `run_into` would raise for `out`."""

    def start(self, input: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Returns the result and whether it is still being computed; if so, it is registered for `wait_tensor`."""

    def start_into(self, input: torch.Tensor, out: torch.Tensor) -> torch.distributed.distributed_c10d.Work | None:
        """Starts to write the result to `out`. Returns a work to wait for, or None if nothing is pending."""

    def run_all(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

class CompiledProgram:
    """One rank's program for a plan, or for an operator's text (`compiled`)."""

    def __init__(self, plan_bytes: bytes, rank: int) -> None: ...
    @property
    def groups(self) -> list[tuple[list[int], list[int]]]:
        """(mesh dims, ranks ascending) of each group the program communicates in."""

    def bind(self, group_names: Sequence[str]) -> Executable:
        """Binds the program to process groups. `group_names` has a registered name for each of `groups`."""

def compiled(text: str, rank: int) -> CompiledProgram:
    """Compiles an operator's text for a rank and caches the program. `executable` uses the same cache."""

def executable(text: str, group_names: Sequence[str], rank: int) -> Executable:
    """Returns the executable for an operator's text, bound to these groups. It is cached."""

class StridedCopy:
    """The copy that packs and unpacks, for tests and benchmarks.

    A box is ``(src_offset, dst_offset, sizes, src_strides, dst_strides)``, in elements of `item_bytes`, outermost dim
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

    `sizes` are (m, n, k). A matrix is ``(offset, row_stride, column_stride)`` in elements; `batch_strides` are those of
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
        """Returns the reason why the device's 8-bit float units cannot compute this scaled product, or None."""

    def waves(self, lhs: torch.Tensor, dst: torch.Tensor, sms_left: int = 0) -> float | None:
        """Returns the number of waves in which dst's device computes the product, given the dtypes; None if unknown."""

class ExpertPlacement:
    """The ranks that hold each expert. A replica is one expert on one rank, numbered in the order of ranks. A code is a
    replica's number plus 1, or 0 for none."""

    def __init__(self, num_experts: int, experts_of_rank: Sequence[Sequence[int]]) -> None:
        """Raises ValueError if an expert is on no rank, is out of range, or is listed twice for one rank."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def first_replica(self) -> list[int]:
        """First replica of each rank, then the number of replicas."""

    @property
    def rank_of_replica(self) -> list[int]: ...
    @property
    def hash(self) -> int: ...
    def choose(self, expert_ids: torch.Tensor, rank: int, node_of_rank: Sequence[int]) -> torch.Tensor:
        """Returns int32 codes for the int64 ids of `rank`, in host memory. Raises ValueError if an id is out of
        range."""

def count_by_replica(codes: torch.Tensor, num_replicas: int) -> torch.Tensor: ...
def drop_beyond(codes: torch.Tensor, taken: torch.Tensor, capacity: int) -> tuple[torch.Tensor, int]:
    """Drops tokens beyond the capacity. A replica that has `taken` some tokens already takes `capacity` in all. Returns
    the codes, in which dropped ones are 0, and the number of dropped ones."""

def route_rows(
    codes: torch.Tensor, target_of_replica: Sequence[int], num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Returns `send_rows` and `returns` of a `RowExchange`, and the numbers of rows and of codes for each rank. A
    target of -1 is no rank."""

def expand_rows(
    codes: torch.Tensor, first_replica: int, num_local: int, origins: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the pairs of a row and a code, ordered by expert, then by origin; the indices of pairs by row; and the
    number of pairs of each expert."""

class DevicePlacement:
    """The tables of an `ExpertPlacement` on a device. Its methods do not wait for the device."""

    def __init__(self, placement: ExpertPlacement, device: str) -> None: ...
    def choose(self, expert_ids: torch.Tensor, rank: int) -> torch.Tensor: ...
    def route(self, codes: torch.Tensor, rows_per_rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns `send_rows` and `returns` of a `RowExchange`, and the number of codes without a row."""

def expand_rows_on_device(
    codes: torch.Tensor, first_replica: int, num_local: int, origins: torch.Tensor | None, capacity: int, max_pairs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does what `expand_rows` does for at most `max_pairs` pairs and `capacity` pairs of each expert. Also returns the
    number of dropped pairs."""

class RowExchange:
    """The rows that ranks of a group send each other, and the places at which returned rows are summed.

    `wire` is the device type of the tensors that the group transfers.
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
    """All-to-all of int64 rows from and to host memory, staged on a device."""

def record_bytes(parts: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of a row whose parts are sent together."""

def take_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose row i is row ``index[i]`` of `rows`, or zeros for -1."""

def sum_rows(rows: torch.Tensor, table: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Returns the sums of the rows that each row of `table` names, added in the order of its columns."""

def take_weighted_rows(rows: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
def dot_rows(rows: torch.Tensor, table: torch.Tensor, others: torch.Tensor, like: torch.Tensor) -> torch.Tensor: ...

class BatchHandle:
    """A batch that was started. On CPU a wait blocks the caller; on devices with streams it makes the current stream
    wait. Every wait raises DistBackendError if the batch has failed."""

    def wait_for_sources(self) -> None:
        """Waits until no source is read any more, so that the sources may change."""

    def wait_for_destination(self, destination: int) -> None:
        """Waits until this rank's part of a destination, given by its index, is complete."""

    def wait_for_destination_and_sends(self, destination: int) -> None:
        """Waits until this rank's part of a destination is complete, and this rank has sent its elements of the other
        parts."""

    def wait(self) -> None:
        """Waits for the end of the batch."""

    def is_done(self) -> bool:
        """Returns True once the batch has ended; does not wait."""

    @property
    def completion_order(self) -> list[int]:
        """Indices of the destinations, in the order in which `wait_for_destination_and_sends` returns for them."""

class BoundBatch:
    """One rank's part of a batch, bound to a process group that has all ranks of the batch's layouts. It does not keep
    the group alive."""

    def __init__(self, batch_bytes: bytes, rank: int, group_name: str, group_device: str) -> None:
        """`batch_bytes`: from `Batch.to_bytes`. `group_device`: the type of device whose tensors the group transfers,
        ``"cpu"`` for Gloo. Raises ValueError if a rank of the layouts is not in the group."""

    def run(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
        """Fills `destinations`. Both lists have this rank's parts, with the shapes and dtypes of their layouts. Raises
        ValueError for other tensors, and DistBackendError if a transfer fails."""

    def start(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> BatchHandle:
        """Like `run`, but returns once the first transfers are under way. Sources must not change before
        `wait_for_sources` returns."""

def nothing_watches(in_backward: bool) -> bool:
    """True if no mode, trace or transform is active on this thread, and no backward (unless `in_backward`)."""

def thread_id() -> int:
    """Returns autograd's number of this thread."""

def thread_of_current_node() -> int:
    """Returns autograd's number of the thread that created the node whose backward is running. For devices other than
    CPU it is not this thread, because their backwards run on threads of autograd."""

def as_view(base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Makes `part`, which must be new and not require a gradient, a view of `base` for autograd. Autograd cannot follow
    writes in place to such a view: they raise where the gradient of the other tensor would be wrong."""

def exchange_memory(a: torch.Tensor, b: torch.Tensor) -> None:
    """Swaps the memory of two storages of equal size. All tensors that share these storages see the swap."""

def begin_trace() -> None: ...
def end_trace() -> list[tuple[str, str, int, int, float, float]]:
    """Returns the events since `begin_trace`: lane, instruction, chunk, run, and start and end in seconds."""

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

    This applies to products that cuBLASLt computes on CUDA. With True, sums keep the precision of the tensor cores,
    about 14 bits, which is faster on Hopper. With False, they are added to float32 accumulators at intervals. The
    setting is per process and initially False, as in torch; if ranks differ, so may the bits of their results. Returns
    the previous setting. Raises ValueError for anything but a bool.
    """

def invalidate_sized_plans() -> None:
    """Must be called after `tables.current` changes. Operators with sizes then plan again."""

def compare_ranks(on: bool) -> None:
    """Makes operators check that all ranks run the same (`check_ranks`)."""

def cached_staging_bytes() -> int: ...
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
