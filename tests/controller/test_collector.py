"""What the endpoint exports, against the records of a run in virtual time; its names against Prometheus' rules."""

import json
import re

import pytest
from fakes.engine import StandInEngine
from fakes.run import attempt, recipe
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families
from recipe_files import ROOT

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.telemetry import RunCollector
from megatron_scalerl.engine.membership import Membership

BOARD = ROOT / "recipes/grafana/megatron_scalerl.json"


def collector(**changes):
    given = {"run": "r", "run_id": "1f", "planned_steps": 6, "device": "process"} | changes
    return RunCollector(**given)


def samples(of):
    """(name, labels as a frozen set) -> value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(of.registry).decode())
        for sample in family.samples
    }


def value(of, name, **labels):
    return samples(of)[f"scalerl_{name}", frozenset(labels.items())]


def everything():
    """A collector that has something to show in every family."""
    full = collector()
    engines = Membership.of([StandInEngine()])
    engines.members[0].client.in_flight = 3
    full.members = lambda: engines.members
    full.attempt(0, lambda: {"trainer": 7200.0, "lost": 0.0})
    full.write(1, {"reward": 1.0, "tokens": 5.0, "weight_bytes": 2.0, "publish_seconds": 2.0, "step_seconds": 4.0})
    full.write(1, {"validation/pass_rate": 0.75, "validation/pass_rate/math": 0.5})
    return full


def test_a_run_exports_what_its_records_and_its_ledger_say(tmp_path):
    shown = collector()
    attempt(recipe(tmp_path), collector=shown)
    rows = read_jsonl(tmp_path / "r/metrics.jsonl")
    validations = read_jsonl(tmp_path / "r/validation.jsonl")
    last = rows[-1]
    assert value(shown, "step") == value(shown, "policy_version") == value(shown, "planned_steps") == 6
    assert value(shown, "last", key="reward") == last["reward"]
    assert value(shown, "last", key="train_pass_rate") == last["train_pass_rate"]
    assert value(shown, "last", key="validation/pass_rate") == validations[-1]["pass_rate"]
    assert value(shown, "validation_step") == validations[-1]["step"] == 6
    assert value(shown, "last", key="entropy") == 0.1
    assert value(shown, "batches_total") == 6
    assert value(shown, "sum_total", key="step_seconds") == pytest.approx(sum(r["step_seconds"] for r in rows))
    generated = sum(r["generated_tokens_per_second"] * r["step_seconds"] for r in rows)
    assert value(shown, "generated_tokens_total") == pytest.approx(generated) and generated > 0
    waited = sum(r["wait_for_batch_seconds"] for r in rows)
    assert value(shown, "sum_total", key="wait_for_batch_seconds") == pytest.approx(waited)
    assert value(shown, "weight_updates_total") == 6
    assert value(shown, "sum_total", key="weight_update_seconds") == pytest.approx(6 * 0.25)
    ledger = Ledger(tmp_path / "r/ledger.jsonl", "device_hours", incarnation="later")
    for role in ("startup", "trainer", "engine", "validation", "lost"):
        assert value(shown, "device_seconds_total", role=role) == pytest.approx(3600 * ledger.hours(role))
    ledger.close()
    assert value(shown, "engines", state="serving") == 1 and value(shown, "engines", state="lost") == 0
    assert value(shown, "trainer_restarts_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kill_at_s", [9.5, 15.0, 21.0])
def test_device_seconds_never_fall_over_a_kill(tmp_path, kill_at_s):
    """The process dies with its counters; the ledger goes on. To Prometheus the smallest fall is a new start at 0."""
    before, after = collector(), collector()
    assert attempt(recipe(tmp_path), kill_at_s=kill_at_s, collector=before).reason is None
    roles = ("startup", "trainer", "engine", "validation", "lost")
    held = {role: value(before, "device_seconds_total", role=role) for role in roles}
    resumed = []

    def first_look(engines):
        resumed.append({role: value(after, "device_seconds_total", role=role) for role in roles})

    attempt(recipe(tmp_path), collector=after, changes=[(0.001, first_look)])
    [found] = resumed
    assert all(found[role] >= held[role] for role in roles)
    assert sum(found.values()) == pytest.approx(3 * kill_at_s, abs=3 * 10), "all but the time since a heartbeat"


def test_nothing_is_shown_of_a_step_that_was_not_made():
    names = {name for name, _ in samples(collector())}
    assert "scalerl_last" not in names and "scalerl_validation_step" not in names
    assert "scalerl_batches_total" in names, "a counter begins at 0"


def test_a_batch_without_a_step_and_a_step_without_an_update_count_as_such():
    shown = collector()
    shown.write(3, {"skipped": 1.0, "step_seconds": 2.0, "generated_tokens_per_second": 10.0})
    shown.write(4, {"step_seconds": 3.0, "publish_seconds": 0.0, "engine_paused_seconds": 0.0})
    assert value(shown, "skipped_batches_total") == 1 and value(shown, "batches_total") == 1
    assert value(shown, "generated_tokens_total") == 20 and value(shown, "weight_updates_total") == 0


def test_a_reason_of_lost_completions_counts_for_its_own_batch():
    shown = collector()
    shown.write(1, {"lost/environment_hung": 2.0, "reward": 1.0})
    shown.write(1, {"validation/pass_rate": 0.5})
    assert value(shown, "last", key="lost/environment_hung") == 2.0
    shown.write(2, {"lost/no_logprobs": 1.0})
    numbers = [value(shown, "last", key=f"lost/{reason}") for reason in ("environment_hung", "no_logprobs")]
    assert numbers == [0.0, 1.0] and value(shown, "last", key="reward") == 1.0


def test_engines_are_counted_by_state_and_given_up_ones_apart():
    engines, shown = Membership.of([StandInEngine(), StandInEngine()]), collector()
    shown.members = lambda: engines.members
    engines.evict(engines.members[1].client, "it hangs")
    assert value(shown, "engines", state="serving") == 1 and value(shown, "engines", state="draining") == 1
    assert value(shown, "engines_given_up") == 1


def test_both_formats_can_be_parsed_and_agree():
    shown = everything()
    page = exposition.generate_latest(shown.registry).decode()
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("scalerl_")
    }
    assert found == {key: number for key, number in samples(shown).items() if key[0].startswith("scalerl_")}


def test_every_expression_of_the_board_names_what_is_exported():
    board = json.loads(BOARD.read_text())
    exported = {name for name, _ in samples(everything())}
    labels = {name: set() for name in exported}
    for name, pairs in samples(everything()):
        labels[name] |= {key for key, _ in pairs}
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert 8 <= len(board["panels"]) <= 12 and expressions
    for expression in expressions:
        named = set(re.findall(r"\bscalerl_\w+", expression))
        assert named and named <= exported, expression
        assert 'run="$run"' in expression, "several runs may be scraped by one Prometheus"
    for panel in board["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            of_metrics = set.union(*(labels[name] for name in re.findall(r"\bscalerl_\w+", target["expr"])))
            assert shown <= of_metrics, target
    queries = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert {name for query in queries for name in re.findall(r"\bscalerl_\w+", query)} <= exported
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
