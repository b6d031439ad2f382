# make demo   installs what is needed and answers a question over this project's own documentation
# make test   installs the test extra and runs the whole suite
# Both create .venv; a second run is quick.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# llama-cpp-python compiles llama.cpp from source on first install: leave out what is not needed here.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF

INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint notebooks clean

demo: $(VENV)/.demo
	$(BIN)/cachegen-rag demo

test: $(VENV)/.test
	$(BIN)/python -P -m pytest

notebooks: $(VENV)/.test
	CACHEGEN_RAG_NOTEBOOKS=1 $(BIN)/python -P -m pytest tests/test_cookbook.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy cachegen_rag kernels integrations
	$(BIN)/python -P -m pytest -q tests/test_packaging.py -k point_down

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
