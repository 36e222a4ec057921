# Everything starts from a bare machine with Python 3.11 or newer: each target makes .venv where it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= auto
# Neighbours stay in one process, where they share their fixtures.
SHARED := -n $(JOBS) --dist worksteal

.PHONY: help demo demo-segment demo-detect serve fuzz bench-serve test test-all lint timm-tests catalog dist docs gallery bench bench-loader pictures-given bench-gpu clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(INSTALLED) ## train on embedded pictures, into a new folder under runs/ with a report (two to four minutes on two cores)
	$(BIN)/weft demo

demo-segment: $(INSTALLED) ## tell cell nuclei from their background (two to four minutes on two cores)
	$(BIN)/weft demo segment

demo-detect: $(INSTALLED) ## find and outline each cell nucleus (about five minutes on two cores)
	$(BIN)/weft demo detect

serve: $(INSTALLED) ## a page and an HTTP interface at http://127.0.0.1:8000, with a small model that comes with Weft
	$(BIN)/weft serve demo

fuzz: $(INSTALLED) ## 10,000 mutated pictures and requests against the server: no crash, no leak, no 500 (some minutes)
	$(BIN)/python -m tests.helpers.fuzz 10000

test: lint timm-tests ## lint, types and tests (ten to twenty minutes on two cores)
	$(BIN)/python -m pytest $(SHARED) -m "not slow"

test-all: lint timm-tests ## everything: all sizes in timm's own tests, all switches in the compilers
	$(BIN)/python -m pytest $(SHARED)

lint: $(INSTALLED) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

timm-tests: $(INSTALLED) ## fetch timm's own test file for the installed version
	@$(BIN)/python -m tests.helpers.fetch_timm_tests

catalog: $(INSTALLED) ## count parameters and MACs of all models again, for `weft models`
	$(BIN)/python -m weft.catalog.catalog

dist: $(INSTALLED) ## build the sdist and, from it, the wheel, into dist/
	rm -rf dist
	$(BIN)/python -m build

docs: $(INSTALLED) ## write docs/counts.md, docs/papers.md and the pictures of the architectures and of the code again (about three minutes)
	$(BIN)/python -m tools.counts
	$(BIN)/python -m tools.papers
	$(BIN)/python -m tools.draw
	$(BIN)/python -m tools.rooms
	$(BIN)/python -m tools.step_parts

gallery: $(INSTALLED) ## docs/gallery.md from trained runs: make gallery RUNS="runs/a runs/b" (FOREGROUND="Car Pedestrian" for masks, OUTLINES="camvid" in place of photographs)
	@test -n "$(RUNS)" || { echo 'Say which runs: make gallery RUNS="runs/a runs/b"'; exit 2; }
	$(BIN)/python -m tools.gallery --runs $(RUNS) --foreground $(FOREGROUND) --outlines $(OUTLINES)

bench: $(INSTALLED) ## CPU speed of cvt_13 next to transformers and DeiT-S
	$(BIN)/python benchmarks/cpu_inference.py --out benchmarks/results

bench-serve: $(INSTALLED) ## the server under load and at overload, next to LitServe: needs pip install litserve, and wrk
	$(BIN)/python benchmarks/serve.py --soak 180 --out benchmarks/results

bench-loader: pictures-given $(INSTALLED) ## reading pictures next to timm: make bench-loader PICTURES=folder (class folders of JPEGs)
	$(BIN)/python benchmarks/loader.py "$(PICTURES)" --out benchmarks/results

pictures-given:
	@test -n "$(PICTURES)" || { echo "Say which pictures: make bench-loader PICTURES=folder"; exit 2; }

bench-gpu: $(INSTALLED) ## all models next to their peers on this GPU, and the tables of docs/performance.md and the README from it
	$(BIN)/python benchmarks/gpu_speed.py --train --infer --first
	$(BIN)/python -m tools.performance

clean: ## remove what the other targets made
	rm -rf $(VENV) demo .cache .pytest_cache .ruff_cache build dist *.egg-info

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Weft needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[all]"
	@touch $@
