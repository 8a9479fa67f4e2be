#!/usr/bin/env python3
"""Trains random small models under `sw.fully_shard`, and compares every step with a model that is not sharded.

    python tests/python/hunt.py --cases 300 --seed 7             # also under FSDP2, for comparison
    python tests/python/hunt.py --seconds 60                     # a random seed, which is printed
    python tests/python/hunt.py --case "Case(seed=5, ...)"       # one case, as it was printed

In each step gradients, weights, outputs and norms are compared. A case passes if all are equal, or if all ranks raise
a known error in the same step; a table at the end lists these errors. Where a case makes ranks differ, some may raise
such an error alone, for which the others wait until their timeout. Everything else is a failure: wrong values, an
unknown error, an error on only some ranks, a hang, a process that died. A failing case is run again alone with fewer
features, and the smallest case that fails in the same way is printed. hunt_models.py has the modules, hunt_cases.py
draws cases, hunt_runs.py runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import pickle
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import hunt_cases
import pool_worker
from hunt_cases import Case
from hunt_models import Injected, Interrupt
from hunt_runs import EXACT, ROUGH, Run, Tolerance, difference
from pool import Pool, _context

CHUNK = 12
# Timeouts in seconds: of a collective under test, of the exchange of findings about it, and of the whole call.
COLLECTIVE_TIMEOUT, LINK_TIMEOUT, CALL_TIMEOUT = 25, 60, 120

# Kinds of verdicts. A case with one of the first two passes.
EQUAL, REFUSED = "equal", "refused"
WRONG, MIXED, UNKNOWN, HANG, DIED = "WRONG", "ERROR ON SOME RANKS", "UNKNOWN ERROR", "HANG", "DIED"
INVALID = "INVALID"


@dataclasses.dataclass(frozen=True)
class Verdict:
    kind: str
    step: int = -1
    text: str = ""

    @property
    def is_right(self) -> bool:
        return self.kind in (EQUAL, REFUSED)


# Errors that a case may raise under sw.fully_shard on all ranks. Any other error is a failure.
_REFUSALS = re.compile(
    "Injected|Interrupt|"
    "RuntimeError: .* written between a forward and its backward, which needs the old values|"
    "RuntimeError: .*: a weight under sw.fully_shard was read after it was released|"
    "RuntimeError: (The differentiated Tensor at index .*|One of the differentiated Tensors) "
    "appears to not have been used in the graph|"
    "(TorchRuntimeError: RuntimeError when making fake tensor call.*got RuntimeError\\('|RuntimeError: )"
    "aten.* got mixed torch.Tensor and DTensor|"
    "RuntimeError: .* must have the same dtype|"
    # Gradients that DTensor replicates, and its missing rule for anomaly detection. FSDP2 raises them too.
    "RuntimeError: aten.add_.Tensor: in-place operations that require placement changes|"
    "NotImplementedError: Operator aten._is_any_true.default does not have a sharding strategy|"
    "RuntimeError: .* was replaced while its gradient waits for a reduction|"
    "RuntimeError: chunked must be False for .* if compiled graphs contain units|"
    # Modules keep full weights after a forward without a backward, or because a forward has registered one again.
    "RuntimeError: Error\\(s\\) in loading state_dict for Model:.* got mixed torch.Tensor and DTensor|"
    "RuntimeError: an optimizer must have the sharded parameters of sw.fully_shard|"
    "ValueError: .* must belong to one unit, got a parameter that is tied to a weight of another unit|"
    "ValueError: shardwright: sw.fully_shard: the ranks have (used )?different modules",
    re.DOTALL,
)

Finding = tuple[str, str] | None  # kind and text of what one rank found


class Link:
    """Exchanges findings between ranks over a group of its own, apart from the group under test."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=LINK_TIMEOUT))

    def agree(self, finding: Finding, step: int, may_raise_alone: bool = False) -> Verdict | None:
        """Combines the findings of all ranks into a verdict. Returns None if no rank found anything.

        `may_raise_alone`: an error of PyTorch or of a read may be raised on some ranks, while the others wait for them.
        """
        found: list[Finding] = [None] * dist.get_world_size()
        dist.all_gather_object(found, finding, group=self._group)
        if not any(found):
            return None
        text = "\n".join(f"rank {rank}: {each[1] if each else 'nothing'}" for rank, each in enumerate(found))
        kinds = {each[0] if each else EQUAL for each in found}
        if INVALID in kinds:
            return Verdict(INVALID, step, text)
        late = [each[1] for each in found if each and re.search("[Tt]imed? ?out", each[1])]
        if late:
            raised = [each[1] for each in found if each and each[0] == REFUSED and each[1] not in late]
            is_alone = bool(raised) and not raised[0].startswith("ValueError: shardwright")
            if may_raise_alone and is_alone and all("one of them has raised an error before" in each for each in late):
                return Verdict(REFUSED, step, raised[0])
            return Verdict(HANG, step, text)
        if kinds == {REFUSED}:
            return Verdict(REFUSED, step, found[0][1] if found[0] else "")
        return Verdict(MIXED if REFUSED in kinds else WRONG, step, text)


def _attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, Finding]:
    try:
        return function(*args), None
    except (Exception, Injected, Interrupt) as error:
        return None, (REFUSED, f"{type(error).__name__}: {error}")


def _right(function: Callable[..., Any], *args: Any) -> tuple[Any, Finding]:
    """Calls a function of the unsharded model. An error there makes the case invalid: the generator is at fault."""
    value, finding = _attempt(function, *args)
    return value, finding and (INVALID, f"whole model: {finding[1]}")


def _train(case: Case, index: int, run: Run) -> list[tuple[str, Any]]:
    step = case.steps[index]
    run.prepare(step)
    run.fail(index, step)
    if run.engine != "DDP":
        return run.compute(index, step)
    before = {name: p.grad for name, p in run.parameters.items()}
    for p in run.parameters.values():
        p.grad = None
    records = run.compute(index, step)
    for name, p in run.parameters.items():
        has = torch.tensor(float(p.grad is not None))
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
        dist.all_reduce(has)
        dist.all_reduce(gradient)
        p.grad = before[name]
        if has:
            gradient /= dist.get_world_size()
            p.grad = gradient if p.grad is None else p.grad + gradient
    return records


def _compare(pairs: Sequence[tuple[str, Any, Any]], tolerance: Tolerance) -> Finding:
    found = [difference(*pair, tolerance) for pair in pairs]
    wrong = [each for each in found if each is not None]
    return (WRONG, "; ".join(wrong[:4])) if wrong else None


def _gradients(run: Run, unsharded: Run) -> list[tuple[str, Any, Any]]:
    return [(f"gradient of {name}", run.parameters[name].grad, p.grad) for name, p in unsharded.parameters.items()]


def _weights(run: Run, unsharded: Run, reads_state: bool) -> list[tuple[str, Any, Any]]:
    pairs = [(name, run.parameters[name], p) for name, p in unsharded.parameters.items()]
    if reads_state:
        state = run.model.state_dict()
        pairs += [(f"{name} in the state dict", state[name], p) for name, p in unsharded.parameters.items()]
    return pairs


def _stale(case: Case, index: int, run: Run, expected: Finding) -> Finding:
    finding = _attempt(_train, case, index, run)[1]
    if expected is None or "modified by an inplace" not in expected[1]:
        return None
    return finding or (WRONG, "a backward has read weights that were written since the forward")


def run_case(case: Case, engine: str, link: Link, folder: str) -> Verdict:
    """Trains a sharded and an unsharded model. Stops at the first step in which any rank has a finding."""
    is_rough = case.policy == "bfloat16" or any(step.context == "autocast" for step in case.steps)
    tolerance = ROUGH if is_rough else EXACT
    unsharded, invalid = _right(Run, case, "whole")
    run, finding = _attempt(Run, case, engine, folder)
    if (verdict := link.agree(invalid or finding, -1)) is not None:
        return verdict
    for index, step in enumerate(case.steps):
        right, invalid = _right(_train, case, index, unsharded)
        if step.differs:  # ends the case too: ranks that differ raise, or happen to use the same units
            return link.agree(_attempt(_train, case, index, run)[1], index, may_raise_alone=True) or Verdict(EQUAL)
        if step.backward == "stale":  # ends the case: the unsharded model cannot run the batches of several ranks here
            return link.agree(_stale(case, index, run, invalid), index) or Verdict(EQUAL)
        records, finding = (None, invalid) if invalid else _attempt(_train, case, index, run)
        if finding is None:
            pairs = [(what, got, value) for (what, got), (_, value) in zip(records, right, strict=True)]
            finding = _compare(pairs + ([] if step.defers else _gradients(run, unsharded)), tolerance)
        if (verdict := link.agree(finding, index, step.losses == "by_rank")) is not None:
            return verdict
        right, invalid = _right(unsharded.clip, step)
        norm, finding = _attempt(run.clip, step)
        _, invalid = _right(unsharded.finish, index, step) if invalid is None else (None, invalid)
        finding = (
            invalid or finding or _compare([("norm", norm, right)], tolerance) or _attempt(run.finish, index, step)[1]
        )
        if finding is None:
            pairs, finding = _attempt(_weights, run, unsharded, step.reads_state)
            finding = finding or _compare(pairs, tolerance)
        if (verdict := link.agree(finding, index)) is not None:
            return verdict
    return Verdict(EQUAL)


def run_cases(cases: Sequence[Case], engine: str, folder: str) -> None:
    """Runs cases on this rank, and writes each verdict to a file as soon as it is known."""
    rank, world = dist.get_rank(), dist.get_world_size()
    path = os.path.join(folder, f"verdicts_{rank}")

    def begin(number: int) -> Link:
        # Messages that a case leaves in flight must not reach the next one.
        pool_worker._begin_life(world, f"{folder}/life_{number}", rank, COLLECTIVE_TIMEOUT)
        if "torch._dynamo" in sys.modules:  # imported only if a case needed it, because that takes long
            torch._dynamo.reset()
        return Link()

    link = begin(0)
    with open(path, "wb") as file:
        for number, case in enumerate(cases, 1):
            pool_worker.note(f"{engine}: {case}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict = run_case(case, engine, link, folder)
            pickle.dump(verdict, file)
            file.flush()
            if verdict.kind != EQUAL:
                link = begin(number)


class Hunt:
    """Runs cases in worker processes. Replaces the processes if one died or hangs."""

    def __init__(self, pool: Pool, world: int) -> None:
        self._pool, self._world = pool, world

    def run(self, cases: Sequence[Case], engine: str) -> list[Verdict]:
        """Returns a verdict for each case."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(cases):
            verdicts += self._run_chunk(cases[len(verdicts) : len(verdicts) + CHUNK], engine)
        return verdicts

    def run_alone(self, case: Case, engine: str) -> Verdict:
        """Runs a case in fresh processes."""
        self._pool.close()
        return self._run_chunk([case], engine)[0]

    def _run_chunk(self, cases: Sequence[Case], engine: str) -> list[Verdict]:
        with tempfile.TemporaryDirectory(prefix="shardwright_hunt_") as folder:
            message = ""
            try:
                self._pool.run(run_cases, self._world, cases, engine, folder, timeout_seconds=CALL_TIMEOUT)
            except AssertionError as error:
                message = str(error)
            self._pool._life = None  # The cases have replaced the process group.
            found = _read(os.path.join(folder, "verdicts_0"))
            if message:
                self._pool.close()
                found.append(Verdict(DIED if "exit code" in message else HANG, -1, message))
            if engine == "shardwright":
                found = [_checked(verdict) for verdict in found]
            return found[: len(cases)]

    def smallest(self, case: Case, engine: str, verdict: Verdict, seconds: float) -> tuple[Case, Verdict]:
        """Returns a case with as few features as possible that fails in the same way."""
        deadline, tried = time.monotonic() + seconds, {case}
        is_smaller = True
        while is_smaller and time.monotonic() < deadline:
            is_smaller = False
            for simpler in hunt_cases.simpler(case):
                if simpler in tried or time.monotonic() > deadline:
                    continue
                tried.add(simpler)
                found = self._run_chunk([simpler], engine)[0]
                if found.kind == verdict.kind:
                    case, verdict, is_smaller = simpler, found, True
                    break
        return case, verdict


def _checked(verdict: Verdict) -> Verdict:
    is_known = verdict.kind != REFUSED or _REFUSALS.match(verdict.text)
    return verdict if is_known else dataclasses.replace(verdict, kind=UNKNOWN)


def _read(path: str) -> list[Verdict]:
    found: list[Verdict] = []
    if os.path.exists(path):
        with open(path, "rb") as file:
            while True:
                try:
                    found.append(pickle.load(file))
                except EOFError:
                    break
    return found


def plain(text: str) -> str:
    """Returns an error's text without the numbers and names that differ from case to case."""
    text = re.sub(r"\(.*?\)", "(...)", text.splitlines()[0])
    return re.sub(r"\d+", "N", text)[:160]


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns a table of the errors that were raised on all ranks, with counts."""
    counts = Counter(plain(verdict.text) for verdict in verdicts if verdict.kind == REFUSED)
    kinds = Counter(verdict.kind for verdict in verdicts)
    lines = [", ".join(f"{count} {kind}" for kind, count in kinds.most_common())]
    return "\n".join([*lines, *(f"  refused {count:3}: {text}" for text, count in counts.most_common())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="how many (default: as many as fit into --seconds)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, help="of the first case; the next ones follow (default: a random one)")
    parser.add_argument("--case", help="one case, as it is printed")
    parser.add_argument("--world", type=int, default=2, help="the number of ranks (%(default)s)")
    parser.add_argument("--engines", default="shardwright,FSDP2", help="also: DDP, to check the hunt (%(default)s)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="cases for each call (%(default)s)")
    parser.add_argument("--shrink", type=float, default=20, help="seconds to look for a smaller case (%(default)s)")
    options = parser.parse_args()
    first = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"torch {torch.__version__}, seed {first}", flush=True)
    # Workers are forked from a process that has imported everything.
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])
    _context.set_forkserver_preload(["hunt", "torch._dynamo"])
    pool = Pool()
    begin, failures = time.monotonic(), 0
    verdicts: dict[str, list[Verdict]] = {engine: [] for engine in options.engines.split(",")}
    try:
        hunt = Hunt(pool, options.world)
        done = 0
        while done < (options.cases or 1 << 30) and (options.cases or time.monotonic() - begin < options.seconds):
            count = min(options.chunk, (options.cases or 1 << 30) - done)
            cases = [hunt_cases.draw(first + done + i) for i in range(count)]
            if options.case:
                cases, options.cases = [hunt_cases.parse(options.case)], 1
            for engine, all_found in verdicts.items():
                found = hunt.run(cases, engine)
                all_found += found
                for case, verdict in zip(cases, found, strict=True):
                    if (verdict.is_right or verdict.kind == INVALID) and not options.case:
                        continue
                    failures += not verdict.is_right and engine == "shardwright"
                    if not verdict.is_right and engine != "FSDP2":
                        print(f"\n{engine}: {verdict.kind}: {case}\n{verdict.text}", flush=True)
                        case, verdict = hunt.smallest(case, engine, verdict, options.shrink)
                        alone = hunt.run_alone(case, engine)
                        if alone.kind != verdict.kind:
                            print(f"in fresh processes it is: {alone.kind}")
                    print(f"{engine}: {verdict.kind} in step {verdict.step}: {case}\n{verdict.text}", flush=True)
            done += count
    finally:
        pool.close()
    for engine, all_found in verdicts.items():
        print(f"\n{engine}, {len(all_found)} cases in {time.monotonic() - begin:.0f} s: {table(all_found)}")
    return 1 if failures else 0


if __name__ == "__main__":
    import hunt  # Workers find its functions by this name.

    sys.exit(hunt.main())
