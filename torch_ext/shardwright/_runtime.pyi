"""Types of the extension module that runs programs. Import torch before it."""

from collections.abc import Sequence

import torch

torch_version: str
has_cuda: bool

class CompiledProgram:
    """One rank's program for a plan."""

    def __init__(self, plan_bytes: bytes, rank: int) -> None: ...
    @property
    def groups(self) -> list[tuple[list[int], list[int]]]:
        """(mesh dims, ranks ascending) of each group the program communicates in."""

    def bind(self, group_names: Sequence[str]) -> Executable:
        """Registered names of the process groups, one per entry of `groups`."""

class Executable:
    """A program bound to process groups, which it does not keep alive."""

    @property
    def groups(self) -> list[tuple[list[int], list[int]]]:
        """(mesh dims, ranks ascending) of each group the program communicates in."""

    @property
    def input_shape(self) -> list[int]: ...
    @property
    def output_shape(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def mesh_ranks(self) -> list[int]: ...
    @property
    def signature(self) -> dict[str, str]:
        """What ranks that run the same redistribute have in common, by name."""

    @property
    def is_identity(self) -> bool:
        """Whether the result is the input itself."""

    @property
    def communications(self) -> list[tuple[str, str, list[int], int, int, int]]:
        """Of each step of the plan that communicates: op, reduce op, mesh dims, group size, gather dim, shard dim."""

    @property
    def group_names(self) -> list[str]:
        """Registered names of the process groups it is bound to."""

    @property
    def communicates(self) -> bool: ...
    @property
    def received_bytes(self) -> int: ...
    def run(self, input: torch.Tensor) -> torch.Tensor: ...
    def start(self, input: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The result and whether it is still under way; if so it is registered for `wait_tensor`."""

    def run_all(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

def executable(text: str, group_names: Sequence[str], rank: int) -> Executable:
    """That of an operator's text, bound to these groups; kept."""

def begin_trace() -> None: ...
def end_trace() -> list[tuple[str, str, int, int, float, float]]:
    """Lane, instruction, chunk, run, start and end in seconds, of everything since `begin_trace`."""

def finish_programs(timeout_seconds: float) -> bool:
    """For the end of the process: waits this long at most for asynchronous programs. True if all are finished."""

def thread_id() -> int: ...
def thread_of_current_node() -> int: ...
def register_capture_query(device_type: str, address: int) -> None: ...
def register_device_copy(device_type: str, address: int) -> None: ...
def is_capturing(device: str) -> bool: ...
def drain() -> None:
    """Makes every program that was started start all its communications."""

def counters() -> dict[str, int]: ...
def cast_products() -> dict[str, int]:
    """Products of 8-bit floats that were cast to float32, on other devices than CPU, by reason."""

def reset_counters() -> None: ...

class StridedCopy:
    """What packs and unpacks, for tests and benchmarks.

    Boxes are ``(src_offset, dst_offset, sizes, src_strides, dst_strides)``, in elements of `item_bytes`, outermost dim
    first. Nothing is checked.
    """

    def __init__(
        self, boxes: Sequence[tuple[int, int, Sequence[int], Sequence[int], Sequence[int]]], item_bytes: int
    ) -> None: ...
    def run(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """From and to flat tensors on one device, which do not overlap."""

def reduce_parts(
    op: str, parts: Sequence[torch.Tensor], divisor: float, dst: torch.Tensor, with_aten: bool = False
) -> None:
    """dst = (op over the parts, in order) / divisor, for tests and benchmarks: all flat, of one size, dtype and device.

    `with_aten`: as on devices that have nothing of their own for it. Nothing is checked.
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
        """lhs and rhs of one floating dtype, dst too or float32; `sms_left`: multiprocessors to leave alone."""

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
        """Of 8-bit floats, by float32 scales, into bfloat16 or float32.

        Scales have no dims, or one: m of lhs, n of rhs. Raises ValueError on other dtypes.
        """

    def why_not_scaled(self, lhs: torch.Tensor, rhs: torch.Tensor, dst: torch.Tensor) -> str | None:
        """What about these keeps a scaled product from units for 8-bit floats, if anything."""

    def waves(self, lhs: torch.Tensor, dst: torch.Tensor, sms_left: int = 0) -> float | None:
        """How often the product fills dst's device, by the dtypes of lhs and dst; None where that is not known."""

def nothing_watches(in_backward: bool) -> bool:
    """Whether no mode, trace or transform is to see what this thread does, and no backward is under way, or may be."""

def set_fast_accumulation(enabled: bool) -> bool:
    """Whether products of 8-bit floats with scales accumulate fast, as ``use_fast_accum=True`` of torch's scaled_mm.

    On CUDA, where cuBLASLt multiplies: sums keep the precision of the tensor cores, about 14 bits, instead of being
    taken to float32 every now and then; faster on Hopper. False at first, as in torch. Of this process; ranks may
    differ, and then so may the bits of their results. Returns what it was. Raises ValueError for anything but a bool.
    """

def set_sm_carveout(sms: int) -> None:
    """Multiprocessors that products leave to the kernels of transfers that are under way beside them.

    On CUDA, for what cuBLASLt multiplies; a wish, whose effect depends on the kernel. 0, which it is at first: none are
    left, and the library decides. Of this process; ranks may differ. Raises ValueError below 0.
    """

def kept_staging_bytes() -> int: ...
def note_changed_tables() -> None:
    """To be called where `tables.current` has changed: operators with sizes then ask for plans anew."""

def release_staging() -> None:
    """Gives the memory of temporaries that is kept for the next run (on CPU, at most 256 MiB) back to the system."""
