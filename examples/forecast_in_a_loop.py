"""A forecast of the run's end after every validation, in a training loop of your own: go on, or stop?

    python examples/forecast_in_a_loop.py

It needs no Megatron and no torch: the rows of validations so far are all. Here they are replayed from a recorded run
(megatron_scalerl/fit/data/tiny, held back from everything that the forecast learned).
"""

from megatron_scalerl.fit.outlook import outlook, run_fit
from megatron_scalerl.fit.tiny_runs import tiny_runs

RUN = "chain_lr2e-4_g8"


def validations():
    """The rows that your loop would append, one after each validation."""
    [run] = [run for run in tiny_runs() if run.name == RUN]
    for number, step in enumerate(run.step):
        yield {
            "step": int(step),
            "compute": float(run.compute[number]),  # any unit: what the run has used until here
            "pass_rate": float(run.pass_rate[number]),  # mean over the same held-out prompts each time
            "prompts": run.prompts,
            "generations": int(run.generations[number]),  # both sizes: the noise of this point
        }


def main() -> None:
    rows, steps = [], max(row["step"] for row in validations())
    for row in validations():
        rows.append(row)
        made = outlook(rows, steps=steps)  # None before there are four validations after step 0, and at the end
        if made is None:
            continue
        verdict = made.verdict
        if row["step"] % 20 == 0:
            print(f"step {row['step']:3d}  measured {row['pass_rate']:.3f}  forecast {made.line()}")
        if verdict == "stop":
            break
    fit = run_fit(rows, steps=steps).result
    low, high = fit.intervals["asymptote"]
    print(f"{verdict} at step {rows[-1]['step']}: ceiling A {fit.asymptote:.3f} [{low:.3f}, {high:.3f}]")
    *_, last = validations()
    print(f"what came at step {last['step']}: {last['pass_rate']:.3f}")


if __name__ == "__main__":
    main()
