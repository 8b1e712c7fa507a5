# `make run` and `make test` set up what they need in .venv. With PYTHON=/path/to/python they take that
# Python as it is, with the torch in it, and touch no network: a flash_cute that is installed there is
# used, or else the library is built in this checkout.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run test pytest sanitize lint format build wheel bench clean setup
say = @printf '== %s\n'

ifdef PYTHON
PY := $(PYTHON)
# The folder of a flash_cute that is installed there, with its library, outside of this checkout.
INSTALLED := $(shell $(PY) -c "import importlib.util as u, os, sys; \
  sys.path = [p for p in sys.path if p and os.path.realpath(p) != os.path.realpath('.')]; \
  found = u.find_spec('flash_cute'); folder = os.path.dirname(found.origin) if found else ''; \
  parent = os.path.dirname(folder); \
  print(parent if os.path.isfile(folder + '/_flash_cute.so') and \
  not os.path.samefile(parent, '.') else '')" 2>/dev/null)
else
PY := .venv/bin/python
endif

ifneq ($(INSTALLED),)
# The checkout, where the tests and the bench are, comes after it on the path.
WHERE := PYTHONSAFEPATH=1 PYTHONPATH="$${PYTHONPATH:+$$PYTHONPATH:}$(INSTALLED):$(CURDIR)"
else
WHERE := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
endif
RUN := $(WHERE) $(PY)

help:
	@echo 'make run      the main job: a transformer block on flash_cute, checked against a reference'
	@echo 'make test     linters and tests; what needs a GPU is skipped without one'
	@echo 'make pytest   the tests alone; ARGS="-k causal" goes to pytest'
	@echo 'make lint     clang-format, ruff and mypy; make format rewrites the files'
	@echo 'make build    the library, in place'
	@echo 'make wheel    a wheel for every Linux with glibc 2.28 or newer, in dist/'
	@echo 'make sanitize small calls of every kernel under compute-sanitizer (needs a GPU)'
	@echo 'make bench    the benchmark (needs a GPU); ARGS="--suite train" goes to bench.run'
	@echo 'make clean    delete what was built, .venv excepted'
	@echo 'With PYTHON=/path/to/python they use that Python and its torch, and touch no network.'

run: build
	$(say) 'the transformer block'
	@$(RUN) -m bench.transformer_block $(ARGS)

test: lint pytest

pytest: build
	$(say) 'tests'
	@$(RUN) -m pytest $(ARGS)

# Without the caching allocator each tensor has its own allocation, and memcheck sees its ends.
sanitize: build
	@for tool in memcheck racecheck synccheck initcheck; do \
	  echo "== compute-sanitizer $$tool"; \
	  $(WHERE) PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $(PY) tests/sanitize.py $$tool; \
	done

bench: build
	$(say) 'benchmark'
	@$(RUN) -m bench.run $(ARGS)

ifdef PYTHON
setup:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo 'PYTHON=$(PYTHON) is not a Python 3.10 or newer'; exit 1; }
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || \
	  { echo 'PYTHON=$(PYTHON) has no torch: install torch 2.10 or newer there, or leave PYTHON out'; exit 1; }
else
setup: .venv/.ready

.venv/.ready: requirements.txt csrc/toolchain.py
	$(say) 'setting up .venv (torch is large: the first time takes a while)'
	@for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then echo 'no Python 3.10 or newer was found: install one'; exit 1; fi; \
	[ -x .venv/bin/python ] || $$python -m venv .venv || { rm -rf .venv; \
	  echo "$$python cannot make virtual environments: install its venv (on Debian and Ubuntu: apt install python3-venv)"; \
	  exit 1; }
	@$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	@needs=$$($(PY) csrc/build_library.py --needs); \
	[ -z "$$needs" ] || $(PY) -m pip install --disable-pip-version-check $$needs
	@touch $@
endif

build: setup
ifneq ($(INSTALLED),)
	$(say) 'using the flash_cute installed in $(INSTALLED)'
else
	$(say) 'building flash_cute/_flash_cute.so'
	@$(PY) csrc/build_library.py
endif

wheel: setup
	$(say) 'building the wheel'
	@rm -f dist/*.whl
	@FLASH_CUTE_MANYLINUX=1 $(PY) -c 'import setup; setup.build_wheel("dist", {"--global-option": "-q"})'
	$(say) 'asking auditwheel whether the wheel is what its name says'
	@PATH="$(dir $(PY)):$$PATH" $(PY) -m auditwheel repair dist/*.whl --wheel-dir build/audited \
	  --plat manylinux_2_28_$$(uname -m) --exclude 'libtorch*' --exclude 'libc10*'
	@ls -l dist/*.whl

# A tool of another version than the pinned one would ask for other things: it is left out, and said.
# $(call tool,NAME,WHAT IT DOES,ARGUMENTS OF PYTHON)
tool = @want=$$(sed -n 's/^$(1)==//p' requirements.txt); \
	have=$$($(PY) -c "import importlib.metadata as m; print(m.version('$(1)'))" 2>/dev/null || true); \
	if [ "$$have" = "$$want" ]; then echo '== $(1): $(2)'; $(PY) $(3); \
	else echo "== skipping $(1): version $$want is pinned, and $(PY) has $${have:-none}"; fi
CLANG_FORMAT := -c 'import clang_format; clang_format.clang_format()'
CPP = $(shell find csrc tests bench -name '*.h' -o -name '*.cpp' -o -name '*.cu')

lint: setup
	$(call tool,clang-format,format of the C++ files,$(CLANG_FORMAT) --dry-run --Werror $(CPP))
	$(call tool,ruff,lint,-m ruff check .)
	$(call tool,ruff,format of the Python files,-m ruff format --check .)
	$(call tool,mypy,types of flash_cute,-m mypy)

format: setup
	$(call tool,clang-format,formatting the C++ files,$(CLANG_FORMAT) -i $(CPP))
	$(call tool,ruff,fixing,-m ruff check --fix .)
	$(call tool,ruff,formatting the Python files,-m ruff format .)

clean:
	rm -rf build dist *.egg-info flash_cute/*.so .mypy_cache .ruff_cache .pytest_cache
