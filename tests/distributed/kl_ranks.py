"""What one rank of the tests of algorithm.kl does: steps of a trainer whose loss has a divergence."""

import trainer_ranks


def steps(jobs):
    """For each (name, policy path, layout, further sections): loss, gradient norm and metrics of three steps."""
    found = {}
    for name, path, layout, sections in jobs:
        trainer = trainer_ranks.trainer_of(trainer_ranks.recipe(path, layout, **sections))
        reports = [trainer_ranks._step(trainer, step) for step in (1, 2, 3)]
        found[name] = [(r.loss, float(r.grad_norm), dict(r.metrics)) for r in reports]
        trainer_ranks.release()
    return found
