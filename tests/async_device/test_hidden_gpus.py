"""Processes that load the test device use no GPU, also where there is one: a library in front of CUDA's pretends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import async_device

_LIBRARY = """
#include <stdlib.h>
int cudaGetDeviceCount(int* count) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = visible == NULL || *visible != 0;
  return *count > 0 ? 0 : 100;  /* 100: no device */
}
"""
_SEES_A_GPU = "import torch; assert torch.cuda.is_available()"
_USES_NONE = """
import torch
import async_device
async_device.load()
assert not torch.cuda.is_available()
assert torch.empty(4, pin_memory=True).is_pinned()  # CUDA's memory is not pinned for the test device
x = torch.ones(4, device="asyncdev", requires_grad=True)
(x * x).sum().backward()  # starts autograd's threads
assert x.grad.tolist() == [2.0] * 4
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_loading_the_device_hides_gpus(tmp_path: Path) -> None:
    async_device.build()
    source, library = tmp_path / "one_gpu.c", tmp_path / "one_gpu.so"
    source.write_text(_LIBRARY)
    subprocess.run(["c++", "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    path = os.pathsep.join((str(Path(__file__).parents[1]), *filter(None, sys.path)))
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"LD_PRELOAD": str(library), "PYTHONPATH": path}
    for program in (_SEES_A_GPU, _USES_NONE):
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
