# Everything that a fresh machine needs: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# MLX's backend for this machine: Metal comes with mlx on macOS, elsewhere an extra chooses it.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
ifeq ($(shell uname -s),Darwin)
  EXTRA :=
else ifneq ($(CUDA),)
  EXTRA := cuda$(CUDA)
else
  EXTRA := cpu
endif
comma := ,

.PHONY: demo test lint wheel clean

demo: $(VENV)/.demo ## install, and generate text from the embedded model
	$(BIN)/strata_mlx generate --prompt "class Stack:" --max-tokens 120

test: $(VENV)/.test ## install, and run all tests
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(VENV)/.test ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(VENV)/.test ## build the package into dist/
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".$(if $(EXTRA),[$(EXTRA)])"
	touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev$(if $(EXTRA),$(comma)$(EXTRA))]"
	touch $@ $(VENV)/.demo
