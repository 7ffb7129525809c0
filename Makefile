# Every command sets up what it needs: git, make and Python >= 3.11 are enough.
#   make book    execute every chapter and build the site; prints where it is
#   make test    everything that CI runs
#   make serve   the book on http://127.0.0.1:$(PORT)
#   make lab     the chapters in JupyterLab
#   make sync    notebooks from the texts, executed at the defaults
#   make bench   the benchmarks: tables printed, and written as JSON to benchmarks/results
PYTHON ?= python3
PORT ?= 8000
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

export PYTHON
unexport PYTHONPATH PYTHONHOME

.PHONY: book test serve lab sync bench setup clean
.DEFAULT_GOAL := book

setup: $(READY)

$(READY): requirements.txt pyproject.toml tools/setup.sh
	@sh tools/setup.sh venv $(VENV)
	@touch $@

book: $(READY)
	@$(RUN) -m lipattn.book build

test: $(READY)
	@sh tools/setup.sh browser
	@$(RUN) tools/check.py

serve: book
	@echo "http://127.0.0.1:$(PORT)   (Ctrl-C stops)"
	@$(RUN) -m http.server $(PORT) --bind 127.0.0.1 --directory book/_build/html

lab: $(READY)
	@$(VENV)/bin/jupyter lab --notebook-dir=book

sync: $(READY)
	@$(RUN) -m lipattn.book sync --jobs 2

bench: $(READY)
	@mkdir -p benchmarks/results
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(RUN) "$$script"; done

clean:
	rm -rf book/_build
