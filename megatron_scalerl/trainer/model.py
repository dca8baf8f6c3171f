"""The policy: a GPTModel on packed rows whose last stage returns token log-probabilities and entropies."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_scalerl.checkpoints import safe_megatron
from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.checkpoints.hf_folder import family_of_folder
from megatron_scalerl.distributed.device import HAVE_TE, capability, gpu_memory
from megatron_scalerl.distributed.fused_attention import why_unfused
from megatron_scalerl.distributed.parallel import Parallel, unwrap, virtual_pipeline_size
from megatron_scalerl.logits import token_logprobs, token_loss
from megatron_scalerl.logits.choice import LARGE_GPU, workspace_mb
from megatron_scalerl.logits.chunk_loss import ChunkLoss
from megatron_scalerl.logits.divergence import Direction, SecondPolicy
from megatron_scalerl.logits.projection import Entropy
from megatron_scalerl.models.adapters import adapter_family, is_adapter
from megatron_scalerl.models.family import Family, padded_vocab_size
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.layers import routing
from megatron_scalerl.trainer.layers.context import share_of
from megatron_scalerl.trainer.layers.lora import fill_adapters, without_adapters
from megatron_scalerl.trainer.layers.packing import PackedRow, Plan, packed_row
from megatron_scalerl.trainer.layers.spec import block_submodules
from megatron_scalerl.trainer.options import ModelOptions, ddp_config, model_options
from megatron_scalerl.weights.source import load_hf


class PolicyModel(GPTModel):
    """The layers of the policy on one pipeline stage; the last stage also computes log-probabilities and the loss."""

    def __init__(
        self,
        options: ModelOptions,
        family: Family,
        *,
        recipe: Recipe,
        parallel: Parallel,
        vp_stage: int | None = None,
    ):
        chunks = virtual_pipeline_size() or 1
        super().__init__(
            config=options.config,
            transformer_layer_spec=block_submodules(
                options.config,
                family,
                pp_rank=parallel.pp_rank,
                vp_stage=vp_stage,
                tp_group=parallel.groups.tp,
                lora=recipe.policy.lora,
            ),
            vocab_size=padded_vocab_size(family.vocab_size, parallel.tp_size),
            pre_process=parallel.pp_rank == 0 and vp_stage in (None, 0),
            post_process=parallel.is_last_stage and vp_stage in (None, chunks - 1),
            position_embedding_type="rope",
            parallel_output=True,
            vp_stage=vp_stage,
            **options.gpt,
        )
        self.family = family
        self.adapters: Family | None = None
        """The weight map of the adapters, which are then the only trained parameters; None without policy.lora."""
        if lora := recipe.policy.lora:
            self.adapters = adapter_family(family, rank=lora.rank, targets=lora.targets)
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        self.logits = recipe.policy.logits
        self.projection: dict[str, Any] = dict(
            group=parallel.groups.tp,
            logits=recipe.policy.logits,
            vocab_size=family.vocab_size,
            grad_logits=recipe.trainer.logit_gradient,
            sequence_parallel=options.config.sequence_parallel,
            workspace_mb=workspace_mb(
                recipe.trainer.logit_workspace_mb,
                large_gpu=gpu_memory() >= LARGE_GPU,
                shared=recipe.engine.colocate,
            ),
            # The last stage runs the backward pass directly after the forward pass, as `keep_logits` expects.
            keep_logits=True,
            backend=recipe.trainer.logit_backend,
        )
        if self.post_process:
            # GPTModel's own head would hold the logits of all tokens, [N, vocab], in memory at once.
            self.output_layer.forward = self._use_head
        self.second: tuple[PolicyModel, ...] = ()
        """The frozen policy of algorithm.kl. If empty, this policy without its adapters is used.

        A tuple keeps torch from registering the frozen policy as a submodule."""
        self.parallel = parallel
        self.inv_freq = family.inv_freq.to(parallel.device)
        routing.install(self.decoder)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        plan: Plan,
        temperature: float = 1.0,
        entropy: Entropy = "metric",
        expert_choices: Tensor | None = None,
        loss: ChunkLoss | None = None,
        kl_weights: Tensor | None = None,
        kl_direction: Direction = "reverse",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities of `targets` and entropies, [2, N] fp32, nats, on the last stage.

        tokens and targets [N]; `plan` is the result of the method `plan` for the row, on this device. Row 0 of the
        result: the log-probability of each target given the sequence up to the target; row 1: the entropy. Off the
        plan's loss mask both rows are 0. With `loss` (see `logits.api.token_loss`) the result is the loss and both
        rows, without gradient. kl_weights [N] are the tokens' weights in the divergence from the frozen policy
        (`second`). The weighted divergence is added to the loss, and row 2 of the result has the divergences.
        expert_choices [N, L, K] are the engine's (`layers.routing`); None: routers choose by themselves. Earlier
        stages return hidden states.

        All ranks of a tensor-, context- or pipeline-parallel group get the same arguments. With context parallelism
        each rank computes a share of the row, and returns the values of all tokens and the loss of the share.
        Nothing is read back from the device: the caller has checked the targets (`trainer.agreement`).
        """
        share = plan.share
        second = None
        if kl_weights is not None:
            second = self._second_policy(plan, tokens, share.of_row(kl_weights), kl_direction)
        hidden = self.hidden_states(plan, tokens, expert_choices)
        if not self.post_process:
            return hidden
        assert targets.shape == (share.length,)
        options = dict(
            self.projection,
            temperature=temperature,
            entropy=entropy,
            places=plan.places,
            targets=share.of_row(targets),
            trusted=True,
        )
        if loss is None:
            pair = self.output_layer(partial(token_logprobs, hidden[:, 0], **options))
            return share.whole_row(torch.stack(pair, dim=1)).t()
        if share.places is not None:
            loss = partial(_loss_of_row, loss, share.places)
        total, *pair = self.output_layer(partial(token_loss, hidden[:, 0], loss=loss, second=second, **options))
        return total, share.whole_row(torch.stack(pair, dim=1)).t()

    @torch.no_grad()
    def _second_policy(self, plan: Plan, tokens: Tensor, weights: Tensor, direction: Direction) -> SecondPolicy:
        model = self
        if self.second:
            [model] = self.second
        with without_adapters(model):
            hidden = model.hidden_states(plan, tokens)
        head = model._use_head(lambda weight: weight)
        return SecondPolicy(hidden=hidden[:, 0], weight=head, token_weights=weights, direction=direction)

    def plan(self, starts: list[int], position_ids: Tensor, loss_mask: Tensor | None) -> Plan:
        """How this rank computes a row. All tensors are in host memory.

        `starts` are the S+1 numbers of cu_seqlens; position_ids and loss_mask [N]; loss_mask None: all tokens count.
        """
        share = share_of(
            starts,
            rank=self.parallel.cp_rank,
            size=self.parallel.cp_size,
            group=self.parallel.groups.cp,
            divisor=row_divisor(self.config),
        )
        if share.position_ids is not None:
            position_ids = share.position_ids
        chunk = self.family.attention_chunk_size
        packed = packed_row(share.starts, position_ids, chunk=chunk, fused=HAVE_TE, share=share)
        # Without a loss mask every token of the row has loss, but tokens that pad the share have none.
        if loss_mask is None and share.places is not None:
            loss_mask = torch.ones(share.length, dtype=torch.bool)
        places = None
        if loss_mask is not None:
            places = share.of_row(loss_mask).nonzero()[:, 0]
        return Plan(share=share, packed=packed, places=places)

    def hidden_states(self, plan: Plan, tokens: Tensor, expert_choices: Tensor | None = None) -> Tensor:
        """[n, 1, H] states of this rank's tokens after this stage's layers; tokens [N], expert_choices [N, L, K].

        Under sequence parallelism n is further split over the tensor-parallel ranks.
        """
        row = plan.packed
        assert row.position_ids is not None
        if expert_choices is not None:
            row.expert_choices = plan.share.of_row(expert_choices, fill=routing.UNKNOWN)
            # Under sequence parallelism routers see the tokens of this tensor-parallel rank alone.
            if self.config.sequence_parallel:
                row.expert_choices = row.expert_choices.chunk(self.parallel.tp_size)[self.parallel.tp_rank]
        embedded = None
        if self.pre_process:
            tokens = plan.share.of_row(tokens)[None]
            embedded = self.embedding(input_ids=tokens, position_ids=row.position_ids[None])
            # Megatron's recomputation computes no gradients of the first adapters unless the embedding requires one.
            if self.adapters is not None:
                embedded.requires_grad_()
        angles: Tensor | None = self._rotary_angles(row)
        # Latent attention takes its angles from the row (`layers.latent`).
        if self.config.multi_latent_attention:
            row.angles = angles
            angles = None
        return self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=row,
        )

    def _set_attention_backend(self) -> None:
        """Makes attention without a fused kernel an error: Transformer Engine's fallback keeps all scores of a row.

        Megatron would set NVTE_UNFUSED_ATTN to 1, and would refuse an environment where the variable is 0.
        """
        if self.config.attention_backend == AttnBackend.auto:
            os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
        else:
            super()._set_attention_backend()

    def _use_head(self, project: Callable[..., Any]) -> Any:
        """Replacement of the output layer's forward, which calls `project` with the head's weight.

        A call of the layer runs Megatron's hooks, which wait for the weights under overlap_param_gather.
        """
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return project(weight=weight)

    def _rotary_angles(self, row: PackedRow) -> Tensor:
        """Rotary angles [n, 1, 1, d] for each token. "thd" rows get a table [longest, 1, 1, d] by position, except in
        latent attention."""
        frequencies = self.inv_freq
        if row.qkv_format == "thd" and not self.config.multi_latent_attention:
            positions = torch.arange(row.longest, device=frequencies.device)
        else:
            assert row.position_ids is not None
            positions = row.position_ids
        half = positions.float()[:, None] * frequencies
        # Each angle rotates a pair of elements and occurs twice: side by side if interleaved, else half a head apart.
        pairs = half.repeat(1, 2)
        if self.config.rotary_interleaved:
            pairs = torch.repeat_interleave(half, 2, dim=-1)
        return pairs[:, None, None, :]


def row_divisor(config: Any) -> int:
    """A share has a multiple of this many tokens: the tensor-parallel size under sequence parallelism, else 1."""
    if config.sequence_parallel:
        return config.tensor_model_parallel_size
    return 1


def _loss_of_row(loss: ChunkLoss, row_places: Tensor, logprobs: Tensor, entropies: Tensor, places: Tensor) -> Tensor:
    """Call `loss` with positions in the whole row instead of `places`, which are positions in a rank's share."""
    return loss(logprobs, entropies, row_places[places])


def build_policy(
    hf_path: str | Path, recipe: Recipe, parallel: Parallel, *, load_weights: bool = True
) -> list[torch.nn.Module]:
    """Model chunks of this pipeline stage for Megatron's schedules, with the weights of `hf_path`.

    If the recipe has policy.megatron_path, weights are loaded from there. Each chunk is DistributedDataParallel(
    Float16Module(PolicyModel)) in bf16 and DistributedDataParallel(PolicyModel) in fp32. Raises ValueError for
    options that Megatron or the policy's layers refuse, and for weights of another policy.
    """
    family = family_of_folder(hf_path)
    options = model_options(family, recipe, parallel)
    if HAVE_TE and find_spec("flash_attn") is None and os.environ.get("NVTE_UNFUSED_ATTN") != "1":
        _check_attention(options.config, recipe)
    if recipe.rollouts.routing_replay:
        routing.check_replay(options.config, pipeline_size=parallel.pp_size)
    stages: list[int | None] = list(range(virtual_pipeline_size() or 0)) or [None]
    models = [
        PolicyModel(options, family, recipe=recipe, parallel=parallel, vp_stage=stage).to(parallel.device)
        for stage in stages
    ]
    config = options.config
    ddp = ddp_config(recipe)
    wrapped: list[torch.nn.Module] = list(models)
    if config.bf16:
        wrapped = [Float16Module(config, model) for model in models]
    # The wrapper has cast the biases of routers to bf16. They have to be fp32 before weights are loaded.
    for model in models:
        routing.freeze_biases(model.decoder)
    if load_weights and recipe.policy.megatron_path:
        load_megatron(models, recipe.policy.megatron_path)
    elif load_weights:
        load_hf(models, family, hf_path, parallel)
    section = recipe.algorithm.kl
    if section is not None and section.to != "base":
        for model in models:
            model.second = (frozen_policy(section.to, recipe, parallel),)
    if models[0].adapters is not None:
        fill_adapters(models, models[0].adapters, recipe, parallel)
    chunks: list[torch.nn.Module] = [
        # Buckets help only the first chunk, because reductions of later chunks overlap with compute anyway.
        DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0)
        for index, module in enumerate(wrapped)
    ]
    if HAVE_TE and recipe.policy.lora is None and recipe.megatron.model.get("gradient_accumulation_fusion", True):
        accumulate_in_linears(chunks)
    _sync_functions(config, ddp, chunks)
    return chunks


def _check_attention(config: Any, recipe: Recipe) -> None:
    """Raises ValueError where Transformer Engine would compute attention without a fused kernel."""
    reason = why_unfused(
        capability(),
        deterministic=recipe.trainer.deterministic,
        heads=config.num_attention_heads / config.tensor_model_parallel_size,
        longest=recipe.engine.vllm.get("max_model_len", 0),
    )
    if reason:
        raise ValueError(reason)


def frozen_policy(hf_path: str, recipe: Recipe, parallel: Parallel) -> PolicyModel:
    """A policy that is never trained, in the recipe's data type.

    `plan.settings` has checked that the policy in `hf_path` has the vocabulary of the trained policy.
    """
    family = family_of_folder(hf_path)
    recipe = recipe.with_settings(policy={"lora": None})
    options = model_options(family, recipe, parallel)
    model = PolicyModel(options, family, recipe=recipe, parallel=parallel).to(parallel.device)
    if options.config.bf16:
        # The wrapper is not kept: its constructor casts `model` in place.
        Float16Module(options.config, model)
    routing.freeze_biases(model.decoder)
    load_hf([model], family, hf_path, parallel)
    return model.requires_grad_(False).eval()


def accumulate_in_linears(chunks: Sequence[torch.nn.Module]) -> None:
    """Makes Transformer Engine's linear layers add weight gradients to main_grad, which DDP has made.

    Megatron-LM does so by default. The option is set here and not in the configuration: Megatron's output layer,
    whose forward is ours, would refuse the option without apex (tensor_parallel/layers.py:1070). Layers of
    Transformer Engine read the attribute in every forward pass and tell DDP (module/linear.py:2540, 1701 of 2.20.2).
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def _sync_functions(config: Any, ddp: Any, chunks: list[Any]) -> None:
    """Tells Megatron's schedules how to defer gradient reduction to the last micro-batch."""
    if not ddp.overlap_grad_reduce:
        return
    functions = [chunk.no_sync for chunk in chunks]
    # Megatron's interleaved schedule takes a list, every other schedule a function.
    config.no_sync_func = functions
    if len(functions) == 1:
        config.no_sync_func = functions[0]


def load_megatron(models: Sequence[Any], path: str | Path) -> None:
    """Load this rank's unwrapped model chunks from a checkpoint that `convert` wrote. Collective.

    Parameters are cast to the model's type; rows that pad the vocabulary become 0. The only other data read are
    modules' extra states, which must be empty. Raises ValueError for a folder that is not a complete checkpoint, or
    not of this policy, and for parts that `safe_megatron` refuses.
    """
    path = Path(path)
    if (path / COMMIT).is_file() or not path.is_dir():
        read_commit(path)
    load_chunks(models, safe_megatron.load(sharded_models(models), path, common=False))


def load_chunks(models: Sequence[Any], state: Mapping[str, Any]) -> None:
    """Load `state`, in the form of `sharded_models`, into model chunks.

    For a policy with adapters, `state` may lack parameters: the adapters, or all weights except adapters.
    """
    for key, model in keyed(models).items():
        model.load_state_dict(state[key], strict=unwrap(model).adapters is None)


def sharded_models(models: Sequence[Any], *, adapters: bool = False) -> dict[str, Any]:
    """Key of `keyed` -> the chunk's sharded state: the adapters alone if `adapters`, else all except adapters."""
    state = {}
    for key, model in keyed(models).items():
        items = model.sharded_state_dict().items()
        state[key] = {name: part for name, part in items if is_adapter(name) == adapters}
    return state


def keyed(models: Sequence[Any]) -> dict[str, Any]:
    """Model chunks by Megatron's keys in checkpoints: "model" for one chunk, else "model0", "model1" and so on."""
    if len(models) == 1:
        return {"model": models[0]}
    return {f"model{i}": model for i, model in enumerate(models)}
