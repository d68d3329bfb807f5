# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed

.PHONY: demo docs test suite test-slow test-faults sbom audit test-cpus test-mutants test-oldest test-newest release-check release-install test-tools lint install browser clean

install: $(STAMP)

# The package without extras: all that the demo needs.
$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --constraint constraints.txt
	touch $(CORE)

# Quantus brings the OpenCV that draws windows and needs a display's libraries; the headless one, put in its place, has all that is used.
$(STAMP): $(CORE)
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	$(BIN)/python -m pip install --quiet $(HEADLESS) --constraint constraints.txt
	touch $(STAMP)

demo: $(CORE)
	$(BIN)/seecause demo --out demo

# One worker more than two cores have: tests wait for browsers and processes. Who has nothing left takes from the others, and
# the type checker, which has one core's work for a minute, runs beside them.
WORKERS ?= 3
SUITE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

test: install browser
	$(MAKE) --jobs 2 lint suite

suite:
	$(SUITE)

test-slow: install
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q -m slow

# Processes killed at twenty random moments (SEECAUSE_SEED draws others), signals, disks, workers.
test-faults: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'slow or not slow' tests/test_faults.py tests/test_determinism.py

# The suite with kernels of other processors: a result may not hang on the last bit of one machine.
test-cpus: install
	ATEN_CPU_CAPABILITY=default $(SUITE)
	ATEN_CPU_CAPABILITY=avx2 $(SUITE)

# Known one-line bugs, planted one at a time in a copy of src: every one must be caught (about half an hour).
test-mutants: install
	$(BIN)/python tests/mutants.py

# The oldest releases that pyproject.toml allows, in a virtual environment of their own, and the whole suite on them. Their
# warnings are not errors; families that they have not got are skipped.
OLDEST := 'torch==2.6.0' 'torchvision==0.21.0' 'timm==1.0.26' 'transformers==5.17.0' 'numpy==2.0.2' 'pillow==11.0.0' 'safetensors==0.8.0' \
	'scikit-learn==1.5.2' 'scipy==1.14.1' 'pyarrow==17.0.0' 'cyclopts==5.4.0' 'rich==14.3.0' 'jinja2==3.1.4' 'matplotlib==3.9.2' 'lazy_loader==0.4' \
	'peft==0.21.2' 'pandas==2.2.2' 'open_clip_torch==2.32.0' 'fastapi==0.115.0' 'uvicorn==0.30.0'
HEADLESS := --force-reinstall --no-deps opencv-python-headless
test-oldest: browser
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --editable '.[dev]' $(OLDEST)
	.venv-oldest/bin/python -m pip install --quiet $(HEADLESS)
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal -q -W default

# What a release needs: sdist and wheel are built, their metadata, licence and size are checked, and each is installed without
# extras and without our constraints into an environment of its own, where the demo runs. Uploading them is left to a person.
release-check:
	rm -rf dist .venv-release
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --upgrade pip build twine
	.venv-release/bin/python -m build --outdir dist .
	.venv-release/bin/python -m twine check --strict dist/*
	for file in dist/*.whl dist/*.tar.gz; do $(MAKE) release-install FILE=$$file || exit 1; done

release-install:
	test "$$(stat -c %s $(FILE))" -lt 20000000
	case $(FILE) in *.whl) unzip -l $(FILE);; *) tar tzf $(FILE);; esac | grep -q 'LICENSE'
	rm -rf .venv-wheel dist/tried
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --upgrade pip
	.venv-wheel/bin/python -m pip install --quiet $(FILE)
	mkdir dist/tried
	cd dist/tried && ../../.venv-wheel/bin/seecause demo --out demo && ../../.venv-wheel/bin/seecause explain 'critters:clean:test#3' --out explained
	.venv-wheel/bin/python tests/without_extras.py

# Tools that read packages, apart from them.
.venv-audit/.installed:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet 'cyclonedx-bom>=7.0' 'pip-audit>=2.9'
	touch .venv-audit/.installed

# dist/seecause.cdx.json: every package that the wheel brings, its version and licence (CycloneDX).
sbom: .venv-audit/.installed
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet . --constraint constraints.txt
	mkdir -p dist
	.venv-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --of JSON -o dist/seecause.cdx.json .venv-wheel/bin/python

# Known vulnerabilities of what is pinned, from a public database. A database that does not know the holes of an old release cannot be
# asked: then nothing is audited, which is a failure and says so. A package that is skipped is a failure, too.
KNOWN := https://pypi.org/pypi/requests/2.19.0/json
audit: .venv-audit/.installed
	@.venv-audit/bin/python -c "import json, urllib.request as r; assert json.load(r.urlopen('$(KNOWN)', timeout=20))['vulnerabilities']" 2>/dev/null \
		|| { echo "audit: no database of vulnerabilities at $(KNOWN): nothing was audited" >&2; exit 2; }
	.venv-audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

# Tools whose own dependencies are pinned otherwise than ours, in an environment of their own.
test-tools:
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet --upgrade pip
	.venv-tools/bin/python -m pip install --quiet --editable '.[tools]' pytest mlflow-skinny wandb fiftyone
	OMP_NUM_THREADS=1 .venv-tools/bin/python -m pytest -q -W default tests/test_integrations.py

# The newest release of everything, without our constraints, in a virtual environment of its own, and the whole suite on them.
test-newest: browser
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	.venv-newest/bin/python -m pip install --quiet --upgrade $(HEADLESS)
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal -q

lint: install
	$(BIN)/ruff check src tests tools benchmarks examples docs/hooks.py docs/docstrings.py docs/pictures.py
	$(BIN)/ruff format --check src tests tools benchmarks examples docs/hooks.py docs/docstrings.py docs/pictures.py
	$(BIN)/python tests/readme_types.py

# The site (out/site/index.html); a warning is an error (not with --quiet, which hides warnings from the count).
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The page is tested in a real browser: Debian's chromium, where apt can install it.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || echo "no chromium: browser tests will be skipped"

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-wheel .venv-tools .venv-audit .venv-release dist demo
