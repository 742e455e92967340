# Everything a person or CI runs, on nothing but git, make and Python. `make` alone shows what there is.
#
# The environments are made from the hashed locks by plain pip, and remade when a lock, pyproject.toml or the Python changes:
# the name of each stamp carries the hash of those inputs. Set PYTHON to use another interpreter than python3.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Tests start hundreds of gateways: without bytecode each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
SYSTEM_PACKAGES := gcc libc6-dev git make python3 python3-venv

# $(call key,FILES): sixteen digits that change with the interpreter or with any of the files.
key = $(shell { $(PYTHON) -VV; cat $(1); } 2>/dev/null | sha256sum | cut -c1-16 || true)
VENV := .venv/.ready-$(call key,locks/dev.txt pyproject.toml)
MUTATES := .venv-mutate/.ready-$(call key,locks/mutate.txt)
SITE := .venv-docs/.ready-$(call key,locks/docs.txt)
GEN := .venv-gen/.ready-$(call key,locks/gen.txt)
RUN := .venv/bin/
VERSION := $(shell sed -n 's/^VERSION = "\(.*\)"$$/\1/p' gateway/__init__.py)

# pip says what it does only when it fails or takes long; no question, no notice about itself.
PIP := -m pip install --quiet --disable-pip-version-check --no-input --require-hashes

# $(call environment,DIR,LOCK): an environment that holds what the lock says; a new one when the interpreter is another.
define environment
	@version=$$($(PYTHON) -VV); \
	if [[ "$$($(1)/bin/python -VV 2>/dev/null)" != "$$version" ]]; then \
		echo "making $(1) ($${version%% (*})"; $(PYTHON) -m venv --clear $(1); \
	fi; \
	echo "installing $(2)"; $(1)/bin/python $(PIP) -r $(2); rm -f $(1)/.ready-*
endef

.PHONY: help
help: ## show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: needs
needs:
	@missing=""; \
	command -v git >/dev/null || missing=" git"; \
	command -v cc >/dev/null || command -v gcc >/dev/null || missing="$$missing gcc libc6-dev"; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing="$$missing Python>=3.11"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	if [[ -n "$$missing" ]]; then \
		echo "missing:$$missing"; echo "this needs: $(SYSTEM_PACKAGES)   (Python >= 3.11)"; exit 1; \
	fi >&2

.PHONY: system-packages
system-packages:
	@echo "$(SYSTEM_PACKAGES)"

$(VENV): | needs
	$(call environment,.venv,locks/dev.txt)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
	@touch $@

$(GEN): | needs
	$(call environment,.venv-gen,locks/gen.txt)
	@touch $@

$(MUTATES): | needs
	$(call environment,.venv-mutate,locks/mutate.txt)
	@touch $@

$(SITE): | needs
	$(call environment,.venv-docs,locks/docs.txt)
	@touch $@

.PHONY: venv
venv: $(VENV) ## make the environment in .venv (the others do it by themselves)

.PHONY: demo
demo: $(VENV) ## a node with 8 simulated GPUs through kubelet upgrades and back
	@$(RUN)gateway demo

# termtosvg wants a terminal, which `script` gives it. The pace leaves time to read; it changes nothing else.
.PHONY: recording
recording: $(VENV) ## record `make demo` as docs/demo.svg (needs Debian's termtosvg)
	@command -v termtosvg >/dev/null || { echo "missing: termtosvg (apt-get install termtosvg)" >&2; exit 1; }
	@script --quiet --return --command "termtosvg docs/demo.svg --command '$(RUN)gateway demo --pace 1.5' \
		--template gjm8 --screen-geometry 92x24 --min-frame-duration 200 --max-frame-duration 3000 --loop-delay 6000" /dev/null

# Tests of one module stay together, because they share what is dear to make; the longest modules come first, in tests/compat.
# Four processes even on two cores, because those modules mostly wait for processes to start.
PARALLEL := --numprocesses=4 --dist=loadfile --no-loadscope-reorder

# A machine that stood still is no finding: what fails runs again, and is named at the end with what it said. Not what harms a pod.
RERUNS := --reruns=2 --reruns-delay=1 --max-suite-reruns=20 --rerun-show-tracebacks --rerun-except='is given to both|\bpod .+ lost |ended by itself'

# TEST: more of pytest's options. "--reruns=0" runs nothing again, "-m root" runs less.
TEST ?=
PYTEST = $(RUN)python -m pytest $(PARALLEL) $(RERUNS)
.PHONY: test
test: $(VENV) ## all tests, on one genuine kubelet of each API (the first time builds them: 2 minutes on two cores)
	@$(RUN)python -m gateway_lab.kubelets.build 1.8 1.9 1.37
	$(PYTEST) -m 'not other_kubelet' tests/compat tests/contract tests/unit $(TEST)

.PHONY: test-all
test-all: kubelets ## the same on every genuine kubelet that `make kubelets` builds (the first time builds them: 5 minutes on two cores)
	$(PYTEST) tests/compat tests/contract tests/unit $(TEST)

.PHONY: test-lab
test-lab: $(VENV) ## the tests of the laboratory, the tools and CI themselves: for who changes these
	$(PYTEST) tests/lab $(TEST)

.PHONY: unit
unit: $(VENV) ## the tests that need no genuine kubelet
	$(PYTEST) -m 'not genuine' tests/compat tests/contract tests/unit $(TEST)

# Tables of decisions and wires, and what is promised of words, pages and folders: these start no gateway.
TABLES := adapters* again architecture contributing docs doctor_nodes dra_adapters dra_decisions drift explored flags \
	layout leader_machine lean negotiate plan registration spelled tally wire words
.PHONY: quick
quick: lint imports types ## lint, types, tables, and the first row of each history of the contract, in about a minute: for while you write
	$(RUN)python -m pytest --quiet --numprocesses=2 --dist=loadfile $(TABLES:%=tests/unit/test_%.py) tests/contract --first

.PHONY: nightly
nightly: $(VENV) ## what is too slow for each change, each once: all kubelets, mutants, whole nodes, searches and trials (root; hours)
	@.ci/nightly

.PHONY: kubelets
kubelets: $(VENV) ## build the genuine kubelet device managers
	@$(RUN)python -m gateway_lab.kubelets.build

# COMPAT: more options. "--genuine yes" builds every kubelet first, "--kubelets 1.28,1.37 --no-hops" runs less.
COMPAT ?=
.PHONY: compat
compat: kubelets ## the compatibility matrix, on the kubelets that are built and emulated others: compat-report/
	@$(RUN)gateway compat --genuine built $(COMPAT)

.PHONY: compat-bridge
compat-bridge: kubelets ## the same through the bridge, with a plugin of each API behind it: compat-report/API/
	@for api in 0.1 v1alpha2 v1beta1; do \
		$(RUN)gateway compat --genuine built --no-hops --behind $$api --out compat-report/$$api $(COMPAT) || exit 1; done

.PHONY: thirdparty
thirdparty: kubelets ## genuine plugins of others behind the bridge, ended and killed on kubelets of each API (root or user namespaces; fetches Go modules)
	$(RUN)python -m gateway_lab.plugins.thirdparty

# LABELS: names of fake nodes; "--write" writes the golden files.
LABELS ?=
.PHONY: labels
labels: $(VENV) ## compare our node labels with those of NVIDIA's GPU Feature Discovery (root or user namespaces; fetches Go modules)
	$(RUN)python -m tests.labels $(LABELS)

# COMPARED: which ones, on which kubelets: "--kubelets 1.32,1.37 sample-device-plugin". All by default.
COMPARED ?=
.PHONY: compared
compared: kubelets ## examine genuine plugins of others and our own, and remake docs/compared.md (root or user namespaces; fetches Go modules)
	$(RUN)python -m tools.examine $(COMPARED)
	$(RUN)python -m tools.compared docs/compared.md

# KUBELETS: on which kubelets, oldest first. E2E: more of pytest's options. In the environment: REPEAT, how often each scenario is run;
# SETTLE, how many seconds each looks on; OUTCOMES, a file for what was seen. The images are made first: the node has no network.
KUBELETS ?= 1.32 1.36 1.37
export KUBELETS
E2E ?=
NODE = $(RUN)python -m gateway_lab.node $(addprefix --kubelet ,$(KUBELETS))
.PHONY: e2e-made
e2e-made: $(VENV)
	@$(NODE) --make
	@$(RUN)python -m tools.image --newest --tag $(VERSION) --tag $(VERSION)-b --out build/e2e

.PHONY: e2e
e2e: e2e-made ## scenarios on a whole genuine node (wants root; the first time builds Kubernetes: 10 minutes or more)
	$(NODE) -- .venv/bin/python -m pytest --timeout=1800 -m e2e tests/e2e/test_continuity.py tests/e2e/test_migration.py $(E2E)
	@$(RUN)python -m gateway_lab.node --leftovers

.PHONY: e2e-chart
e2e-chart: e2e-made ## the README's five steps, the how-tos' commands, and the Helm chart's rolls and features, on such a node (`.ci/chart` builds Helm first)
	$(NODE) -- .venv/bin/python -m pytest --timeout=1800 -m e2e tests/e2e/test_readme.py tests/e2e/test_try.py tests/e2e/test_tasks.py tests/e2e/test_operator.py \
		tests/e2e/test_chart.py $(E2E)
	@$(RUN)python -m gateway_lab.node --leftovers

# WRITE_DOCS=1 in the environment: write what came of NVIDIA's manifests into docs/nvidia-manifests.md, instead of comparing.
.PHONY: e2e-dra
e2e-dra: $(VENV) ## the same with ResourceClaims, each of the kubelets on a node of its own
	@for version in $(KUBELETS); do \
		$(RUN)python -m gateway_lab.node --kubelet $$version --kubelet $(lastword $(KUBELETS)) -- \
			.venv/bin/python -m pytest --timeout=1800 -m e2e tests/e2e/test_dra.py -k $$version $(E2E) || exit 1; done
	$(RUN)python -m gateway_lab.node --kubelet $(lastword $(KUBELETS)) -- \
		.venv/bin/python -m pytest --timeout=1800 -m e2e tests/e2e/test_vendor_claims.py $(E2E)
	@$(RUN)python -m gateway_lab.node --leftovers

.PHONY: e2e-bridge
e2e-bridge: e2e-made ## a plugin behind the gateway ends, crashes and is upgraded on such a node, and its kubelet is, too
	$(NODE) -- .venv/bin/python -m pytest --timeout=1800 -m e2e tests/e2e/test_bridge.py $(E2E)
	@$(RUN)python -m gateway_lab.node --leftovers

# CROSSINGS: more options. "--times 10 --seed 2" crosses less often, otherwise.
CROSSINGS ?=
.PHONY: crossings
crossings: $(VENV) ## a node crosses to DRA and back again and again while pods come and go; what it costs, as JSON
	@$(RUN)python -m gateway_lab.node -- .venv/bin/python -m gateway_lab.node.crossings $(CROSSINGS)

# KILLS: more options, as "--slow-look".
KILLS ?=
.PHONY: kills
kills: e2e-made ## kill the gateway that leads of two in a pod, 50 times: what the kubelet and the API server see of it
	@$(RUN)python -m gateway_lab.node -- .venv/bin/python -m gateway_lab.node.kills $(KILLS)

# Those of the kubelets that `make kubelets` builds are played by CI, too (tests/compat/test_bugs.py). This builds all: `make nightly` does.
.PHONY: track-record
track-record: $(VENV) ## see each known bug happen on a genuine kubelet that has it, and not on one that hasn't
	@$(RUN)python -m gateway_lab.bugs.run

# IMAGE: more options. "--tag 0.1.0 --tag 0.1.0-b" makes two archives of one layer, to try a roll with.
IMAGE ?=
.PHONY: image image-lock
image: $(VENV) ## the container image, as an OCI archive in dist/image, and what is in it (no container engine needed)
	@$(RUN)python -m tools.image $(IMAGE)
image-lock: $(VENV) ## lock the newest of Debian's packages for the image, in deploy/image.lock
	@$(RUN)python -m tools.image --lock

.PHONY: release-dry-run
release-dry-run: $(VENV) ## all of a release in dist/release, then installed on a whole node by digest (root; docker-registry, skopeo; 4 minutes)
	@$(RUN)python -m tools.release --dry-run

.PHONY: manifests
manifests: $(VENV) ## render deploy/kustomize into deploy/manifests, and hold both against Kubernetes' schemas
	.ci/manifests --write

.PHONY: lint
lint: $(VENV) ## ruff, all rules: code and format
	$(RUN)ruff check && $(RUN)ruff format --check

.PHONY: types
types: $(VENV) ## mypy, strict
	$(RUN)mypy

.PHONY: imports
imports: $(VENV) ## the rules of who may import whom
	$(RUN)lint-imports --no-cache

# MUTATE: words in the names of the modules; all by default.
MUTATE ?=
.PHONY: mutate
mutate: $(MUTATES) ## break the pure modules in every small way (mutmut), and name what no table of theirs notices
	@.venv-mutate/bin/python -m tools.mutate $(MUTATE)

# MUTANTS: less than all. "KA11 DRA9" for rules or names with these words, "--turn 8" for an eighth, another one at each commit.
MUTANTS ?=
.PHONY: mutants
mutants: $(VENV) ## break each rule on purpose; a test must notice
	$(RUN)python -m tests.mutants $(MUTANTS)

.PHONY: bench
bench: $(VENV) ## measure the promises that have a figure
	$(RUN)python -m gateway_lab.bench

# WALKS: more options. "--walks 200" for fewer, "--seed 1000" for others, "--steps ..." for one again.
WALKS ?= --walks 2000
.PHONY: walks
walks: $(VENV) ## random walks over a node (kubelets, gateways, pods, orders, hardware) on a moved clock; half a second each
	@$(RUN)python -m tests.contract.walks $(WALKS)

# GAUNTLET: more options. "--minutes 60 --seeds 20" for a long soak, "--seed 7", "--replay FILE", "--every".
GAUNTLET ?=
.PHONY: gauntlet
gauntlet: $(VENV) ## every fault, alone and mixed by chance, on emulated kubelets and the genuine ones that are built
	@$(RUN)python -m gateway_lab.trials.gauntlet $(GAUNTLET)

.PHONY: docs docs-check
docs: $(VENV) ## write the tables of docs/ from what the code declares
	$(RUN)python -m tools.dialects docs/dialects.md
	$(RUN)python -m tools.faults docs/faults.md
	$(RUN)python -m tools.conformance docs/conformance.md
	$(RUN)python -m tools.compared docs/compared.md
	$(RUN)python -m tools.bugs docs/track-record.md
	$(RUN)python -m tools.flags docs/configuration.md
	$(RUN)python -m tools.metrics docs/observability.md
	$(RUN)python -m tools.schemas
	$(RUN)python -m tools.chart
	$(RUN)python -m tools.doctor docs/doctor.md
	$(RUN)python -m tools.version
docs-check: $(VENV) ## are the tables of docs/ what the code declares, and do the pages keep to the words and lengths of tools/prose.py?
	$(RUN)python -m tools.prose
	$(RUN)python -m tools.dialects --check docs/dialects.md
	$(RUN)python -m tools.faults --check docs/faults.md
	$(RUN)python -m tools.conformance --check docs/conformance.md
	$(RUN)python -m tools.compared --check docs/compared.md
	$(RUN)python -m tools.bugs --check docs/track-record.md
	$(RUN)python -m tools.flags --check docs/configuration.md
	$(RUN)python -m tools.metrics --check docs/observability.md
	$(RUN)python -m tools.schemas --check
	$(RUN)python -m tools.chart --check
	$(RUN)python -m tools.doctor --check docs/doctor.md
	$(RUN)python -m tools.version --check

# What draws the site's diagrams: a package of the npm registry, by its hash.
MERMAID := mermaid-11.16.0
MERMAID_SHA256 := ff48c94a0a0458b377a5187ad01407184d2a182e6476c2015b7068ff58355fae
build/$(MERMAID).tgz:
	@mkdir -p build; cd build; npm pack --silent $(subst -,@,$(MERMAID)) >/dev/null; \
	echo "$(MERMAID_SHA256)  $(MERMAID).tgz" | sha256sum --check --quiet

# REPOSITORY: the address to which the site links. By default that of the remote `origin`.
REPOSITORY ?= $(shell git remote get-url origin 2>/dev/null || true)
.PHONY: site
site: $(SITE) $(if $(shell command -v npm),build/$(MERMAID).tgz) ## docs/ as a site, in build/site (with npm, diagrams are drawn); a dead link is an error
	@REPOSITORY="$(REPOSITORY)" MERMAID=build/$(MERMAID).tgz NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.PHONY: generate generate-check
generate: $(GEN) ## write adapters/pb from protos/
	.venv-gen/bin/python tools/generate.py
generate-check: $(GEN) ## is adapters/pb what protos/ say?
	.venv-gen/bin/python tools/generate.py --check

.PHONY: locks locks-upgrade locks-check
locks: $(VENV) ## remake the locks after a change of pyproject.toml; pins stay as far as they can
	$(RUN)python tools/locks.py
locks-upgrade: $(VENV) ## remake the locks with the newest releases
	$(RUN)python tools/locks.py --upgrade
locks-check: $(VENV) ## are the locks what pyproject.toml asks for?
	$(RUN)python tools/locks.py --check

.PHONY: clean
clean: ## remove what was made here (the cache of built kubelets lies outside and stays)
	rm -rf .venv .venv-gen .venv-docs build dist compat-report *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find gateway gateway_lab adapters devices tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
