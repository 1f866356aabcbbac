# Every target sets up what it needs in a local virtual environment.
#   make demo      train a small language model with and without monoidreduce, compare
#   make test      lint, build, documents, C++ law suite, Python tests, packaging tests
#   make test-more     tests of tools and exhaustive ones, which `make test` leaves out
#   make test-release  what `make test` leaves to a release: these, torch 2.6, an isolated build
#                  (a release is `make test-all` and `make build`)
#   make test-all  both
#   make docs      the site of the documents, in build/site
#   make build     source distribution and wheel for everybody, in build/dist
#   make bench     speed, memory and accuracy beside torch
#   make sanitize  CPU tests and law suite under the address and undefined-behaviour sanitizers
# PYTHON is the interpreter to use, TORCH the torch to install (any pip requirement, 2.6 or later). OLDEST_TORCH is
# that of test-release, in an environment of its own: 5 GB, with the CUDA libraries that PyPI's torch 2.6 needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
OLDEST_TORCH ?= torch==2.6.0
OLDER_TRL := 1.9.0 1.12.0 1.15.0

# The wheel that is tested has machine code for this machine's GPUs. Where there is none, kernels are compiled only to see that
# they compile: to PTX, without optimization, which takes a third of the time.
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+$$' | sort -u | \
  sed 's/\.//; s/$$/-real/' | paste -sd,)
FOR_NO_GPU := 80-virtual,90a-virtual
ARCHS ?= $(if $(GPUS),$(GPUS:%=%,90a-real),$(FOR_NO_GPU))
UNOPTIMIZED := -DMONOIDREDUCE_UNOPTIMIZED_KERNELS=$(if $(filter $(FOR_NO_GPU),$(ARCHS)),ON,OFF)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OLDEST := .venv-oldest
OLDEST_PIP := $(OLDEST)/bin/python -m pip --disable-pip-version-check
DIST := build/dist
TESTED := build/tested
ISOLATED := build/isolated
CMAKE := $(BIN)/cmake
CPP_TESTS := build/tests
SANITIZED := build/sanitize
PYTEST := -c '$(CURDIR)/pyproject.toml' '$(CURDIR)/tests' -n 2 --dist worksteal

SOURCES := setup.py pyproject.toml MANIFEST.in CMakeLists.txt README.md $(shell find cmake csrc monoidreduce -type f \
  -not -name '*.py[cod]' -not -name '_C*')
CPP_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

TEST_ENVIRONMENT := $(patsubst %,$(VENV)/%.done,test cute nvrtc integrations libraries $(OLDER_TRL:%=trl-%))
TESTING := PATH='$(CURDIR)/$(BIN)':$$PATH

# Two processes of tests have two threads each: on two processors, threads that spin as they wait take half of the time.
test test-more test-release sanitize: export OMP_WAIT_POLICY = passive

.DELETE_ON_ERROR:
.PHONY: demo test test-more test-release test-all build lint docs bench sanitize clean

# The installed package is run and tested from build/, where the source folder monoidreduce/ does not hide it.
demo: $(VENV)/demo.done
	cd build && ../$(BIN)/python -m monoidreduce demo --plot '$(CURDIR)/build/demo.png'

bench: $(VENV)/bench.done
	$(BIN)/python bench/run.py --out bench/results --plot build/bench.png

build: $(VENV)/build.done

# mypy reads the stub of the extension module, which the build makes.
lint: $(VENV)/lint.done $(VENV)/test.done
	cp $(VENV)/lib/python3*/site-packages/monoidreduce/_C.pyi monoidreduce/
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

# A broken link, an anchor that is not there or a page that is on no menu is an error.
docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# C++ tests, then Python's. The kernels for a GPU's C++ test become PTX, which shows that they compile.
test: lint docs $(TEST_ENVIRONMENT)
	$(CMAKE) -S . -B $(CPP_TESTS) -G Ninja -DMONOIDREDUCE_BUILD_PYTHON=OFF -DMONOIDREDUCE_BUILD_TESTS=ON \
	  -DMONOIDREDUCE_WERROR=ON -DMONOIDREDUCE_CUDA_ARCHS=80-virtual -DMONOIDREDUCE_UNOPTIMIZED_KERNELS=ON \
	  -DMONOIDREDUCE_CUTE_INCLUDE="$$(echo '$(CURDIR)/$(VENV)'/lib/python3*/site-packages/cutlass_library/source/include)"
	$(CMAKE) --build $(CPP_TESTS)
	$(BIN)/ctest --test-dir $(CPP_TESTS) --output-on-failure --parallel 2
	cd build && $(TESTING) MONOIDREDUCE_DIST='$(CURDIR)/$(TESTED)' ../$(BIN)/pytest $(PYTEST) -m 'not release'

# The tests that are left out of `make test`.
test-more: $(TEST_ENVIRONMENT)
	cd build && $(TESTING) MONOIDREDUCE_DIST='$(CURDIR)/$(TESTED)' ../$(BIN)/pytest $(PYTEST) -m release

# These, the tests marked `oldest` with the oldest torch, and a wheel that is built as an index builds it.
test-release: test-more $(OLDEST)/test.done $(VENV)/isolated.done
	cd build && ../$(OLDEST)/bin/pytest $(PYTEST) -m oldest
	cd build && MONOIDREDUCE_DIST='$(CURDIR)/$(ISOLATED)' ../$(BIN)/pytest -c '$(CURDIR)/pyproject.toml' \
	  '$(CURDIR)/tests/packaging/test_contents.py'

test-all: test test-release

sanitize: $(VENV)/test.done
	$(CMAKE) -S . -B $(SANITIZED) -G Ninja -DMONOIDREDUCE_SANITIZE=address,undefined -DMONOIDREDUCE_BUILD_TESTS=ON \
	  -DMONOIDREDUCE_CUDA=OFF -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(CMAKE) --build $(SANITIZED)
	$(BIN)/ctest --test-dir $(SANITIZED) --output-on-failure
	rm -rf $(SANITIZED)/site && mkdir $(SANITIZED)/site && cp -r monoidreduce $(SANITIZED)/site
	$(CMAKE) --install $(SANITIZED) --prefix $(SANITIZED)/site/monoidreduce
	cd $(SANITIZED) && PYTHONPATH='$(CURDIR)/$(SANITIZED)/site' ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ../../$(BIN)/pytest $(PYTEST) --ignore '$(CURDIR)/tests/packaging'

# What this file made: an environment without one of its stamps is somebody else's.
clean:
	rm -rf build monoidreduce.egg-info monoidreduce/_C*
	@for made in $(VENV) $(OLDEST); do ! ls $$made/*.done >/dev/null 2>&1 || rm -rf $$made; done

# Stamps an environment from its first moment on, and refuses a folder that is there without a stamp.
begin = @[ ! -e $(1) ] || ls $(1)/*.done >/dev/null 2>&1 || { echo "$(1) is there, and make has not made it: \
  move it away, or name another folder: make $(2)=FOLDER"; exit 1; }; mkdir -p $(1); touch $(1)/begun.done

# The environment, one step a stamp file.
$(VENV)/created.done:
	$(call begin,$(VENV),VENV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "monoidreduce needs Python 3.10 or later: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian: apt install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "$(PYTHON) has no C headers. On Debian: apt install python3-dev"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	@touch $@

$(VENV)/torch.done: $(VENV)/created.done
	$(PIP) install '$(TORCH)'
	@touch $@

$(VENV)/lint.done: $(VENV)/created.done pyproject.toml
	$(PIP) install --quiet --group lint
	@touch $@

$(VENV)/docs.done: $(VENV)/created.done pyproject.toml
	$(PIP) install --quiet --group docs
	@touch $@

# CuTe's headers, for a test of the kernels' layouts; what the wheel's Python code needs is not needed.
$(VENV)/cute.done: $(VENV)/created.done
	$(PIP) install --quiet --no-deps nvidia-cutlass==4.2.0.0
	@touch $@

# The compiler of programs that are made while they run, for tests of device code: the newest, and in a folder of its own
# the oldest.
$(VENV)/nvrtc.done: $(VENV)/created.done pyproject.toml
	$(PIP) install --quiet --group nvrtc
	$(PIP) install --quiet --upgrade --target $(VENV)/nvrtc-oldest --group nvrtc-oldest
	@touch $@

# Libraries that the integrations are for. They take the torch that is there.
$(VENV)/integrations.done: $(VENV)/torch.done pyproject.toml
	$(PIP) install --quiet --group integrations
	@touch $@

# Older versions of TRL for a test of the adapter, without what they require: it is here for the newest.
$(VENV)/trl-%.done: $(VENV)/created.done
	$(PIP) install --quiet --upgrade --no-deps --no-compile --target $(VENV)/trl-$* trl==$*
	@touch $@

# Libraries that tests import in processes of their own, which find there what this environment has not.
$(VENV)/libraries.done: $(VENV)/created.done pyproject.toml
	$(PIP) install --quiet --upgrade --no-deps --no-compile --target $(VENV)/libraries --group libraries
	@touch $@

# What a wheel is built with, without an environment of its own for each build.
$(VENV)/builder.done: $(VENV)/created.done pyproject.toml
	$(PIP) install --quiet --group build
	@touch $@

# The wheel that is tested, from the sources as they lie here. Its objects are kept in build/temp.*: what did not change is
# not compiled again.
$(VENV)/wheel.done: $(VENV)/builder.done $(SOURCES)
	rm -rf $(TESTED) build/lib.*
	MONOIDREDUCE_CUDA_ARCHS='$(ARCHS)' CMAKE_ARGS='$(UNOPTIMIZED) $(CMAKE_ARGS)' $(BIN)/python -m build --no-isolation \
	  --sdist --wheel --outdir $(TESTED)
	@touch $@

# Built from the source distribution, both in isolated environments; for CPUs alone, which leaves out most of the compiler's time.
$(VENV)/isolated.done: $(VENV)/builder.done $(SOURCES)
	rm -rf $(ISOLATED)
	MONOIDREDUCE_CUDA=OFF $(BIN)/python -m build --outdir $(ISOLATED)
	@touch $@

# The wheel for everybody, built in the same way.
$(VENV)/build.done: $(VENV)/builder.done $(SOURCES)
	rm -rf $(DIST)
	$(BIN)/python -m build --outdir $(DIST)
	@touch $@

# The wheel's optional requirements are named after the targets that need them.
$(VENV)/demo.done $(VENV)/bench.done $(VENV)/test.done: $(VENV)/%.done: $(VENV)/torch.done $(VENV)/wheel.done
	$(PIP) install --quiet --force-reinstall --no-deps $(TESTED)/*.whl
	$(PIP) install --quiet "$$(echo $(TESTED)/*.whl)[$*]"
	@touch $@

# The oldest torch, with the same wheel. Compiling modules that nothing imports would take 20 seconds.
$(OLDEST)/torch.done: $(VENV)/created.done
	$(call begin,$(OLDEST),OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST_PIP) install --no-compile '$(OLDEST_TORCH)'
	@touch $@

$(OLDEST)/test.done: $(OLDEST)/torch.done $(VENV)/wheel.done
	$(OLDEST_PIP) install --quiet --force-reinstall --no-deps $(TESTED)/*.whl
	$(OLDEST_PIP) install --quiet "$$(echo $(TESTED)/*.whl)[test]"
	@touch $@
