"""Imported by every Python process of a run of PyTorch's own tests, including their workers.

Once a process loads PyTorch's test base classes, this module

- turns shardwright on (SHARDWRIGHT_TORCH_TESTS=ours);
- makes the tests fork their ranks instead of starting an interpreter for each (SHARDWRIGHT_TORCH_TESTS_FORK=1);
- replaces the ranks that several tests of a class share after each test that fails;
- runs tests that require GPUs without them (SHARDWRIGHT_TORCH_TESTS_WITHOUT_GPUS=1);
- replaces FSDP2's function by `sw.fully_shard` (SHARDWRIGHT_TORCH_TESTS_FULLY_SHARD=1);
- writes `sw.stats()` to $SHARDWRIGHT_TORCH_TESTS_OUT/stats, one file per process.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.util
import json
import os
import pathlib
import sys

_BASES = "torch.testing._internal.common_distributed"
_FSDP = "torch.distributed.fsdp._fully_shard"
_FSDP_BASES = "torch.testing._internal.common_fsdp"
_INDUCTOR_BASES = "torch.testing._internal.inductor_utils"
_MODE = os.environ.get("SHARDWRIGHT_TORCH_TESTS", "")
_OUT = pathlib.Path(os.environ.get("SHARDWRIGHT_TORCH_TESTS_OUT", ""))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once it has been imported."""

    def __init__(self, name, then):
        self.name = name
        self.then = then

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_call(module):
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_and_call
        return spec


def _replace_fully_shard(package):
    """Replaces the function before other modules import it from its package, and tests from those modules."""
    stock = package.fully_shard

    @functools.wraps(stock)
    def fully_shard(module, **options):
        import shardwright

        return shardwright.fully_shard(module, **options)

    package.fully_shard = package._fully_shard.fully_shard = fully_shard


def _prepare(bases):
    import torch

    if os.environ.get("SHARDWRIGHT_TORCH_TESTS_FORK") == "1":
        fork = torch.multiprocessing.get_context("fork").Process
        bases.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(fork)
        torch.multiprocessing.set_start_method("fork")
    if os.environ.get("SHARDWRIGHT_TORCH_TESTS_WITHOUT_GPUS") == "1":
        bases.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
        for devices in (torch.accelerator, torch.cuda, torch.cpu):  # tests use as many ranks as there are devices
            devices.device_count = lambda: 4
        torch.cpu.current_device = lambda: None  # `torch.device("cpu", ...)` refuses the "cpu" that it returns
        torch.cuda.can_device_access_peer = lambda *_: False
        _drop_device_ids(torch.nn.parallel)
    _replace_ranks_after_failures(bases.MultiProcContinuousTest)
    if _MODE == "ours":
        import shardwright

        shardwright.enable()
        atexit.register(_write_stats)
        _count_ranks_apart(bases.MultiProcessTestCase)
        _count_shared_ranks_apart(bases.MultiProcContinuousTest)


def _replace_ranks_after_failures(test_case):
    """Kills the ranks of a class after a failed test. The class then starts new ranks for its next test.

    PyTorch skips all later tests of the class.
    """
    tear_down = test_case.tearDown

    @functools.wraps(tear_down)
    def tear_down_and_kill(self):
        tear_down(self)
        cls = type(self)
        if cls.poison_pill and cls.__dict__.get("_processes_spawned", False):
            for process in cls.processes:
                process.kill()
                process.join()
            cls._processes_spawned = cls.poison_pill = False

    test_case.tearDown = tear_down_and_kill


def _claim_a_gpu(inductor_bases):
    """Makes tests run that are skipped unless inductor has a GPU; they compile for the CPU."""
    inductor_bases.HAS_GPU = True


def _drop_device_ids(parallel):
    """Removes `device_ids`, which DistributedDataParallel refuses for modules on CPU."""
    ddp = parallel.DistributedDataParallel
    init = ddp.__init__

    @functools.wraps(init)
    def init_without_device_ids(self, *args, device_ids=None, **kwargs):
        init(self, *args, **kwargs)

    ddp.__init__ = init_without_device_ids


def _count_ranks_apart(test_case):
    """Resets the counts that a forked rank inherits, and writes them at its end, where exit handlers do not run."""
    import shardwright

    run_test = test_case.run_test

    @functools.wraps(run_test)
    def counted(self, *args, **kwargs):
        shardwright.reset_stats()
        try:
            return run_test(self, *args, **kwargs)
        finally:
            _write_stats()

    test_case.run_test = counted


def _count_shared_ranks_apart(test_case):
    """Does the same for ranks that run several tests. They write their counts after each test, as ranks are killed."""
    import shardwright

    work, run_test = test_case._worker_loop.__func__, test_case._run_test_given_id.__func__

    @functools.wraps(work)
    def counted_work(cls, *args):
        shardwright.reset_stats()
        work(cls, *args)

    @functools.wraps(run_test)
    def counted_test(cls, *args, **kwargs):
        try:
            run_test(cls, *args, **kwargs)
        finally:
            _write_stats()

    test_case._worker_loop = classmethod(counted_work)
    test_case._run_test_given_id = classmethod(counted_test)


def _write_stats():
    import shardwright

    folder = _OUT / "stats"
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{os.getpid()}.part"  # a killed process leaves no partial file
    written.write_text(json.dumps(shardwright.stats()))
    written.replace(folder / f"{os.getpid()}.json")


def _prepare_fsdp(fsdp_bases):
    """Makes FSDP2's tests use processes as ranks; without GPUs they use one rank, or threads without Gloo groups."""
    import torch

    fsdp_bases.DEVICE_COUNT = 4
    torch.accelerator.device_count = lambda: 8  # some use eight ranks

    class RanksAreProcesses(fsdp_bases.FSDPTest):
        def run_test(self, *args):
            self.perThreadSetUp()
            try:
                super().run_test(*args)
            finally:
                self.perThreadTearDown()

        def perThreadSetUp(self):
            pass

        def perThreadTearDown(self):
            pass

    fsdp_bases.FSDPTestMultiThread = RanksAreProcesses


if _MODE:
    sys.meta_path.insert(0, _AfterImport(_BASES, _prepare))
if os.environ.get("SHARDWRIGHT_TORCH_TESTS_WITHOUT_GPUS") == "1":
    sys.meta_path.insert(0, _AfterImport(_INDUCTOR_BASES, _claim_a_gpu))
if _MODE and os.environ.get("SHARDWRIGHT_TORCH_TESTS_FULLY_SHARD") == "1":
    sys.meta_path.insert(0, _AfterImport(_FSDP_BASES, _prepare_fsdp))
    if _MODE == "ours":
        sys.meta_path.insert(0, _AfterImport(_FSDP, _replace_fully_shard))
