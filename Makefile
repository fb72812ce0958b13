# `make demo` and `make test` set everything up by themselves: they need Python 3.11 or newer, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/demo

.PHONY: help demo demo-sites test bench bench-peers docs lint fmt clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   install into $(VENV), train ten clients, evaluate, predict (about 3 minutes after the install)"
	@echo "make demo-sites   a coordinator and three sites over HTTPS on this machine (about 2 minutes)"
	@echo "make test   install into $(VENV), lint, types, all tests"
	@echo "make bench  install into $(VENV), short versions of the benchmarks (some minutes, on an idle machine)"
	@echo "make bench-peers  the same work by Flower and pfl beside ours, each in a venv of its own (some 10 minutes)"
	@echo "make docs   write docs/config.md: every key, from the code"
	@echo "make fmt    format the code"
	@echo "make clean  remove $(VENV), caches and $(RUN)"

# A stamp for each set of requirements: installed anew when pyproject.toml changes.
$(VENV)/.package: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.package
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@

demo: $(VENV)/.package
	rm -rf $(RUN)
	$(BIN)/fedppd train configs/quickstart.yaml --out $(RUN)
	$(BIN)/fedppd evaluate $(RUN)
	$(BIN)/fedppd data sample mnist5k $(RUN)/digit.png
	$(BIN)/fedppd data sample glyphs $(RUN)/letter.png --index 5
	$(BIN)/fedppd predict $(RUN) $(RUN)/digit.png $(RUN)/letter.png
	@echo
	@echo "What to try next:"
	@echo "  open $(RUN)/report.html                        figures, plots, who holds what"
	@echo "  $(BIN)/fedppd serve $(RUN)               a page to draw on and an API at http://127.0.0.1:8000"
	@echo "  $(BIN)/fedppd predict $(RUN) IMAGE.png   a digit of your own, white on black"
	@echo "  $(BIN)/fedppd resume $(RUN) --set federation.rounds=40"

demo-sites: $(VENV)/.package
	PATH="$(CURDIR)/$(BIN):$$PATH" sh demos/sites.sh runs/demo-sites

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# With Ray the longest files come first: a long one at the end would keep one worker busy and the other idle.
test: lint
	$(BIN)/pytest -m "not long" -n auto tests/unit tests/statistical tests/k8s
	$(BIN)/pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder --durations 20 \
		tests/e2e tests/cluster tests/conformance tests/runtime tests/service tests/sites

bench: $(VENV)/.package
	$(BIN)/python benchmarks/local_update.py --short
	$(BIN)/python benchmarks/round_overhead.py --short
	$(BIN)/python benchmarks/server.py --short
	$(BIN)/python benchmarks/scaling.py --short
	$(BIN)/python benchmarks/evaluation_share.py --short

# Where CIFAR-10 is not under FEDPPD_DATA, random images take its place.
bench-peers: $(VENV)/.package
	$(BIN)/python benchmarks/peers/compare.py

docs: $(VENV)/.package
	$(BIN)/fedppd config --markdown > docs/config.md

fmt: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache $(RUN)
