"""One optimizer step against a plain reference, and what must not change it."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from policy_rows import greedy
from random_policies import completion_logprobs
from random_policy import batches_of, plan_of, random_samples
from transformers import AutoModelForCausalLM

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching.packing import build, filler_micro_batch
from megatron_scalerl.batching.rollout_bytes import arrays_of
from megatron_scalerl.distributed.parallel import unwrap
from megatron_scalerl.losses.inputs import separable
from megatron_scalerl.recipe.sections import OptimizerSection
from megatron_scalerl.trainer.step import constant_with_warmup
from megatron_scalerl.trainer.weight_changes import WeightChanges
from megatron_scalerl.types import Batch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
NO_CLIP = {"optimizer": {"clip_grad": 0}}


def reference_cispo(model, samples):
    """-sum w min(rho, 5) A log pi over sampled tokens, written out with the gradient left in the model."""
    total = 0.0
    for s in samples:
        logprobs = completion_logprobs(model, s)
        mask = torch.tensor(s.rollout.loss_mask)
        rho = (logprobs.detach() - torch.tensor(s.rollout.rollout_logprobs)).exp().clamp(max=5.0)
        total = total - (s.token_weight * rho * s.advantage * logprobs)[mask].sum()
    total.backward()
    return total.item()


def gradients(trainer):
    return {n: p.main_grad.clone() for n, p in unwrap(trainer.chunks[0]).named_parameters()}


def weights(trainer):
    return {n: p.detach().clone() for n, p in unwrap(trainer.chunks[0]).named_parameters()}


def test_gradients_are_those_of_the_plain_sum(new_trainer, policy):
    samples = random_samples(1)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    loss = reference_cispo(model, samples)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    trainer = new_trainer(**NO_CLIP)
    # three micro-batches, one of them a filler: Megatron would divide by 3
    [batch] = batches_of(samples, micro_batch_tokens=64)
    batch = Batch(step=1, micro_batches=(*batch.micro_batches, filler_micro_batch(2)))
    assert len(batch.micro_batches) == 3
    report = trainer.step(batch)
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    found = gradients(trainer)
    theirs = {
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight.grad,
        "output_layer.weight": model.lm_head.weight.grad,
        "decoder.layers.1.mlp.linear_fc2.weight": model.model.layers[1].mlp.down_proj.weight.grad,
        "decoder.layers.0.self_attention.linear_proj.weight": model.model.layers[0].self_attn.o_proj.weight.grad,
    }
    for name, grad in theirs.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6 * norm, msg=name)


@pytest.mark.parametrize("loss", ["cispo", "dapo", "grpo", "gspo"])
def test_accumulated_micro_batches_equal_one(new_trainer, loss):
    samples = random_samples(2, count=8)
    section = {"loss": {"name": loss, "clip_low": None if loss == "cispo" else 0.9}}
    one, many = new_trainer(**NO_CLIP, **section), new_trainer(**NO_CLIP, **section)
    [whole], [parts] = batches_of(samples), batches_of(samples, micro_batch_tokens=64)
    assert len(whole.micro_batches) == 1 and len(parts.micro_batches) > 2
    a, b = one.step(whole), many.step(parts)
    assert b.loss == pytest.approx(a.loss, rel=1e-5)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    assert a.grad_norm > 0
    assert b.tokens == a.tokens == sum(len(s.prompt_token_ids) + len(s.rollout.token_ids) for s in samples)
    for key in ("entropy", "mismatch_mean", "mismatch_max", "ess", "is_weight_mean"):
        assert b.metrics[key] == pytest.approx(a.metrics[key], rel=1e-5)


def same(trainer, batch):
    return batch


def scored(trainer, batch):
    trainer.logprobs([[5, 6, 7, 8]])
    return batch


def filled(trainer, batch):
    return Batch(step=batch.step, micro_batches=(filler_micro_batch(2), *batch.micro_batches, filler_micro_batch(4)))


@pytest.mark.parametrize("change", [same, scored, filled])
def test_steps_are_deterministic_and_neither_scoring_nor_fillers_change_them(new_trainer, change):
    [batch] = batches_of(random_samples(3))
    plain, other = new_trainer(), new_trainer()
    for step in (1, 2):
        batch = replace(batch, step=step)
        a, b = plain.step(batch), other.step(change(other, batch))
        assert (a.loss, a.grad_norm, a.tokens, a.metrics) == (b.loss, b.grad_norm, b.tokens, b.metrics)
    theirs = weights(other)
    assert all(torch.equal(w, theirs[n]) for n, w in weights(plain).items())


def test_learning_rate_warms_up_linearly_then_stays():
    rate = constant_with_warmup(OptimizerSection(lr=5e-7, warmup_steps=100))
    assert [rate(s) for s in (1, 50, 100, 101, 9999)] == pytest.approx([5e-9, 2.5e-7, 5e-7, 5e-7, 5e-7])
    assert constant_with_warmup(OptimizerSection(lr=1e-4, warmup_steps=0))(1) == 1e-4


def test_the_optimiser_uses_the_scheduled_rate(new_trainer):
    # AdamW's first step moves every weight with a gradient by the learning rate
    [batch] = batches_of(random_samples(5))
    trainer = new_trainer(optimizer={"lr": 1e-3, "warmup_steps": 4, "weight_decay": 0.0})
    name = "decoder.final_layernorm.weight"
    before = weights(trainer)[name]
    report = trainer.step(batch)
    assert report.learning_rate == pytest.approx(2.5e-4)
    moved = (weights(trainer)[name] - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 2.5e-4), rtol=1e-3, atol=0)


def test_weight_decay_acts_on_matrices_only(new_trainer):
    [batch] = batches_of(random_samples(5))
    plain = new_trainer(optimizer={"lr": 1e-3, "weight_decay": 0.0})
    decayed = new_trainer(optimizer={"lr": 1e-3, "weight_decay": 0.1})
    before = weights(plain)
    for trainer in (plain, decayed):
        trainer.step(batch)
    without, with_decay = weights(plain), weights(decayed)
    for name, start in before.items():
        # decoupled: lr x decay x weight, on top of the same step
        expected = 1e-3 * 0.1 * start if start.dim() > 1 else torch.zeros_like(start)
        torch.testing.assert_close(without[name] - with_decay[name], expected, rtol=2e-3, atol=3e-7, msg=name)


def test_gradients_are_clipped_to_the_norm(new_trainer):
    [batch] = batches_of(random_samples(6))
    trainer = new_trainer(optimizer={"clip_grad": 1e-3})
    report = trainer.step(batch)
    assert report.grad_norm > 1e-2  # before clipping
    clipped = math.sqrt(sum(g.double().square().sum().item() for g in gradients(trainer).values()))
    assert clipped == pytest.approx(1e-3, rel=1e-3)


def test_logprobs_and_greedy_tokens_are_those_of_hugging_face(new_trainer, policy):
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    samples = random_samples(7)
    lists = [s.prompt_token_ids + s.rollout.token_ids for s in samples]
    trainer = new_trainer(trainer={"micro_batch_tokens": 64})
    scored = trainer.token_scores(lists)
    assert scored[0] == trainer.logprobs(lists)
    for ids, found, entropies in zip(lists, *scored, strict=True):
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
        expected = logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=5e-5)
        torch.testing.assert_close(torch.tensor(entropies), -(logprobs.exp() * logprobs).sum(-1), rtol=0, atol=5e-5)
    prompt = list(lists[0][:8])
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert greedy(trainer, prompt, 12) == out[0, 8:].tolist()


def test_a_loss_that_is_not_finite_is_an_error(new_trainer):
    samples = random_samples(9, count=1)
    [batch] = batches_of(samples)
    batch.micro_batches[0].advantages[:] = float("nan")
    with pytest.raises(RuntimeError, match=r"step 1: the loss is nan"):
        new_trainer().step(batch)


def test_metrics_count_what_they_say(new_trainer):
    samples = random_samples(10, count=5)
    trainer = new_trainer(loss={"max_is_weight": 1.5})
    lists = [s.prompt_token_ids + s.rollout.token_ids for s in samples]
    pairs, ages, uncertain = [], [], []
    for s, *scores in zip(samples, *trainer.token_scores(lists)):
        completion = (each[len(s.prompt_token_ids) - 1 :] for each in scores)
        for keep, ours, entropy, theirs, version in zip(
            s.rollout.loss_mask, *completion, s.rollout.rollout_logprobs, s.rollout.policy_versions
        ):
            if keep:
                pairs.append(ours - theirs)
                ages.append(3 - version)
                uncertain.append(entropy)
    ratios = torch.tensor(pairs, dtype=torch.float64)
    rho = ratios.exp()
    [batch] = batches_of(samples)
    metrics = trainer.step(batch).metrics
    expected = {
        "loss_tokens": len(pairs),
        "entropy": sum(uncertain) / len(pairs),
        "mismatch_mean": ratios.abs().mean(),
        "mismatch_max": ratios.abs().max(),
        "kl_k3": (rho - 1 - ratios).mean(),
        "capped_share": (rho > 1.5).double().mean(),
        "is_weight_mean": rho.mean(),
        "is_weight_max": rho.max(),
        "ess": rho.sum() ** 2 / (len(pairs) * rho.square().sum()),
        "token_staleness_mean": sum(ages) / len(ages),
        "token_staleness_max": max(ages),
    }
    for age, name in enumerate(("0", "1", "2", "3_4")):
        chosen = torch.tensor([a == age for a in ages])
        expected[f"mismatch_staleness_{name}"] = ratios[chosen].abs().mean()
        expected[f"loss_tokens_staleness_{name}"] = chosen.sum()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name
    assert "mismatch_staleness_5_8" not in metrics
    assert 0 < expected["capped_share"] < 1


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("lr", [1e-4, 1e-12])
def test_the_share_of_elements_that_a_step_changes(new_trainer, sharded, lr):
    trainer = new_trainer(
        policy={"dtype": "bfloat16"},
        optimizer={"lr": lr, "warmup_steps": 0},
        megatron={"ddp": {"use_distributed_optimizer": sharded}},
    )
    for step in (1, 2):  # of each step alone
        before = weights(trainer)
        [batch] = batches_of(random_samples(step), step=step)
        found = trainer.step(batch).metrics["weights_changed"]
        after = weights(trainer)
        changed = sum(int((after[n] != before[n]).sum()) for n in before)
        assert found == changed / sum(p.numel() for p in before.values())
        assert 0.05 < found < 0.95 if lr == 1e-4 else found == 0


def test_a_pipeline_stage_without_experts_has_nothing_to_tell_of_them():
    """Megatron makes an optimizer for them all the same, without a buffer."""
    part = SimpleNamespace(
        is_stub_optimizer=False,
        buffers=[],
        data_parallel_group=SimpleNamespace(size=lambda: 2),
        _get_model_and_main_params_data_float16=lambda: ([], []),
        _copy_main_params_to_model_params=lambda: None,
    )
    changes = WeightChanges(part, torch.device("cpu"))
    part._copy_main_params_to_model_params()
    assert not changes.written.gathers and changes.counts().tolist() == [0, 0]


def test_changes_of_fp32_weights_which_are_written_in_place_are_not_counted(new_trainer):
    [batch] = batches_of(random_samples(1))
    assert "weights_changed" not in new_trainer().step(batch).metrics


def test_fused_adamw_differs_by_rounding(new_trainer, monkeypatch):
    """PyTorch's two forms of one step of AdamW on a CPU; on a GPU the fused one is used."""
    sections = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}}
    plain = new_trainer(**sections)
    monkeypatch.setattr("megatron_scalerl.trainer.optimizer.HAVE_GPU", True)
    fused = new_trainer(**sections)
    kinds = [
        {group["fused"] for part in t.optimizer.chained_optimizers for group in part.optimizer.param_groups}
        for t in (plain, fused)
    ]
    assert kinds == [{None}, {True}]
    for step in (1, 2, 3):
        [batch] = batches_of(random_samples(step), step=step)
        assert fused.step(batch).loss == pytest.approx(plain.step(batch).loss, rel=1e-6)
    theirs = weights(fused)
    for name, weight in weights(plain).items():
        # a step moves a weight by 1e-3; rounding of one of size 1 is 1.2e-7
        torch.testing.assert_close(theirs[name], weight, rtol=3e-7, atol=1e-6, msg=name)


@pytest.mark.parametrize("stages, expected", [(1, 3), (2, 4), (4, 4)])
def test_interleaved_stages_get_micro_batches_in_multiples_of_their_number(
    new_trainer, monkeypatch, stages, expected
):
    """Megatron refuses others (schedules.py); the schedule is not run, as it hangs over gloo."""
    trainer, [batch] = new_trainer(), batches_of(random_samples(1), micro_batch_tokens=64)
    [first, *_] = batch.micro_batches
    batch = Batch(step=1, micro_batches=(first,) * 3)
    monkeypatch.setattr(trainer, "chunks", [*trainer.chunks] * (2 if stages > 1 else 1))
    monkeypatch.setattr(trainer, "parallel", replace(trainer.parallel, pp_size=stages))
    monkeypatch.setattr(trainer, "_check", lambda *_, **__: None)
    given = []

    def schedule(micro_batches, loss, *, train):
        given.append((len(micro_batches), [m.token_weights.any() for m in micro_batches[3:]], train))
        raise EOFError

    monkeypatch.setattr(trainer, "_schedule", schedule)
    for work in (lambda: trainer.step(batch), lambda: trainer.token_scores([[1] * 40] * 3)):
        monkeypatch.setattr(trainer, "micro_batch_tokens", 64)
        with pytest.raises(EOFError):
            work()
    assert given == [(expected, [False] * (expected - 3), train) for train in (True, False)]


class Twice(ScaleRL):
    """Twice the recipe's loss, without a mark: it is not computed in the chunks of the logits."""

    def loss(self, inputs):
        whole = super().loss(inputs)
        return replace(whole, loss=2 * whole.loss)


def test_a_step_of_a_users_algorithm_has_its_loss_and_its_numbers(new_trainer):
    samples = random_samples(2, count=8)
    [batch] = batches_of(samples, micro_batch_tokens=64)
    names = ("scalerl", "rloo:RLOO", f"{__name__}:Twice")
    paper, rloo, twice = [new_trainer(algorithm=name).step(batch) for name in names]
    assert rloo.loss == paper.loss and rloo.grad_norm == paper.grad_norm
    assert twice.loss == pytest.approx(2 * paper.loss, rel=1e-6)
    tokens = [(sample.advantage > 0, sum(sample.rollout.loss_mask)) for sample in samples]
    share = sum(count for positive, count in tokens if positive) / sum(count for _, count in tokens)
    assert 0 < share < 1 and rloo.metrics["loss/positive_share"] == pytest.approx(share)
    assert rloo.metrics.keys() - paper.metrics.keys() == {"loss/positive_share"}


class Gap(ScaleRL):
    """The advantage of a token is its column."""

    columns = ("gap",)

    @separable
    def loss(self, inputs):
        assert inputs.staleness is not None and inputs.staleness.shape == inputs.advantages.shape
        return super().loss(replace(inputs, advantages=inputs.columns["gap"]))


@pytest.mark.parametrize("in_chunk", [True, False])
def test_a_column_reaches_the_loss_of_every_token(new_trainer, in_chunk):
    samples = random_samples(2, count=8)
    trainer = {"loss_in_chunk": in_chunk}
    [batch] = batches_of(samples, micro_batch_tokens=64)
    rank = plan_of([replace(each, advantage=7.0) for each in samples], micro_batch_tokens=64).ranks[0]
    order = plan_of(samples, micro_batch_tokens=64).numbers[0]
    arrays = [arrays_of(samples[i].rollout) for i in order]
    named = [
        replace(rollout, columns={"gap": np.full(len(rollout.token_ids), samples[i].advantage)})
        for i, rollout in zip(order, arrays)
    ]
    built = build(rank, named, pad_multiple=1, columns=("gap",))
    built = Batch(step=1, micro_batches=(*built.micro_batches, filler_micro_batch(2)))
    paper = new_trainer(trainer=trainer, **NO_CLIP).step(batch)
    by_column = new_trainer(trainer=trainer, algorithm=f"{__name__}:Gap", **NO_CLIP).step(built)
    assert by_column.loss == pytest.approx(paper.loss, rel=1e-6)
    assert by_column.grad_norm == pytest.approx(paper.grad_norm, rel=1e-6)
