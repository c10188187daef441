# The interface of the project. Every target sets up what it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS ?= 2

.PHONY: run test test-slow bench docs lint lines type guardrails clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -U "pip>=25.1"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e . --group dev
	touch $(STAMP)

run: $(STAMP)
	$(BIN)/python -m esper.scripts.demo

test: lint type
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group models --group rl --group docs --group package
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(if $(ONLY),--only $(ONLY))

docs: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html, or, to search: $(BIN)/python -m http.server --directory site"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "src: $$(cat $$(find src -name '*.py') | wc -l) lines"

lines:
	@for package in src/esper src/esper/*/; do \
		depth=$$([ $$package = src/esper ] && echo 1 || echo 9); \
		files=$$(find $$package -maxdepth $$depth -name '*.py'); \
		[ -z "$$files" ] || echo "$$(basename $$package) $$(cat $$files | wc -l)"; \
	done

type: $(STAMP)
	$(BIN)/mypy

guardrails: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" tests/test_import_isolation.py tests/meta/test_factored_action_contracts.py \
		tests/simic/test_vectorized.py tests/simic/training/test_entropy_annealing.py \
		tests/simic/rewards/escrow/test_escrow_wiring.py tests/simic/test_reward_normalizer_checkpoint.py \
		tests/simic/test_gpu_preload_batch_size.py tests/scripts/test_train.py

clean:
	rm -rf .venv bench.json site
