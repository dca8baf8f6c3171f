# Short names for the commands of this repository.
.PHONY: install lint test test-fast test-all docs bench test-gpu mutation
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
docs:
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build
bench:
	.venv/bin/python tools/bench_step.py
	.venv/bin/python tools/bench_logits.py
	.venv/bin/python tools/bench_rollouts.py
	.venv/bin/python tools/bench_convert.py
	.venv/bin/python tools/bench_store.py
	.venv/bin/python tools/bench_plan.py memory
test-gpu:
	.venv/bin/python -m pytest -m gpu tests/gpu
mutation: .venv-mutation
	OMP_NUM_THREADS=1 nice .venv/bin/python tools/mutation.py
.venv-mutation:
	.venv/bin/pip install --quiet --target $@ cosmic-ray==8.7.0
