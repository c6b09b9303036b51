# The commands of a working day. `make` lists them; each may be repeated, and is quick when there is nothing to do.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CONFIG ?= examples/gpt/gpt.toml
ARGS ?=
JOBS ?= $(shell nproc)
TORCH_CACHE := -DTORCH_ROOT="$(TORCH_ROOT)" -DTorch_DIR="$(Torch_DIR)"
SOURCES = $(shell git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h' '*.c')

.PHONY: help setup build train test test-all matrix bench peers fuzz format lint docs clean

help:  ## this list
	@echo 'make TARGET, where TARGET is'
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 12
	@echo 'TORCH_ROOT=<folder> or Torch_DIR=<folder> takes a libtorch of your own instead of the wheel.'

setup:  ## Debian packages, libtorch and the default text; installs what is missing (.ci/debian.txt, .ci/torch.txt, .ci/python.txt)
	@.ci/setup

build: setup  ## the host, plug-ins, examples and tests, into build/
	@$(call configure,)
	@$(call compile)

train: setup  ## builds what training needs and trains; CONFIG=file.toml, ARGS="strategy=zero0 train.steps=20"
	@$(call configure,)
	@$(call compile,--target zr_training)
	@build/bin/zeroth train $(CONFIG) $(ARGS)

test: build  ## the tests of every change
	@.ci/test

test-all: build  ## test, and those that take long (ctest label *slow): before a release, before an issue is resolved
	@.ci/test all

matrix: build  ## the parity matrix in full, one table; CELLS="zero3 fp16": cells whose names hold one of the words
	@build/tests/parity_matrix $(CELLS)

bench:  ## the benchmarks: a table, and build/bench.json; ARGS="checkpoint step": programs whose names hold one of the words
	@.ci/setup bench
	@$(call configure,-DZR_BENCHMARKS=ON)
	@$(call compile)
	@.ci/bench $(ARGS)

peers: build  ## beside PyTorch's DDP and FSDP and DeepSpeed, which it installs: build/peers/table.txt; ARGS="--sizes S"
	@.ci/peers $(ARGS)

fuzz:  ## the parsers of checkpoints under libFuzzer, SECONDS=60; a text that breaks them is kept in build/fuzz
	@.ci/setup lint
	@mkdir -p build/fuzz/corpus
	@clang++ -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Icore -Isdk/include \
	  tests/unit/core/checkpoint/fuzz_target.cpp core/checkpoint/metadata.cpp core/base/file.cpp \
	  core/checkpoint/json.cpp core/checkpoint/json_field.cpp core/checkpoint/manifest.cpp \
	  core/checkpoint/safetensors.cpp core/base/failure.cpp core/base/text.cpp $$(pkg-config --cflags --libs libxxhash) -o build/fuzz/checkpoint
	@build/fuzz/checkpoint -max_total_time=$(or $(SECONDS),60) -artifact_prefix=build/fuzz/ build/fuzz/corpus

format:  ## lays the sources out anew (.clang-format)
	@.ci/setup lint
	@clang-format -i $(SOURCES)

lint: build  ## layout, names and mistakes, as errors (.clang-format, .clang-tidy)
	@.ci/setup lint
	@clang-format --dry-run -Werror $(SOURCES) || { echo 'lint: remedy: make format' >&2; exit 1; }
	@mkdir -p build/lint && sed -E 's/ -fno-gnu-unique//; s/ -Winvalid-pch -include [^ ]*//; s/ -c / -D_Float16=__fp16 -c /' \
	  build/compile_commands.json > build/lint/compile_commands.json  # what clang 14 does not take from gcc
	@run-clang-tidy -quiet -p build/lint -j $(JOBS) '$(CURDIR)/(core|sdk|plugins|examples)/.*' > build/lint/log 2>&1 || \
	  { grep -E '(error|warning): ' build/lint/log | sed 's/\x1b\[[0-9;]*m//g' | sort -u >&2; \
	    echo 'lint: remedy: mend these; the whole of it is in build/lint/log' >&2; exit 1; }
	@echo 'lint: clean'

docs:  ## the documentation as a site, with the reference of the public headers: build/site/index.html
	@.ci/setup docs
	@.ci/docs

clean:  ## removes what was built; downloads (build/deps, build/data, build/peers) stay
	@find build -mindepth 1 -maxdepth 1 ! -name deps ! -name data ! -name peers -exec rm -rf {} + 2>/dev/null || true
	@echo 'clean: build/ holds downloads only'

# Quiet unless it fails.
define configure
cmake --preset dev $(TORCH_CACHE) $(1) > build/configure.log 2>&1 || \
  { cat build/configure.log >&2; echo 'build: configuring failed; remedy: see above; if packages are missing, make setup' >&2; exit 3; }
endef
define compile
cmake --build build -j $(JOBS) $(1) || \
  { echo 'build: compiling failed, see the first error above; killed by the kernel: try JOBS=1' >&2; exit 3; }
endef
