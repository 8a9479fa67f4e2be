"""Moves state dicts from one set of layouts to another, planned once and run many times: `transfer`.

A destination is one tensor of the argument `to`, given by its index in the plan. A bucket is a buffer for the messages
of one round.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..layouts.errors import argument_error
from ..layouts.topology import Topology, default_topology, named_topology
from ..planning.batches import BUCKET_BYTES, BUCKETS
from ..rules import explaining
from ..runtime import argument_checks, counters, executables, groups
from ..versions.changes import Changes, Note, Report, check_changes
from ..versions.locations import Location, locations_of
from ..versions.messages import Rounds
from ..versions.pieces import Ends
from ..versions.second_copy import SecondCopy
from . import batches
from .batches import BoundBatch, largest_part_bytes
from .progress import Progress
from .receiving import Receiving
from .setup import Options, Setup, read_options, read_or_report, set_up


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
            bytes for each changed block. Receivers keep 8 bytes: a checksum of what they have received. Everything is
            sent if a destination has other values than these. It excludes layouts with pending
            reductions or flattened dims, and staging.
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


_Run = batches.Run | Rounds  # of everything, or of what changed
# Destinations that `receive` moves together: their indices, the run of their batch, and this rank's tensors.
_Group = tuple[range, batches.Run, list[torch.Tensor]]


class SourceFree:
    """The event after which a transfer no longer reads its sources."""

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
        self._failure = failure  # error of a progress function, which the next wait raises
        self.is_waited_for = False
        self.source_free = SourceFree(run)

    def is_done(self) -> bool:
        """Returns True if the transfer is complete. Does not wait."""
        return self._run.is_done()

    def wait(self, swap: bool = True) -> None:
        """Waits until this rank's destination is complete. Raises an error of the `progress` function at the end.

        With ``staging="double"`` it exchanges the copies afterwards, unless `swap` is False.
        """
        if not self.is_waited_for:
            self._complete()
            if not self._owner._has_second_copy:
                self._owner._check_locations("wait", self._locations)
            elif swap:
                self._owner.swap()
        if (failure := self._take_failure()) is not None:
            raise failure

    def supersede(self) -> Exception | None:
        """Completes the transfer before a later start, like `wait`. Returns an error of `progress` not yet raised."""
        if not self.is_waited_for:
            self._complete()
            if self._owner._has_second_copy:
                self._owner._swap_unless_moved()
        return self._take_failure()

    def _complete(self) -> None:
        failure = self._owner._complete(self._run)
        self._failure = self._failure or failure
        self.is_waited_for = True

    def _take_failure(self) -> Exception | None:
        failure, self._failure = self._failure, None
        return failure


class Transfer:
    """A planned transfer. `start` runs it, any number of times, on all ranks of its group."""

    def __init__(
        self,
        setup: Setup,
        options: Options,
        progress: bool | Callable[[int, int, str], None],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._setup = setup
        self._options = options
        self._group = groups.weakly(group)
        self._progress = progress
        self._has_second_copy = options.staging == "double"
        self._changes: Changes | None = None
        if options.only_changed:
            ends = Ends(setup.sources, setup.destinations, setup.items, setup.rank)
            check_changes(ends, options.only_changed, options.staging)
            self._changes = Changes(ends, options.only_changed, group)
        self._last_handle: TransferHandle | None = None  # of the last `start`
        self._receiving: weakref.ref[Receiving] | None = None  # of the last `receive`
        self._allocated: dict[int, torch.Tensor] = {}  # tensors allocated for destinations, by index
        self._second_copy: SecondCopy | None = None
        # The batch of all destinations. Raises on all ranks, before anything moves, if a bucket is too small.
        self._batch = self._bind_batch(range(len(setup.names)), options.buckets)
        self._receive_batches: list[tuple[range, BoundBatch]] | None = None  # groups of destinations, for `receive`
        self._max_groups = min(2, options.buckets)  # groups in flight in `receive`, which share the buckets

    @property
    def names(self) -> list[str]:
        """The names of the tensors that move, in order, on all ranks."""
        return list(self._setup.names)

    @property
    def tensors(self) -> dict[str, Any]:
        """This rank's part of the destination by name: the tensors passed as `to`, or local tensors allocated here."""
        setup = self._setup
        tensors = self._destination()
        return {name: self._shown_tensor(name, tensors[i]) for i, name in enumerate(setup.names) if setup.has_part(i)}

    def start(self, everything: bool = False) -> TransferHandle:
        """Starts to move the current values of the source. All ranks of the group must call this at the same point.

        Sources must not be written to before ``source_free.wait()``, and the destination is complete after ``wait()``.
        Earlier runs of this transfer are completed first. The call waits for all ranks. With `only_changed`, it also
        waits for all rounds of messages but the last.

        Args:
            everything: with `only_changed`, send everything. It suffices that one rank asks for it.

        Raises:
            ValueError: raised on all ranks, before anything moves: a tensor has another layout, dtype or device than
                when the transfer was planned, or its module no longer has it; or a rank has no memory left for its
                destination.
            RuntimeError: other ranks did not call within the timeout.
        """
        failure = self._complete_earlier_runs("start")
        second_copy = self._second_copy

        def prepare() -> Note | None:
            nonlocal second_copy
            tensors = self._destination()
            if self._has_second_copy and (second_copy is None or second_copy.locations != locations_of(tensors)):
                second_copy = SecondCopy(tensors)
            return None if self._changes is None else self._changes.scan(self._source, tensors, everything)

        notes = self._reread(prepare)
        self._second_copy = second_copy
        tensors = self._destination()
        run: _Run
        report = None
        if self._changes is not None:
            run, report = self._start_changed(self._changes, [Note(*note) for note in notes], tensors)
        else:
            run = self._batch.start(tensors if second_copy is None else second_copy.tensors)
        if not self._has_second_copy:
            self._increment_versions(range(len(tensors)))
        self._last_handle = TransferHandle(self, run, failure, locations_of(tensors))
        self._last_handle.report = report
        return self._last_handle

    def receive(self) -> Receiving:
        """Starts to move the source, and yields (name, tensor) of this rank's parts as they complete.

        All ranks of the group must call this and iterate to the end; ranks without a part get no items. Sources must
        not be written to before the end. Destinations that were passed as tensors are filled in place. Other tensors
        are allocated when their group starts, and belong to the caller once yielded. A group has about `bucket_bytes`.
        Two groups are in flight at a time and share the buckets; the first ones start with this call.

        Earlier runs of this transfer are completed first; an earlier iterator that is not at its end then raises
        RuntimeError. An iterator that is closed or dropped completes the transfer, even if it was never advanced.
        """
        if self._has_second_copy:
            raise argument_error("receive: staging", "None", "'double'; call start() instead")
        if self._changes is not None:
            raise argument_error(
                "receive: only_changed", "False", f"{self._options.only_changed}; call start() instead"
            )
        failure = self._complete_earlier_runs("receive")
        self._reread()
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
        if self._second_copy is None:
            raise ValueError("swap: there is no second copy; use staging='double', and call start() first")
        if self._last_handle is not None and not self._last_handle.is_waited_for:
            raise RuntimeError("swap: the last transfer was not waited for; call its wait(swap=False) first")
        self._check_locations("swap", self._second_copy.locations)
        self._exchange(self._second_copy)

    def explain(self, topology: Topology | str | None = None, limit: int = explaining.LIMIT) -> str:
        """Returns bytes, rounds, memory and predicted time, also by tensor and by link, as text. No communication.

        Args:
            topology: as in `plan`; default, the result of `calibrate`, else the environment's, else a built-in one.
            limit: maximum number of tensors and of links to show, those with most bytes first.
        """
        table = named_topology(topology)
        if table is None:
            table = default_topology(executables.lowering(self._setup.device.type, self._group.get()))
        return explaining.explain(self._batch.batch, self._setup.names, table, limit)

    def _start_changed(self, changes: Changes, notes: list[Note], tensors: list[torch.Tensor]) -> tuple[_Run, Report]:
        """Starts to send what changed, or everything, to `tensors`. `notes` are those of all ranks about changes."""
        reason = changes.why_everything(notes)
        if reason:
            counters.counts.full_starts += 1
            return self._batch.start(tensors), changes.report(reason, None)
        group, written = self._group.get(), [tensor.detach() for tensor in tensors]
        torch.autograd.graph.increment_version(written)  # writes in inference mode bypass autograd
        round_bytes = self._options.bucket_bytes * self._options.buckets
        device = written[0].device if written else self._setup.device  # with its index, unlike the argument `device`
        wire = executables.wire(device, group)
        rounds = changes.send(notes, self._source, written, round_bytes, group, device, wire)
        report = changes.report("", rounds)
        counters.counts.changed_starts += 1
        counters.counts.changed_bytes += report.received_bytes
        return rounds, report

    def _source(self, index: int) -> torch.Tensor:
        """Returns this rank's part of a source."""
        return argument_checks.resolved(self._setup.source(index).detach())

    def _destination(self) -> list[torch.Tensor]:
        """Returns this rank's tensors of all destinations: passed ones, else ones that are allocated once and kept."""
        passed = map(self._setup.destination, range(len(self._setup.names)))
        return [tensor if tensor is not None else self._allocated_tensor(index) for index, tensor in enumerate(passed)]

    def _allocated_tensor(self, index: int) -> torch.Tensor:
        """Returns the tensor that is allocated once for a destination, if none was passed."""
        if index not in self._allocated:
            self._allocated[index] = self._destination_tensor(index)
        return self._allocated[index]

    def _exchange(self, second_copy: SecondCopy) -> None:
        """Exchanges both copies of the destination."""
        second_copy.exchange()
        torch.autograd.graph.increment_version(self._destination())
        self._increment_versions(range(len(self._setup.names)))

    def _swap_unless_moved(self) -> None:
        """Exchanges both copies of the destination, unless its tensors got other storages after the last start."""
        if self._second_copy is not None and not self._has_moved(self._second_copy.locations):
            self._exchange(self._second_copy)

    def _has_moved(self, locations: list[Location]) -> bool:
        """Returns True if this rank's destination is no longer at `locations` in memory."""
        return bool(self._setup.tensors.destination.reread()) or locations_of(self._destination()) != locations

    def _check_locations(self, by: str, locations: list[Location]) -> None:
        """Raises RuntimeError if this rank's destination is no longer at `locations` in memory."""
        if self._has_moved(locations):
            raise RuntimeError(
                f"{by}: tensors of the destination got other storages after the last start(); start again"
            )

    def _reread(self, prepare: Callable[[], Note | None] = lambda: None) -> list[Any]:
        """Reads all tensors again, then calls `prepare`. Returns its results on all ranks.

        Raises ValueError on all ranks, before anything is sent, if a tensor no longer matches the plan, or `prepare`
        fails on a rank, for example because the rank has no memory left.
        """
        own = self._second_copy.num_tensors if self._second_copy is not None else {}
        problems: list[str] = []
        rank = groups.rank_in_meshes(self._group.get())
        problems += read_or_report(lambda: self._setup.tensors.reread(own), problems, rank, [])
        note = None if problems else read_or_report(prepare, problems, rank)
        return self._setup.starts.agree(problems, note)

    def _increment_versions(self, indices: range) -> None:
        """Tells autograd about writes to passed tensors. A DTensor and its local tensor have separate versions."""
        tensors = (self._setup.tensors.destination.given.get(self._setup.names[index]) for index in indices)
        values = [tensor.value for tensor in tensors if tensor is not None and tensor.value is not None]
        torch.autograd.graph.increment_version(values)

    def _destination_tensor(self, index: int) -> torch.Tensor:
        """Returns the tensor that this rank passed for a destination, or a new tensor of its shape."""
        setup = self._setup
        layout = setup.destinations[index]
        if (tensor := setup.destination(index)) is not None:
            return tensor
        shape = layout.local_shape(setup.rank) if setup.has_part(index) else (0,)
        return torch.empty(shape, dtype=getattr(torch, layout.dtype), device=setup.device)

    def _shown_tensor(self, name: str, local: torch.Tensor) -> Any:
        """Returns the tensor that the user gets for a destination's local tensor: the one passed in `to`, if any."""
        tensor = self._setup.tensors.destination.given.get(name)
        return local if tensor is None or tensor.value is None else tensor.value

    def _bind_batch(self, destinations: range, buckets: int, first_sender_group: int = 0) -> BoundBatch:
        """Returns the batch that fills these destinations. `first_sender_group` is tried first."""
        return BoundBatch(
            self._setup, destinations, self._options.bucket_bytes, buckets, self._group.get(), first_sender_group
        )

    def _complete(self, run: _Run) -> Exception | None:
        """Waits for the destinations in the order in which they complete, and reports progress.

        Returns the error of the progress function, which is not called again after it.
        """
        failure = None
        with Progress(self._progress, self._setup, groups.rank_in_meshes(self._group.get())) as report:
            for index in run.completion_order():
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

    def _complete_earlier_runs(self, by: str) -> Exception | None:
        """Completes earlier runs, because other ranks wait for them. `by` is the method that calls.

        Returns the error of a progress function, if any. Raised here, it would leave other ranks waiting. An error in
        writing to this rank's destination needs no report, because the next run writes everything. After an error in
        communication nothing can be sent, so it is raised.
        """
        receiving = self._receiving() if self._receiving is not None else None
        if receiving is not None:
            receiving.complete(by)
        try:
            return self._last_handle.supersede() if self._last_handle is not None else None
        except dist.DistBackendError:
            raise
        except Exception:
            return None

    def _receive(self, failure: Exception | None) -> Generator[tuple[str, Any], None, None]:
        """Yields ("", None) once the first groups have started, and then the items of `receive`."""
        if self._receive_batches is None:
            buckets = self._options.buckets // self._max_groups
            chunked = enumerate(self._destination_ranges())
            self._receive_batches = [(chunk, self._bind_batch(chunk, buckets, index)) for index, chunk in chunked]
        setup = self._setup
        in_flight: list[_Group] = []
        rest = iter(self._receive_batches)
        with Progress(self._progress, setup, groups.rank_in_meshes(self._group.get())) as report:
            self._start_groups(in_flight, rest)
            with self._completing_on_error(in_flight, rest):
                yield "", None
            while self._start_groups(in_flight, rest):
                chunk, run, tensors = in_flight[0]
                for index in run.completion_order():
                    run.wait_for(index)
                    with self._completing_on_error(in_flight, rest):
                        report(chunk[index])
                        name, local = setup.names[chunk[index]], tensors[index]
                        tensors[index] = local.new_empty(0)
                        if setup.has_part(chunk[index]):
                            yield name, self._shown_tensor(name, local)
                        del local
                run.wait()
                del run, tensors, in_flight[0]
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _completing_on_error(self, in_flight: list[_Group], rest: Iterator[tuple[range, BoundBatch]]) -> Iterator[None]:
        """Completes the transfer if the block raises or the iterator is closed, because other ranks wait for it."""
        try:
            yield
        except BaseException:
            while self._start_groups(in_flight, rest):
                in_flight.pop(0)[1].wait()
            raise

    def _start_groups(self, in_flight: list[_Group], rest: Iterator[tuple[range, BoundBatch]]) -> bool:
        """Starts groups of `rest` until `_max_groups` are in flight. Returns False if none is in flight or left."""
        while len(in_flight) < self._max_groups and (following := next(rest, None)) is not None:
            chunk, batch = following
            tensors = [self._destination_tensor(i) for i in chunk]
            in_flight.append((chunk, batch.start(tensors), tensors))
            self._increment_versions(chunk)
        return bool(in_flight)

    def _destination_ranges(self) -> Iterator[range]:
        """Yields ranges of destinations whose largest parts fit into `bucket_bytes`. Equal on all ranks."""
        begin, total = 0, 0
        for i, layout in enumerate(self._setup.destinations):
            size = largest_part_bytes(layout)
            if i > begin and total + size > self._options.bucket_bytes:
                yield range(begin, i)
                begin, total = i, 0
            total += size
        if begin < len(self._setup.destinations):
            yield range(begin, len(self._setup.destinations))
