# Everything starts from Python 3.11 or newer and make: each target builds the .venv that it needs.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

.PHONY: demo test browser soak check bench docs format clean

# The main job on built-in data: about a minute of training, then numbers, answers and a report.
demo: .venv/installed-core
	@$(BIN)/python examples/demo.py

# Bytecode is written, because the tests start many processes; stealing work keeps the tests of a file together.
test: .venv/installed-dev
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

# What the tests of the web page need: Chromium (by apt-get where that works) and axe-core, which checks accessibility.
browser: build/axe.min.js
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get && apt-get update -qq && apt-get install -y -qq chromium; } || \
	  echo "Install Chromium to test the web page."

build/axe.min.js:
	@mkdir -p build/axe
	cd build/axe && npm pack axe-core@4 --silent && tar xzf axe-core-*.tgz package/axe.min.js && mv package/axe.min.js ..
	@rm -rf build/axe

# What takes many minutes: fifty killed runs, 50,000 broken requests, pip installing the wheel.
soak: .venv/installed-dev
	$(BIN)/python -m pytest -m soak -s

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks.forward
	$(BIN)/python -m benchmarks.mixed_sizes
	$(BIN)/python -m benchmarks.load
	$(BIN)/python -m benchmarks.loader
	$(BIN)/python -m benchmarks.scan
	$(BIN)/python -m benchmarks.train_step
	$(BIN)/python -m benchmarks.train_loading
	$(BIN)/python -m benchmarks.engines
	$(BIN)/python -m benchmarks.cost
	$(BIN)/python -m benchmarks.serve

# The site, in build/docs: every warning is an error. The first line writes the pages that repeat the code.
docs: .venv/installed-dev
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "Open build/docs/index.html"

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vitral needs Python 3.11 or newer, and $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed-core: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/installed-dev: .venv/installed-core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,peers,all,docs]'
	@touch $@

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache
