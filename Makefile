# Short names for the commands of this repository.
.PHONY: install lint test test-fast test-all rehearse
install:
	tools/install.sh cpu
lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
test:
	bash tests/run.sh
test-fast:
	bash tests/run.sh --fast
test-all:
	bash tests/run.sh --all
rehearse:
	.venv/bin/megatron-scalerl check-gpu --rehearse
