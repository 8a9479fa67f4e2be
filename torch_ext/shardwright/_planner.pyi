# Written by `make stubs` from the bindings in csrc/bindings.
"""The torch-free extension module. Its public interface is `Layout`, `Mesh` and `plan` of the package."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

class GemmModel:
    """Predicts the time of matrix products. Chunks are chosen with it, so it must be the same on every rank.

    A product is cut into tiles, and each processor computes one at a time: a product of few tiles leaves processors
    idle.

    Args:
        name: shown in messages.
        num_processors: the SMs of a GPU; 1 for all cores of a CPU together.
        tile_rows, tile_columns: the size of a tile of the result.
        flops_per_us: rate of one processor for 16-bit operands. 8 bits run twice, 32 half, 64 a quarter as fast.
        launch_ps: picoseconds per product.
        memory_ps_per_kib: picoseconds per KiB to read operands and write results.
        contention_percent: slowdown of a product during transfers, in percent.
        chunk_ps: on CPU, picoseconds by which a chunk's transfer ends later alongside products than alone.
        transfer_processors: on devices, the processors that a transfer needs for full speed; 0 if copy engines carry it
            out.

    Raises:
        ValueError: a value is negative or above 2^40, or a divisor is below 1.
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
        transfer_processors: int = 16,
    ) -> None: ...
    @staticmethod
    def named(name: str) -> GemmModel:
        """Returns a built-in model, ``"h100"``, ``"a100"`` or ``"cpu"``: orders of magnitude, not measurements. Raises
        ValueError on other names."""

    @staticmethod
    def names() -> list[str]:
        """Returns the names of the built-in models."""

    def with_copy_engines(self) -> GemmModel:
        """Returns this model for transfers by copy engines, as between peers' arenas. They need no processors, and slow
        down products by at most 3%."""

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
    @property
    def transfer_processors(self) -> int: ...
    def picoseconds(self, m: int, n: int, k: int, count: int = 1, item_bytes: int = 2) -> int:
        """Returns the predicted time, in picoseconds, of `count` products of m x k by k x n, with operands of
        `item_bytes` bytes per element. Raises ValueError for negative sizes."""

class Link:
    """The latency and bandwidth of messages to other ranks."""

    def __init__(self, message_ps: int, ps_per_kib: int) -> None:
        """Takes the picoseconds of a message and of a KiB."""

    @property
    def message_ps(self) -> int:
        """Picoseconds for each message received."""

    @property
    def ps_per_kib(self) -> int:
        """Picoseconds per KiB of the larger of bytes sent and bytes received by a rank."""

    def __eq__(self, other: object) -> bool: ...

class Topology:
    """The latencies and bandwidths between ranks, in integer picoseconds, so that every rank computes the same plan.

    A node is `ranks_per_node` consecutive ranks (0: all ranks). Groups within a node use the link `inside`, other
    groups `between`. `mesh_dims` has other links for some mesh dims, by name.
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
        """Returns a built-in topology. Raises ValueError for other names; the message lists the names."""

    @staticmethod
    def names() -> list[str]:
        """Returns the names of the built-in topologies."""

    @property
    def name(self) -> str:
        """The name, which plans report."""

    @property
    def ranks_per_node(self) -> int:
        """Number of consecutive ranks on a node; 0: all ranks."""

    @property
    def step_ps(self) -> int:
        """Fixed cost of a collective, in picoseconds."""

    @property
    def memory_ps_per_kib(self) -> int:
        """Picoseconds per KiB of local copies."""

    @property
    def inside(self) -> Link:
        """The link within a node."""

    @property
    def between(self) -> Link:
        """The link between nodes."""

    @property
    def mesh_dims(self) -> dict[str, Link]:
        """The links of mesh dims, by name."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def to_json(self) -> str:
        """Returns JSON that `load_topology` reads."""

class Lowering:
    """The capabilities of a process group's transport, which determine the instructions that carry out a plan
    (csrc/cost/lowering.h)."""

    @staticmethod
    def named(name: str) -> Lowering:
        """Returns the lowering ``"nccl"`` or ``"gloo"``. Raises ValueError for other names."""

    @staticmethod
    def of_backend(backend: str, device_type: str) -> Lowering:
        """Returns the lowering for the backend of a process group, given by its name, on a type of device."""

    @staticmethod
    def of_device(device_type: str) -> Lowering:
        """Returns the lowering for programs of a single rank on a type of device."""

    @staticmethod
    def names() -> list[str]:
        """Returns the names of all lowerings."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def default_topology(self) -> Topology:
        """The topology for plans without another one."""

    @property
    def default_gemm_model(self) -> GemmModel:
        """The model of products for plans without another one."""

    @property
    def is_on_device(self) -> bool:
        """True if transfers read and write device memory; otherwise they use host memory."""

    def uses_messages(self, bytes_to_each_peer: int) -> bool:
        """Returns True if an exchange of this size is sent as messages, False if it is one all-to-all."""

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
    def topology(self) -> Topology | None:
        """The topology for plans on this mesh, or None."""

    @property
    def dim_names(self) -> list[str]:
        """The names of the mesh dims."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the mesh dims."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def ndim(self) -> int:
        """Number of mesh dims."""

    @property
    def ranks(self) -> list[int]:
        """The ranks in row-major order."""

    def coordinate(self, rank: int) -> list[int] | None:
        """Returns a rank's coordinate along each mesh dim, or None if the rank is not on the mesh."""

    def group_ranks(self, rank: int, mesh_dims: Sequence[int]) -> list[int]:
        """Returns the ranks that differ from `rank` only in `mesh_dims` (indices), and `rank` itself, ascending. Raises
        ValueError if the rank or a mesh dim is not on the mesh."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def has_same_ranks(self, other: Mesh) -> bool:
        """Returns True if names, sizes and ranks are equal. Topologies may differ."""

class Layout:
    """A global tensor's shape, dtype, and placements on a mesh.

    Layouts are equal if shape and dtype are equal, the meshes are equal, and the cuts are the same in the same order.
    Equal layouts share plans.
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
    def mesh(self) -> Mesh:
        """The mesh."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""

    @property
    def flattened(self) -> int:
        """Number of leading tensor dims that placements and local tensors count as one; 1 if none are flattened."""

    @property
    def flattened_shape(self) -> tuple[int, ...]:
        """The global shape with the flattened dims as one dim. Placements, local shapes and regions refer to it."""

    @property
    def is_partition(self) -> bool:
        """True if along each mesh dim every element is on one coordinate, in ascending order; see `Pieces`."""

    @property
    def dtype(self) -> str:
        """The name of the dtype, such as ``"float32"``."""

    @property
    def placements(self) -> tuple[str, ...]:
        """The placement of each mesh dim, as text. Strided shards that encode a shard order are shown as plain shards;
        see `shard_order`."""

    @property
    def shard_order(self) -> dict[int, list[int]]:
        """For each sharded tensor dim, the mesh dims that shard it, in the order of the cuts. Mesh dims of size 1 are
        left out."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def check_blocks_are_whole(self, dim: int, unit: int) -> None:
        """Raises ValueError if a rank's part of `dim`, an index into `flattened_shape`, begins or ends within a block
        of `unit` elements."""

    @property
    def has_equal_parts(self) -> bool:
        """True if all ranks hold parts of one shape."""

    @property
    def has_pending(self) -> bool:
        """True if a reduction is pending along some mesh dim."""

    def without_pending(self) -> Layout:
        """Returns this layout with R instead of pending reductions."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's local tensor; (0,) if the rank is not on the mesh."""

    def region(self, rank: int) -> list[list[tuple[int, int]]]:
        """Returns, for each tensor dim, the [begin, end) intervals of global indices on the rank, in local order.
        Raises ValueError if the rank is not on the mesh."""

    def view(self, shape: Sequence[int], flattened: int = 1) -> Layout:
        """Returns the layout of a reshaped tensor in which every rank keeps its elements in their order.

        If a mesh dim shards a tensor dim that becomes several dims, the result's mesh has several dims in its place.
        Otherwise the mesh is the same. Nothing moves.

        Args:
            shape: as for ``torch.reshape``; one size may be -1.
            flattened: number of leading dims of the result that its placements and local tensors count as one.

        Raises:
            ValueError: no layout of this shape has these parts. The message gives the reason, and the cheapest
                redistribute before the view, with its cost over NCCL on the mesh's topology, by default ``"64x8"``.
        """

    def permute(self, dims: Sequence[int]) -> Layout:
        """Returns the layout of the tensor whose dim i is dim ``dims[i]`` of this one. Local tensors are permuted
        equally."""

def nearest_cut(src: Layout, ranks: Sequence[int]) -> tuple[int, list[list[tuple[int, int]]]]:
    """Returns the sharding of one tensor dim over `ranks` for which the fewest elements leave their rank, as (tensor
    dim, [begin, end) intervals of each rank). Each rank gets at most ceil(n / number of ranks) of the n indices."""

def has_gradient(layout: Layout) -> bool:
    """Returns True if all pending reductions of a layout can be differentiated."""

def gradient_layout(layout: Layout, argument: str) -> Layout:
    """Returns the layout of the gradient of a tensor: R instead of P. Raises ValueError that names `argument` if a
    pending reduction cannot be differentiated."""

def is_floating(dtype: str) -> bool:
    """Returns True for floating dtypes of 16 bits or more."""

def is_complex(dtype: str) -> bool:
    """Returns True for complex dtypes."""

class Step:
    """One move of a plan."""

    @property
    def op(self) -> str:
        """The kind of step: slice, partition, zero_fill, all_gather, all_to_all, permute, exchange, reduce_scatter,
        all_reduce, cross or rearrange."""

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """Indices of the mesh dims that the step spans."""

    @property
    def before(self) -> Layout:
        """The layout before the step."""

    @property
    def after(self) -> Layout:
        """The layout after the step."""

    @property
    def ordered(self) -> bool:
        """True if contributions are exchanged and summed in rank order, instead of by a native collective."""

    @property
    def rounds(self) -> int:
        """Number of rounds in which the elements are sent. More rounds need less temporary memory; each counts as a
        step."""

    @property
    def predicted_us(self) -> float:
        """The predicted time with the plan's topology, in microseconds."""

    @property
    def replica_policy(self) -> str:
        """The way in which replicas (ranks with equal data) share the sending of the data. ``"aligned"``: each receiver
        gets its data from one replica. ``"whole_messages"``: the replicas divide the messages. ``"even_bytes"``: they
        divide the elements, which splits some messages. ``"node_local"``: each replica sends to its own node, and they
        divide the remaining messages."""

    @property
    def wire_bytes_max(self) -> int:
        """Bytes received from other ranks by the rank that receives most."""

    @property
    def wire_bytes_sum(self) -> int:
        """Bytes received by all ranks."""

    @property
    def send_bytes_max(self) -> int:
        """Bytes sent by the rank that sends most."""

    @property
    def messages_max(self) -> int:
        """Messages received by the rank that receives most."""

    @property
    def sent_messages_max(self) -> int:
        """Messages sent by the rank that sends most."""

class Plan:
    """The moves from one layout to another, and their costs. ``str(plan)`` is one line per move."""

    @property
    def src(self) -> Layout:
        """The source layout."""

    @property
    def dst(self) -> Layout:
        """The destination layout."""

    @property
    def backend(self) -> str:
        """The lowering that the plan is for: ``"nccl"`` or ``"gloo"``."""

    @property
    def objective(self) -> str:
        """The cost that the plan minimizes: ``"time"`` or ``"bytes"``."""

    @property
    def topology(self) -> str:
        """The name of the topology with which the plan was chosen."""

    @property
    def certificate(self) -> dict[str, tuple[int, int]]:
        """For each cost, by name, its value and a lower bound for any plan. The names are ``wire_bytes_max`` and
        ``wire_bytes_sum`` (received), ``send_bytes_max``, ``messages_max``, ``steps`` (those that communicate),
        ``peak_bytes`` and ``predicted_ps``."""

    @property
    def remarks(self) -> list[str]:
        """One sentence for each bound that the plan does not meet and each property that it cannot guarantee."""

    @property
    def replicas_are_bitwise_equal(self) -> bool:
        """True if replicas are bitwise equal after reductions, whichever library reduces."""

    @property
    def segments(self) -> int:
        """Number of segments of the tensor that pass through the steps as a pipeline; 1 on one mesh."""

    @property
    def steps(self) -> list[Step]:
        """The steps in order."""

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
        """True if the maxima of bytes and messages, received and sent, are over all ranks.

        If False, the mesh has too many classes of ranks to compute the costs of each, and the maxima are over its
        outermost ranks. Always True up to 4,096 ranks.
        """

    @property
    def send_bytes_max(self) -> int:
        """Bytes sent over all steps by the rank that sends most."""

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
        """True if no rank allocates more than `peak_bytes`; see `maxima_are_exact`."""

    @property
    def predicted_us(self) -> float:
        """The predicted time with the plan's topology, in microseconds."""

    def wire_bytes(self, rank: int) -> int:
        """Returns the bytes that one rank receives in all steps. Raises ValueError if the rank is not on the meshes."""

    def rank_peak_bytes(self, rank: int) -> int:
        """Returns the most memory that one rank allocates at once."""

    def program(self, rank: int) -> str:
        """Returns the instructions of one rank, as text."""

    def simulate(self) -> int:
        """Runs the programs of all ranks in this process. Returns the bytes that all ranks receive. Raises RuntimeError
        if an element is wrong, or if bytes or memory differ from the plan's."""

    def to_bytes(self) -> bytes:
        """Returns the plan as bytes, which `from_bytes` reads."""

    @staticmethod
    def from_bytes(data: bytes) -> Plan:
        """Returns the plan from the result of `to_bytes`. Raises ValueError for other bytes."""

    def to_json(self) -> str:
        """Returns JSON as described in docs/plan.schema.json; `plan_from_json` reads it."""

    def to_svg(self) -> str:
        """Returns an SVG picture of the ranks' parts and messages: a row per rank (up to 16 ranks) or per mesh dim."""

    def to_html(self) -> str:
        """Returns an HTML page with times, timeline, costs, links, certificate and picture. The page has no scripts and
        needs no other files."""

class PlanningTables:
    """The defaults for plans and products. Immutable: the ``with...`` methods return a new object."""

    def __init__(self) -> None: ...
    def with_pin(self, plan: Plan) -> PlanningTables:
        """Returns tables in which this plan is pinned for its layouts and backend."""

    def without_pin(self, plan: Plan) -> PlanningTables:
        """Returns tables without the pin for the layouts and backend of this plan. Raises ValueError if there is
        none."""

    def pinned(self, src: Layout, dst: Layout, backend: str) -> Plan | None:
        """Returns the pinned plan, or None."""

    def with_measured(
        self, backend: str, topology: Topology, gemm_models: Mapping[tuple[str, str], GemmModel]
    ) -> PlanningTables:
        """Returns tables with a measured topology for the backend, and with measured models by (device type, dtype)."""

    def without_measured(self) -> PlanningTables:
        """Returns tables without measured topologies and models."""

    def with_environment(self, topology: Topology | None) -> PlanningTables:
        """Returns tables in which the environment variable ``SHARDWRIGHT_TOPOLOGY`` gives this topology, or none."""

    def measured_topology(self, backend: str) -> Topology | None:
        """Returns the measured topology, or None."""

    def measured_gemm_model(self, device_type: str, dtype: str) -> GemmModel | None:
        """Returns the model that was measured for this dtype, else a model for another dtype of the device type, else
        None."""

    def gemm_model(self, device_type: str, dtype: str) -> GemmModel:
        """Returns the measured model, else the default model of the device type."""

    @property
    def environment(self) -> Topology | None: ...
    def summary(self) -> dict[str, str]:
        """Returns a text with a hash of the content for each table, by name, for ranks to compare."""

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
) -> Plan:
    """Returns the cheapest plan from one layout to another, from the cache of plans if possible.

    The arguments are those of `shardwright.plan`; `tables` are the defaults, and `memory_limit` is in bytes. Raises
    ValueError if an argument is invalid or no plan meets the memory limit.
    """

def plan_through(
    layouts: Sequence[Layout],
    backend: str = "nccl",
    objective: str = "time",
    topology: Topology | None = None,
    groups: Sequence[Sequence[int]] = (),
    reduce: str = "fast",
    tables: PlanningTables = ...,
) -> Plan:
    """Returns the plan with one move from each layout to the next, at most 30 moves. Raises ValueError if there is no
    such move, or if there are more."""

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
) -> Plan:
    """Returns the plan with these steps: (kind of step, mesh dims, layouts before and after, replica policy, rounds,
    ordered, ranks per node). Raises ValueError if they do not form a plan."""

def plan_text(plan: Plan) -> str:
    """Returns a plan as text, which operators take: a label, ``"|"``, and the plan's bytes in base64."""

def parse_plan(text: str) -> Plan:
    """Returns the plan from the result of `plan_text`. Raises ValueError for other texts."""

def simulation_bytes(plan: Plan) -> int:
    """Returns an estimate of the memory that ``plan.simulate()`` needs, in bytes."""

def plan_cache_counts() -> dict[str, int]:
    """Returns the hits and misses of the cache of plans since the last reset, and its size."""

def reset_plan_cache_counts() -> None:
    """Sets the hits and misses to 0."""

def clear_plan_cache() -> None:
    """Removes all plans from the cache."""

def view_of(layout: Layout, shape: Sequence[int], for_dtensor: bool = False) -> Layout | str:
    """Returns ``layout.view(shape)``, or the reason why there is no such layout. With `for_dtensor`, only layouts that
    DTensor can express."""

def move_before_view(
    layout: Layout, shape: Sequence[int], for_dtensor: bool, backend: str, tables: PlanningTables
) -> tuple[Plan, Layout, str] | None:
    """Returns (cheapest redistribute before a view, layout of the view after the redistribute, message with the
    reason), or None if the view needs no redistribute."""

def is_known_to_dtensor(layout: Layout) -> bool:
    """Returns True if DTensor's placements can express the layout."""

class Batch:
    """Tensors that are moved together.

    `sources` and `destinations` are layouts. An item is (index of a source, index of a destination, axes). An axis is
    (source dim, destination dim, first index in the source, first index in the destination, length), with -1 for an
    absent dim. Axes of None mean the full tensor. `bucket_bytes` and `buckets` are the maximum size of a rank's
    buckets, and the maximum number of them. `first_sender_group` is the sender group (csrc/batch/item_family.h) that is
    tried first.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        destinations: Sequence[Layout],
        items: Sequence[tuple[int, int, Sequence[tuple[int, int, int, int, int]] | None]],
        bucket_bytes: int = 67108864,
        buckets: int = 3,
        first_sender_group: int = 0,
    ) -> None: ...
    @property
    def num_items(self) -> int: ...
    def digests(self) -> list[int]:
        """Returns a digest of the settings, then a digest for each item, which covers the settings and all items up to
        it."""

    def reductions(self) -> dict[int, Layout]:
        """Returns, for each source with pending reductions, its index and the layout to which it is reduced first."""

    def item_text(self, item: int) -> str:
        """Returns the description of an item, given by its index."""

    def to_bytes(self) -> bytes:
        """Returns the batch in the form that the runtime takes."""

class BatchPlan:
    """The plan of a batch and its costs. ``str(plan)`` describes it. Maxima are over ranks."""

    def __init__(self, batch: Batch) -> None: ...
    @property
    def ranks(self) -> list[int]:
        """The ranks of all layouts, ascending."""

    @property
    def num_items(self) -> int: ...
    @property
    def num_kinds(self) -> int:
        """Number of kinds of items. Items of one kind have equal layouts and maps."""

    @property
    def received_bytes_max(self) -> int:
        """Bytes received by the rank that receives most. No plan can have fewer."""

    @property
    def received_bytes_sum(self) -> int:
        """Bytes received by all ranks."""

    @property
    def kept_bytes_sum(self) -> int:
        """Bytes that are copied locally."""

    @property
    def sent_bytes_max(self) -> int:
        """Bytes sent by the rank that sends most."""

    @property
    def sent_bytes_bound(self) -> int:
        """A lower bound on `sent_bytes_max` if only ranks that hold the data send it."""

    @property
    def sent_bound_is_exact(self) -> bool:
        """True if some way of sending reaches `sent_bytes_bound`; False if that is not known."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds of messages."""

    @property
    def rounds_bound(self) -> int:
        """A lower bound on the number of rounds with the requested `bucket_bytes`."""

    @property
    def messages_max(self) -> int:
        """Messages received by the rank that receives most."""

    @property
    def messages_sum(self) -> int:
        """Messages received by all ranks."""

    @property
    def messages_are_exact(self) -> bool:
        """True if `messages_max` and `messages_sum` are exact; if not, they are upper bounds."""

    @property
    def reductions(self) -> int:
        """Number of sources with pending reductions, which are reduced before anything is sent."""

    @property
    def reduction_bytes_sum(self) -> int:
        """Bytes received by all ranks for these reductions."""

    @property
    def reduced_bytes_max(self) -> int:
        """Bytes of the reduced parts on the rank that holds most of them."""

    @property
    def reducing_bytes_max(self) -> int:
        """Temporary bytes of the reduction that needs most, besides its result."""

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket."""

    @property
    def buckets(self) -> int:
        """Number of buckets on each rank."""

    @property
    def memory_bytes(self) -> int:
        """Extra bytes of memory on each rank: buckets * bucket_bytes. With reductions, an upper bound that includes
        them."""

    def to_json(self) -> str: ...

class Schedule:
    """The schedule of a `Matmul` (csrc/products/matmul.h).

    Args:
        method: ``"serial"``, ``"ring"``, ``"collective"`` or ``"flags"``.
        chunks: the number of chunks, or for a ring, for each chunk that is sent, its distances: how many ranks away on
            the ring its parts are.
        depth: the maximum number of transfers under way during a product.
        sms_left: multiprocessors that products leave to transfers under way.

    Raises:
        ValueError: the method is unknown. `Matmul.check` checks that a schedule is possible for a product.
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
        """Returns a matmul that moves an operand by a plan and multiplies it.

        Args:
            products: for each product, (axes with the moved operand first, layout of the other operand, True if a bias
                is added).
            keeps_gathered: True if the moved operand is an output too.
            scaling: for 8-bit operands, (True for scales by row, dtype of the result, plan of the moved operand's
                scales if they are by row).

        Raises:
            ValueError: the arguments contradict each other.
        """

    @staticmethod
    def scatter(
        plan: Plan,
        terms: Sequence[tuple[str, Layout, Layout]],
        has_addend: bool = False,
        scaling: tuple[bool, str, Plan | None] | None = None,
    ) -> Matmul:
        """Returns a matmul that sums products and moves the sum by a plan.

        Args:
            terms: for each product, (axes, layouts of both operands).
            has_addend: True if one more tensor is added, in the layout of the plan's source.
            scaling: as in `gather`, without a plan.

        Raises:
            ValueError: the arguments contradict each other.
        """

    @staticmethod
    def parse(text: str) -> tuple[Matmul, Schedule]:
        """Returns the matmul and the schedule from the result of `to_text`. Raises ValueError for other texts."""

    @property
    def plan(self) -> Plan:
        """The plan of the move."""

    @property
    def num_partners(self) -> int:
        """Number of ranks that take part in the step that is divided into chunks."""

    @property
    def communicates(self) -> bool:
        """True if the plan communicates."""

    @property
    def why_only_serial(self) -> str | None:
        """The reason why no part of the matmul can be divided into chunks, or None if some part can."""

    def check(self, schedule: Schedule) -> None:
        """Raises ValueError if the schedule is not possible for this matmul."""

    def predictions(self, model: GemmModel, depth: int | None = None) -> list[tuple[Schedule, int]]:
        """Returns (schedule, predicted picoseconds) for the serial schedule, then for every method and number of
        chunks. Each has the number of processors left to transfers, and the depth unless `depth` is given, that are
        predicted to be fastest."""

    def choose(self, model: GemmModel, depth: int | None = None) -> Schedule:
        """Returns the schedule with the least predicted time; the serial one unless another saves at least 2%."""

    def tuned(self, schedule: Schedule, model: GemmModel, depth: int | None = None) -> Schedule:
        """Returns `schedule` with the depth and the processors left to transfers that `predictions` chooses."""

    def timeline(self, schedule: Schedule, model: GemmModel) -> dict[str, Any]:
        """Returns the predicted timeline of the first rank, in picoseconds: ``spans``, each (lane, instruction, chunk,
        start, end); ``total_ps``; ``communication_ps`` and ``gemm_ps``, the sums of the times of transfers and of
        products."""

    def program(self, schedule: Schedule, rank: int) -> str:
        """Returns the instructions of one rank, as text."""

    def peak_bytes(self, schedule: Schedule, rank: int) -> int:
        """Returns the most memory that one rank allocates at once, in bytes."""

    def shapes(self, rank: int) -> tuple[list[list[int]], list[tuple[list[int], str]]]:
        """Returns the shapes of a rank's inputs, and the shapes and dtypes of its outputs."""

    def to_text(self, schedule: Schedule) -> str:
        """Returns the matmul and the schedule as text, which operators take."""

class ProductPlan:
    """The plan of a product of placed tensors, forward and backward (csrc/products/product_plan.h).

    Args:
        axes: one text per weight, as in einsum: ``"bsk,nk->bsn"``.
        operand, weights, biases, results: the layouts of the given tensors, and the requested layouts of the results.
        cuts: the axis that is sharded along each mesh dim during the product, or ``"-"`` for none. Default: the cuts
            predicted to be fastest.
        scaled_by: how operands of 8-bit floats are scaled: ``"tensor"`` or ``"row"``.
        scales: if by row, the layouts of scales of operand and weights that are not placed like their operand's rows.
        keeps_gathered: True if the forward also returns the moved operand, for the backward.
        method, chunks, depth: as in `shardwright.linear`.
        backend, topology, tables: as in `shardwright.plan`.
        gemm_models: the models that predict products, by the dtype of the moved tensor.

    Raises:
        ValueError: the arguments contradict each other, or the schedule is not possible.
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
    def axes(self) -> list[str]:
        """The axes of each product, as in einsum."""

    @property
    def operand(self) -> Layout:
        """The layout of the operand."""

    @property
    def weights(self) -> list[Layout]:
        """The layouts of the weights."""

    @property
    def biases(self) -> list[Layout | None]:
        """The layouts of the biases; None for weights without one."""

    @property
    def results(self) -> list[Layout]:
        """The layouts of the results."""

    @property
    def scaled_by(self) -> str:
        """The scaling of 8-bit operands: ``"tensor"``, ``"row"`` or ``""`` (not)."""

    @property
    def cuts(self) -> str:
        """The axis that is sharded along each mesh dim during the product, or ``"-"``."""

    @property
    def lead(self) -> str:
        """The tensor whose move overlaps with the product: ``"operand"``, ``"weight"`` or ``"result"``."""

    @property
    def keeps_gathered(self) -> bool:
        """True if the forward also returns the moved operand, for the backward."""

    @property
    def has_equal_parts(self) -> bool:
        """True if, for every tensor, all ranks hold parts of one size."""

    @property
    def chooses_schedules(self) -> bool:
        """True if the method or the number of chunks is chosen by predicted time."""

    @property
    def moved_operand(self) -> Layout:
        """The operand's layout during the product."""

    @property
    def operand_gradient(self) -> Layout:
        """The layout in which the backward returns the operand's gradient. Raises ValueError for products with
        scales."""

    @property
    def result_gradients(self) -> list[Layout]:
        """The layouts of the results' gradients if they are placed like the results."""

    @staticmethod
    def parse(text: str) -> ProductPlan:
        """Returns the plan from the result of `to_text`. Raises ValueError for other texts."""

    def to_text(self) -> str:
        """Returns the arguments of the plan as text, which operators take. Equal plans give equal texts in every
        process."""

    def to_json(self) -> str:
        """Returns the layouts, moves and costs as JSON."""

    def gemm_model(self, dtype: str) -> GemmModel:
        """Returns the model for products whose moved tensor has this dtype."""

    def predicted_ps(self) -> int:
        """Returns the predicted time of the forward, in picoseconds."""

    @property
    def forward(self) -> ProductDataflow:
        """The operations of the forward. Inputs: operand, weights, biases of the weights that have one, scales.
        Outputs: results, then the moved operand if it is kept."""

    def backward(self, given: Sequence[Layout | None], needs: Sequence[bool]) -> ProductDataflow:
        """Returns the operations of a backward.

        Inputs: operand (the moved one if it is kept), weights, gradients of the results, then the addend to the
        operand's gradient if there is one. Outputs: gradients of operand, weights and biases.

        Args:
            given: the layouts of the results' gradients, None for the usual ones (`result_gradients`). One more item is
                the layout of the addend, or None.
            needs: flags for the gradients of the operand, each weight, and the bias of each weight.
        """

class ProductNode:
    """One operation on the tensors of a product (csrc/products/dataflow.h)."""

    @property
    def kind(self) -> str:
        """The kind of operation: ``"move"``, ``"matmul"``, ``"bias"``, ``"sum"`` or ``"add"``."""

    @property
    def inputs(self) -> list[int]:
        """Numbers of the values that it reads."""

    @property
    def outputs(self) -> list[int]:
        """Numbers of the values that it makes; -1 for an output that was not requested."""

    @property
    def released(self) -> list[int]:
        """Numbers of the values that no later node reads."""

    @property
    def plan(self) -> Plan | None:
        """The plan of a move, else None."""

    @property
    def matmul(self) -> Matmul | None:
        """The `Matmul` of a matmul, else None."""

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of a matmul, else None."""

    def adds_bias(self, plan: ProductPlan, rank: int) -> bool:
        """Returns True if `rank` adds the bias. While a sum is pending, only one rank along its mesh dims adds it."""

class ProductDataflow:
    """The operations of a forward or backward. Values are numbered, inputs first."""

    @property
    def names(self) -> list[str]:
        """The name of each value."""

    @property
    def layouts(self) -> list[Layout]:
        """The layout of each value."""

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""

    @property
    def outputs(self) -> list[int]:
        """Numbers of the values that are outputs; -1 for an output that was not requested."""

    @property
    def nodes(self) -> list[ProductNode]:
        """The nodes in execution order."""

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
    """Returns the plan of a product of tensors, from the arguments of the function (``"linear"``, ``"gather"`` or
    ``"sum"``) that multiplies them; see csrc/products/product_arguments.h. A DTensor is given with its layout; `scales`
    are those of x and of the weights. Without a `gemm_model`, the tables' model for the device type is used. Raises
    ValueError if the arguments are invalid."""

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
    """Returns the layouts that `ProductPlan` takes: (operand, weights, biases, results).

    `axes` are as in einsum, `sizes` are those of the axes, and the other arguments are placements as text, one text per
    tensor. Empty `biases` mean no biases. Empty `results` are placed so that they need no move. Raises ValueError if an
    axis has no size, or if placements do not fit a tensor.
    """

class Attention:
    """Attention whose sequence is sharded over ranks (csrc/attention/attention.h)."""

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
        """Makes an attention with the method ``"serial"``; `with_method` changes the method.

        Args:
            mesh: a mesh of one dim.
            dtype: of queries, keys, values and results.
            sizes: batch, heads, heads of keys and values, depth, and depth of values.
            parts: by position on the mesh, the [begin, end) intervals of the queries' sequence on that rank, in local
                order.
            key_parts: the same for the sequence of keys and values, or None in self-attention.
            keys_are_whole: True if every rank has all keys and values already.
            window: a query at i sees the keys j with ``|i - j| < window``; None for all keys.
            documents: the lengths of consecutive documents; tokens see only their own document. Empty for one document.
            mask: dtype and shape of this rank's mask tensor, or None.
            scale: factor of the scores.
            chunks: number of chunks of equal length at whose ends the intervals are cut into blocks; 0: none.
            lowering: of the transport that sends keys, values and results.

        Raises:
            ValueError: the arguments contradict each other.
        """

    def with_method(self, method: str, topology: Topology | None) -> Attention:
        """Returns this attention with another method. Raises ValueError if the method is not possible: ``"two_level"``
        needs a topology with nodes."""

    def with_mask(self, mask: tuple[str, tuple[int, int, int, int]]) -> Attention:
        """Returns this attention for a mask tensor of this dtype and shape. Raises ValueError if they do not fit."""

    @property
    def method(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def lowering(self) -> Lowering: ...
    def rows(self, rank: int) -> int:
        """Returns the number of rows of queries that a rank holds."""

    def key_rows(self, rank: int) -> int:
        """Returns the number of rows of keys that a rank holds."""

    def with_default_mask(self) -> Attention:
        """Returns this attention without the dtype and shape of the mask tensor, which may differ between ranks."""

    def counts(self, rank: int) -> tuple[int, int, int, int]:
        """Returns, for one rank, the numbers of block products that are full, triangular and other, and the number of
        (query, key) pairs that are not masked."""

    def program(self, rank: int, backward: bool = False) -> str:
        """Returns the instructions of one rank, forward or backward, as text."""

    def peak_bytes(self, rank: int, backward: bool = False) -> int:
        """Returns the most memory that one rank allocates at once."""

    def to_text(self, backward: bool) -> str:
        """Returns the forward or the backward as text, which operators take."""

    def choose(self, topology: Topology | None, model: GemmModel, with_backward: bool) -> str:
        """Returns the method predicted to be fastest. A topology of None is the backend's default."""

    def forecasts(
        self, topology: Topology | None, model: GemmModel, with_backward: bool = True
    ) -> list[tuple[str, int, int, int, int, int]]:
        """Returns for each method: name; picoseconds of the forward, of the backward, and of the forward's compute
        alone; bytes received by the rank that receives most, and the most bytes that a rank allocates at once, both in
        the forward."""

    def describe(self, topology: Topology | None, model: GemmModel) -> str:
        """Returns a text with the sizes, the block products of each rank, and the predictions."""

class StepSchedule:
    """The gathers and releases of weights within a training step; see csrc/schedule/schedule.h."""

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
        chunked_weights: Sequence[
            tuple[int, int, int, int, int, int, bool, tuple[Sequence[tuple[int, int, int]], int, int]]
        ] = (),
        may_add_chunks: bool = False,
        activations: Sequence[tuple[str, int, int, int, int, int, int, int]] = (),
    ) -> None:
        """Plans a step.

        Args:
            weights: each (name, rest_bytes, use_bytes, keep_bytes, gradient_bytes, gather_ps, reduce_ps, fetch_ps,
                send_ps): bytes of the sharded part, of the gathered weight, of what is kept from first to last use, and
                of the gradient; picoseconds of a gather, of a reduction, and of their copies from and to the host, or
                0.
            uses: each (weights, pass, gradients, compute_ps): indices of the weights that are needed; "forward",
                "recompute" or "backward"; weights whose gradients are complete afterwards; picoseconds of the compute,
                or 0.
            budget_bytes: memory limit for gathered weights, kept copies, gathered activations, gradients and
                `held_bytes`.
            prefetch: number of weight changes by which gathers are ahead. A weight change is a use that needs a weight
                which the use before does not need. None: the least number whose predicted step is within 1% of the
                fastest within the budget.
            alignment_bytes: alignment of addresses in the arena.
            held_bytes: part of the budget that is always in use outside of the arena.
            gather_until: for each use, the index of a later use. While the use runs, the gathers for all uses up to
                that index should be done or under way. An index below the use itself requires nothing.
            chunked_weights: weights that may be gathered in chunks, each (weight, use_bytes, gather_ps, chunk_bytes,
                transfer_ps, num_chunks, in_backwards, reduction): index; bytes and picoseconds of the part that is
                gathered before the use; bytes of the chunks that exist at a time, picoseconds of all chunks, and their
                number; True if backwards may gather chunks too; the reduction of the gradient in chunks. A reduction is
                (products, rest_ps, gradient_bytes): its products (none: not in chunks), picoseconds of the part that is
                not in chunks, and bytes of the gradient meanwhile. A product is (transfer_ps, last_chunk_ps, use):
                picoseconds of all chunks and of one chunk, and its use (-1: the one that completes the gradient).
            may_add_chunks: adds the bytes of chunks to the budget.
            activations: activations of which parts are kept, in the order in which they are needed, each (name,
                kept_bytes, bytes, gather_ps, saved, first, last, until): bytes of the kept part and of the gathered
                activation; picoseconds of a gather, or 0; the use that saves it, the first and the last use that need
                it, and the activation in whose turn it is needed last. An activation's turn lasts from its first need
                to the first need of the next one.

        Raises:
            ValueError: the budget is too small (the message names one that suffices), or the arguments are invalid.
        """

    @property
    def original_of(self) -> list[int]:
        """For each weight: -1, or for a chunked weight the index of the weight that it stands for. Chunked weights are
        last."""

    @property
    def prefetch(self) -> int:
        """Number of weight changes by which gathers are ahead."""

    @property
    def lanes(self) -> dict[str, Any] | None:
        """The predicted times of the step, by name; None if the durations of uses or gathers are unknown.

        A span is (begin_ps, end_ps), in picoseconds from the beginning of the step.

        - ``uses``, ``gathers``, ``reductions``, ``activations``: a span for each item of the schedule's list of this
          name. An activation's span is that of its gather.
        - ``fetches``: for each gather, the span of the copy from the host.
        - ``sends``: for each reduction, the span of the copy to the host.
        - ``chunks``: (weight, use, is_reduction, span) of all chunks that are transferred for a weight within a use,
          for its gather or for the reduction of its gradient.
        - ``compute_ps``, ``transfer_ps``, ``copy_ps``: the sums of the durations of uses, transfers and copies.
        - ``total_ps``: the duration of the step.
        """

    @property
    def uses(self) -> list[tuple[list[int], str, list[int], int]]:
        """For each use: (weights, pass, gradients, compute_ps), as given to the constructor. A weight that is gathered
        in chunks is replaced by its chunked weight (`original_of`)."""

    @property
    def buffers(self) -> list[tuple[int, bool, int, int, int, int]]:
        """For each buffer in the arena: (weight, is_kept_copy, first, last, size_bytes, offset_bytes). It exists from
        use `first` to use `last`."""

    @property
    def gathers(self) -> list[tuple[int, int, int, int, bool]]:
        """For each gather: (weight, buffer, start, needed, from_copy). It starts before use `start` and is done before
        use `needed`. With `from_copy`, it reads the kept copy instead of the sharded parts."""

    @property
    def chunk_gathers(self) -> list[tuple[int, int]]:
        """For each gather in chunks: (weight, use), with the index of the original weight. All chunks are gathered
        during the use. The part that is not in chunks is one of `gathers`."""

    @property
    def reductions(self) -> list[tuple[int, int, int, int, bool]]:
        """For each reduction: (weight, first, start, finish, in_chunks). The gradient exists from use `first` on. The
        reduction starts after use `start` and is done after use `finish`. With `in_chunks`, chunks are reduced during
        the uses from `first` to `start`, and only the rest after `start`."""

    def to_svg(self) -> str:
        """Returns the step as a standalone SVG picture: compute, transfers, and the buffers in the arena."""

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""

    @property
    def live_buffer_bytes(self) -> int:
        """Maximum of the bytes of buffers that exist at once, a lower bound on `arena_bytes`."""

    @property
    def peak_gradient_bytes(self) -> int:
        """Maximum of the bytes of gradients that exist at once."""

    @property
    def peak_activation_bytes(self) -> int:
        """Maximum of the bytes of activations that exist at once."""

    @property
    def activations(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """For each activation: (name, kept_bytes, bytes, gather_ps, saved, first, last, until), as given to the
        constructor."""

    @property
    def activation_gathers(self) -> list[tuple[int, int]]:
        """For each activation: (start, trigger). Its gather starts in use `start`, when the activation `trigger` is
        first needed. With a `trigger` of -1, the gather starts before the use."""

    @property
    def peak_bytes(self) -> int:
        """Size of the arena, plus the maximum of the bytes of gradients and activations that exist at once, plus
        `held_bytes`."""

    def to_json(self) -> str:
        """Returns the schedule as JSON."""

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
    """Returns the least budget, in bytes, with which gathers are as far ahead as required and each reduction runs
    during the next backward."""

class LinkFit:
    """The costs of transfers over a link, fitted to measurements."""

    @property
    def step(self) -> float:
        """Seconds per step."""

    @property
    def message(self) -> float:
        """Seconds per message."""

    @property
    def byte(self) -> float:
        """Seconds per byte."""

    @property
    def error(self) -> float:
        """Mean relative error of the fit."""

def fit_links(
    inside: Sequence[tuple[int, int, float]],
    between: Sequence[tuple[int, int, float]],
    mesh_dims: Mapping[str, Sequence[tuple[int, int, float]]],
    crossing: Set[str],
) -> tuple[LinkFit, LinkFit, dict[str, LinkFit]]:
    """Returns (link within nodes, link between nodes, links of mesh dims by name), fitted to measurements.

    `inside`, `between` and the values of `mesh_dims` are measured all-to-alls, as (number of peers, bytes sent,
    seconds). `crossing` names the mesh dims along which ranks are on different nodes.
    """

def forecast_batch(
    batch_bytes: bytes, topology: Topology
) -> tuple[list[tuple[int, int, int, int, int, int]], list[tuple[int, int, int, int, int]], int, int]:
    """Predicts the traffic and times of a batch, in bytes and picoseconds.

    Returns (destinations, links, total time, time of reductions). A destination is (bytes received by all ranks, bytes
    received by the rank that receives most, bytes copied locally, first round, last round, time), with rounds of -1 if
    nothing is sent. A link is (sender, receiver, bytes, upper bound on messages, time). The total time includes the
    reductions of sources.
    """
