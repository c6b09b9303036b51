# Commands for development. `make` lists them. Every target can be repeated and is fast if there is nothing to do.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CONFIG ?= examples/gpt/gpt.toml
ARGS ?=
# The weights of the example; other files say themselves where theirs are.
SAVE = $(if $(filter examples/gpt/gpt.toml,$(CONFIG)),$(if $(findstring checkpoint.,$(ARGS)),,checkpoint.dir=checkpoints/gpt checkpoint.every=400 checkpoint.keep=1))
PYTHON ?= build/deps/python/bin/python
JOBS ?= $(shell nproc)
# Where CMake finds nvcc: what an earlier call has found, environment, the one that .ci/setup cuda unpacks, PATH.
NVCC ?= $(firstword $(wildcard $(shell sed -n 's/^CMAKE_CUDA_COMPILER:[A-Z]*=//p' build/CMakeCache.txt 2> /dev/null) \
  $(firstword $(CUDACXX)) $(addsuffix /bin/nvcc,$(CUDA_PATH) build/deps/cuda/nvidia/cu13)) $(shell command -v nvcc))
TORCH_CACHE := -DTORCH_ROOT="$(TORCH_ROOT)" -DTorch_DIR="$(Torch_DIR)"
SOURCES = $(shell git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h' '*.c' ':!sdk/abi')  # sdk/abi is a copy

.PHONY: help setup build train test test-all test-hosts matrix faults bench peers gpu nvcc fuzz wheel format lint docs clean

help:  ## prints this list
	@echo 'make TARGET, where TARGET is one of'
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 12
	@echo 'TORCH_ROOT=<folder> or Torch_DIR=<folder> uses your own libtorch instead of the pinned wheel.'

setup:  ## installs missing packages, libtorch, a Python environment and a text (.ci/debian.txt, torch.txt, python.txt)
	@.ci/setup

build: setup  ## builds zeroth, the plug-ins, the examples and all tests except programs of slow tests only, into build/
	@$(call configure,-DZR_SLOW_TESTS=OFF)
	@$(call compile)

train: setup  ## builds what training needs, and trains; CONFIG=file.toml, ARGS="strategy=zero0 train.steps=20"
	@$(call configure,)
	@$(call compile,--target zr_training)
	@build/bin/zeroth train $(CONFIG) $(ARGS) $(SAVE)

test: build  ## runs the tests that every change must pass
	@.ci/test

test-all: setup  ## runs all tests, also the slow ones (ctest label *slow); use it before a release
	@.ci/setup hosts
	@$(call configure,-DZR_SLOW_TESTS=ON)
	@$(call compile)
	@.ci/test all

test-hosts: build  ## runs the jobs of the multi-rank tests over MPI, on two simulated hosts
	@.ci/test hosts

matrix: build  ## runs the parity matrix; CASES="zero3-*-n3 fp16": test cases whose names contain one of the words
	@build/tests/parity_matrix $(CASES)

faults: setup  ## plants 24 faults in a copy of the tree and checks that the fast tests find each; FAULTS="name": only these
	@tests/faults/faults.py $(FAULTS)

bench:  ## runs the benchmarks, writes build/bench.json; ARGS="checkpoint step": programs with one of the words
	@.ci/setup bench hosts
	@$(call configure,-DZR_BENCHMARKS=ON)
	@$(call compile)
	@.ci/bench $(ARGS)

peers: build  ## compares with DDP, FSDP and DeepSpeed, which it installs: build/peers/table.txt; ARGS="--sizes S"; HOSTS=2
	@$(call compile,--target peers_zeroth)
	@.ci/peers $(if $(HOSTS),--hosts $(HOSTS)) $(ARGS)

gpu: nvcc setup  ## runs the GPU tests and rows of tests/gpu on this machine's GPU; PART="collectives 2": one part
	@$(call configure,-DZR_SLOW_TESTS=OFF -DZR_CUDA=ON)
	@$(call compile)
	@$(call compile,--target gpu_step gpu_optimizer gpu_collectives gpu_largest gpu_fault gpu_nccl)
	@tests/gpu/pack build/gpu && build/gpu/run $(or $(PART),all)

nvcc:
	@[ -n '$(NVCC)' ] || { echo 'gpu: error: the compiler for CUDA, nvcc, was not found' >&2; \
	  echo '  remedy: .ci/setup cuda; or add its folder to PATH, such as PATH=/usr/local/cuda/bin:$$PATH' >&2; exit 3; }

fuzz:  ## runs the checkpoint parsers under libFuzzer, SECONDS=60; stores failing inputs in build/fuzz
	@.ci/setup lint
	@mkdir -p build/fuzz/corpus
	@clang++ -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Icore -Icore/base/include -Isdk/include \
	  tests/unit/core/checkpoint/fuzz_target.cpp core/checkpoint/metadata.cpp core/base/file.cpp \
	  core/checkpoint/json.cpp core/checkpoint/json_field.cpp core/checkpoint/manifest.cpp \
	  core/checkpoint/safetensors.cpp core/base/error.cpp core/base/text.cpp $$(pkg-config --cflags --libs libxxhash fmt) -o build/fuzz/checkpoint
	@build/fuzz/checkpoint -max_total_time=$(or $(SECONDS),60) -artifact_prefix=build/fuzz/ build/fuzz/corpus

wheel: setup  ## builds the Python package and checks it: build/wheel/zeroth-*.whl (core/python/pyproject.toml)
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PYTHON) .ci/wheel

format:  ## formats the sources (.clang-format, .ruff.toml)
	@.ci/setup lint
	@clang-format -i $(SOURCES)
	@[ ! -d core/python ] || build/deps/python/bin/ruff format -q core/python

lint: setup  ## checks format, names and common mistakes; warnings are errors (.clang-format, .clang-tidy, .ruff.toml)
	@.ci/setup lint
	@clang-format --dry-run -Werror $(SOURCES) || { echo 'lint: remedy: make format' >&2; exit 1; }
	@[ ! -d core/python ] || { build/deps/python/bin/ruff format -q --check core/python && build/deps/python/bin/ruff check -q core/python; } || \
	  { echo 'lint: remedy: make format; then fix what build/deps/python/bin/ruff check core/python prints' >&2; exit 1; }
	@[ ! -d core/python ] || build/deps/python/bin/mypy --strict --no-error-summary --cache-dir build/lint/mypy core/python || \
	  { echo 'lint: remedy: fix these types' >&2; exit 1; }
	@cmake --preset dev $(TORCH_CACHE) -B build/lint -DZR_UNITY=OFF -DZR_TESTS=OFF > build/configure.log 2>&1 || { cat build/configure.log >&2; exit 3; }
	@# Removes what clang does not accept from gcc, and declares what muon uses of gcc's omp.h.
	@sed -E -i 's/ -fno-gnu-unique//; s/ -Winvalid-pch -include [^ ]*//' build/lint/compile_commands.json
	@mkdir -p build/lint/openmp && echo 'extern "C" { int omp_get_max_threads(); void omp_set_num_threads(int); }' > build/lint/openmp/omp.h
	@# Only .cpp files: clang does not accept the options of nvcc, and its own CUDA header includes one that CUDA 13 lacks.
	@run-clang-tidy-19 -extra-arg=-isystem$(CURDIR)/build/lint/openmp -quiet -p build/lint -j $(JOBS) '$(CURDIR)/(core|sdk|plugins|examples)/.*\.cpp$$' > build/lint/log 2>&1 || true
	@grep -q 'warnings generated' build/lint/log || { cat build/lint/log >&2; echo 'lint: clang-tidy did not run; remedy: see its output above' >&2; exit 1; }
	@# Of misc-include-cleaner, only unused includes count: a file may use what the headers that it includes provide.
	@! grep -E '^[^|]*(error|warning): ' build/lint/log | grep -v 'no header providing' | sed 's/\x1b\[[0-9;]*m//g' | sort -u >&2 || \
	  { echo 'lint: remedy: fix these; the full output is in build/lint/log' >&2; exit 1; }
	@echo 'lint: clean'

docs:  ## builds the documentation and the reference of the installed headers: build/site/index.html
	@.ci/setup docs
	@.ci/docs

clean:  ## removes build outputs; keeps downloads (build/deps, build/data, build/peers)
	@find build -mindepth 1 -maxdepth 1 ! -name deps ! -name data ! -name peers -exec rm -rf {} + 2>/dev/null || true
	@echo 'clean: build/ has only downloads now'

# Prints the output of CMake only if it fails.
define configure
cmake --preset dev $(TORCH_CACHE) $(1) > build/configure.log 2>&1 || \
  { cat build/configure.log >&2; echo 'build: cmake failed, see its output above; remedy: if packages are missing, make setup' >&2; exit 3; }
endef
define compile
cmake --build build -j $(JOBS) $(1) || \
  { echo 'build: compilation failed, see the first error above; remedy: if the kernel killed the compiler, try JOBS=1' >&2; exit 3; }
endef
