# Every target sets up what it needs; nothing is installed outside .venv and the user's cache folder.
PYTHON ?= python3
BIN := .venv/bin
# A machine with a GPU may have what is needed without .venv, and no way to install more.
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
PROTOS := $(shell find protos -name '*.proto')
KERNELS := $(wildcard kernels/csrc/*) kernels/build.py
BUILT_FROM := pyproject.toml hatch_build.py $(PROTOS) $(KERNELS)
# Bytecode is compiled behind it, by all cores.
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile
COMPUTATIONS := $(wildcard $(addprefix tests/test_,kernels_*.py triton_*.py models_*.py decode_graphs.py \
    memory_pressure.py system_parity.py worker_memory.py worker_runner.py))

# Where Python may not keep bytecode, each process would compile all that it imports anew.
define install
	$(PIP) --editable '.[$(EXTRAS)]'
	@echo "compiling bytecode"
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib kernels pagewire protos router scheduler worker || true
endef

# Several targets one after the other: they install into one .venv. `test` has a make of its own for what runs side by side.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

.PHONY: demo test test-services test-computations up protos docs lint format compose-test soak soak-cancel chaos fuzz test-gpu check-gpu bench-scheduler bench-kv-memory bench-gpu compare clean

# The main job on a bare machine: the real model through the real three processes, once.
demo: .venv/serves
	@$(BIN)/pagewire demo

# Lint, types, tests. Those that only compute have what the others, which mostly wait for processes, leave of two cores.
test: .venv/installed
	@$(MAKE) --no-print-directory --jobs=2 test-services lint test-computations

test-services: .venv/installed
	$(BIN)/pytest $(COMPUTATIONS:%=--ignore=%)

# What they say is shown when they are done, since the others show their progress meanwhile.
test-computations: .venv/installed
	@said=$$(OMP_WAIT_POLICY=passive nice -n 19 $(BIN)/pytest $(COMPUTATIONS) 2>&1); status=$$?; printf '%s\n' "$$said"; exit $$status

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Millions of random moves of the scheduler core, checked one by one; for a night.
soak: .venv/installed
	PAGEWIRE_SOAK_WALKS=$${PAGEWIRE_SOAK_WALKS:-100000} $(BIN)/pytest --timeout=0 tests/test_scheduler_properties.py

# 100,000 cancels at every stage, through real processes: memory stays flat. Ten minutes.
soak-cancel: .venv/installed
	SOAK_CANCELS=$${SOAK_CANCELS:-100000} $(BIN)/pytest -s tests/test_soak_cancel.py

# Workers, schedulers and routers die, hang and are stopped at random under load, 120 times: no stream is other than
# it would be. Twenty minutes, with a table; FAULTS=400 SEED=2 ARGUMENTS="--json out.json" for another night.
chaos: .venv/installed
	$(BIN)/pagewire model >/dev/null
	$(BIN)/python -m bench.chaos --faults $${FAULTS:-120} --seed $${SEED:-1} $(ARGUMENTS)

# Any message and any bytes at the public API, hundred times as many as in the tests.
fuzz: .venv/installed
	PAGEWIRE_FUZZ_EXAMPLES=$${PAGEWIRE_FUZZ_EXAMPLES:-30000} $(BIN)/pytest --timeout=0 tests/test_fuzz_requests.py tests/test_fuzz_wire.py

# Time of the scheduler core and tokens/s of the whole control plane, with a worker that answers at once.
bench-scheduler: .venv/installed
	$(BIN)/python -m bench.scheduler_speed

# What share of the KV memory holds tokens, and what sharing saves; FIGURE=out.svg draws it.
bench-kv-memory: .venv/installed
	$(if $(FIGURE),$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[bench]')
	$(BIN)/python -m bench.kv_memory $(if $(FIGURE),--figure $(FIGURE))

# The service beside its peers, which are installed once (8 GB): ENGINES=pagewire,vllm WORKLOADS=w1,w3 ROUNDS=1 narrow it.
compare: .venv/installed
	$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[bench]'
	$(BIN)/python -m bench.compare $(if $(ENGINES),--engines $(ENGINES)) $(if $(WORKLOADS),--workloads $(WORKLOADS)) \
	    $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGUMENTS)

# Kernels and worker on a GPU, where there is one; elsewhere each test says that it was skipped.
test-gpu: .venv/installed
	$(BIN)/pytest -rs -m gpu

bench-gpu:
	$(GPU_PYTHON) -m bench.gpu

# Both, within eight minutes.
check-gpu:
	$(GPU_PYTHON) -m bench.gpu_check

up: .venv/serves
	@$(BIN)/pagewire up

protos: .venv/installed
	$(BIN)/python hatch_build.py

# The page of the public API, from the comments in its .proto files.
docs: .venv/installed
	$(BIN)/python -m docs.api > docs/api.md.new && mv docs/api.md.new docs/api.md

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The real containers, with Docker or without: see deploy/compose_test.py.
compose-test: .venv/installed
	$(BIN)/python deploy/compose_test.py

# What serves, 1 GB; or that and what the tests run and check, as much again.
.venv/serves: EXTRAS := worker
.venv/serves: .venv/torch $(BUILT_FROM)
	$(install)
	@touch $@

.venv/installed: EXTRAS := worker,dev
.venv/installed: .venv/torch $(BUILT_FROM)
	$(install)
	@touch .venv/serves $@

# pip takes one core, the compiler all: the kernels are compiled meanwhile, and what builds the package finds them done.
.venv/torch:
	@echo "setting up .venv (some minutes the first time)"
	$(PYTHON) -m venv .venv
	$(PYTHON) kernels/build.py >/dev/null 2>&1 & trap "kill $$!" INT TERM; $(PIP) torch==2.13.0; status=$$?; wait; exit $$status
	@touch $@

clean:
	rm -rf .venv build dist kernels/*.so
	find . -name __pycache__ -o -name '*_pb2*.py*' | xargs rm -rf
