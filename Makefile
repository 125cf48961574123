# The verbs of the project; `make` alone lists them.

PYTHON ?= python3
RUN ?= demo/run
DEMO_PAGES ?=
PAGES ?=
PEER ?=
LMPLZ ?=
TEXTS ?=
SLOW ?=
ALL ?=
UPGRADE ?=
TORCH ?= 2.11.0
PYTHON2 ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NATIVE := $(VENV)/.native
JAVA_CLASSES := $(VENV)/.java-classes
LOCKED := $(BIN)/pip install --quiet --no-compile --require-hashes --no-deps --no-build-isolation
# By all cores, where pip would compile by one, and without a quarter of the bytes: tests of packages, and models of
# transformers other than Llama. It fails for files of other versions of Python, which nothing imports.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing|transformers/models/(?!auto|llama)[^/]+)/' $(VENV)/lib || true
TOOLS := .venv-lock
HEAVY := spark or dist or slow or browser or gpu
FAST_TESTS := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m "not ($(HEAVY))"
QUICK := tests/rules tests/schemas tests/pipeline/engine tests/jobs/test_cli.py --ignore=tests/rules/test_extend.py

.DEFAULT_GOAL := help
.PHONY: help setup requirements demo test check coverage versions bench bench-extraction fit-main-text lint docs wheel report lock audit sbom clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: requirements $(INSTALLED) $(NATIVE) $(JAVA_CLASSES) ## check the machine, then install everything, pinned, into .venv

demo: setup ## a demo crawl, every stage, a small model in two processes, the report; again: resume (DEMO_PAGES=N pages)
	$(BIN)/penstock demo-crawl demo/crawl $(if $(DEMO_PAGES),--pages $(DEMO_PAGES))
	$(BIN)/penstock run demo --out demo/run
	$(BIN)/penstock plan demo/run
	$(BIN)/penstock train demo/run --ranks 2
	$(BIN)/penstock report demo/run --truth demo/crawl/truth.jsonl
	@echo "The report: $(CURDIR)/demo/run/report.html"

# Tests start hundreds of processes: none of them compiles again what another one has compiled.
test check coverage: export PYTHONDONTWRITEBYTECODE :=

# Two of the processes run the tests that start processes themselves, and one of these all of Spark's: tests/conftest.py.
test: setup ## the tests that this machine can run, with a sixteenth of the expensive files (ALL=1: all; SLOW=1: slow ones too)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup $(if $(SLOW),,-m "not slow") \
		$(if $(SLOW)$(ALL),,--expensive-files share)

check: ## before a commit: lint, and the tests that finish in a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; tests=0; $(FAST_TESTS) $(QUICK) || tests=$$?; wait $$types && exit $$tests

coverage: setup ## the fast tests with the share of lines that they run; fails below the share in setup.cfg
	$(FAST_TESTS) --cov --cov-report=term:skip-covered

versions: ## the training half in a second environment, .venv-torch2.11 (TORCH=2.12.1, PYTHON2=python3.13: others)
	.ci/second_environment $(TORCH) $(PYTHON2)

bench: setup ## measure speed, as ratios taken in one run (PAGES=jsonl PEER="python script": signals; LMPLZ=, TEXTS=: n-grams)
	$(BIN)/python -m bench.pipeline
	$(BIN)/python -m bench.dedup --skew
	$(BIN)/python -m bench.data
	$(BIN)/python -m bench.train
	$(BIN)/python -m bench.search
	$(BIN)/python -m bench.trace
	$(BIN)/python -m bench.takedown
	$(BIN)/python -m bench.formats
	$(if $(PAGES),$(BIN)/python -m bench.signals $(PAGES) $(PEER))
	$(if $(LMPLZ),$(BIN)/python -m bench.lm --lmplz $(LMPLZ) $(TEXTS))
	$(BIN)/python -m bench.figures

bench-extraction: setup ## compare extractors on pages with human main text: F1, snippets, documents lost, time (half an hour)
	$(BIN)/python -m tests.bench_extraction

fit-main-text: setup ## fit the model of the extractor, and a model for each fold for bench-extraction (half an hour)
	$(LOCKED) -r locks/fit.txt
	$(BIN)/python -m tests.fit_main_text --folds build/main_text --processes 2

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup ## the documentation as a site in build/site, with the reference pages of this checkout; a broken link fails
	PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation: $(CURDIR)/build/site/index.html; with its search: python3 -m http.server -d build/site"

wheel: setup ## build the wheel into dist/ and check its list of files
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m pytest tests/packaging -m "not slow"

report: setup ## write the report of a run again (RUN=folder, demo/run unless named)
	$(BIN)/penstock report $(RUN)

lock: ## renew the hashes in locks/ for the versions of constraints.txt (UPGRADE=1: for the newest versions)
	.ci/lock $(if $(UPGRADE),upgrade)

audit: $(TOOLS)/.installed ## compare the locked versions with the published vulnerabilities (needs an advisory service)
	@for lock in dev build spark train; do $(TOOLS)/bin/pip-audit --require-hashes --disable-pip -r locks/$$lock.txt || exit; done

sbom: $(TOOLS)/.installed ## the bill of materials of each image and of the development environment, in build/sbom (CycloneDX)
	@mkdir -p build/sbom
	@for lock in dev spark train; do $(TOOLS)/bin/cyclonedx-py requirements --sv 1.6 --output-reproducible \
		--of JSON --output-file build/sbom/$$lock.cdx.json locks/$$lock.txt || exit; done
	@echo "The bills of materials: $(CURDIR)/build/sbom"

clean: ## remove the demo, benchmarks, caches and build products; environments stay
	rm -rf demo artifacts build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -not -path './$(VENV)*/*' -prune -exec rm -rf {} +

# The stamp makes the installation run again only when the pins or the declared dependencies change.
# torch is pinned by version alone, since its files differ by index; its own dependencies are in the lock file.
$(INSTALLED): constraints.txt locks/build.txt locks/dev.txt setup.cfg | requirements
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a few minutes the first time (torch and Spark are large, fasttext is compiled)"
	$(LOCKED) -r locks/build.txt
	$(LOCKED) -r locks/dev.txt
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch
	@$(COMPILE)
	@touch $@

# Installs this checkout, and builds the native modules from their sources. setuptools warns of every editable
# installation that has some.
$(NATIVE): $(INSTALLED) setup.py $(wildcard pipeline/*/cpp/*)
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Runs work without it.
$(JAVA_CLASSES): $(INSTALLED) | $(NATIVE)
	@echo "Archiving the classes of Spark, so that it starts in less time"
	@$(BIN)/python -m jobs.class_archive 2>$(VENV)/java-classes.log || cat $(VENV)/java-classes.log >&2
	@touch $@

$(TOOLS)/.installed: locks/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --require-hashes --no-deps -r locks/tools.txt
	@touch $@

# Everything that pip cannot bring, checked before anything is made; one message names all that lacks.
# Spark takes JAVA_HOME before the PATH, and setuptools the compiler that Python was built with unless CXX names one.
define REQUIREMENTS
lacking= debian= fedora= homebrew=
lacks() {
    lacking="$$lacking  - $$1\n" debian="$$debian $$2" fedora="$$fedora $$3" homebrew="$$homebrew $$4"
}
python() { "$$PYTHON" "$$@" 2>/dev/null; }

if python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    python -c 'import ensurepip, venv' ||
        lacks "the venv module of Python" python3-venv python3 python@3.11
    python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        lacks "the headers of Python (Python.h)" python3-dev python3-devel python@3.11
else
    lacks "Python 3.11 or newer, venv and headers (found: $$(python --version || echo none); PYTHON= names another)" \
        "python3 python3-venv python3-dev" "python3 python3-devel" python@3.11
fi

java=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
[ "$${java:-0}" -ge 17 ] ||
    lacks "Java 17 or 21 (found: $${java:-none}$${JAVA_HOME:+ in JAVA_HOME=$$JAVA_HOME})" \
        openjdk-17-jre-headless java-21-openjdk-headless openjdk@17

cxx=$${CXX:-$$(python -c 'import sysconfig; print(sysconfig.get_config_var("CXX") or "c++")' || echo c++)}
echo '#include <vector>' | $$cxx -x c++ -fsyntax-only - 2>/dev/null ||
    lacks "a C++ compiler, for fasttext and the native module (tried: $$cxx)" g++ gcc-c++ gcc

[ -z "$$lacking" ] && exit 0
printf '%b' "Nothing was installed. This machine lacks:\n$$lacking"
printf '%s\n' "Install it, then call make again:" "  Debian, Ubuntu:  apt-get install$$debian" \
    "  Fedora:          dnf install$$fedora" "  Homebrew:        brew install$$homebrew"
exit 1
endef

requirements: export SCRIPT = $(REQUIREMENTS)
requirements: export PYTHON := $(PYTHON)
requirements:
	@sh -c "$$SCRIPT"
