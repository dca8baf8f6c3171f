"""What workers of an engine need of a policy's tensors, without an engine."""

from megatron_scalerl.weights.plan import Part, WeightPlan, all_of


def whole_plan(manifest):
    """The plan of a single sender, which has all tensors as a whole, for workers that need all tensors as a whole."""
    needs = all_of(manifest)
    parts = tuple(Part(number, 0, 0, ranges) for number, [ranges] in enumerate(needs))
    return WeightPlan(parameters=manifest, senders=1, needs=(needs,), parts=parts)


def needs_of_worker(manifest, worker, workers):
    """Of an engine with tensor parallelism: halves of rows or columns, cut where no rank of the trainer ends."""

    def half(ranges, number):
        axis = number % len(ranges) if ranges else 0
        if workers == 1 or not ranges or ranges[axis][1] < 2:
            return ranges
        cut = ranges[axis][1] // 2 - (ranges[axis][1] > 5)
        part = ((0, cut), (cut, ranges[axis][1]))[worker]
        return (*ranges[:axis], part, *ranges[axis + 1 :])

    return tuple((half(ranges, n),) for n, [ranges] in enumerate(all_of(manifest)))
