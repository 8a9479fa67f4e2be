"""csrc/runtime/cuda/lt_calls.h handles every status that every call of cuBLASLt may return.

A stub of cuBLASLt, loaded before the real one, returns the statuses. No GPU is needed.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from shardwright._native import _runtime

# Results of shardwright_try_lt_product, and the expected one for each value of cublasStatus_t.
DONE, DECLINED, FAILED = 1, 0, -1
ANSWERS = {0: DONE, 7: DECLINED, 8: DECLINED, 15: DECLINED} | dict.fromkeys((1, 3, 11, 13, 14, 16), FAILED)

STUB = r"""
#include <stdlib.h>
#include <stdint.h>
#include <string.h>
typedef struct { uint64_t algo[8]; size_t workspace; int state; float waves; int reserved[4]; } Result;
static int answer(const char* name) {
  const char* failing = getenv("LT_CALL");
  return failing != NULL && strcmp(failing, name) == 0 ? atoi(getenv("LT_STATUS")) : 0;
}
static int made = 1;
#define MAKE(name, ...) int name(void** out, ##__VA_ARGS__) { *out = &made; return answer(#name); }
#define DROP(name) int name(void* one) { (void)one; return 0; }
#define SET(name) int name(void* one, int what, const void* value, size_t size) \
  { (void)one; (void)what; (void)value; (void)size; return answer(#name); }
MAKE(cublasLtMatmulDescCreate, int compute, int scale)
MAKE(cublasLtMatrixLayoutCreate, int dtype, uint64_t rows, uint64_t columns, int64_t leading)
MAKE(cublasLtMatmulPreferenceCreate)
DROP(cublasLtMatmulDescDestroy)
DROP(cublasLtMatrixLayoutDestroy)
DROP(cublasLtMatmulPreferenceDestroy)
SET(cublasLtMatmulDescSetAttribute)
SET(cublasLtMatrixLayoutSetAttribute)
SET(cublasLtMatmulPreferenceSetAttribute)
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                                   int count, Result* results, int* found) {
  memset(results, 0, sizeof *results);
  results->state = answer("state");
  *found = answer("none") == 0;
  return answer("cublasLtMatmulAlgoGetHeuristic");
}
int cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,
                   void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                   const void* algorithm, void* workspace, size_t bytes, void* stream) {
  return answer("cublasLtMatmul");
}
"""

TRY_ALL = """
import ctypes, os, sys
import torch
from shardwright._native import _runtime
attempt = ctypes.CDLL(_runtime.__file__).shardwright_try_lt_product
attempt.argtypes = [ctypes.c_int64, ctypes.c_int]
k = 0
for line in sys.stdin:
    call, status = line.split()
    ctypes.CDLL(None).setenv(b"LT_CALL", call.encode(), 1)
    ctypes.CDLL(None).setenv(b"LT_STATUS", status.encode(), 1)
    k += 16
    first = attempt(k, 0)
    ctypes.CDLL(None).setenv(b"LT_CALL", b"nothing", 1)
    print(call, status, first, attempt(k, 0))
"""

CALLS = [
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "state",
    "cublasLtMatmul",
]


@pytest.mark.skipif(not _runtime.has_cuda or shutil.which("gcc") is None, reason="needs a build with CUDA, and gcc")
def test_every_status_is_handled(tmp_path: pathlib.Path) -> None:
    (tmp_path / "stub.c").write_text(STUB)
    stub = str(tmp_path / "stub.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", stub, str(tmp_path / "stub.c")], check=True)
    cases = [(call, status) for call in CALLS for status in ANSWERS] + [("none", 1)]
    found = subprocess.run(
        [sys.executable, "-c", TRY_ALL],
        env={**os.environ, "LD_PRELOAD": stub},
        input="".join(f"{call} {status}\n" for call, status in cases),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    for (call, status), line in zip(cases, found.stdout.splitlines(), strict=True):
        expected = DECLINED if call == "none" else ANSWERS[status]
        again = DECLINED if expected == DECLINED else DONE  # a declined product is not tried again, a failed one is
        assert line.split() == [call, str(status), str(expected), str(again)]
