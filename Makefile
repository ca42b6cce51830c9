PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CORE := CMakeLists.txt $(wildcard src/muster/_core/*)

# What steps envs by way of the core, and what restarts them.
SANITIZED := tests/conformance/test_backends.py tests/backends/test_recovery.py tests/vector/test_lending.py \
  tests/envs/test_wrappers.py

# Some tests wait for processes: tests/conftest.py makes three processes for two cores.
IN_PARALLEL := --numprocesses logical --dist worksteal

# The tests that run without PyTorch, and name no env or message that only new releases of other packages have.
WITHOUT_TORCH := tests/backends tests/conformance tests/doctor/test_command.py tests/doctor/test_diagnose.py \
  tests/doctor/test_machine.py tests/envs/test_dm_env.py tests/envs/test_groups.py tests/envs/test_melting_pot.py \
  tests/envs/test_wrappers.py tests/interop/test_gymnasium_dropins.py tests/pickling/test_pickling.py tests/recipes \
  tests/spaces tests/training/test_events.py tests/training/test_picture.py tests/transport tests/vector \
  tests/waiting tests/workers

# Extra arguments for the script behind `demo`, `demo-marl`, `test`, `test-all`, `soak`, `fuzz` and `bench`:
# make test ARGS="-k layers"
ARGS ?=
# How long `fuzz` runs.
SECONDS ?= 300

.DEFAULT_GOAL := help
.PHONY: help demo demo-marl test test-all soak fuzz sanitize lint docs test-docs bench wheels wheel test-wheels test-lowest

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.core ## Train CartPole-v1 to a mean return of 475, in about a minute
	$(BIN)/muster train CartPole-v1 $(ARGS)

# All that it leaves lies in one folder.
demo-marl: RUN := runs/demo-marl-$(shell date +%Y%m%d-%H%M%S)
demo-marl: $(VENV)/.core ## Train the three agents of simple_spread_v3 in about three minutes, and film them
	$(BIN)/muster train pettingzoo/mpe/simple_spread_v3 --total-steps 150k --run-dir $(RUN) $(ARGS)
	$(BIN)/muster eval $(RUN) --video $(RUN)/film.mp4

# Where a shell forbids Python to keep bytecode, all modules under test would be compiled in each process.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.core ## Run the tests that take seconds
	$(BIN)/python -m pytest -m "not slow" $(IN_PARALLEL) $(ARGS)

test-all: $(VENV)/.core ## Run all tests
	$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

soak: $(VENV)/.core ## Kill and stop workers at random and fork for 5 minutes, and check every row
	$(BIN)/python tests/faults/soak.py --seconds 300 $(ARGS)

fuzz: $(VENV)/.core ## Run random programs with new seeds for 5 minutes, or SECONDS=1200, against a model and the peers
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS) $(ARGS)

sanitize: build/sanitize/.core ## Run the stepping tests on a core built with AddressSanitizer and UBSan
	@# Not under fork: GCC 12's AddressSanitizer holds its allocator's lock across it.
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" PYTHONMALLOC=malloc \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	build/sanitize/bin/python -m pytest -m "not slow" -p no:cacheprovider --timeout 600 -k "forkserver or not fork" $(SANITIZED) $(ARGS)

lint: $(VENV)/.core ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs $(VENV)/.core ## Build the site into docs/_build/html
	$(BIN)/python docs/drawing.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

test-docs: $(VENV)/.docs $(VENV)/.core ## Run every program of README, docs and docstrings
	$(BIN)/python -m pytest $(IN_PARALLEL) tests/docs $(ARGS)

bench: $(VENV)/.bench $(VENV)/.core ## Measure env steps per second, and write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/bench_stepping.py --write $(ARGS)
	$(BIN)/python docs/drawing.py speed drop_ins

wheels: ## Build the four wheels and the source distribution into dist/, without a compiler; WHEEL=3.12-x86_64: one
	$(PYTHON) packaging/build_wheels.py $(WHEEL)

wheel: ## Build one wheel into dist/, for the Python that runs, without a compiler
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install --disable-pip-version-check --quiet ziglang
	@# Debian's Python has a part of its headers below /usr/include itself, where this compiler does not look.
	CXXFLAGS="-idirafter /usr/include" MUSTER_ZIG="$$(build/wheel/bin/python -c 'import ziglang; print(ziglang.__path__[0])')/zig" \
	MUSTER_WHEEL_MACHINE="$$(uname -m)" build/wheel/bin/python -m pip wheel \
	    --disable-pip-version-check --quiet --no-deps --wheel-dir dist \
	    --config-settings=build-dir=build/wheel/cmake --config-settings=cmake.toolchain-file=$(abspath packaging/zig.cmake) .
	@echo "dist/: $$(ls dist)"

test-lowest: build/lowest/.core ## Test with the oldest release of every package, without PyTorch
	build/lowest/bin/python -m pytest -m "not slow" -o filterwarnings=default $(IN_PARALLEL) $(WITHOUT_TORCH) $(ARGS)

test-wheels: ## Test the wheels of dist/ on every Python found, and on those that PYTHONS names
	$(PYTHON) packaging/try_wheels.py

# Three stamps, so that a second call has nothing to do: the packages, the compiled core, the benchmarks' peers.
# torch comes first and by itself: its pin decides which build of it everything after it gets.
$(VENV)/.packages: pyproject.toml constraints.txt src/muster/envs/install_meltingpot.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt scikit-build-core nanobind numpy cmake ninja
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m muster.envs.install_meltingpot --quiet --constraint constraints.txt
	touch $@

$(VENV)/.core: $(VENV)/.packages $(CORE)
	$(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.bench: $(VENV)/.packages
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[bench]'
	@# Its file of values is all that is read: what its programs need stays out.
	$(PIP) install --constraint constraints.txt --no-deps rl_zoo3
	touch $@

$(VENV)/.docs: $(VENV)/.packages
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	touch $@

build/lowest/.packages: $(VENV)/.packages packaging/lowest.py
	$(BIN)/python -m venv --clear build/lowest
	$(BIN)/python packaging/lowest.py > build/lowest/requirements.txt
	build/lowest/bin/python -m pip install --disable-pip-version-check --quiet -r build/lowest/requirements.txt \
	    pytest pytest-timeout pytest-xdist 'gymnasium[mujoco]' ale-py pyzmq
	touch $@

build/lowest/.core: build/lowest/.packages $(VENV)/.core $(shell find src -name '*.py')
	rm -rf build/lowest/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/lowest/wheel .
	build/lowest/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --force-reinstall \
	    build/lowest/wheel/*.whl
	build/lowest/bin/python -m muster.envs.install_meltingpot --quiet
	touch $@

# An environment of its own, so that the sanitized core is nobody else's: it finds all other packages in .venv, but not
# the editable install there, since .pth files are read in an environment's own folder only.
build/sanitize/.core: $(VENV)/.packages $(CORE)
	$(BIN)/python -m venv --without-pip build/sanitize
	$(BIN)/cmake -S . -B build/sanitize/cmake -G Ninja -DMUSTER_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug \
	    -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" -DPython_EXECUTABLE="$(abspath $(BIN))/python"
	$(BIN)/cmake --build build/sanitize/cmake
	$(BIN)/cmake --install build/sanitize/cmake --prefix build/sanitize/site
	for file in $(abspath src)/muster/*; do ln -sfn "$$file" build/sanitize/site/muster/; done
	$(BIN)/python -c "import site, glob; \
	    here, = glob.glob('build/sanitize/lib/python*/site-packages'); \
	    open(here + '/paths.pth', 'w').write('$(abspath build/sanitize/site)\n' + site.getsitepackages()[0] + '\n')"
	touch $@
