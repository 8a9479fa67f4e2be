"""State dicts from one set of layouts to another, planned once and run many times: `transfer`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._native import _planner
from ..layouts import argument_values
from ..layouts.topology import Topology, named_topology, tables_now
from ..planning.batches import BUCKET_BYTES, BUCKETS
from ..rules import explaining
from ..runtime import argument_checks, executables, groups
from . import batches
from .batches import BoundBatch
from .current import Place, places_of
from .progress import Progress
from .setup import Options, SetUp, checked, set_up
from .staging import SecondCopy


def transfer(
    state_dict: Any,
    to: Any,
    map: Any = (),
    *,
    bucket_bytes: int = BUCKET_BYTES,
    buckets: int = BUCKETS,
    staging: str | None = None,
    unused: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: bool | Callable[[int, int, str], None] = False,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Transfer:
    """Plans the move of a state dict from the layouts that its tensors have to others, and checks all of it.

    All ranks of the group call, also those that hold nothing of either side. Each says what it has; the ranks tell each
    other their layouts here, once.

    Args:
        state_dict: this rank's tensors by name; None on ranks without any. Pending reductions are reduced at each
            start, before it returns. Each is a DTensor, a pair of a local tensor
            and its `Layout`, or a tensor that is the same on all ranks that pass it. Dicts within it have their names
            joined by dots. Ranks may have different tensors, as stages of a pipeline do. A module, or a function
            that returns the state dict and does not communicate, is allowed too. All are read at every start, as they
            are then; no transfer changes them.
        to: the tensors of the destination by name. A `Layout`, or (placements, mesh, shape, dtype), asks for a new
            tensor on every rank of its mesh, and may be passed by some ranks alone. A DTensor, a pair of a local
            tensor and its `Layout`, or a tensor that is the same on all ranks that pass it, is filled in place. A
            module or a function is allowed as in `state_dict`.
        map: rules that make the destination's tensors of those of the source, applied in order: `fuse`, `split`,
            `stack`, `unstack`, `transpose`, `rename`, `cast`.
        bucket_bytes, buckets: a run takes `buckets` buffers of `bucket_bytes` on each rank besides the destination, and
            keeps `buckets` rounds of messages under way.
        staging: None writes into the destination as elements arrive. ``"double"`` keeps a second copy of its storages,
            writes into that, and exchanges both at once when a transfer is waited for, or at `Transfer.swap`.
        unused: patterns of names, after the map, that the destination may lack; also of what is no tensor in
            `state_dict`.
        ignore: patterns of names in `to` that keep what they hold if no tensor of the source has their name; also of
            what is no tensor there.
        progress: a function of (done_bytes, total_bytes, name), which is called on this rank as tensors are complete;
            True shows a bar on rank 0 (with tqdm, if it is installed).
        group: the process group whose ranks take part; default, the default group. Meshes have global ranks, or those
            in the group if `connect` made it; DTensors are not allowed there.
        device: the device of all tensors, for ranks that pass none; default, the only one for which the group has a
            backend. Such ranks must pass it if there are backends for the CPU and for an accelerator.

    Raises:
        ValueError: on all ranks, with everything that is wrong anywhere: names that one side lacks, elements that no
            source gives or that several give, shapes, dtypes without a cast, layouts that ranks disagree on, local
            tensors that contradict their layout, arguments that differ. Nothing has been moved then.
        RuntimeError: torch.distributed is not initialised.
    """
    argument_checks.check_group(group)
    groups.check_initialised()
    if dist.get_rank(group) < 0:
        raise ValueError(f"group: rank {dist.get_rank()} is not in it; allowed are calls by its ranks alone")
    problems: list[str] = []
    rank = groups.rank_in_meshes(group)
    options = Options(
        bucket_bytes=checked(lambda: _at_least("bucket_bytes", bucket_bytes, 1), problems, rank),
        buckets=checked(lambda: _at_least("buckets", buckets, 1), problems, rank),
        staging=checked(lambda: _staging(staging), problems, rank),
        unused=checked(lambda: _patterns("unused", unused), problems, rank, []),
        ignore=checked(lambda: _patterns("ignore", ignore), problems, rank, []),
    )
    if not (isinstance(progress, bool) or callable(progress)):
        problems.append(f"progress: got a {type(progress).__name__}; allowed are True, False or a function")
    return Transfer(set_up(state_dict, to, map, options, group, device, problems), options, progress, group)


def _at_least(argument: str, given: Any, least: int) -> int:
    value = argument_values.integer(given, argument)
    if value < least:
        raise ValueError(f"{argument}: got {value}; allowed are {least} and more")
    return value


def _staging(given: Any) -> str | None:
    if given is not None and given != "double":
        raise ValueError(f"staging: got {given!r}; allowed are None and 'double'")
    return None if given is None else "double"


def _patterns(argument: str, given: Any) -> list[str]:
    return [str(one) for one in argument_values.items(given, argument, "a list of patterns of names")]


# Destinations that are received together: their numbers, the run, and this rank's tensors.
_Group = tuple[range, batches.Run, list[torch.Tensor]]


class SourceFree:
    """Says when a transfer reads its sources no more."""

    def __init__(self, run: batches.Run) -> None:
        self._run = run

    def wait(self) -> None:
        """Waits until this rank's part of the source may be written to again."""
        self._run.wait_for_sources()


class TransferHandle:
    """A transfer under way. A failure is raised by every wait."""

    def __init__(self, owner: Transfer, run: batches.Run, failure: Exception | None, places: list[Place]) -> None:
        self._owner = owner
        self._run = run
        self._places = places  # of the destination
        self._failure = failure  # of a progress function
        self.is_waited_for = False
        self.source_free = SourceFree(run)

    def is_done(self) -> bool:
        """Returns whether all has arrived, without waiting."""
        return self._run.is_done()

    def wait(self, swap: bool = True) -> None:
        """Waits until this rank's destination is complete. With ``staging="double"`` it is then exchanged for what was
        there before, unless `swap` is False. What a `progress` function raises is raised at the end."""
        if not self.is_waited_for:
            failure = self._owner._complete(self._run)
            self._failure = self._failure or failure
            self.is_waited_for = True
            if not self._owner._stages:
                self._owner._check_places("wait", self._places)
            elif swap:
                self._owner.swap()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class Receiving(Generator[tuple[str, Any], None, None]):
    """The result of `Transfer.receive`. `close` moves what is left."""

    def __init__(self, tensors: Generator[tuple[str, Any], None, None]) -> None:
        self._tensors = tensors
        self._completed_by = ""

    def send(self, value: None) -> tuple[str, Any]:
        if self._completed_by:
            raise RuntimeError(f"receive: {self._completed_by}() was called before its end, so what was left has moved")
        return self._tensors.send(value)

    def throw(self, *given: Any) -> tuple[str, Any]:
        return self._tensors.throw(*given)

    def close(self) -> None:
        self._tensors.close()

    def complete(self, by: str) -> None:
        if inspect.getgeneratorstate(self._tensors) != inspect.GEN_CLOSED:  # type: ignore[arg-type]
            self.close()
            self._completed_by = by


class Transfer:
    """A planned transfer. `start` runs it, any number of times, on all ranks of its group."""

    def __init__(
        self,
        made: SetUp,
        options: Options,
        progress: bool | Callable[[int, int, str], None],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._made = made
        self._options = options
        self._group = groups.weakly(group)
        self._progress = progress
        self._stages = options.staging == "double"
        self._under_way: TransferHandle | None = None
        self._receiving: weakref.ref[Receiving] | None = None
        self._own: dict[int, torch.Tensor] = {}  # destinations that were made here, by number
        self._copy: SecondCopy | None = None
        # A bucket may be too small, on all ranks alike: found here, before anything moves.
        self._batch = self._plan(range(len(made.names)), options.buckets)
        self._chunks: list[tuple[range, BoundBatch]] | None = None
        self._most_groups = min(2, options.buckets)  # under way at a time in `receive`; they share the buckets

    @property
    def names(self) -> list[str]:
        """The names of the tensors that move, in order, on all ranks."""
        return list(self._made.names)

    @property
    def tensors(self) -> dict[str, Any]:
        """This rank's part of the destination by name: what was passed as `to`, else local tensors made here."""
        made = self._made
        front = self._destination()
        return {name: self._value(name, front[i]) for i, name in enumerate(made.names) if made.has_part(i)}

    def start(self) -> TransferHandle:
        """Starts to move what the source holds now. All ranks of the group call, at the same point, and wait for each
        other to come.

        Sources must not be written to before ``source_free.wait()``, and the destination is complete after ``wait()``.
        What was started or received before is completed first.

        Raises:
            ValueError: on all ranks, with nothing moved: a tensor that was passed has another layout, dtype or device
                than when the transfer was planned, or is one that its module no longer has.
            RuntimeError: other ranks did not come in time.
        """
        failure = self._complete_all("start")
        self._renew()
        front = self._destination()
        if self._stages:
            if self._copy is None or self._copy.places != places_of(front):
                self._copy = SecondCopy(front)
            run = self._batch.start(self._copy.tensors)
        else:
            run = self._batch.start(front)
            self._mark_given(range(len(front)))
        self._under_way = TransferHandle(self, run, failure, places_of(front))
        return self._under_way

    def receive(self) -> Receiving:
        """Starts to move the source, and yields (name, tensor) of this rank's parts as they are complete.

        All ranks of the group call, and iterate to the end; those without a part get nothing. Sources must not be
        written to before that end. Destinations that were passed as tensors are filled in place. For all others a
        tensor is made when its turn comes and is the caller's from then on. They come in groups of about
        `bucket_bytes`, of which two are under way at a time, the first from this call on, and share the buckets.
        What was started or received before is completed first; an iterator that is not at its end then raises
        RuntimeError. One that is closed or dropped moves what is left, also where it was never advanced.
        """
        if self._stages:
            raise ValueError("receive: the transfer has staging='double'; allowed is start() there")
        failure = self._complete_all("receive")
        self._renew()
        tensors = self._receive(failure)
        next(tensors)  # starts the first groups; from here on it is closed as every other place is
        receiving = Receiving(tensors)
        self._receiving = weakref.ref(receiving)
        return receiving

    def swap(self) -> None:
        """Exchanges the destination for the one that the last transfer was written to, at once and on this rank alone.

        The storages of the tensors exchange their memory with others, so that views of them, and parameters whose
        detached tensors were passed, see it too. What was captured in a graph goes on reading the same addresses.
        """
        if self._copy is None:
            raise ValueError("swap: the transfer has no second copy; allowed with staging='double', after start()")
        if self._under_way is not None and not self._under_way.is_waited_for:
            raise RuntimeError("swap: the last transfer has not been waited for; allowed after its wait(swap=False)")
        self._check_places("swap", self._copy.places)
        self._copy.exchange()
        torch.autograd.graph.increment_version(self._destination())
        self._mark_given(range(len(self._made.names)))

    def explain(self, topology: Topology | str | None = None, limit: int = explaining.LIMIT) -> str:
        """Returns bytes, rounds, memory and predicted time, also by tensor and by link, as text. Communicates nothing.

        Args:
            topology: as in `plan`; default, what `calibrate` measured, else the environment's, else a built-in one.
            limit: how many tensors and links are shown, those with most bytes.
        """
        table = named_topology(topology)
        if table is None:
            lowering = executables.lowering(self._made.device.type, self._group.get())
            now = tables_now()
            table = now.measured_topology(lowering.name) or now.environment or lowering.default_topology
        return explaining.explain(self._batch.batch, self._made.names, table, limit)

    def _destination(self) -> list[torch.Tensor]:
        """Returns this rank's tensors of all destinations. Those made here are kept."""
        found = map(self._made.destination, range(len(self._made.names)))
        return [one if one is not None else self._made_here(number) for number, one in enumerate(found)]

    def _made_here(self, number: int) -> torch.Tensor:
        if number not in self._own:
            self._own[number] = self._local(number)
        return self._own[number]

    def _check_places(self, by: str, places: list[Place]) -> None:
        """Raises RuntimeError where this rank's destination is not where the last transfer took it to be."""
        if self._made.tensors.destination.renew() or places_of(self._destination()) != places:
            raise RuntimeError(
                f"{by}: tensors of the destination were given other storages; allowed after the next start()"
            )

    def _renew(self) -> None:
        """Reads the tensors that ranks passed again. Raises on all ranks, with nothing sent, if some do not fit."""
        kept = self._copy.kept if self._copy is not None else {}
        problems: list[str] = []
        found = checked(lambda: self._made.tensors.renew(kept), problems, groups.rank_in_meshes(self._group.get()), [])
        self._made.starts.agree([*problems, *found])

    def _mark_given(self, numbers: range) -> None:
        """Lets autograd know that given tensors are written to. A DTensor and its local tensor count apart."""
        found = (self._made.tensors.destination.given.get(self._made.names[number]) for number in numbers)
        values = [given.value for given in found if given is not None and given.value is not None]
        torch.autograd.graph.increment_version(values)

    def _local(self, number: int) -> torch.Tensor:
        """Returns this rank's tensor of a destination, made here if none was passed."""
        made = self._made
        layout = made.destinations[number]
        if (given := made.destination(number)) is not None:
            return given
        shape = layout.local_shape(made.rank) if made.has_part(number) else (0,)
        return torch.empty(shape, dtype=getattr(torch, layout.dtype), device=made.device)

    def _value(self, name: str, local: torch.Tensor) -> Any:
        given = self._made.tensors.destination.given.get(name)
        return local if given is None or given.value is None else given.value

    def _plan(self, destinations: range, buckets: int, first_sender: int = 0) -> BoundBatch:
        return BoundBatch(self._made, destinations, self._options.bucket_bytes, buckets, self._group.get(), first_sender)

    def _complete(self, run: batches.Run) -> Exception | None:
        """Waits for each destination in the order of their arrival, and reports progress.

        Returns what the progress function raised, after which it is not called again.
        """
        failure = None
        with Progress(self._progress, self._made, groups.rank_in_meshes(self._group.get())) as report:
            for number in run.in_order():
                run.wait_for(number)
                try:
                    if failure is None:
                        report(number)
                except Exception as error:
                    failure = error
            run.wait()
        return failure

    def _complete_all(self, by: str) -> Exception | None:
        """Completes what other ranks wait for, whatever this rank's caller does.

        Returns what a progress function raised, for the next wait: raised now, it would keep others waiting.
        """
        receiving = self._receiving() if self._receiving is not None else None
        if receiving is not None:
            receiving.complete(by)
        try:
            if self._under_way is not None:
                self._under_way.wait()
        except dist.DistBackendError:
            raise
        except Exception as error:
            return error
        return None

    def _receive(self, failure: Exception | None) -> Generator[tuple[str, Any], None, None]:
        if self._chunks is None:
            buckets = self._options.buckets // self._most_groups
            chunked = enumerate(self._chunked())
            self._chunks = [(chunk, self._plan(chunk, buckets, turn)) for turn, chunk in chunked]
        made = self._made
        under_way: list[_Group] = []
        left = iter(self._chunks)
        with Progress(self._progress, made, groups.rank_in_meshes(self._group.get())) as report:
            self._fill(under_way, left)
            with self._moving_all(under_way, left):
                yield "", None
            while self._fill(under_way, left):
                chunk, run, tensors = under_way[0]
                for number in run.in_order():
                    run.wait_for(number)
                    with self._moving_all(under_way, left):
                        report(chunk[number])
                        name, local = made.names[chunk[number]], tensors[number]
                        tensors[number] = local.new_empty(0)
                        if made.has_part(chunk[number]):
                            yield name, self._value(name, local)
                        del local
                run.wait()
                del run, tensors, under_way[0]
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _moving_all(self, under_way: list[_Group], left: Iterator[tuple[range, BoundBatch]]) -> Iterator[None]:
        """Moves all that is left where the caller wants no more, or has failed: the other ranks go on."""
        try:
            yield
        except BaseException:
            while self._fill(under_way, left):
                under_way.pop(0)[1].wait()
            raise

    def _fill(self, under_way: list[_Group], left: Iterator[tuple[range, BoundBatch]]) -> bool:
        """Starts groups until as many are under way as may be. Returns False if there are none any more."""
        while len(under_way) < self._most_groups and (following := next(left, None)) is not None:
            chunk, batch = following
            tensors = [self._local(i) for i in chunk]
            under_way.append((chunk, batch.start(tensors), tensors))
            self._mark_given(chunk)
        return bool(under_way)

    def _chunked(self) -> Iterator[range]:
        """Yields runs of destinations of about bucket_bytes on the rank that has most, the same on all ranks."""
        begin, total = 0, 0
        for i, layout in enumerate(self._made.destinations):
            size = _largest_part_bytes(layout)
            if i > begin and total + size > self._options.bucket_bytes:
                yield range(begin, i)
                begin, total = i, 0
            total += size
        if begin < len(self._made.destinations):
            yield range(begin, len(self._made.destinations))


@functools.lru_cache(maxsize=1024)
def _largest_part_bytes(layout: _planner.Layout) -> int:
    itemsize = int(getattr(torch, layout.dtype).itemsize)
    return itemsize * max(math.prod(layout.local_shape(rank)) for rank in layout.mesh.ranks)
