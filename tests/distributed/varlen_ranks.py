"""What one rank does in the tests of packed rows as Transformer Engine gets them."""

import parity_ranks


def many(jobs):
    """`parity_ranks.many` with rows in Megatron's "thd" format and a reference in the place of TE's attention."""
    from varlen_reference import ReferenceVarlenProvider

    from megatron_scalerl.trainer import model
    from megatron_scalerl.trainer.layers import spec

    model.HAVE_TE, model.capability = True, lambda: (9, 0)
    spec.spec_provider = ReferenceVarlenProvider
    return parity_ranks.many(jobs)
