# Everything a newcomer needs: `make serve` and `make test`. Each target sets up what it uses.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: install serve test test-slow lint format bench clean

NATIVE := CMakeLists.txt $(wildcard src/twinfire/kernels/cpu/csrc/*)

# $(VENV)/.ready-EXTRAS is made once per set of extras and again when pyproject.toml or the native
# sources change. torch goes first and alone, so that no other package's looser range can choose
# another build. Without build isolation a rebuild compiles only what changed.
$(VENV)/.ready-%: pyproject.toml $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(findstring torch,$*),$(BIN)/python -m pip install --quiet 'torch~=2.13.0')
	$(BIN)/python -m pip install --quiet 'scikit-build-core>=0.11' 'nanobind>=2.7' 'cmake>=3.24' ninja
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[$*]'
	@touch $@

# Serving on CPU needs no torch.
install: $(VENV)/.ready-cpu

serve: install
	$(BIN)/twinfire serve $(ARGS)

test: $(VENV)/.ready-torch,test
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.ready-torch,test
	$(BIN)/python -m pytest -m 'slow and not gpu' --timeout 7200 $(ARGS)

lint: $(VENV)/.ready-torch,test,lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-torch,test,lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-torch,bench
	$(BIN)/python benchmarks/quick.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
