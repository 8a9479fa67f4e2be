"""Part 1 of the demo: the same training, step by step, with stock DTensor and with shardwright."""

import itertools
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

import shardwright as sw
from clock import RedistributeClock
from compare import ENGINES
from llama import ALPHABET, Config, Llama, encode, parallelize, read_text
from ranks import coordinate, over_ranks
from redistribute_cases import torch_placements
from report import ProgressBar, in_mebibytes, say, say_text

SEQUENCE_LENGTHS = (97, 61)
BATCH_PER_REPLICA = 4
NUM_BLOCKS = 5
STEPS_PER_BLOCK = 5


class Weight:
    """One parameter: sharded over dp and tp between uses, unsharded over dp in use (as in FSDP with TP).

    `sharded_layout` has the placements on (dp, tp) between steps: tensor parallelism's placement on tp, and on dp a
    shard of the tensor dim that tp does not cut.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter, mesh: DeviceMesh):
        self.name, self.parameter, self.mesh = name, parameter, mesh
        tp_placement = parameter.placements[0]
        on_tp = f"S({tp_placement.dim})" if tp_placement.is_shard() else "R"
        self.sharded_layout = ("S(1)" if on_tp == "S(0)" else "S(0)", on_tp)
        self.used_layout = ("R", on_tp)
        local = parameter.detach().to_local()
        used = self._dtensor(local, torch_placements(self.used_layout))
        sharded = used.redistribute(placements=torch_placements(self.sharded_layout))
        self.local = torch.nn.Parameter(sharded.to_local().clone())
        self.sharded = self._dtensor(self.local.detach(), torch_placements(self.sharded_layout))

    def gather(self) -> None:
        """Updates the model's copy: from the sharded layout to the used layout."""
        used = self.sharded.redistribute(placements=torch_placements(self.used_layout))
        self.parameter.detach().to_local().copy_(used.to_local())

    def reduce_gradient(self) -> None:
        """Sums the model's gradient over dp, and over tp where the layer left it partial, into the sharded layout."""
        gradient = self.parameter.grad
        placements = (Partial("sum"), *gradient.placements)
        summed = self._dtensor(gradient.to_local(), placements).redistribute(placements=self.sharded.placements)
        self.local.grad = summed.to_local()
        self.parameter.grad = None

    def _dtensor(self, local: torch.Tensor, placements: tuple[Placement, ...]) -> DTensor:
        shape, stride = self.parameter.shape, self.parameter.stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)


class Trainer:
    """A model, its sharded weights, and their optimizer. The same seed gives the same weights."""

    def __init__(self, mesh: DeviceMesh, config: Config, seed: int = 0):
        torch.manual_seed(seed)
        self.num_replicas = mesh["dp"].size()
        self.model = Llama(config)
        parallelize(self.model, mesh["tp"])
        self.weights = [Weight(name, parameter, mesh) for name, parameter in self.model.named_parameters()]
        self.optimizer = torch.optim.AdamW([weight.local for weight in self.weights], lr=2e-3)

    def step(self, characters: torch.Tensor) -> torch.Tensor:
        """Runs one step on int64 (sequence + 1, batch); returns the mean loss of this replica's batch."""
        for weight in self.weights:
            weight.gather()
        logits = self.model(characters[:-1])
        loss = F.cross_entropy(logits.flatten(0, 1), characters[1:].flatten())
        (loss / self.num_replicas).backward()
        for weight in self.weights:
            weight.reduce_gradient()
        self.optimizer.step()
        return loss.detach()


class Batches:
    """Yields the text as endless batches, one per step and dp coordinate; the length changes every step."""

    def __init__(self, characters: torch.Tensor, dp_coordinate: int):
        self.characters, self.dp_coordinate = characters, dp_coordinate

    def __getitem__(self, step: int) -> torch.Tensor:
        length = SEQUENCE_LENGTHS[step % len(SEQUENCE_LENGTHS)] + 1
        random = torch.Generator().manual_seed(1000 * step + self.dp_coordinate)
        starts = torch.randint(len(self.characters) - length, (BATCH_PER_REPLICA,), generator=random)
        return torch.stack([self.characters[start : start + length] for start in starts], dim=1)


@dataclass
class Record:
    """The measurements of one engine on this rank; calls and bytes are those of one step."""

    losses: list[torch.Tensor] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    redistribute_seconds: list[float] = field(default_factory=list)
    calls: int = 0
    calls_over_several_mesh_dims: int = 0
    received_bytes: float = 0


def train(mesh: DeviceMesh, num_blocks: int = NUM_BLOCKS) -> Trainer:
    """Trains on this rank with both engines alternately; rank 0 prints. Returns the trainer of shardwright."""
    config, text = Config(), read_text()
    say_text(
        f"A language model of {config.num_layers} Llama blocks (dim {config.dim}, hidden {config.hidden}, "
        f"{config.num_heads} heads) reads Python's own reference and licence ({len(text):,} characters, "
        f"{len(ALPHABET)} different), in sequences of {' and '.join(map(str, SEQUENCE_LENGTHS))}, which tp cannot "
        "divide. Tensor and sequence parallel on tp, by PyTorch's own styles; weights are sharded over dp too."
    )
    say()

    batches = Batches(encode(text), coordinate(mesh)[0])
    trainers = {name: Trainer(mesh, config) for name in ENGINES}
    records = {name: Record() for name in ENGINES}
    sw.reset_stats()

    num_steps = num_blocks * STEPS_PER_BLOCK
    progress = ProgressBar("training", len(ENGINES) * num_steps)
    for block, name in itertools.product(range(num_blocks), ENGINES):
        with ENGINES[name]():
            for step in range(block * STEPS_PER_BLOCK, (block + 1) * STEPS_PER_BLOCK):
                _timed_step(trainers[name], batches[step], records[name])
                progress.advance(f"loss {records[name].losses[-1]:.3f}  {name}")
    progress.close()

    for name, engine in ENGINES.items():
        with engine(), sw.debug.wire_meter() as meter:
            for step in range(num_steps, num_steps + len(SEQUENCE_LENGTHS)):
                records[name].losses.append(trainers[name].step(batches[step]))
        records[name].received_bytes = meter.received_bytes / len(SEQUENCE_LENGTHS)
    _report(records)
    return trainers["shardwright"]


def _timed_step(trainer: Trainer, characters: torch.Tensor, record: Record) -> None:
    dist.barrier()
    start = time.perf_counter()
    with RedistributeClock() as clock:
        record.losses.append(trainer.step(characters))
    record.step_seconds.append(time.perf_counter() - start)
    record.redistribute_seconds.append(clock.seconds)
    record.calls = clock.calls
    record.calls_over_several_mesh_dims = clock.calls_over_several_mesh_dims


def _report(records: dict[str, Record]) -> None:
    stock, ours = records.values()
    losses = {name: torch.stack(record.losses) for name, record in records.items()}
    for values in losses.values():  # every rank has its replica's loss, so both means are equal
        dist.all_reduce(values, dist.ReduceOp.AVG)
    difference = (losses["stock"] - losses["shardwright"]).abs().max().item()
    start, end = losses["stock"][0], losses["stock"][-4:].mean()
    say(f"  Loss {start:.3f} -> {end:.3f} in {len(losses['stock'])} steps.")
    bitwise = "bitwise equal" if difference == 0 else "not bitwise: sums may be taken in another order"
    say(f"  The two runs' losses: max abs difference {difference:.1e} ({bitwise}).\n")

    def median_ms(seconds: list[float]) -> float:
        warm = over_ranks(seconds[STEPS_PER_BLOCK:], dist.ReduceOp.AVG)
        return 1000 * statistics.median(warm)

    pair = (stock, ours)
    received = [over_ranks([record.received_bytes], dist.ReduceOp.SUM)[0] for record in pair]
    rows = (
        ("redistributes in a step, per rank", "{}", [record.calls for record in pair]),
        ("  of them over two mesh dims at once", "{}", [record.calls_over_several_mesh_dims for record in pair]),
        ("bytes received in a step, all ranks", "{} MiB", [in_mebibytes(value) for value in received]),
        ("time in redistributes, per step", "{:.1f} ms", [median_ms(record.redistribute_seconds) for record in pair]),
        ("time of the whole step", "{:.1f} ms", [median_ms(record.step_seconds) for record in pair]),
    )
    say(f"  {'':38}{'stock':>14}{'shardwright':>14}")
    for label, form, (left, right) in rows:
        say(f"  {label:38}{form.format(left):>14}{form.format(right):>14}")

    stats, several = sw.stats(), ours.calls_over_several_mesh_dims
    say()
    say_text(
        f"shardwright on rank 0: {stats['calls']} calls, {stats['plans']} plans, "
        f"{stats['fallbacks']} calls left to PyTorch."
    )
    for reason, count in stats["fallback_reasons"].items():
        say(f"    {count} x {reason}")
    say_text(
        f"All but {several} of the {ours.calls} change at most one mesh dim. There stock moves the fewest bytes too, "
        "except from Shard to Shard on CPU; what else can be won is the cost of the call. Times include waiting for "
        "other ranks."
    )
