"""Several threads enable and disable the drop-in; the cost of a switch with thousands of modules loaded."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, _redistribute

import dtensors
import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.dtensor import mode as modes
from shardwright.dtensor import patch

# In a tuple, because the drop-in replaces every module attribute that is the function.
STOCK = (_redistribute.redistribute_local_tensor, DTensor.redistribute)


def _is_bound() -> bool:
    """True if PyTorch's functions are replaced by ours. Fails if only one of them is."""
    bound = {_redistribute.redistribute_local_tensor is not STOCK[0], DTensor.redistribute is not STOCK[1]}
    assert len(bound) == 1, "one of two places is ours, the other is PyTorch's"
    return bound.pop()


def _mode() -> str:
    mode = modes.current()
    return "strict" if mode.strict else "on" if mode.on else "off"


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    yield
    sw.enable()  # functions that a block replaced stay replaced after its end, for its backward
    sw.disable()
    assert not _is_bound()
    assert _mode() == "off"


def _run(*bodies: Callable[[], None]) -> list[BaseException]:
    """Runs these in threads with the shortest switch interval. Returns their exceptions."""
    raised: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "hangs"
    return raised


def test_threads_enable_and_disable_concurrently() -> None:
    def toggle() -> None:
        for _ in range(60):
            with contextlib.suppress(RuntimeError):  # another thread has disabled it meanwhile
                sw.enable()
                sw.disable()

    assert _run(toggle, toggle, toggle) == []
    with contextlib.suppress(RuntimeError):
        sw.disable()
    assert not _is_bound()
    sw.enable()
    assert _is_bound(), "enable binds nothing any more"


def test_concurrent_enabled_blocks() -> None:
    def block(seed: int) -> Callable[[], None]:
        def body() -> None:
            choices = random.Random(seed)
            for _ in range(60):
                with sw.enabled(strict=choices.random() < 0.5):
                    assert modes.current().on and _is_bound()
                    with sw.enabled():
                        assert modes.current().on and _is_bound()
                    assert modes.current().on and _is_bound()

        return body

    assert _run(block(1), block(2), block(3)) == []
    assert _mode() == "off"


class _Turns:
    """Runs the steps of two threads in a fixed order."""

    def __init__(self) -> None:
        self._events: dict[int, threading.Event] = {}

    def _event(self, number: int) -> threading.Event:
        return self._events.setdefault(number, threading.Event())

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        if number > 0:
            assert self._event(number - 1).wait(30)
        yield
        self._event(number).set()


def test_overlapping_blocks_of_two_threads() -> None:
    """The end of the first block undoes only its own mode, and the end of the second does not restore it."""
    turns, seen = _Turns(), []

    def first() -> None:
        with turns.turn(0):
            block = sw.enabled()
            block.__enter__()
        with turns.turn(2):
            block.__exit__(None, None, None)
            seen.append(_mode())

    def second() -> None:
        with turns.turn(1):
            block = sw.enabled(strict=True)
            block.__enter__()
        with turns.turn(3):
            block.__exit__(None, None, None)
            seen.append(_mode())

    assert _run(first, second) == []
    assert seen == ["strict", "off"]


def test_disable_in_another_thread_keeps_a_block_enabled() -> None:
    turns, seen = _Turns(), []
    sw.enable(strict=True)

    def in_block() -> None:
        with turns.turn(0):
            block = sw.enabled()
            block.__enter__()
        with turns.turn(2):
            seen.append((_mode(), _is_bound()))
            block.__exit__(None, None, None)
            seen.append(_mode())

    def in_other_thread() -> None:
        with turns.turn(1):
            sw.disable()
            with pytest.raises(RuntimeError, match="not enabled"):
                sw.disable()

    assert _run(in_block, in_other_thread) == []
    assert seen == [("on", True), "off"]
    sw.enable()  # disable() then restores everything that was replaced for the block
    sw.disable()
    assert not _is_bound()


def test_switches_within_a_block_end_with_it() -> None:
    sw.enable(strict=True)
    with sw.enabled():
        assert _mode() == "on"
        sw.disable()
        assert _mode() == "off"
        with pytest.raises(RuntimeError, match="not enabled"):
            sw.disable()
    assert _mode() == "strict" and _is_bound(), "what was on before the block is not on after it"
    sw.disable()
    with sw.enabled():
        sw.disable()
        assert not _is_bound()
        sw.enable(strict=True)
        assert _mode() == "strict" and _is_bound()
    assert _mode() == "off"


def _during_a_call() -> None:
    """During `sw.redistribute`, other threads have their own mode, and the end of theirs does not end this one."""
    full = torch.arange(24.0).view(6, 4)
    x = dtensors.distribute(full, get_mesh((2,)), ["S(0)"]).detach().requires_grad_()
    seen = []

    def look(**options: Any) -> DTensor:
        with ThreadPoolExecutor(1) as other:
            seen.append((modes.mode_in_effect(), other.submit(modes.mode_in_effect).result(60)))
            if not seen[-1][1].on:
                other.submit(sw.enable).result(60)
                other.submit(sw.disable).result(60)
        return DTensor.redistribute(x, **options)

    x.redistribute = look  # type: ignore[method-assign]
    for options in ({}, {"make_groups": False}, {"views": True}):
        with sw.enabled(**options) if options else contextlib.nullcontext():  # type: ignore[arg-type]
            outside = modes.current()
            for _ in range(2):
                sw.reset_stats()
                y = sw.redistribute(x, [Replicate()])
                assert seen.pop() == (outside._replace(on=True, strict=True), outside)
                assert modes.current() is outside and modes.mode_in_effect() is outside
                assert torch.equal(y.to_local(), full)
        y.to_local().sum().backward()
        assert sw.stats()["calls"] == 2 and sw.stats()["fallbacks"] == 0
        assert x.grad is not None and torch.equal(x.grad.to_local(), torch.ones(3, 4))  # type: ignore[attr-defined]
        x.grad = None


def test_redistribute_by_function_changes_no_other_thread(pool: Pool) -> None:
    pool.run(_during_a_call, 2)


def test_failed_enable_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(show: bool) -> None:
        raise ImportError("a piece of torch is missing")

    monkeypatch.setattr(patch, "_replace_function", fail)
    with pytest.raises(ImportError, match="a piece"):
        sw.enable()
    assert not _is_bound() and _mode() == "off"
    monkeypatch.undo()
    sw.enable()
    assert _is_bound()


@contextlib.contextmanager
def _module(name: str, **names: object) -> Iterator[types.ModuleType]:
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    try:
        yield module
    finally:
        del sys.modules[name]


def test_modules_that_take_the_function_later() -> None:
    """Finds the function in modules that take it at any time, under any name."""
    with _module("holds_early", mover=STOCK[0]) as early, _module("grows") as grows, _module("by_name") as by_name:
        by_name.redistribute_local_tensor = None
        for _ in range(2):
            sw.enable()
            assert early.mover is not STOCK[0]
            with _module("came_meanwhile", mover=_redistribute.redistribute_local_tensor) as late:
                grows.mover = by_name.redistribute_local_tensor = _redistribute.redistribute_local_tensor
                sw.disable()
                held = [early.mover, late.mover, grows.mover, by_name.redistribute_local_tensor]
                assert all(function is STOCK[0] for function in held)
        sw.enable()
        assert grows.mover is by_name.redistribute_local_tensor is early.mover is not STOCK[0]
        sw.disable()


def test_switching_is_fast() -> None:
    """A switch is much faster than a scan of every attribute of every module."""
    with contextlib.ExitStack() as stack:
        for number in range(2000):
            stack.enter_context(_module(f"one_of_many_{number}", **{f"name_{n}": n for n in range(100)}))
        sw.enable()
        sw.disable()

        def scan() -> None:
            for module in list(sys.modules.values()):
                for _ in [name for name, value in list(vars(module).items()) if value is STOCK[0]]:
                    pass

        def switch() -> None:
            sw.enable()
            sw.disable()

        assert _least(switch) < 0.7 * _least(scan)


def _least(call: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return min(times)
