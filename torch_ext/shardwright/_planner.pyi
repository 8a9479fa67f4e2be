# Written by `make stubs` from the bindings in csrc/bindings.
"""The torch-free extension module. Its public interface is `Layout`, `Mesh` and `plan` of the package."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

class GemmModel:
    """Predicts how long a matrix product takes. Chunks are chosen with it, so it must be the same on every rank.

    A product is cut into tiles, and each processor computes one at a time: a product of few tiles leaves processors
    idle.

    Args:
        name: shown in messages.
        num_processors: the SMs of a GPU; 1 for all cores of a CPU together.
        tile_rows, tile_columns: the size of a tile of the result.
        flops_per_us: of one processor, for 16-bit operands; 8 bits run twice, 32 half, 64 a quarter as fast.
        launch_ps: picoseconds per product.
        memory_ps_per_kib: picoseconds per KiB to read operands and write results.
        contention_percent: how much longer a product takes while data travels.
        chunk_ps: on CPU, by how many picoseconds a chunk's transfer ends later alongside products than alone.

    Raises:
        ValueError: a figure is negative, or one that is divided by is below 1.
    """

    def __init__(
        self,
        *,
        name: str,
        num_processors: int,
        tile_rows: int,
        tile_columns: int,
        flops_per_us: int,
        launch_ps: int,
        memory_ps_per_kib: int,
        contention_percent: int,
        chunk_ps: int = 0,
    ) -> None: ...
    @staticmethod
    def named(name: str) -> GemmModel:
        """Returns a built-in model, ``"h100"``, ``"a100"`` or ``"cpu"``: orders of magnitude, not measurements. Raises
        ValueError on other names."""

    @staticmethod
    def names() -> list[str]: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def num_processors(self) -> int: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def tile_columns(self) -> int: ...
    @property
    def flops_per_us(self) -> int: ...
    @property
    def launch_ps(self) -> int: ...
    @property
    def memory_ps_per_kib(self) -> int: ...
    @property
    def contention_percent(self) -> int: ...
    @property
    def chunk_ps(self) -> int: ...
    def picoseconds(self, m: int, n: int, k: int, count: int = 1, item_bytes: int = 2) -> int:
        """Returns the time of `count` products of m x k by k x n."""

class Link:
    """The latency and bandwidth of messages to other ranks."""

    def __init__(self, message_ps: int, ps_per_kib: int) -> None: ...
    @property
    def message_ps(self) -> int:
        """Picoseconds for each message received."""

    @property
    def ps_per_kib(self) -> int:
        """Picoseconds per KiB of the larger of bytes sent and bytes received by a rank."""

    def __eq__(self, other: object) -> bool: ...

class Topology:
    """The latencies and bandwidths between ranks, in integer picoseconds, so that every rank computes the same plan.

    Ranks are on nodes of `ranks_per_node` consecutive ranks (0: all on one node). Groups on one node use the link
    `inside`, others `between`; `mesh_dims` gives single mesh dims, by name, links of their own.
    """

    def __init__(
        self,
        name: str,
        ranks_per_node: int,
        step_ps: int,
        memory_ps_per_kib: int,
        inside: Link,
        between: Link,
        mesh_dims: Mapping[str, Link] = ...,
    ) -> None: ...
    @staticmethod
    def named(name: str) -> Topology:
        """Returns a built-in topology. Raises a ValueError that lists them on other names."""

    @staticmethod
    def names() -> list[str]: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def step_ps(self) -> int:
        """Fixed cost of a collective."""

    @property
    def memory_ps_per_kib(self) -> int:
        """Picoseconds per KiB of local copies."""

    @property
    def inside(self) -> Link: ...
    @property
    def between(self) -> Link: ...
    @property
    def mesh_dims(self) -> dict[str, Link]: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def to_json(self) -> str:
        """Returns JSON that `load_topology` reads."""

class Lowering:
    """The abilities of a process group's transport, which decide how a plan is carried out (csrc/cost/lowering.h)."""

    @staticmethod
    def named(name: str) -> Lowering:
        """Returns that of ``"nccl"`` or ``"gloo"``. Raises a ValueError that lists these on other names."""

    @staticmethod
    def of_backend(backend: str, device_type: str) -> Lowering:
        """Returns that for the name of a process group's backend (csrc/cost/backend.h)."""

    @staticmethod
    def of_device(device_type: str) -> Lowering:
        """Returns that of what one rank does alone."""

    @staticmethod
    def names() -> list[str]: ...
    @property
    def name(self) -> str: ...
    @property
    def default_topology(self) -> Topology: ...
    @property
    def default_products(self) -> GemmModel: ...
    @property
    def is_on_device(self) -> bool:
        """Returns whether transfers read and write the memory of the device; otherwise that of the host."""

    def goes_by_messages(self, bytes_to_each_peer: int) -> bool:
        """Returns whether such an exchange is sent as messages. Otherwise it is one all-to-all."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Mesh:
    """A grid of ranks with named dims. Meshes are equal if names, sizes, ranks and topology are."""

    def __init__(
        self,
        dim_names: Sequence[str],
        dim_sizes: Sequence[int],
        ranks: Sequence[int] | None = None,
        topology: Topology | None = None,
    ) -> None: ...
    @property
    def topology(self) -> Topology | None: ...
    @property
    def dim_names(self) -> list[str]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def ndim(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    def coordinate(self, rank: int) -> list[int] | None:
        """Returns a rank's coordinate; None for a rank that is not on the mesh."""

    def group_ranks(self, rank: int, mesh_dims: Sequence[int]) -> list[int]:
        """Returns the ranks that differ from `rank` only in `mesh_dims`, itself included, ascending."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def has_same_ranks(self, other: Mesh) -> bool:
        """Returns whether names, sizes and ranks are the same; topologies may differ."""

class Layout:
    """A global tensor's shape and dtype, and how it is placed on a mesh.

    Layouts are equal if they are of one tensor on equal meshes with the same cuts in the same order; they share plans.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: Sequence[int],
        placements: Sequence[str],
        dtype: str = "float32",
        shard_order: Mapping[int, Sequence[int]] = ...,
        strided: str = "auto",
        flattened: int = 1,
    ) -> None: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def flattened(self) -> int:
        """The number of leading tensor dims that are seen as one, in placements and in local tensors; 1 if none are."""

    @property
    def flattened_shape(self) -> tuple[int, ...]:
        """The shape with these dims as one. Placements, local shapes and regions are of it."""

    @property
    def is_partition(self) -> bool:
        """True if along each mesh dim every element lies on one coordinate, in ascending order; see `Pieces`."""

    @property
    def dtype(self) -> str: ...
    @property
    def placements(self) -> tuple[str, ...]:
        """One per mesh dim. Strided shards that encode an order of cuts appear as plain ones; see `shard_order`."""

    @property
    def shard_order(self) -> dict[int, list[int]]:
        """{tensor dim: mesh dims that cut it, first cut first}; mesh dims of size 1 are left out."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def check_blocks_are_whole(self, dim: int, unit: int) -> None:
        """Raises ValueError if a part of the dim, as `flattened_shape` counts, begins or ends within a unit."""

    @property
    def has_equal_parts(self) -> bool:
        """Returns whether all ranks hold parts of one shape."""

    @property
    def has_pending(self) -> bool:
        """Returns whether a reduction is pending along some mesh dim."""

    def without_pending(self) -> Layout:
        """Returns the same layout with R where reductions are pending."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of this rank's part; (0,) for a rank that is not on the mesh."""

    def region(self, rank: int) -> list[list[tuple[int, int]]]:
        """Returns, per tensor dim, the [begin, end) intervals of global indices that the rank holds, in local order."""

    def view(self, shape: Sequence[int], flattened: int = 1) -> Layout:
        """The layout of this shape in which every rank keeps its elements in their order, so that nothing moves.

        Its mesh is this one, or one with mesh dims split where one of them cuts what becomes several tensor dims.

        Args:
            shape: as for ``torch.reshape``; one size may be -1.
            flattened: how many leading dims of the result are seen as one, in its placements and in local tensors.

        Raises:
            ValueError: no layout has these parts. The text says why, and names the cheapest redistribute after which
                the view moves nothing, with its cost over NCCL on the mesh's topology, by default ``"64x8"``.
        """

    def permute(self, dims: Sequence[int]) -> Layout:
        """The layout with dim i being dim ``dims[i]`` of this one; local parts are permuted alike."""

def nearest_cut(src: Layout, ranks: Sequence[int]) -> tuple[int, list[list[tuple[int, int]]]]:
    """Returns the tensor dim to cut and the intervals of each rank so that least has to move."""

def has_gradient(layout: Layout) -> bool:
    """Returns whether all reductions that are due can be differentiated."""

def gradient_layout(layout: Layout, argument: str) -> Layout:
    """The layout of a gradient: R where the value is partial. Raises ValueError, naming `argument`, where none is."""

def is_floating(dtype: str) -> bool:
    """Returns whether it is a floating dtype of 16 bits or more."""

def is_complex(dtype: str) -> bool: ...

class Step:
    """One move of a plan."""

    @property
    def op(self) -> str:
        """slice, partition, zero_fill, all_gather, all_to_all, permute, exchange, reduce_scatter, all_reduce, cross or
        rearrange."""

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """Indices of the mesh dims that it spans."""

    @property
    def before(self) -> Layout: ...
    @property
    def after(self) -> Layout: ...
    @property
    def ordered(self) -> bool:
        """Returns whether contributions are exchanged and summed in rank order, never by a native collective."""

    @property
    def rounds(self) -> int:
        """The number of rounds in which the move is carried out, to need less staging; each counts as a step."""

    @property
    def predicted_us(self) -> float: ...
    @property
    def sharing(self) -> str:
        """The way in which ranks with equal data share its sending. ``"none"``: each receiver reads from one of them.
        ``"messages"``: whole messages are shared out. ``"bytes"``: elements are, which splits some messages.
        ``"nodes"``: holders serve their own node first, and what is left is shared by all."""

    @property
    def wire_bytes_max(self) -> int:
        """Bytes received from other ranks by the rank that receives most."""

    @property
    def wire_bytes_sum(self) -> int:
        """Bytes received by all ranks."""

    @property
    def send_bytes_max(self) -> int: ...
    @property
    def messages_max(self) -> int:
        """Messages received by the rank that receives most."""

    @property
    def sent_messages_max(self) -> int:
        """Messages sent by the rank that sends most."""

class Plan:
    """The moves from one layout to another, and what they cost. ``str(plan)`` is one line per move."""

    @property
    def src(self) -> Layout: ...
    @property
    def dst(self) -> Layout: ...
    @property
    def backend(self) -> str: ...
    @property
    def objective(self) -> str: ...
    @property
    def topology(self) -> str:
        """The name of the topology with which the plan was chosen."""

    @property
    def certificate(self) -> dict[str, tuple[int, int]]:
        """Figures with a lower bound for any plan: ``wire_bytes_max`` and ``wire_bytes_sum`` received,
        ``send_bytes_max``, ``messages_max``, ``steps`` that communicate, ``peak_bytes``, ``predicted_ps``."""

    @property
    def remarks(self) -> list[str]:
        """A sentence for each bound that the plan does not meet, and for each property that it cannot guarantee."""

    @property
    def replicas_are_bitwise_equal(self) -> bool:
        """True if ranks that end with the same part hold the same bits of what was reduced, whichever library does the
        reduction."""

    @property
    def segments(self) -> int:
        """In how many segments the tensor takes the steps, each one step behind the one before it; 1 on one mesh."""

    @property
    def steps(self) -> list[Step]: ...
    @property
    def wire_bytes_max(self) -> int:
        """Bytes received from other ranks over all steps, by the rank that receives most."""

    @property
    def wire_bytes_sum(self) -> int:
        """Bytes received over all steps by all ranks; see `wire_bytes_sum_is_exact`."""

    @property
    def wire_bytes_sum_is_exact(self) -> bool:
        """True if `wire_bytes_sum` is exact; if not, it is an upper bound. Up to 4,096 ranks it is always exact."""

    @property
    def maxima_are_exact(self) -> bool:
        """Returns whether the maxima of bytes and messages, received and sent, hold for every rank.

        If not, they are those of the outermost ranks of a mesh with too many kinds of ranks to look at each. Always so
        up to 4,096 ranks.
        """

    @property
    def send_bytes_max(self) -> int: ...
    @property
    def messages_max(self) -> int:
        """Messages received over all steps by the rank that receives most."""

    @property
    def sent_messages_max(self) -> int:
        """Messages sent over all steps by the rank that sends most."""

    @property
    def bound_bytes_max(self) -> int:
        """A lower bound, for any plan, on the bytes received by the rank that receives most."""

    @property
    def bound_bytes_sum(self) -> int:
        """A lower bound, for any plan, on the bytes received by all ranks."""

    @property
    def bound_send_bytes_max(self) -> int:
        """A lower bound, for any plan, on the bytes sent by the rank that sends most."""

    @property
    def peak_bytes(self) -> int:
        """The most memory allocated at once on the worst rank: the result and temporaries, not the source."""

    @property
    def peak_bytes_is_exact(self) -> bool:
        """Returns whether no rank allocates more than `peak_bytes`; see `maxima_are_exact`."""

    @property
    def predicted_us(self) -> float:
        """The predicted time with the plan's topology, in microseconds."""

    def wire_bytes(self, rank: int) -> int:
        """Returns the bytes that one rank receives."""

    def rank_peak_bytes(self, rank: int) -> int:
        """Returns the most memory that one rank allocates at once."""

    def program(self, rank: int) -> str:
        """Returns the instructions of one rank, as text."""

    def simulate(self) -> int:
        """Runs all ranks in this process. Returns the bytes moved; raises RuntimeError if an element is wrong, or if
        bytes or memory differ from what the plan says."""

    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> Plan:
        """Raises ValueError on bytes that are not a plan."""

    def to_json(self) -> str:
        """Returns JSON as described in docs/plan.schema.json; `plan_from_json` reads it."""

    def to_svg(self) -> str:
        """Returns a picture of who holds what and who sends what to whom: by rank up to 16 ranks, else by mesh dim."""

    def to_html(self) -> str:
        """Returns an HTML page with the picture and the plan's text."""

class PlanningTables:
    """The defaults for plans and products. Immutable: the ``with...`` methods return a new object."""

    def __init__(self) -> None: ...
    def with_pin(self, plan: Plan) -> PlanningTables: ...
    def without_pin(self, plan: Plan) -> PlanningTables:
        """Raises ValueError if nothing is pinned for the plan's layouts and backend."""

    def pinned(self, src: Layout, dst: Layout, backend: str) -> Plan | None: ...
    def with_measured(
        self, backend: str, topology: Topology, gemm_models: Mapping[tuple[str, str], GemmModel]
    ) -> PlanningTables:
        """`gemm_models` by device type and dtype."""

    def without_measured(self) -> PlanningTables: ...
    def with_environment(self, topology: Topology | None) -> PlanningTables: ...
    def measured_topology(self, backend: str) -> Topology | None: ...
    def measured_gemm_model(self, device_type: str, dtype: str) -> GemmModel | None:
        """Returns what was measured for products of this dtype, or else of another."""

    def gemm_model(self, device_type: str, dtype: str) -> GemmModel:
        """Returns what was measured, or else the default of the device."""

    @property
    def environment(self) -> Topology | None: ...
    def summary(self) -> dict[str, str]:
        """Returns a short text per table, with a hash of its content, for ranks of a job to compare."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

def make_plan(
    src: Layout,
    dst: Layout,
    backend: str = "nccl",
    objective: str = "time",
    topology: Topology | None = None,
    groups: Sequence[Sequence[int]] = (),
    reduce: str = "fast",
    memory_limit: int | None = None,
    tables: PlanningTables = ...,
) -> Plan: ...
def plan_through(
    layouts: Sequence[Layout],
    backend: str = "nccl",
    objective: str = "time",
    topology: Topology | None = None,
    groups: Sequence[Sequence[int]] = (),
    reduce: str = "fast",
    tables: PlanningTables = ...,
) -> Plan: ...
def plan_of_steps(
    src: Layout,
    dst: Layout,
    steps: Sequence[tuple[str, Sequence[int], Layout, Layout, str, int, bool, int]],
    backend: str,
    objective: str,
    topology: Topology,
    named_groups_only: bool,
    segments_dim: int,
    segments: int,
) -> Plan: ...
def plan_text(plan: Plan) -> str:
    """Returns a plan as operators take it: a label, ``"|"``, and its bytes in base64."""

def parse_plan(text: str) -> Plan:
    """Parses what `plan_text` wrote. Raises ValueError on other text."""

def simulation_bytes(plan: Plan) -> int:
    """Estimates how much memory ``plan.simulate()`` takes."""

def plan_cache_counts() -> dict[str, int]: ...
def reset_plan_cache_counts() -> None: ...
def clear_plan_cache() -> None: ...
def view_of(layout: Layout, shape: Sequence[int], for_dtensor: bool = False) -> Layout | str:
    """Returns ``layout.view(shape)``, or why there is none; `for_dtensor`: none that DTensor can say."""

def move_before_view(
    layout: Layout, shape: Sequence[int], for_dtensor: bool, backend: str, tables: PlanningTables
) -> tuple[Plan, Layout, str] | None:
    """Returns the cheapest plan after which the view moves nothing, that view, and a text that says so and why.

    None: the view moves nothing as it is.
    """

def is_known_to_dtensor(layout: Layout) -> bool:
    """Returns whether DTensor's placements can say it."""

class Batch:
    """Many tensors that move together.

    Each item is (number of a source, number of a destination, axes). An axis is (source dim, destination dim, first
    index in each, length), with -1 for a dim that is not there; None is the whole tensor.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        destinations: Sequence[Layout],
        items: Sequence[tuple[int, int, Sequence[tuple[int, int, int, int, int]] | None]],
        bucket_bytes: int = 67108864,
        buckets: int = 3,
        first_turn: int = 0,
    ) -> None: ...
    @property
    def num_items(self) -> int: ...
    def digests(self) -> list[int]:
        """A number for the settings, then one for each item, which depends on all before it."""

    def reductions(self) -> dict[int, Layout]:
        """The layout that each source with pending reductions, by its number, is reduced to before anything moves."""

    def item_text(self, item: int) -> str: ...
    def to_bytes(self) -> bytes: ...

class BatchPlan:
    """The plan of a batch and its figures. ``print`` shows it."""

    def __init__(self, batch: Batch) -> None: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def num_items(self) -> int: ...
    @property
    def num_kinds(self) -> int:
        """Kinds of items that are planned alike."""

    @property
    def received_bytes_max(self) -> int:
        """The bytes that the worst rank receives; no plan can do with less."""

    @property
    def received_bytes_sum(self) -> int: ...
    @property
    def kept_bytes_sum(self) -> int:
        """The bytes that are copied locally."""

    @property
    def sent_bytes_max(self) -> int: ...
    @property
    def sent_bytes_bound(self) -> int:
        """The least bytes that the worst rank sends if only holders send."""

    @property
    def sent_bound_is_exact(self) -> bool: ...
    @property
    def num_rounds(self) -> int: ...
    @property
    def rounds_bound(self) -> int: ...
    @property
    def messages_max(self) -> int:
        """Messages to one rank."""

    @property
    def messages_sum(self) -> int: ...
    @property
    def messages_are_exact(self) -> bool: ...
    @property
    def reductions(self) -> int:
        """The number of tensors with pending reductions, which are reduced before anything moves."""

    @property
    def reduction_bytes_sum(self) -> int:
        """The bytes that all ranks receive for that."""

    @property
    def reduced_bytes_max(self) -> int:
        """The bytes of the reduced parts on the rank that has most of them."""

    @property
    def reducing_bytes_max(self) -> int:
        """The bytes that the reduction that needs most memory takes besides its result."""

    @property
    def bucket_bytes(self) -> int: ...
    @property
    def buckets(self) -> int: ...
    @property
    def memory_bytes(self) -> int:
        """Extra memory on each rank: buckets * bucket_bytes. With reductions, at most so much."""

    def to_json(self) -> str: ...

class Schedule:
    """The plan of a `Matmul` (csrc/products/matmul.h).

    Args:
        method: ``"serial"``, ``"ring"``, ``"collective"`` or ``"flags"``.
        chunks: their number, or for a ring the distances of each.
        depth: the most transfers that are under way during a product.
        sms_left: multiprocessors that products leave to transfers under way.

    Raises:
        ValueError: the method is unknown. `Matmul.check` tells whether a schedule fits a product.
    """

    def __init__(
        self, method: str, chunks: int | Sequence[Sequence[int]] = 1, *, depth: int = 1, sms_left: int = 0
    ) -> None: ...
    @property
    def method(self) -> str: ...
    @property
    def chunks(self) -> int | list[list[int]]: ...
    @property
    def depth(self) -> int: ...
    @property
    def sms_left(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Matmul:
    """Matrix products and a redistribute as one program (csrc/products/matmul.h)."""

    @staticmethod
    def gather(
        plan: Plan,
        products: Sequence[tuple[str, Layout, bool]],
        keeps_gathered: bool = False,
        scaling: tuple[bool, str, Plan | None] | None = None,
    ) -> Matmul:
        """Moves an operand by a plan and multiplies it. `products` has, for each product, the axes (with the operand
        that moves first), the other operand, and whether a bias is added. `scaling` of 8-bit operands is whether scales
        are by row, the dtype of the result, and, if by row, the plan of the moved operand's scales. Raises ValueError
        if these do not fit together."""

    @staticmethod
    def scatter(
        plan: Plan,
        terms: Sequence[tuple[str, Layout, Layout]],
        has_addend: bool = False,
        scaling: tuple[bool, str, Plan | None] | None = None,
    ) -> Matmul:
        """Sums products, and with `has_addend` one more tensor in the layout of the plan's source, and moves the result
        by a plan. `terms` has the axes and both operands of each product; `scaling` is as in `gather`, without a
        plan."""

    @staticmethod
    def parse(text: str) -> tuple[Matmul, Schedule]:
        """Parses what `to_text` wrote."""

    @property
    def plan(self) -> Plan: ...
    @property
    def num_partners(self) -> int: ...
    @property
    def communicates(self) -> bool: ...
    @property
    def why_only_serial(self) -> str | None:
        """Why nothing of it can be chunked; None if something can."""

    def check(self, schedule: Schedule) -> None:
        """Raises ValueError if the schedule is not possible."""

    def predictions(self, model: GemmModel, depth: int | None = None) -> list[tuple[Schedule, int]]:
        """Returns schedules with their picoseconds: serial first, then every method and number of chunks, each with the
        depth (unless it is given) and the processors left to transfers that are predicted to be fastest."""

    def choose(self, model: GemmModel, depth: int | None = None) -> Schedule:
        """Returns the schedule that is predicted to be fastest; serial unless another one saves 2%."""

    def tuned(self, schedule: Schedule, model: GemmModel, depth: int | None = None) -> Schedule:
        """Returns the schedule with the depth and the processors left to transfers that `predictions` would choose."""

    def timeline(self, schedule: Schedule, model: GemmModel) -> dict[str, Any]:
        """Returns the prediction for the first rank: ``spans`` with lane, instruction, chunk, start and end in
        picoseconds; ``total_ps``, ``communication_ps`` and ``gemm_ps``."""

    def program(self, schedule: Schedule, rank: int) -> str: ...
    def peak_bytes(self, schedule: Schedule, rank: int) -> int: ...
    def shapes(self, rank: int) -> tuple[list[list[int]], list[tuple[list[int], str]]]:
        """Returns the shapes of a rank's inputs, and the shapes and dtypes of its outputs."""

    def to_text(self, schedule: Schedule) -> str: ...

class ProductPlan:
    """The plan of a product of placed tensors, forward and backward (csrc/products/product_plan.h).

    Args:
        axes: one text per weight, as in einsum: ``"bsk,nk->bsn"``.
        operand, weights, biases, results: the layouts of the given tensors, and those requested for the results.
        cuts: the axis that is cut along each mesh dim during the product, or ``"-"``; default: the cuts predicted to be
            fastest.
        scaled_by: how operands of 8-bit floats are scaled: ``"tensor"`` or ``"row"``.
        scales: if by row, the layouts of scales of operand and weights that are not placed like their operand's rows.
        keeps_gathered: whether the forward also returns the gathered operand, for the backward.
        method, chunks, depth: as in `shardwright.linear`.
        backend, topology, tables: as in `shardwright.plan`.
        gemm_models: how long products take, by the dtype of the tensor that is moved.

    Raises:
        ValueError: the arguments do not fit together, or the schedule is not possible.
    """

    def __init__(
        self,
        axes: Sequence[str],
        operand: Layout,
        weights: Sequence[Layout],
        biases: Sequence[Layout | None],
        results: Sequence[Layout],
        *,
        cuts: str | None = None,
        scaled_by: str = "",
        scales: Sequence[Layout | None] = (),
        keeps_gathered: bool = False,
        method: str | None = None,
        chunks: int | Sequence[Sequence[int]] | None = None,
        depth: int | None = None,
        backend: str = "nccl",
        topology: Topology | None = None,
        tables: PlanningTables = ...,
        gemm_models: Mapping[str, GemmModel] = ...,
    ) -> None: ...
    @property
    def axes(self) -> list[str]: ...
    @property
    def operand(self) -> Layout: ...
    @property
    def weights(self) -> list[Layout]: ...
    @property
    def biases(self) -> list[Layout | None]: ...
    @property
    def results(self) -> list[Layout]: ...
    @property
    def scaled_by(self) -> str: ...
    @property
    def cuts(self) -> str: ...
    @property
    def lead(self) -> str:
        """The tensor whose move overlaps with the product: ``"operand"``, ``"weight"`` or ``"result"``."""

    @property
    def keeps_gathered(self) -> bool: ...
    @property
    def has_equal_parts(self) -> bool:
        """Whether, for every tensor, all ranks hold parts of one size."""

    @property
    def chooses_schedules(self) -> bool:
        """Returns whether methods or numbers of chunks were left to be chosen by predicted time."""

    @property
    def moved_operand(self) -> Layout:
        """The operand's layout during the product."""

    @property
    def operand_gradient(self) -> Layout:
        """The layout of the operand's gradient as the backward returns it."""

    @property
    def result_gradients(self) -> list[Layout]:
        """The layouts of gradients that are placed like the results."""

    @staticmethod
    def parse(text: str) -> ProductPlan:
        """Makes the plan from what `to_text` wrote. Raises ValueError on other text."""

    def to_text(self) -> str:
        """Returns everything that the plan depends on, as operators take it; the same in every process."""

    def to_json(self) -> str: ...
    def gemm_model(self, dtype: str) -> GemmModel: ...
    def predicted_ps(self) -> int:
        """Returns the predicted time of the forward."""

    @property
    def forward(self) -> ProductDataflow:
        """Inputs: operand, weights, biases of the weights that have one, scales. Outputs: results, then the moved
        operand if it is kept."""

    def backward(self, given: Sequence[Layout | None], needs: Sequence[bool]) -> ProductDataflow:
        """Inputs: operand (the moved one if it is kept), weights, gradients of the results, then the addend to the
        operand's gradient if there is one. Outputs: gradients of operand, weights and biases.

        Args:
            given: the layouts of the results' gradients, None for the usual ones (`result_gradients`). If there is one
                more, it is the layout of the addend, or None.
            needs: whether the gradients of operand, weights and biases are requested; biases by weight.
        """

class ProductNode:
    """One operation on the tensors of a product (csrc/products/dataflow.h)."""

    @property
    def kind(self) -> str:
        """``"move"``, ``"matmul"``, ``"bias"``, ``"sum"`` or ``"add"``."""

    @property
    def inputs(self) -> list[int]: ...
    @property
    def outputs(self) -> list[int]: ...
    @property
    def released(self) -> list[int]:
        """Values that no later node reads."""

    @property
    def plan(self) -> Plan | None:
        """The plan of a move."""

    @property
    def matmul(self) -> Matmul | None: ...
    @property
    def schedule(self) -> Schedule | None: ...
    def adds_bias(self, plan: ProductPlan, rank: int) -> bool:
        """Returns whether this rank adds the bias. Where sums stay due, only one rank along their mesh dims does."""

class ProductDataflow:
    """Nodes in execution order. Values are numbered, inputs first; an output of -1 was not requested."""

    @property
    def names(self) -> list[str]: ...
    @property
    def layouts(self) -> list[Layout]: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def outputs(self) -> list[int]: ...
    @property
    def nodes(self) -> list[ProductNode]: ...

def plan_product(
    function: str,
    x: tuple[object, Layout | None],
    weights: Sequence[tuple[object, Layout | None] | None],
    biases: Sequence[tuple[object, Layout | None] | None],
    scales: Sequence[tuple[object, Layout | None] | None],
    *,
    requires_grad: bool,
    placements: Sequence[str] | None,
    rank: int,
    num_ranks: int,
    checks_parts: bool,
    backend: str,
    tables: PlanningTables,
    device_type: str,
    dim: int | None = None,
    size: int | Sequence[int] | None = None,
    columns: int | Sequence[int] | None = None,
    out_dtype: object = None,
    method: str | None = None,
    chunks: int | Sequence[Sequence[int]] | None = None,
    depth: int | None = None,
    save: str = "shard",
    gemm_model: GemmModel | None = None,
) -> ProductPlan:
    """The plan of a product of tensors, from the arguments of the function (``"linear"``, ``"gather"`` or ``"sum"``)
    that multiplies them: csrc/products/product_arguments.h says more. Tensors come with the layouts of DTensors;
    `scales` are those of x and of the weights. Without a `gemm_model`, that of the tables for the type of device is
    taken. Raises ValueError for arguments that do not fit."""

def product_layouts(
    mesh: Mesh,
    axes: str,
    sizes: Mapping[str, int],
    dtype: str,
    operand: str,
    weights: Sequence[str],
    biases: Sequence[str],
    results: Sequence[str],
) -> tuple[Layout, list[Layout], list[Layout | None], list[Layout]]:
    """Returns the layouts that `ProductPlan` takes, from axes as in einsum, their sizes, and placements as text.

    Without `biases` there are none; without `results`, they are placed so that no move of them is needed. Raises
    ValueError if an axis has no size, or if placements do not fit a tensor.
    """

class Attention:
    """Attention whose sequence is cut over ranks (csrc/attention/attention.h)."""

    def __init__(
        self,
        mesh: Mesh,
        dtype: str,
        sizes: tuple[int, int, int, int, int],
        parts: Sequence[Sequence[tuple[int, int]]],
        *,
        key_parts: Sequence[Sequence[tuple[int, int]]] | None,
        keys_are_whole: bool,
        is_causal: bool,
        window: int | None,
        documents: Sequence[int],
        mask: tuple[str, tuple[int, int, int, int]] | None,
        scale: float,
        chunks: int,
        lowering: Lowering,
    ) -> None:
        """Takes a mesh of one dim; batch, heads, heads of keys, depth and depth of values; and by position the [begin,
        end) intervals of the sequence that a rank holds, in local order. `key_parts`: those of keys, None for the same.
        `mask`: the dtype and shape of this rank's mask tensor. `chunks`: 0 for blocks as ranks hold them. The method is
        serial at first. Raises ValueError if these do not fit together."""

    def with_method(self, method: str, topology: Topology | None) -> Attention:
        """For two_level, nodes are those of the topology. Raises ValueError if it has none."""

    def with_mask(self, mask: tuple[str, tuple[int, int, int, int]]) -> Attention:
        """For a mask tensor of another form. Raises ValueError as the constructor does."""

    @property
    def method(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def lowering(self) -> Lowering: ...
    def rows(self, rank: int) -> int:
        """Returns how many places of the sequence of queries a rank holds."""

    def key_rows(self, rank: int) -> int:
        """Returns how many places of the sequence of keys a rank holds."""

    def as_on_all_ranks(self) -> Attention:
        """Returns the same without what may differ between ranks: the form of the mask tensor."""

    def counts(self, rank: int) -> tuple[int, int, int, int]:
        """Returns the products of blocks that are full, triangles and others, and the pairs that see each other."""

    def program(self, rank: int, backward: bool = False) -> str: ...
    def peak_bytes(self, rank: int, backward: bool = False) -> int: ...
    def to_text(self, backward: bool) -> str:
        """Returns one direction of it as the text that operators take."""

    def choose(self, topology: Topology | None, model: GemmModel, with_backward: bool) -> str:
        """Returns the method predicted to be fastest. Without a topology: with the lowering's default one."""

    def forecasts(
        self, topology: Topology | None, model: GemmModel, with_backward: bool = True
    ) -> list[tuple[str, int, int, int, int, int]]:
        """Returns for each method the picoseconds of forward, backward, and the forward's compute alone, and bytes
        received and allocated by the worst rank."""

    def describe(self, topology: Topology | None, model: GemmModel) -> str: ...

class StepSchedule:
    """When weights are gathered, kept and released within a training step; see csrc/schedule/schedule.h."""

    def __init__(
        self,
        weights: Sequence[tuple[str, int, int, int, int, int, int, int, int]],
        uses: Sequence[tuple[Sequence[int], str, Sequence[int], int]],
        *,
        budget_bytes: int | None = None,
        prefetch: int | None = 1,
        alignment_bytes: int = 256,
        held_bytes: int = 0,
        gather_until: Sequence[int] = (),
        forms: Sequence[
            tuple[int, int, int, int, int, int, bool, tuple[Sequence[tuple[int, int, int]], int, int]]
        ] = (),
        may_add_chunks: bool = False,
        activations: Sequence[tuple[str, int, int, int, int, int, int, int]] = (),
    ) -> None:
        """Plans a step.

        Args:
            weights: name; bytes at rest, in use, kept from first to last use, and of the gradient; picoseconds of a
                gather and of a reduction, and of the copies from and to the host that belong to them, or 0.
            uses: weights that are needed, by index; "forward", "recompute" or "backward"; weights whose gradients are
                complete afterwards; picoseconds of the compute, or 0.
            budget_bytes: for gathered weights, kept copies and gradients.
            prefetch: for how many changes of weights ahead they are gathered. None: as few as it takes to be within 1%
                of the fastest predicted step within the budget.
            alignment_bytes: of addresses in the arena.
            held_bytes: of the budget, what is in use all the time outside of the arena.
            gather_until: by use, the last use whose weights should have begun to be gathered at it; below it: no wish.
            forms: of weights that may be gathered in chunks: index; bytes and picoseconds of what is gathered before
                the use all the same; bytes of the chunks that exist at a time, picoseconds of all and their number;
                whether in backwards too; and of the reduction of the gradient in chunks, products (none: not in
                chunks), each with picoseconds of all chunks and of one, and the use that it is in (-1: that which
                completes the gradient), picoseconds of what is reduced afterwards, and bytes of the gradient meanwhile.
            may_add_chunks: whether their bytes may be added to the budget.
            activations: of which parts are kept, in the order in which they are needed: name; bytes that are kept, and
                gathered; picoseconds of a gather, or 0; the use that saves it, the first and last that need it, and the
                activation in whose turn it is needed last.

        Raises:
            ValueError: the budget is too small, and the text names one that is not; or the arguments contradict.
        """

    @property
    def form_of(self) -> list[int]:
        """By weight, those of `forms` that are used last: the weight that it is in chunks, or -1."""

    @property
    def prefetch(self) -> int: ...
    @property
    def lanes(self) -> dict[str, Any] | None:
        """Begin and end in picoseconds of "uses", "gathers" and "reductions" as predicted; "chunks" within uses, each
        as weight, use, whether it is a reduction, and begin and end; "fetches" from the host by gather and "sends" to
        it by reduction; "activations"; "compute_ps", "transfer_ps", "copy_ps", "total_ps". None without times."""

    @property
    def uses(self) -> list[tuple[list[int], str, list[int], int]]:
        """Weights, pass, weights whose gradients are complete afterwards, and picoseconds of the compute or 0."""

    @property
    def buffers(self) -> list[tuple[int, bool, int, int, int, int]]:
        """Weight, whether it is a kept copy, first and last use, size and offset in bytes."""

    @property
    def gathers(self) -> list[tuple[int, int, int, int, bool]]:
        """Weight, buffer, the use before which it starts, the use that needs it, whether it is from the kept copy."""

    @property
    def chunk_gathers(self) -> list[tuple[int, int]]:
        """Weight, and a use within which all its chunks are gathered; what is not in chunks is one of `gathers`."""

    @property
    def reductions(self) -> list[tuple[int, int, int, int, bool]]:
        """Weight; the uses from which its gradient exists, after which it is reduced, and after which that is done;
        whether in chunks within these uses, all but what is not in chunks."""

    def to_svg(self) -> str:
        """The step as a standalone picture: compute, transfers, and what lies where in the arena."""

    @property
    def arena_bytes(self) -> int: ...
    @property
    def live_buffer_bytes(self) -> int: ...
    @property
    def peak_gradient_bytes(self) -> int: ...
    @property
    def peak_activation_bytes(self) -> int: ...
    @property
    def activations(self) -> list[tuple[str, int, int, int, int, int, int, int]]: ...
    @property
    def activation_gathers(self) -> list[tuple[int, int]]:
        """By activation: the use in which its gather starts, and the activation in whose turn; -1: before the use."""

    @property
    def peak_bytes(self) -> int: ...
    def to_json(self) -> str: ...

def overlapping_budget_bytes(
    weights: Sequence[tuple[str, int, int, int, int, int, int, int, int]],
    uses: Sequence[tuple[Sequence[int], str, Sequence[int], int]],
    *,
    prefetch: int = 1,
    alignment_bytes: int = 256,
    held_bytes: int = 0,
    gather_until: Sequence[int] = (),
    activations: Sequence[tuple[str, int, int, int, int, int, int, int]] = (),
) -> int:
    """The least budget with which gathers are as far ahead as wanted and reductions run alongside the next backward."""

class LinkFit:
    """The costs of a step, a message and a byte over a link, in seconds, and the mean relative error of the fit."""

    @property
    def step(self) -> float: ...
    @property
    def message(self) -> float: ...
    @property
    def byte(self) -> float: ...
    @property
    def error(self) -> float: ...

def fit_links(
    inside: Sequence[tuple[int, int, float]],
    between: Sequence[tuple[int, int, float]],
    mesh_dims: Mapping[str, Sequence[tuple[int, int, float]]],
    crossing: Set[str],
) -> tuple[LinkFit, LinkFit, dict[str, LinkFit]]:
    """Fits links to all-to-alls, given as (peers, bytes sent, seconds): within nodes, between them, by mesh dim."""

def forecast_batch(
    batch_bytes: bytes, topology: Topology
) -> tuple[list[tuple[int, int, int, int, int, int]], list[tuple[int, int, int, int, int]], int, int]:
    """Predicts a batch, in bytes and picoseconds: for each destination what all ranks receive, what the worst one
    receives, what is copied locally, first and last round (-1 for none), time; for each link sender, receiver, bytes,
    messages at most, time; the time of all; and how much of that is for reducing sources before."""
