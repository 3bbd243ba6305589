# Everything runs through .venv, which launch/install.sh makes. `make check` is what CI runs.
bin := .venv/bin

.PHONY: check lint fix test test-fast
check: lint test

lint:
	@launch/install.sh dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

fix:
	@launch/install.sh dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

test:
	launch/test.sh

test-fast:
	launch/test.sh -m "not slow"
