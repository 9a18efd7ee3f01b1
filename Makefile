# Every target works on a bare machine with Python >= 3.11: it builds .venv itself, and does so
# again only when pyproject.toml or constraints.txt changed. Nothing is installed outside .venv
# (test-lowest: build/lowest).

.DEFAULT_GOAL = help
.PHONY: help install demo docs test gpu lint package test-lowest

VENV = .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# Where test-lowest installs.
LOWEST = build/lowest
# Folders and files with tests that need a CUDA device.
GPU_TESTS = tests/gpu tests/compression tests/bench/test_codec.py
# Interpreter that makes .venv; empty: the first of these that is new enough.
PYTHON =
CANDIDATES = python3 python3.14 python3.13 python3.12 python3.11

help:
	@echo 'make install   make $(VENV): torch, then diloco with its development tools'
	@echo 'make demo      train two islands of different shape over a shaped 5 Mbit/s link (minutes)'
	@echo 'make docs      write the reference: docstrings, commands, settings, to build/docs'
	@echo 'make test      run the default test suite'
	@echo 'make gpu       run the tests and the bench that need a CUDA device (minutes)'
	@echo 'make lint      run ruff and mypy'
	@echo 'make package   build sdist and wheel into dist/, and check both'
	@echo 'make test-lowest  run tests with the lowest versions that pyproject.toml allows'
	@echo 'Another interpreter for a new $(VENV): make PYTHON=/path/to/python3.12 install'

install: $(STAMP)
	@echo '==> diloco is installed: $(BIN)/diloco --help'

$(VENV)/pyvenv.cfg:
	@python=; \
	for candidate in $(if $(PYTHON),'$(PYTHON)',$(CANDIDATES)); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'make: no Python >= 3.11 among: $(or $(PYTHON),$(CANDIDATES)).' >&2; \
	  echo 'Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "make: $$python has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; \
	fi; \
	echo "==> making $(VENV) with $$python ($$("$$python" --version))"; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(STAMP): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo '==> installing torch (a large download the first time)'
	@$(BIN)/python -m pip install -q -c constraints.txt torch
	@echo '==> installing diloco and its development tools'
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@echo '==> diloco local --fresh configs/runs/demo.toml'
	@$(BIN)/diloco local --fresh configs/runs/demo.toml

docs: $(STAMP)
	@$(BIN)/python docs/reference.py

# A file's tests run one after the other. Files with real processes may run besides each other: they
# wait for what happens, with deadlines, and claim no time; in one row they would leave a core idle.
test: $(STAMP)
	@echo '==> pytest'
	@$(BIN)/python -m pytest -n auto --dist loadfile

# Whatever the tests find, the bench measures, too; the exit code is the worse of both. What is
# skipped is named with its reason. Figures are in build/gpu.json.
gpu: $(STAMP)
	@mkdir -p build; tests=0; bench=0; \
	echo '==> pytest -m gpu'; \
	$(BIN)/python -m pytest -q -m 'gpu and not slow' $(GPU_TESTS) || tests=$$?; \
	echo '==> diloco bench gpu --require'; \
	$(BIN)/diloco bench gpu --require --json build/gpu.json || bench=$$?; \
	echo "==> make gpu at $$(git describe --always --dirty 2>/dev/null || echo 'no commit'):" \
	  "tests exit with $$tests, bench with $$bench"; \
	exit $$((tests > bench ? tests : bench))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is built from the sdist, so that both are complete.
package: $(STAMP)
	@rm -rf dist
	@echo '==> building sdist and wheel'
	@$(BIN)/python -m build --no-isolation --outdir dist . > dist.log 2>&1 \
	  || { cat dist.log; rm -f dist.log; exit 1; }
	@rm -f dist.log
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# A part of the suite: what touches the packages whose versions differ. Files of text, the run file,
# calls and certificates, messages, commands, sinks, checkpoints, pictures, simulations in virtual
# time, and two islands trained by real processes. What is left out is computed by torch alone, whose
# lowest version is the one that all tests run with. hivemind and megatron-core are left out too:
# their lowest versions are those of constraints.txt.
test-lowest: package
	@$(BIN)/python -m venv $(LOWEST)
	@echo '==> installing the lowest versions into $(LOWEST)'
	@$(LOWEST)/bin/python -m pip install -q -c constraints-lowest.txt torch
	@$(LOWEST)/bin/python -m pip install -q -c constraints-lowest.txt \
	  "$$(echo dist/*.whl)[data,float8,hf,lightning,page,plots,prometheus,sim,tensorboard,wandb]" \
	  pytest pytest-timeout pytest-xdist hypothesis pyyaml
	$(LOWEST)/bin/python -m pytest -n auto --dist loadfile -p no:cacheprovider \
	  tests/config tests/data tests/page tests/security tests/telemetry tests/cli/test_pages.py \
	  tests/transport/test_grpc.py tests/transport/test_tls.py \
	  tests/checkpoint/test_mirror.py tests/checkpoint/test_export.py \
	  tests/integration/test_export_of_a_run.py \
	  tests/simulations/test_network.py tests/simulations/test_planner.py
