# `make demo` and `make test` set themselves up in .venv; PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint

demo: .venv/demo.done
	$(BIN)/rajax demo

test: .venv/test.done
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu"

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && $(BIN)/pip install --quiet --no-deps --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml rajax

# An installation is redone when pyproject.toml changes.
.venv/%.done: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[$*]'
	touch $@
