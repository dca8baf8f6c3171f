"""Write the recorded run of `megatron-scalerl watch --demo` from a finished run.

    python tools/record_demo.py [runs/quickstart_1] [--steps 1,10,20,...,100] [--out FILE.zip]

All records of the run, and of its store the batches of --steps, written anew by the journal. Of the policy only the
tokenizer.
"""

import asyncio
import tempfile
import zipfile
from pathlib import Path

import harness
from checkout import explained

OUT = Path(__file__).parent.parent / "megatron_scalerl" / "page" / "demo" / "run.zip"


def parser():
    """The options."""
    steps = ("1,10,20,30,40,50,60,70,80,90,100", "steps whose batches are kept, N,N,...")
    p = harness.options(__doc__, steps=steps, out=OUT)()
    p.add_argument("run", type=Path, metavar="RUN", nargs="?", default=Path("runs/quickstart_1"))
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take a second

with explained():
    from megatron_scalerl.recipe.file import read_run_recipe
    from megatron_scalerl.rollouts.history import read_batch, read_history
    from megatron_scalerl.rollouts.journal import Journal
    from megatron_scalerl.rollouts.store import read_block, segment_path
    from megatron_scalerl.types import BlockRef

RECORDS = ("recipe.yaml", "metrics.jsonl", "validation.jsonl", "validation_by_prompt.jsonl", "ledger.jsonl")
MORE_RECORDS = ("attempts.jsonl", "engines.jsonl", "end.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


async def copy_batches(run, history, steps, folder):
    """The batches of `steps` in a journal and store of their own."""
    journal = Journal(folder)
    for record in history.batches:
        if record.step in steps:
            for group in read_batch(run, history, record):
                assert isinstance(group.stored, BlockRef)
                block = read_block(segment_path(run / "rollouts", group.stored.segment), group.stored)
                await journal.finish(group, [bytes(each) for each in block.completions])
            await journal.batch(record)
    await journal.close()


def main(options):
    """Write the archive and say its size."""
    history = read_history(options.run)
    policy = Path(read_run_recipe(options.run)["policy"]["path"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(options.out, "w", zipfile.ZIP_LZMA) as archive:
        asyncio.run(copy_batches(options.run, history, {int(step) for step in options.steps.split(",")}, Path(name)))
        files = [(options.run / each, each) for each in (*RECORDS, *MORE_RECORDS) if (options.run / each).exists()]
        files += [(policy / each, f"policy/{each}") for each in TOKENIZER if (policy / each).exists()]
        files += [(path, str(path.relative_to(name))) for path in sorted(Path(name).rglob("*")) if path.is_file()]
        for path, place in files:
            archive.writestr(zipfile.ZipInfo(place), path.read_bytes(), zipfile.ZIP_LZMA)
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main(OPTIONS)
