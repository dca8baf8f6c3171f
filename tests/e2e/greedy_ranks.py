"""What a rank of its own does for the live-update test: Megatron's greedy tokens of a Hugging Face folder."""


def greedy_tokens(recipe_path, policy, prompts, count):
    """The `count` likeliest tokens after each prompt, by Megatron."""
    from policy_rows import greedy

    from megatron_scalerl.recipe.file import load_recipe
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer

    recipe = load_recipe(recipe_path, [f"policy.path={policy}"])
    trainer = make_trainer(recipe, init_parallel(recipe))
    return [greedy(trainer, prompt, count) for prompt in prompts]
