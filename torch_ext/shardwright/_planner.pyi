"""Types of the torch-free extension module. `Layout`, `Mesh` and `plan` of the package are the public face of it."""

from collections.abc import Mapping, Sequence
from typing import Any

class Link:
    """What it costs to reach another rank."""

    def __init__(self, message_ps: int, ps_per_kib: int) -> None: ...
    @property
    def message_ps(self) -> int:
        """Picoseconds for each message received."""

    @property
    def ps_per_kib(self) -> int:
        """Picoseconds per KiB, of the larger of bytes sent and received by a rank."""

class Topology:
    """What joins the ranks of a mesh, in integer picoseconds, so that every rank computes the same plan.

    Ranks are on nodes of `ranks_per_node` consecutive ranks (0: on one node). Groups on one node go by `inside`, others
    by `between`; `mesh_dims` gives single mesh dims, by name, links of their own.
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
        """Raises ValueError naming the known ones."""

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
        """Of local copies."""

    @property
    def inside(self) -> Link: ...
    @property
    def between(self) -> Link: ...
    @property
    def mesh_dims(self) -> dict[str, Link]: ...
    def to_json(self) -> str:
        """What `load_topology` reads."""

class LinkFit:
    """What a step, a message and a byte cost over a link, in seconds, and how far off that is in the mean."""

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
    crossing: set[str],
) -> tuple[LinkFit, LinkFit, dict[str, LinkFit]]:
    """Of all-to-alls as (peers, bytes sent, seconds): within nodes, between them, and along mesh dims by name."""

class Mesh:
    """A grid of ranks with named dims. Equal are meshes with the same names, sizes, ranks and topology."""

    def __init__(
        self,
        dim_names: Sequence[str],
        dim_sizes: Sequence[int],
        ranks: Sequence[int] | None = ...,
        topology: Topology | None = ...,
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
        """Where a rank sits; None for a rank that is not on the mesh."""

    def group_ranks(self, rank: int, mesh_dims: Sequence[int]) -> list[int]:
        """The ranks that differ from `rank` only in `mesh_dims`, itself included, ascending."""

    def has_same_ranks(self, other: Mesh) -> bool:
        """Whether names, sizes and ranks are the same, whatever joins them."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Layout:
    """A global tensor's shape and dtype, and how it lies on a mesh. Equal are layouts that put the same elements in the
    same places of equal meshes; plans for them are one."""

    def __init__(
        self,
        mesh: Mesh,
        shape: Sequence[int],
        placements: Sequence[str],
        dtype: str = ...,
        shard_order: Mapping[int, Sequence[int]] = ...,
        strided: str = ...,
    ) -> None: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def placements(self) -> tuple[str, ...]:
        """One per mesh dim. Strided shards that encode an order of cuts stand as plain ones; see `shard_order`."""

    @property
    def shard_order(self) -> dict[int, list[int]]:
        """{tensor dim: mesh dims that cut it, first cut first}; mesh dims of size 1 are left out."""

    @property
    def has_equal_parts(self) -> bool:
        """Whether all ranks hold parts of one shape."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of this rank's part; (0,) on a rank that is not on the mesh."""

    def region(self, rank: int) -> list[list[tuple[int, int]]]:
        """Per tensor dim the [begin, end) intervals of global indices the rank holds, in local order."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Step:
    """One move of a plan."""

    @property
    def op(self) -> str:
        """slice, partition, zero_fill, all_gather, all_to_all, permute, exchange, reduce_scatter or all_reduce."""

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """Indices of the mesh dims it moves over."""

    @property
    def ordered(self) -> bool:
        """Whether contributions are exchanged and summed in rank order, never by a native collective."""

    @property
    def sharing(self) -> str:
        """How ranks that hold the same share what is sent of it: ``"none"``, each receiver reads from one of them;
        ``"messages"``, whole messages; ``"bytes"``, to the element, which splits some messages."""

    @property
    def rounds(self) -> int:
        """In how many goes the move is carried out, to need less staging; each counts as a step."""

    @property
    def predicted_us(self) -> float: ...
    @property
    def before(self) -> Layout: ...
    @property
    def after(self) -> Layout: ...
    @property
    def wire_bytes_max(self) -> int:
        """Bytes received from other ranks by the rank that receives most."""

    @property
    def wire_bytes_sum(self) -> int:
        """Bytes received by all ranks."""

    @property
    def maxima_are_exact(self) -> bool:
        """Whether `wire_bytes_max`, `send_bytes_max` and `messages_max` hold for every rank.

        If not, they are those of the outermost ranks of a mesh with too many kinds of ranks to look at each. Always so
        up to 4,096 ranks.
        """

    @property
    def send_bytes_max(self) -> int: ...
    @property
    def messages_max(self) -> int:
        """Messages received by the rank that receives most."""

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
        """Name of the table of latencies and bandwidths that the plan was chosen by."""

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
        """Whether `wire_bytes_sum` is exact; if not, an upper bound. Always so up to 4,096 ranks."""

    @property
    def send_bytes_max(self) -> int: ...
    @property
    def messages_max(self) -> int:
        """Messages received over all steps by the rank that receives most."""

    @property
    def bound_bytes_max(self) -> int:
        """What no plan can go below for the rank that receives most."""

    @property
    def bound_bytes_sum(self) -> int:
        """What no plan can go below over all ranks."""

    @property
    def peak_bytes(self) -> int:
        """Memory allocated at once on the worst rank: the result and temporaries, not the source."""

    @property
    def peak_bytes_is_exact(self) -> bool:
        """Whether no rank allocates more than `peak_bytes`; see `maxima_are_exact`."""

    @property
    def predicted_us(self) -> float:
        """Time by the plan's topology, in microseconds."""

    @property
    def certificate(self) -> dict[str, tuple[int, int]]:
        """Figures, each beside what no plan can go below: ``wire_bytes_max`` and ``wire_bytes_sum`` received,
        ``send_bytes_max``, ``messages_max``, ``steps`` that communicate, ``peak_bytes``, ``predicted_ps``."""

    @property
    def remarks(self) -> list[str]:
        """A sentence for each bound that the plan does not meet, and for what it cannot promise."""

    @property
    def replicas_are_bitwise_equal(self) -> bool:
        """Whether ranks that end with the same part hold the same bits of what was reduced, whatever the library that
        reduces."""

    def wire_bytes(self, rank: int) -> int:
        """Bytes that one rank receives."""

    def rank_peak_bytes(self, rank: int) -> int:
        """Memory that one rank allocates at once."""

    def program(self, rank: int) -> str:
        """The instructions of one rank, as text."""

    def simulate(self) -> int:
        """Runs all ranks in this process. Returns the bytes moved; raises RuntimeError if an element is wrong, or if
        bytes or memory differ from what the plan says."""

    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> Plan:
        """Raises ValueError on bytes that are no plan."""

    def to_json(self) -> str:
        """As docs/plan.schema.json says; `plan_from_json` reads it."""

    def to_svg(self) -> str:
        """A picture: who holds what, and who sends what to whom; by rank on meshes of up to 16, else by mesh dim."""

    def to_html(self) -> str:
        """The picture and the plan's text as a page of its own."""

class PlanningTables:
    """What plans and products go by where a call does not say. Immutable: the methods ``with...`` give another."""

    def __init__(self) -> None: ...
    def with_pin(self, plan: Plan) -> PlanningTables: ...
    def without_pin(self, plan: Plan) -> PlanningTables:
        """Raises ValueError where nothing is pinned for the plan's layouts and backend."""

    def pinned(self, src: Layout, dst: Layout, backend: str) -> Plan | None: ...
    def with_measured(
        self, backend: str, topology: Topology, gemm_models: dict[tuple[str, str], GemmModel]
    ) -> PlanningTables:
        """`gemm_models` by device type and dtype."""

    def without_measured(self) -> PlanningTables: ...
    def with_environment(self, topology: Topology | None) -> PlanningTables: ...
    def measured_topology(self, backend: str) -> Topology | None: ...
    def measured_gemm_model(self, device_type: str, dtype: str) -> GemmModel | None: ...
    @property
    def environment(self) -> Topology | None: ...
    def summary(self) -> dict[str, str]:
        """What ranks of one job have in common, by name, with hashes of what is behind the names."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

def lowering_of_backend(backend: str, device_type: str) -> str:
    """``"nccl"`` or ``"gloo"``, by the name that a process group's backend has; csrc/cost/backend.h says more."""

def make_plan(
    src: Layout,
    dst: Layout,
    backend: str = ...,
    objective: str = ...,
    topology: Topology | None = ...,
    groups: Sequence[Sequence[int]] = ...,
    reduce: str = ...,
    memory_limit: int | None = ...,
    tables: PlanningTables = ...,
) -> Plan: ...
def plan_through(
    layouts: Sequence[Layout],
    backend: str = ...,
    objective: str = ...,
    topology: Topology | None = ...,
    groups: Sequence[Sequence[int]] = ...,
    reduce: str = ...,
    tables: PlanningTables = ...,
) -> Plan: ...
def plan_of_steps(
    src: Layout,
    dst: Layout,
    steps: Sequence[tuple[str, Sequence[int], Layout, Layout, str, int, bool]],
    backend: str,
    objective: str,
    topology: Topology,
    named_groups_only: bool,
) -> Plan: ...
def plan_text(plan: Plan) -> str:
    """A plan as operators take it: a label, ``"|"``, and its bytes in base64."""

def parse_plan(text: str) -> Plan:
    """What `plan_text` wrote. Raises ValueError on other text."""

def simulation_bytes(plan: Plan) -> int:
    """About how much memory ``plan.simulate()`` takes."""

def plan_cache_counts() -> dict[str, int]: ...
def reset_plan_cache_counts() -> None: ...
def clear_plan_cache() -> None: ...

class GemmModel:
    """How long a matrix product takes: what chunks are chosen by, the same on every rank.

    A product is cut into tiles, and processors take one each at a time: one of few tiles leaves processors idle.

    Args:
        name: shown in messages.
        num_processors: SMs of a GPU; 1 for the cores of a CPU together.
        tile_rows, tile_columns: of the result.
        flops_per_us: of one processor, for operands of 16 bits; 8 bits go twice, 32 half, 64 a quarter as fast.
        launch_ps: picoseconds per product.
        memory_ps_per_kib: to read operands and write results.
        contention_percent: by how much a product takes longer while data travels.

    Raises:
        ValueError: figures below 0, and below 1 where they divide.
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
    ) -> None: ...
    @staticmethod
    def named(name: str) -> GemmModel:
        """``"h100"``, ``"a100"`` or ``"cpu"``: orders of magnitude, not measurements. Raises ValueError on others."""

    @staticmethod
    def names() -> list[str]: ...
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
    def picoseconds(self, m: int, n: int, k: int, count: int = 1, item_bytes: int = 2) -> int:
        """Of `count` products of m x k by k x n."""

class Schedule:
    """How a `Matmul` is carried out: csrc/products/matmul.h says more.

    Args:
        method: ``"serial"``, ``"ring"`` or ``"collective"``.
        chunks: how many; or of a ring the distances of each.
        depth: transfers under way beside a product, at most.
        sms_left: multiprocessors that products leave to transfers under way beside them.

    Raises:
        ValueError: another method. What fits a product says `Matmul.check`.
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

class Matmul:
    """Matrix products next to a redistribute, as one program: csrc/products/matmul.h says more.

    Methods are ``"serial"``, ``"ring"`` and ``"collective"``.
    """

    @staticmethod
    def gather(
        plan: Plan,
        products: Sequence[tuple[str, Layout, bool]],
        keeps_gathered: bool = False,
        scaling: tuple[bool, str, Plan | None] | None = None,
    ) -> Matmul:
        """Moves an operand by a plan and multiplies it. By product: axes with the operand that moves first, the other
        operand, whether a bias follows. Scaling of operands of 8-bit floats: whether by row, dtype of the result, and
        by row the plan of the operand's scales. Raises ValueError where they do not fit."""

    @staticmethod
    def scatter(
        plan: Plan,
        terms: Sequence[tuple[str, Layout, Layout]],
        has_addend: bool = False,
        scaling: tuple[bool, str, Plan | None] | None = None,
    ) -> Matmul:
        """Sums products, and one more tensor that lies as the plan's source, and moves the result by a plan. By term:
        axes and both operands. Scaling as in `gather`, without a plan."""

    @staticmethod
    def parse(text: str) -> tuple[Matmul, Schedule]:
        """What `to_text` wrote."""

    @property
    def plan(self) -> Plan: ...
    @property
    def num_partners(self) -> int: ...
    @property
    def communicates(self) -> bool: ...
    @property
    def why_only_serial(self) -> str | None:
        """Why nothing of it can go in chunks; None where something can."""

    def check(self, schedule: Schedule) -> None:
        """Raises ValueError where it cannot be done so."""

    def predictions(self, model: GemmModel, depth: int | None = None) -> list[tuple[Schedule, int]]:
        """With picoseconds; serial first, then every method and number of chunks with the depth, unless it is given,
        and what is left to transfers that are predicted fastest."""

    def choose(self, model: GemmModel, depth: int | None = None) -> Schedule:
        """The one with the least prediction; serial unless another saves 2%."""

    def tuned(self, schedule: Schedule, model: GemmModel, depth: int | None = None) -> Schedule:
        """Its method and chunks, with depth and what is left to transfers as in `predictions`."""

    def timeline(self, schedule: Schedule, model: GemmModel) -> dict[str, Any]:
        """``spans``: lane, instruction, chunk, start and end in picoseconds, of the first rank; ``total_ps``,
        ``communication_ps`` and ``gemm_ps``."""

    def program(self, schedule: Schedule, rank: int) -> str: ...
    def peak_bytes(self, schedule: Schedule, rank: int) -> int: ...
    def groups(self, schedule: Schedule, rank: int) -> list[tuple[list[int], list[int]]]: ...
    def shapes(self, rank: int) -> tuple[list[list[int]], list[list[int]], list[str]]:
        """Of a rank's inputs and outputs, and the dtypes of outputs."""

    def to_text(self, schedule: Schedule) -> str: ...

class ProductNode:
    """One thing to be done with the tensors of a product: csrc/products/dataflow.h says more."""

    @property
    def kind(self) -> str:
        """``"move"``, ``"matmul"``, ``"bias"``, ``"sum"`` or ``"add"``."""

    @property
    def inputs(self) -> list[int]: ...
    @property
    def outputs(self) -> list[int]: ...
    @property
    def released(self) -> list[int]:
        """Values that nobody reads any more afterwards."""

    @property
    def plan(self) -> Plan | None:
        """Of a move."""

    @property
    def matmul(self) -> Matmul | None: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def pending(self) -> list[int]:
        """Of a bias: mesh dims of which only the first rank adds it."""

class ProductDataflow:
    """Nodes in their order. Values are numbered, inputs first; an output of -1 was not asked for."""

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

class ProductPlan:
    """How a product of placed tensors is carried out, forward and backward: csrc/products/product_plan.h says more.

    Args:
        axes: by weight, as in einsum: ``"bsk,nk->bsn"``.
        operand, weights, biases, results: where they lie, and where results are asked for.
        cuts: by mesh dim the axis that is cut while it computes, or ``"-"``; default: those predicted fastest.
        scaled_by: of operands of 8-bit floats: ``"tensor"`` or ``"row"``.
        scales: by row, of operand and weights, where scales lie elsewhere than the rows of their operand.
        keeps_gathered: whether the forward gives the operand as gathered, for the backward.
        method, chunks, depth: as in `shardwright.linear`.
        backend, topology, tables: what moves are planned with, as in `shardwright.plan`.
        gemm_models: how long products take, by the dtype of what is moved beside them.

    Raises:
        ValueError: what does not fit together; a schedule that cannot be had.
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
        scales: Sequence[Layout | None] = ...,
        keeps_gathered: bool = False,
        method: str | None = None,
        chunks: int | Sequence[Sequence[int]] | None = None,
        depth: int | None = None,
        backend: str = "nccl",
        topology: Topology | None = None,
        tables: PlanningTables = ...,
        gemm_models: dict[str, GemmModel] = ...,
    ) -> None: ...
    @staticmethod
    def parse(text: str) -> ProductPlan:
        """Of what `to_text` wrote. Raises ValueError on other text."""

    def to_text(self) -> str:
        """All that it follows from, the same in every process, as operators take it."""

    def to_json(self) -> str: ...
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
        """What is moved behind the product: ``"operand"``, ``"weight"`` or ``"result"``."""

    @property
    def keeps_gathered(self) -> bool: ...
    @property
    def has_equal_parts(self) -> bool:
        """Whether all ranks hold parts of one size of all tensors."""

    @property
    def moved_operand(self) -> Layout:
        """The operand's while the product computes."""

    @property
    def operand_gradient(self) -> Layout:
        """Of what the backward gives for the operand."""

    @property
    def result_gradients(self) -> list[Layout]:
        """Of gradients that lie as the results do."""

    def gemm_model(self, dtype: str) -> GemmModel: ...
    def predicted_ps(self) -> int:
        """Of the forward."""

    @property
    def forward(self) -> ProductDataflow:
        """Inputs: operand, weights, biases of those that have one, scales. Outputs: results, then the operand as moved
        where that is kept."""

    def backward(
        self,
        given: Sequence[Layout],
        operand: bool,
        weights: Sequence[bool],
        biases: Sequence[bool],
        addend: Layout | None = None,
    ) -> ProductDataflow:
        """Inputs: operand (as moved where that is kept), weights, gradients of the results, what is added to the
        operand's. Outputs: gradients of operand, weights and biases."""

def cuts_in_place(axes: str, operand: Layout, weight: Layout) -> str:
    """The cuts that operand and weight have already, or nearly."""

def placements_in_place(axes: str, operand: Layout, weight: Layout) -> list[str]:
    """Where the result of these comes to lie by itself."""
