"""A forecast of the run's end after every validation, in a training loop of your own: go on, or stop?

    python examples/forecast_in_a_loop.py

It needs no Megatron and no torch: the rows of validations so far are all. Here they are replayed from a recorded run
of examples/curves/tiny, held back from everything that the forecast learned.
"""

import json
from pathlib import Path

from megatron_scalerl.fit.outlook import outlook, run_fit

RUN = Path("examples/curves/tiny/chain_lr2e-4_g8.json")


def validations():
    """The rows that your loop would append, one after each validation."""
    run = json.loads(RUN.read_text())
    recorded = run["validations"]
    for number, step in enumerate(recorded["step"]):
        yield {
            "step": step,
            "compute": recorded["compute"][number],  # any unit: what the run has used until here
            "pass_rate": recorded["pass_rate"][number],  # mean over the same held-out prompts each time
            "prompts": run["prompts"],
            "generations": recorded["generations"][number],  # both sizes: the noise of this point
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
