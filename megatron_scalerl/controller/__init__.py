"""The controller of a run: one asyncio process without an accelerator that drives trainer and engines.

train.py          the `train` command: checks, run folder, launcher, controller
loop.py           the training loop: step, weight update, checkpoint, restart
preflight.py      checks of a recipe's inputs before any process starts
run_folder.py     lock, recipe and attempts of RUN/; the checkpoint to resume from
weight_sync.py    coordinates a weight update of all engines
probe.py          compares log-probs of trainer and engines after an update
measure.py        validations and evaluations while the training goes on: when, and on which engines
measured_prompts.py  prompts and records of validations and evaluations: RUN/validation.jsonl, RUN/evaluation.jsonl
meter.py          measures time windows and charges the ledger
ledger.py         device-hours by role and batch: RUN/ledger.jsonl, the forecast's compute axis
metrics.py        step and validation records: RUN/metrics.jsonl, RUN/validation.jsonl, TensorBoard, W&B
progress.py       lines and progress bar on the console
telemetry.py      the endpoint for Prometheus, with metrics and files
"""
