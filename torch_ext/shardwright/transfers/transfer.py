"""Moves state dicts from one set of layouts to another, planned once and run many times: `transfer`.

A destination is one tensor of the argument `to`, given by its index in the plan. A bucket is a buffer for the messages
of one round.
"""

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
from ..layouts.errors import argument_error
from ..layouts.topology import Topology, named_topology, tables_now
from ..planning.batches import BUCKET_BYTES, BUCKETS
from ..rules import explaining
from ..runtime import argument_checks, counters, executables, groups
from ..versions.changes import Changes, Note, Report, check_changes
from ..versions.locations import Location, locations_of
from ..versions.messages import Rounds
from ..versions.pieces import Ends
from ..versions.second_copy import SecondCopy
from . import batches
from .batches import BoundBatch
from .progress import Progress
from .setup import Options, SetUp, checked, read_options, set_up


def transfer(
    state_dict: Any,
    to: Any,
    map: Any = (),
    *,
    bucket_bytes: int = BUCKET_BYTES,
    buckets: int = BUCKETS,
    staging: str | None = None,
    only_changed: bool | int = False,
    unused: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: bool | Callable[[int, int, str], None] = False,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Transfer:
    """Plans and checks the move of a state dict to other layouts.

    All ranks of the group must call this, including those without tensors. Ranks exchange their layouts here, once.

    Args:
        state_dict: this rank's tensors by name; None on ranks without any. A tensor is a DTensor, a pair of a local
            tensor and its `Layout`, or a plain tensor that is equal on all ranks that pass it. Names of nested dicts
            are joined by dots. Ranks may have different tensors, as stages of a pipeline do. A module, or a function
            that returns the state dict without communication, is accepted too. Tensors are read again at each start,
            and never changed. Pending reductions are reduced during `start`.
        to: the tensors of the destination by name. A `Layout`, or (placements, mesh, shape, dtype), requires a new
            tensor on every rank of its mesh; not all ranks need to pass it. A DTensor, a pair of a local tensor and its
            `Layout`, or a plain tensor that is equal on all ranks that pass it, is filled in place. A module or a
            function is accepted as in `state_dict`.
        map: rules that convert the source's tensors to the destination's, applied in order: `fuse`, `split`, `stack`,
            `unstack`, `transpose`, `rename`, `cast`.
        bucket_bytes, buckets: each rank allocates `buckets` buffers of `bucket_bytes` in addition to the destination;
            up to `buckets` rounds of messages are in flight.
        staging: None writes to the destination as elements are received. ``"double"`` writes to a second copy of its
            storages, which ``wait()`` or `Transfer.swap` exchanges for the first at once.
        only_changed: from the second start on, send only what changed since the last one: blocks of so many bytes, a
            power of two, and their numbers. True: 8 bytes. If this takes more bytes than everything, or a rank asks
            for everything, everything is sent. The values are those of a full transfer, bit by bit.

            Senders compare their sources, in the dtype in which they are sent, with a state that they keep: for blocks
            of at most 8 bytes a copy; for larger blocks 8 bytes for each, a random hash that two different blocks share
            with a probability of 2**-64. `start` needs temporaries as large as the largest part of a source, and 8
            bytes for each changed block. Receivers keep nothing, so destinations must keep their values. Everything is
            sent if a destination has other memory than before, or if PyTorch's operators wrote to it. Other writes, by
            kernels or through ``.data``, are not detected: call ``start(everything=True)`` after them. It excludes
            layouts with pending reductions or flattened dims, and staging.
        unused: patterns of names, after the map, that the destination may lack; and of values in `state_dict` that are
            no tensors.
        ignore: patterns of names in `to` that keep their values if no tensor of the source has this name; and of values
            in `to` that are no tensors.
        progress: a function of (done_bytes, total_bytes, name) that is called on this rank as tensors complete; True
            shows a bar on rank 0 if stderr is a terminal (with tqdm, if it is installed).
        group: the process group whose ranks take part; default, the default group. Meshes have global ranks, or ranks
            of the group if `connect` made it; DTensors are not supported in such groups.
        device: the device of all tensors, for ranks that pass none; default, the only one for which the group has a
            backend. It is required on such ranks if there are backends for the CPU and for an accelerator.

    Raises:
        ValueError: raised on all ranks, with the problems of all ranks: names that one side lacks, elements with no
            source or with several, different shapes, different dtypes without a cast, layouts or arguments that ranks
            disagree on, local tensors that do not match their layout. Nothing was moved.
        RuntimeError: torch.distributed is not initialized.
    """
    argument_checks.check_group(group)
    groups.check_initialized()
    if dist.get_rank(group) < 0:
        raise ValueError(f"group must contain this rank, got a group without rank {dist.get_rank()}")
    problems: list[str] = []
    rank = groups.rank_in_meshes(group)
    options = read_options(bucket_bytes, buckets, staging, only_changed, unused, ignore, problems, rank)
    if not (isinstance(progress, bool) or callable(progress)):
        problems.append(f"progress must be True, False or a function, got a {type(progress).__name__}")
    return Transfer(set_up(state_dict, to, map, options, group, device, problems), options, progress, group)


_Run = batches.Run | Rounds
# Destinations that are received together: their indices, the run, and this rank's tensors.
_Group = tuple[range, batches.Run, list[torch.Tensor]]


class SourceFree:
    """Waits for the last read of a transfer's sources."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def wait(self) -> None:
        """Waits until this rank's part of the source may be written to again."""
        self._run.wait_for_sources()


class TransferHandle:
    """A running transfer. Every wait raises its error.

    Attributes:
        report: with `only_changed`, the bytes that this rank sends and receives, and why everything was sent if it was.
    """

    def __init__(self, owner: Transfer, run: _Run, failure: Exception | None, locations: list[Location]) -> None:
        self.report: Report | None = None
        self._owner = owner
        self._run = run
        self._locations = locations  # of the destination's tensors
        self._failure = failure  # error of a progress function, raised once
        self.is_waited_for = False
        self.source_free = SourceFree(run)

    def is_done(self) -> bool:
        """True if the transfer is complete. Does not wait."""
        return self._run.is_done()

    def wait(self, swap: bool = True) -> None:
        """Waits until this rank's destination is complete. Raises an error of the `progress` function at the end.

        With ``staging="double"`` it exchanges the copies afterwards, unless `swap` is False.
        """
        if not self.is_waited_for:
            failure = self._owner._complete(self._run)
            self._failure = self._failure or failure
            self.is_waited_for = True
            if not self._owner._stages:
                self._owner._check_locations("wait", self._locations)
            elif swap:
                self._owner.swap()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class Receiving(Generator[tuple[str, Any], None, None]):
    """The result of `Transfer.receive`. `close` completes the transfer."""

    def __init__(self, tensors: Generator[tuple[str, Any], None, None]) -> None:
        self._tensors = tensors
        self._completed_by = ""

    def send(self, value: None) -> tuple[str, Any]:
        if self._completed_by:
            raise RuntimeError(f"receive: {self._completed_by}() was called before the end, and completed the transfer")
        return self._tensors.send(value)

    def throw(self, *error: Any) -> tuple[str, Any]:
        return self._tensors.throw(*error)

    def close(self) -> None:
        self._tensors.close()

    def complete(self, by: str) -> None:
        """Completes the transfer, after which iterating raises RuntimeError. `by` is the method that calls."""
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
        self._changes: Changes | None = None
        if options.only_changed:
            ends = Ends(made.sources, made.destinations, made.items, made.rank)
            check_changes(ends, options.only_changed, options.staging)
            self._changes = Changes(ends, options.only_changed, group)
        self._under_way: TransferHandle | None = None  # the last `start`
        self._receiving: weakref.ref[Receiving] | None = None
        self._own: dict[int, torch.Tensor] = {}  # tensors allocated here, by index of the destination
        self._copy: SecondCopy | None = None
        # Raises on all ranks if a bucket is too small, before anything moves.
        self._batch = self._plan(range(len(made.names)), options.buckets)
        self._chunks: list[tuple[range, BoundBatch]] | None = None  # groups of destinations of `receive`
        self._most_groups = min(2, options.buckets)  # groups in flight in `receive`, which share the buckets

    @property
    def names(self) -> list[str]:
        """The names of the tensors that move, in order, on all ranks."""
        return list(self._made.names)

    @property
    def tensors(self) -> dict[str, Any]:
        """This rank's part of the destination by name: the tensors passed as `to`, or local tensors allocated here."""
        made = self._made
        front = self._destination()
        return {name: self._value(name, front[i]) for i, name in enumerate(made.names) if made.has_part(i)}

    def start(self, everything: bool = False) -> TransferHandle:
        """Starts to move the current values of the source. All ranks of the group must call this at the same point.

        Sources must not be written to before ``source_free.wait()``, and the destination is complete after ``wait()``.
        Earlier runs of this transfer are completed first. The call waits for all ranks. With `only_changed`, it also
        moves changes in all rounds but the last, so that it waits for their messages.

        Args:
            everything: with `only_changed`, send everything. It suffices that one rank asks for it.

        Raises:
            ValueError: raised on all ranks, before anything moves: a tensor has another layout, dtype or device than
                when the transfer was planned, or its module no longer has it.
            RuntimeError: other ranks did not call within the timeout.
        """
        failure = self._complete_all("start")
        notes = self._renew(everything)
        front = self._destination()
        run: _Run
        report = None
        if self._changes is not None:
            run, report = self._start_changed(self._changes, [Note(*note) for note in notes], front)
        elif self._stages:
            if self._copy is None or self._copy.locations != locations_of(front):
                self._copy = SecondCopy(front)
            run = self._batch.start(self._copy.tensors)
        else:
            run = self._batch.start(front)
        if not self._stages:
            self._mark_given(range(len(front)))
        self._under_way = TransferHandle(self, run, failure, locations_of(front))
        self._under_way.report = report
        return self._under_way

    def receive(self) -> Receiving:
        """Starts to move the source, and yields (name, tensor) of this rank's parts as they complete.

        All ranks of the group must call this and iterate to the end; ranks without a part get no items. Sources must
        not be written to before the end. Destinations that were passed as tensors are filled in place. Other tensors
        are allocated when their group starts, and belong to the caller once yielded. A group has about `bucket_bytes`.
        Two groups are in flight at a time and share the buckets; the first ones start with this call.

        Earlier runs of this transfer are completed first; an earlier iterator that is not at its end then raises
        RuntimeError. An iterator that is closed or dropped completes the transfer, even if it was never advanced.
        """
        if self._stages:
            raise argument_error("receive: staging", "None", "'double'; call start() instead")
        if self._changes is not None:
            raise argument_error(
                "receive: only_changed", "False", f"{self._options.only_changed}; call start() instead"
            )
        failure = self._complete_all("receive")
        self._renew()
        tensors = self._receive(failure)
        next(tensors)  # starts the first groups, so that `close` completes the transfer from here on
        receiving = Receiving(tensors)
        self._receiving = weakref.ref(receiving)
        return receiving

    def swap(self) -> None:
        """Exchanges the destination for the copy that the last transfer wrote, at once and on this rank only.

        The storages swap their memory, so views of the tensors, and parameters whose detached tensors were passed,
        change too. A captured CUDA graph keeps reading the same addresses.
        """
        if self._copy is None:
            raise ValueError("swap: there is no second copy; use staging='double', and call start() first")
        if self._under_way is not None and not self._under_way.is_waited_for:
            raise RuntimeError("swap: the last transfer was not waited for; call its wait(swap=False) first")
        self._check_locations("swap", self._copy.locations)
        self._copy.exchange()
        torch.autograd.graph.increment_version(self._destination())
        self._mark_given(range(len(self._made.names)))

    def explain(self, topology: Topology | str | None = None, limit: int = explaining.LIMIT) -> str:
        """Returns bytes, rounds, memory and predicted time, also by tensor and by link, as text. No communication.

        Args:
            topology: as in `plan`; default, the result of `calibrate`, else the environment's, else a built-in one.
            limit: maximum number of tensors and of links to show, those with most bytes first.
        """
        table = named_topology(topology)
        if table is None:
            lowering = executables.lowering(self._made.device.type, self._group.get())
            now = tables_now()
            table = now.measured_topology(lowering.name) or now.environment or lowering.default_topology
        return explaining.explain(self._batch.batch, self._made.names, table, limit)

    def _start_changed(self, changes: Changes, notes: list[Note], front: list[torch.Tensor]) -> tuple[_Run, Report]:
        """Starts to send what changed, or everything. `notes` are those of all ranks."""
        reason = changes.decide(notes)
        if reason:
            counters.counts.full_starts += 1
            return self._batch.start(front), changes.report(reason, None)
        group, into = self._group.get(), [tensor.detach() for tensor in front]
        torch.autograd.graph.increment_version(into)  # writes in inference mode bypass autograd
        round_bytes = self._options.bucket_bytes * self._options.buckets
        wire = executables.wire(self._made.device.type, group)
        rounds = changes.send(notes, self._source, into, round_bytes, group, wire)
        report = changes.report("", rounds)
        counters.counts.changed_starts += 1
        counters.counts.changed_bytes += report.received_bytes
        return rounds, report

    def _source(self, index: int) -> torch.Tensor:
        """Returns this rank's part of a source."""
        return argument_checks.resolved(self._made.source(index).detach())

    def _destination(self) -> list[torch.Tensor]:
        """Returns this rank's tensors of all destinations. Missing ones are allocated once and kept."""
        passed = map(self._made.destination, range(len(self._made.names)))
        return [tensor if tensor is not None else self._made_here(index) for index, tensor in enumerate(passed)]

    def _made_here(self, index: int) -> torch.Tensor:
        """Returns this rank's tensor of a destination that `to` has no tensor for. Allocated once."""
        if index not in self._own:
            self._own[index] = self._local(index)
        return self._own[index]

    def _check_locations(self, by: str, locations: list[Location]) -> None:
        """Raises RuntimeError if this rank's destination is no longer at `locations` in memory."""
        if self._made.tensors.destination.renew() or locations_of(self._destination()) != locations:
            raise RuntimeError(
                f"{by}: tensors of the destination got other storages after the last start(); start again"
            )

    def _renew(self, everything: bool = False) -> list[Any]:
        """Reads all tensors again. Raises on all ranks, before anything is sent, if some no longer match the plan.

        Returns the notes of all ranks about changes. They are exchanged together with the problems.
        """
        own = self._copy.num_tensors if self._copy is not None else {}
        problems: list[str] = []
        rank = groups.rank_in_meshes(self._group.get())
        problems += checked(lambda: self._made.tensors.renew(own), problems, rank, [])
        note, changes = None, self._changes
        if changes is not None and not problems:
            note = checked(lambda: changes.look(self._source, self._destination(), everything), problems, rank)
        return self._made.starts.agree(problems, note)

    def _mark_given(self, indices: range) -> None:
        """Increments the versions of passed tensors. Those of a DTensor and its local tensor are separate."""
        tensors = (self._made.tensors.destination.given.get(self._made.names[index]) for index in indices)
        values = [tensor.value for tensor in tensors if tensor is not None and tensor.value is not None]
        torch.autograd.graph.increment_version(values)

    def _local(self, index: int) -> torch.Tensor:
        """Returns this rank's tensor of a destination. Allocates it if none was passed."""
        made = self._made
        layout = made.destinations[index]
        if (tensor := made.destination(index)) is not None:
            return tensor
        shape = layout.local_shape(made.rank) if made.has_part(index) else (0,)
        return torch.empty(shape, dtype=getattr(torch, layout.dtype), device=made.device)

    def _value(self, name: str, local: torch.Tensor) -> Any:
        """Returns the tensor to show the user for a local tensor: the one passed in `to`, if any."""
        tensor = self._made.tensors.destination.given.get(name)
        return local if tensor is None or tensor.value is None else tensor.value

    def _plan(self, destinations: range, buckets: int, first_sender: int = 0) -> BoundBatch:
        """Returns the batch that fills these destinations. Sender group `first_sender` is tried first."""
        return BoundBatch(
            self._made, destinations, self._options.bucket_bytes, buckets, self._group.get(), first_sender
        )

    def _complete(self, run: _Run) -> Exception | None:
        """Waits for the destinations in the order in which they complete, and reports progress.

        Returns the error of the progress function, which is not called again after it.
        """
        failure = None
        with Progress(self._progress, self._made, groups.rank_in_meshes(self._group.get())) as report:
            for index in run.in_order():
                run.wait_for(index)
                try:
                    if failure is None:
                        report(index)
                except Exception as error:
                    failure = error
            run.wait()
        if self._changes is not None:
            self._changes.note_written(self._destination())
        return failure

    def _complete_all(self, by: str) -> Exception | None:
        """Completes earlier runs, for which other ranks wait.

        Returns the error of a progress function, for the next wait to raise: raised here, it would leave other ranks
        waiting.
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
        """The generator of `receive`. Its first item is empty: it means that the first groups have started."""
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
                for index in run.in_order():
                    run.wait_for(index)
                    with self._moving_all(under_way, left):
                        report(chunk[index])
                        name, local = made.names[chunk[index]], tensors[index]
                        tensors[index] = local.new_empty(0)
                        if made.has_part(chunk[index]):
                            yield name, self._value(name, local)
                        del local
                run.wait()
                del run, tensors, under_way[0]
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _moving_all(self, under_way: list[_Group], left: Iterator[tuple[range, BoundBatch]]) -> Iterator[None]:
        """Completes the transfer if the block raises or the iterator is closed, because other ranks continue."""
        try:
            yield
        except BaseException:
            while self._fill(under_way, left):
                under_way.pop(0)[1].wait()
            raise

    def _fill(self, under_way: list[_Group], left: Iterator[tuple[range, BoundBatch]]) -> bool:
        """Starts groups up to the maximum in flight. Returns False if no group is left."""
        while len(under_way) < self._most_groups and (following := next(left, None)) is not None:
            chunk, batch = following
            tensors = [self._local(i) for i in chunk]
            under_way.append((chunk, batch.start(tensors), tensors))
            self._mark_given(chunk)
        return bool(under_way)

    def _chunked(self) -> Iterator[range]:
        """Yields ranges of destinations of about `bucket_bytes` on the rank that has most. Equal on all ranks."""
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
    """Returns the bytes of the largest local tensor of a layout."""
    itemsize = int(getattr(torch, layout.dtype).itemsize)
    return itemsize * max(math.prod(layout.local_shape(rank)) for rank in layout.mesh.ranks)
