# Written by `make stubs` from the bindings in csrc/bindings.
"""The extension module that runs programs over c10d process groups. Import torch before it."""

from collections.abc import Sequence

import torch
import torch.distributed.distributed_c10d

torch_version: str
has_cuda: bool

def use_peer_copies(group_name: str, device: str, arena_bytes: int, min_bytes: int) -> None:
    """Makes later gathers and messages of the group copy between arenas of `arena_bytes` per rank on the device;
    transfers of fewer than `min_bytes` still use the process group. All ranks of the group must call it. Raises
    ValueError if the device or the sizes do not allow it; see csrc/runtime/peers/peer_transport.h."""

def connect_group(group_name: str, device: str) -> None:
    """Creates the group's communicator on a device, which otherwise happens in the first transfer. All ranks of the
    group must call it."""

def record_use(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Tells the allocator that `stream` uses the tensor's memory, so that the memory is not reused before the stream
    has finished its queued work."""

def view_arena(tensor: torch.Tensor, arena: torch.Tensor, offset_bytes: int) -> None:
    """Makes `tensor` and all its views use the memory of `arena` from `offset_bytes` on. The previous content is not
    copied. Raises ValueError unless `tensor` is contiguous and fits into `arena`, a flat uint8 tensor on its device."""

def release_memory(tensor: torch.Tensor, when_read: str) -> None:
    """Drops the memory of `tensor`. An operator that reads the tensor or a view of it before the next `view_arena`
    raises RuntimeError with the message `when_read`."""

def fingerprint_of(tensor: torch.Tensor) -> int:
    """Returns a hash of a tensor's content, of all bytes on CPU, else of three sums. Waits for the device."""

class Executable:
    """A program bound to process groups, which it does not keep alive."""

    @property
    def groups(self) -> list[tuple[list[int], list[int]]]:
        """(mesh dims, ranks ascending) of each group the program communicates in."""

    @property
    def input_shape(self) -> list[int]:
        """The shape of the first input."""

    @property
    def input_shapes(self) -> list[list[int]]:
        """The shapes of the inputs."""

    @property
    def output_shape(self) -> list[int]:
        """The shape of the first output."""

    @property
    def is_identity(self) -> bool:
        """True if the result is the input itself."""

    @property
    def communications(self) -> list[tuple[str, str, list[int], list[int], int, int, int]]:
        """For each step that communicates: op, reduce op or "", mesh dims, ranks of this rank's group, group size,
        gather dim, shard dim."""

    @property
    def group_names(self) -> list[str]:
        """Registered names of the process groups."""

    @property
    def communicates(self) -> bool:
        """True if this rank communicates."""

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives from other ranks in a run."""

    @property
    def rank(self) -> int: ...
    @property
    def mesh_ranks(self) -> list[int]:
        """The ranks of the mesh in row-major order; with two meshes, the ranks of both, ascending."""

    @property
    def signature(self) -> dict[str, str]:
        """The properties that must be equal on all ranks that run the program, by name."""

    def run(self, input: torch.Tensor) -> torch.Tensor:
        """Runs a program with one input and one output. Returns a new tensor, or `input` if there is nothing to do.
        Raises ValueError for an input of another shape or element size, and DistBackendError if a transfer fails."""

    def run_into(self, input: torch.Tensor, out: torch.Tensor) -> None:
        """Like `run`, but writes to `out`, which must be contiguous and not share memory with `input`. One exception:
        in a one-step gather of a 1-D tensor, `input` may be the part of `out` with the same elements."""

    def check_out(self, input: torch.Tensor, out: torch.Tensor) -> None:
        """Raises the error that `run_into` would raise for `out`."""

    def start(self, input: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Like `run`, but returns once the first transfers are under way: (result, True if it must be waited for with
        torch's `wait_tensor`)."""

    def start_into(self, input: torch.Tensor, out: torch.Tensor) -> torch.distributed.distributed_c10d.Work | None:
        """Like `run_into`, but returns once the first transfers are under way: a Work to wait for, or None if `out` is
        complete."""

    def run_all(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs a program with any number of inputs. Returns its outputs."""

class CompiledProgram:
    """One rank's program, compiled from a plan or from an operator's text (`compiled`)."""

    def __init__(self, plan_bytes: bytes, rank: int) -> None:
        """`plan_bytes`: from `Plan.to_bytes`. Raises ValueError for other bytes, and if the rank is not on the mesh."""

    @property
    def groups(self) -> list[tuple[list[int], list[int]]]:
        """(mesh dims, ranks ascending) of each group the program communicates in."""

    def bind(self, group_names: Sequence[str]) -> Executable:
        """Binds the program to process groups. `group_names` has a registered name for each item of `groups`. Raises
        ValueError if a process group has other ranks."""

def compiled(text: str, rank: int) -> CompiledProgram:
    """Returns the program of a rank for an operator's text. Programs are cached, also for `executable`. Raises
    ValueError for other texts, and if the rank is not on the mesh."""

def executable(text: str, group_names: Sequence[str], rank: int) -> Executable:
    """Returns the executable of a rank for an operator's text, bound to these groups. It is cached. Raises ValueError
    for other texts and groups."""

class StridedCopy:
    """A copy of boxes between two tensors, as in packing and unpacking, for tests and benchmarks.

    A box is ``(src_offset, dst_offset, sizes, src_strides, dst_strides)``, in elements of `item_bytes` bytes, outermost
    dim first. Nothing is checked.
    """

    def __init__(
        self, boxes: Sequence[tuple[int, int, Sequence[int], Sequence[int], Sequence[int]]], item_bytes: int
    ) -> None: ...
    def run(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies the boxes from `src` to `dst`: flat tensors of one dtype on one device, which must not overlap."""

def reduce_parts(
    op: str, parts: Sequence[torch.Tensor], divisor: float, dst: torch.Tensor, with_aten: bool = False
) -> None:
    """Computes dst = (op over the parts, in order) / divisor, for tests and benchmarks.

    `op` is a reduction, such as ``"sum"``. All tensors are flat, of one size, dtype and device. With `with_aten`, ATen
    computes it, as on devices for which shardwright has no reduction. Nothing is checked.
    """

class Gemm:
    """A product dst = lhs x rhs of matrices in flat tensors, or a batch of `count` products, for tests and benchmarks.

    `sizes` are (m, n, k). A matrix is ``(offset, row_stride, column_stride)`` in elements; `batch_strides` are those of
    lhs, rhs and dst. With `accumulates`, the product is added to dst; otherwise the matrix at `bias`, if given, is
    added to every product. Nothing is checked.
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
        """Computes the product. lhs and rhs have one floating dtype; dst has the same dtype, or float32. The product
        leaves `sms_left` multiprocessors unused."""

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
        """Computes the product of 8-bit floats with float32 scales, into bfloat16 or float32.

        A scale has one element, or one per row of lhs or column of rhs. Raises ValueError for other dtypes.
        """

    def why_not_scaled(self, lhs: torch.Tensor, rhs: torch.Tensor, dst: torch.Tensor) -> str | None:
        """Returns the reason why hardware for 8-bit floats cannot compute this scaled product, or None if it can."""

    def waves(self, lhs: torch.Tensor, dst: torch.Tensor, sms_left: int = 0) -> float | None:
        """Returns the number of waves of tiles in which dst's device computes the product, or None if it does not
        report it."""

class ExpertPlacement:
    """The experts on each rank of a group. A replica is one expert on one rank; replicas are numbered in the order of
    ranks. A code is a replica's number plus 1, or 0 for no expert."""

    def __init__(self, num_experts: int, experts_of_rank: Sequence[Sequence[int]]) -> None:
        """`experts_of_rank`: for each rank of the group, its experts in their order. Raises ValueError if an expert is
        on no rank, is out of range, or is listed twice for one rank."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def first_replica(self) -> list[int]:
        """The first replica of each rank, then the number of replicas."""

    @property
    def rank_of_replica(self) -> list[int]:
        """The rank of each replica."""

    @property
    def hash(self) -> int:
        """A hash of the arguments, for ranks to compare."""

    def choose(self, expert_ids: torch.Tensor, rank: int, node_of_rank: Sequence[int]) -> torch.Tensor:
        """Returns int32 codes for `expert_ids` ([tokens, experts per token], int64; -1 for no expert), the choices of
        `rank`. Both are in host memory. `node_of_rank` may be empty. Raises ValueError if an id is out of range."""

def count_by_replica(codes: torch.Tensor, num_replicas: int) -> torch.Tensor:
    """Returns the number of codes for each replica, as int64."""

def drop_beyond_capacity(codes: torch.Tensor, taken: torch.Tensor, capacity: int) -> tuple[torch.Tensor, int]:
    """Limits the number of tokens of each replica to `capacity`, of which it has ``taken[replica]`` already. Returns
    (codes, number of dropped codes). The codes of further tokens are dropped: they become 0."""

def route_rows(
    codes: torch.Tensor, target_of_replica: Sequence[int], num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Returns (send_rows, rows_of_token, number of rows for each rank, number of codes for each rank). The first two
    are arguments of a `RowExchange`. Codes of replicas whose target is -1 are not sent."""

def expand_rows(
    codes: torch.Tensor, first_replica: int, num_local: int, origins: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (pairs, copies, counts) for the replicas ``first_replica`` to ``first_replica + num_local - 1``, from the
    codes of received rows: `codes` is [rows, codes per row], int32. `origins`: a sort key for each row, int64, or None
        for the order of rows. `pairs`: for each copy of a row, ``row * codes per row + column``, sorted by expert, then
        by the row's origin. `copies`: for each code, the index of its copy, or -1. `counts`: number of copies for each
        local expert."""

class DevicePlacement:
    """The tables of an `ExpertPlacement` on a device. Its methods do not wait for the device."""

    def __init__(self, placement: ExpertPlacement, device: str) -> None: ...
    def choose(self, expert_ids: torch.Tensor, rank: int) -> torch.Tensor:
        """Like `ExpertPlacement.choose` without nodes, on the device."""

    def route(self, codes: torch.Tensor, rows_per_rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (send_rows, rows_of_token, number of codes without a row). The first two are arguments of a
        `RowExchange` with `rows_per_rank` rows for each rank."""

def expand_rows_on_device(
    codes: torch.Tensor, first_replica: int, num_local: int, origins: torch.Tensor | None, capacity: int, max_pairs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like `expand_rows`, for at most `max_pairs` copies in all and `capacity` copies for each expert. Also returns the
    number of dropped copies."""

class RowExchange:
    """The rows that the ranks of a group send each other, and the sums of the results that they send back
    (csrc/runtime/expert_exchange.h). Parts are tensors [rows, width]."""

    def __init__(
        self,
        group_name: str,
        group_device: str,
        send_rows: torch.Tensor,
        rows_of_token: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """`group_device`: the type of device whose tensors the group transfers. `send_rows`: row numbers by receiving
        rank; -1 is a row of zeros. `rows_of_token`: [rows, columns], the indices of each row in `send_rows`, then
        -1."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the parts that `send` takes."""

    @property
    def num_received(self) -> int:
        """Number of rows that this rank receives, including the rows from itself."""

    @property
    def num_sent_to_others(self) -> int: ...
    @property
    def num_received_from_others(self) -> int: ...
    def send(self, step: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sends the rows of all parts. Returns the received rows of each part, ordered by sending rank. Raises
        DistBackendError that names `step` if the transfer fails."""

    def send_back(self, step: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sends results for received rows back. Returns, for each part, the sum of the results of each row."""

def exchange_words(group_name: str, step: str, words: torch.Tensor, device: str) -> torch.Tensor:
    """Sends row r of `words` ([group size, n], int64, in host memory) to rank r. Returns a tensor whose row r is from
    rank r. The transfer uses `device`."""

def record_bytes(parts: Sequence[torch.Tensor]) -> int:
    """Returns the bytes that are sent for one row of these parts, with padding."""

def take_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose row i is ``rows[index[i]]``, or zeros if ``index[i]`` is -1."""

def sum_rows(rows: torch.Tensor, table: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Returns a tensor whose row m is the sum over j of ``weights[m, j] * rows[table[m, j]]``, without entries of -1.
    None means weights of 1."""

def take_weighted_rows(rows: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns, for each pair p (an index into the flat `weights` of shape [rows, n]), the row ``rows[p // n]`` times
    weight p; zeros for -1."""

def dot_rows(rows: torch.Tensor, table: torch.Tensor, others: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the dtype of `like`: element (m, j) is the dot product of ``rows[table[m, j]]`` and
    ``others[m]``, 0 for -1."""

class BatchHandle:
    """A batch that was started. On CPU a wait blocks the caller; on devices with streams it makes the current stream
    wait. Every wait raises DistBackendError if the batch has failed."""

    def wait_for_sources(self) -> None:
        """Waits until no source is read any more, so that the sources may change."""

    def wait_for_destination(self, destination: int) -> None:
        """Waits until this rank's part of a destination, given by its index, is complete."""

    def wait_for_destination_and_sends(self, destination: int) -> None:
        """Waits until this rank's part of a destination is complete, and this rank has sent all elements that it sends
        to the destination's parts on other ranks."""

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

def is_plain_eager(allow_backward: bool) -> bool:
    """Returns True if this thread runs plain eager code: no dispatch mode, trace or transform is active, and no
    backward runs. With `allow_backward`, a backward may run."""

def thread_id() -> int:
    """Returns the number that autograd gives to this thread."""

def thread_of_current_node() -> int:
    """Returns the number (see `thread_id`) of the thread that ran the forward of the node whose backward is running, or
    of this thread if no backward runs. On devices other than CPU backwards run on threads of autograd."""

def as_view(base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns `part` as a view of `base` for autograd. `part` must be new and not require a gradient. Autograd does not
    support writes in place to such a view: they raise RuntimeError if a gradient would be wrong."""

def exchange_memory(a: torch.Tensor, b: torch.Tensor) -> None:
    """Swaps the memory of the storages of two tensors, which must have equal sizes. All tensors on these storages are
    affected."""

def begin_trace() -> None:
    """Begins a trace. Discards the events of a trace that was not ended."""

def end_trace() -> list[tuple[str, str, int, int, float, float]]:
    """Ends the trace and returns its events: lane (``"compute"`` or ``"communication"``), instruction, chunk or -1,
    number of the run, and start and end in seconds since `begin_trace`."""

def register_capture_query(device_type: str, address: int) -> None:
    """Registers the CaptureQuery (csrc/runtime/side_stream.h) at this address. Needed before torch 2.15."""

def register_open_groups_query(device_type: str, address: int) -> None:
    """Registers the OpenGroupsQuery (csrc/runtime/open_groups.h) at this address."""

def check_no_open_group(device: str) -> None:
    """Raises RuntimeError if this thread has an open group of transfers for this type of device: on CUDA, of NCCL
    calls; on other types, as reported by the query from `register_open_groups_query`."""

def num_stream_events_made() -> int:
    """Returns the number of device events that were created."""

def register_device_copy(device_type: str, address: int) -> None:
    """Registers the DeviceCopy (csrc/runtime/local_ops.h) at this address."""

def is_capturing(device: str) -> bool:
    """Returns True if a graph is being captured on the current stream of a device, such as ``"cuda:0"``."""

def set_sm_carveout(sms: int) -> None:
    """Sets the number of multiprocessors that products leave to the kernels of transfers under way.

    This applies to products that cuBLASLt computes on CUDA. It is a hint, whose effect depends on the kernel. 0, the
    initial value, means the number in each product's schedule. The setting is per process; ranks may differ. Raises
    ValueError if `sms` is negative.
    """

def set_fast_accumulation(enabled: bool) -> bool:
    """Sets whether scaled products of 8-bit floats accumulate fast, like ``use_fast_accum=True`` of torch's scaled_mm.

    This applies to products that cuBLASLt computes on CUDA. With True, sums keep the precision of the tensor cores,
    about 14 bits, which is faster on Hopper. With False, they are added to float32 accumulators at intervals. The
    setting is per process and initially False, as in torch; if ranks differ, so may the bits of their results. Returns
    the previous setting. Raises ValueError for anything but a bool.
    """

def invalidate_sized_plans() -> None:
    """Makes operators with sizes plan again. Must be called after each change of `tables.current`."""

def set_check_ranks(enabled: bool) -> None:
    """Sets whether all ranks compare the program of each operator before anything is sent (`check_ranks`)."""

def cached_staging_bytes() -> int:
    """Returns the size of the memory that is cached for temporaries on CPU, without memory in use."""

def release_staging() -> None:
    """Frees the memory that is cached for temporaries on CPU (at most 256 MiB)."""

def finish_programs(timeout_seconds: float) -> bool:
    """Waits until all asynchronous programs on CPU are finished, but at most `timeout_seconds`. Then stops the progress
    threads, even if programs are left. For the end of the process. Returns True if all programs were finished in
    time."""

def drain(groups: Sequence[str]) -> None:
    """Makes every program on CPU that uses one of these process groups (names) start all its transfers."""

def counters() -> dict[str, int]:
    """Returns counts since the last reset: runs, bytes received from other ranks, bytes copied from peers' arenas,
    programs compiled from an operator's text, and runs on copies in host memory."""

def cast_products() -> dict[str, int]:
    """Returns the number of products of 8-bit floats that were cast to float32 on devices other than CPU, by reason."""

def reset_counters() -> None:
    """Sets `counters` and `cast_products` to 0."""
