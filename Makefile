# make train    a virtual environment, a corpus and a model trained on 4 ranks
# make test     the whole suite, on one rank and on several
# make wheel    a wheel and an sdist in dist/ (not part of the tests)
# make site     the pages of docs/ as a site with search, in build/site (not part of the tests)
# make notebook examples/plan.ipynb, run, as a page in build/notebook (not part of the tests)
# make bench    the benchmarks behind docs/benchmarks.md (not part of the tests)

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MPIRUN := $(BIN)/mpirun
CORPUS := tokens/stdlib.h5
RANKS ?= 4
# More arguments of the training command, such as --set plan.data=4
ARGUMENTS ?=
export OMP_NUM_THREADS := 1
# Continues to the end, and lists what failed
RUN_TESTS = $(BIN)/python tests/run_all.py

.PHONY: help install train test test-unit test-commands test-ranks test-hosts test-slurm test-random test-thorough lint docs site notebook wheel bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(VENV)/.installed

# Reinstalled only when what is installed changes.
$(VENV)/.installed: constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpi,test]'
	touch $@

$(CORPUS): | install
	$(BIN)/hpctrain prepare --stdlib --tokenizer bpe --vocab-size 1024 --out $@

train: install $(CORPUS)
	@# mpirun hides the terminal from the ranks
	@if [ -t 1 ]; then bar="--progress"; export COLUMNS=$$(tput cols 2>/dev/null || echo 100); fi; \
	set -x; $(MPIRUN) -n $(RANKS) $(BIN)/hpctrain train tiny $(ARGUMENTS) $$bar

test: install
	$(RUN_TESTS)

lint: install
	$(RUN_TESTS) lint

# What of the documentation is made from the code.
docs: install
	$(BIN)/python docs/job_reference.py
	$(BIN)/python docs/api_reference.py
	$(BIN)/python docs/pictures/tiles.py

# In an environment of its own, from what git tracks alone.
wheel:
	rm -rf build dist && $(PYTHON) -m venv build/venv && build/venv/bin/pip install --quiet build
	mkdir build/source && git archive HEAD | tar x -C build/source
	build/venv/bin/python -m build --outdir dist build/source

# Links into the code lead to files that are not in the site.
site:
	rm -rf build/site && $(PYTHON) -m venv build/site-venv && build/site-venv/bin/pip install --quiet 'mkdocs>=1.6,<2'
	build/site-venv/bin/mkdocs build --quiet --config-file mkdocs.yml --site-dir build/site

# In an environment of its own: the notebook's tools are no part of hpctrain. On a path with this folder, its link `comm`
# would be taken for Jupyter's package of that name.
notebook:
	rm -rf build/notebook && $(PYTHON) -m venv build/notebook-venv
	build/notebook-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	build/notebook-venv/bin/pip install --quiet --disable-pip-version-check '.[mpi]' nbconvert ipykernel
	env -u PYTHONPATH build/notebook-venv/bin/jupyter nbconvert --to html --execute examples/plan.ipynb --output-dir build/notebook

test-unit: install
	$(RUN_TESTS) unit

test-commands: install
	$(RUN_TESTS) commands

test-ranks: install
	$(RUN_TESTS) ranks-2 ranks-4 ranks-8 measured

# Four hosts made of network namespaces; skipped, with the reason, without root or iproute2.
test-hosts: install
	$(RUN_TESTS) hosts

# Batch jobs with a real Slurm on this host; skipped, with the reason, without root or Debian's slurm-wlm and munge.
test-slurm: install
	$(RUN_TESTS) slurm

# New random examples instead of the same ones each time, and four times as many where they are costly.
test-random: install
	HPCTRAIN_TEST_EXAMPLES=random $(RUN_TESTS) unit

# All cases and layouts instead of the suite's selection (tests/selection.py): about twice as long as `make test`.
test-thorough: install
	$(RUN_TESTS) --thorough

bench: install
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf $(VENV) build *.egg-info tokens runs
