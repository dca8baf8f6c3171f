"""The run that `watch --demo` shows: the records of a quickstart, with the completions of some steps."""

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from megatron_scalerl.recipe.file import read_run_recipe

RECORDED = Path(__file__).parent / "demo" / "run.zip"


@contextmanager
def recorded_run() -> Iterator[Path]:
    """Unpack the run into a temporary folder, deleted at the end of the block. Raises OSError if this fails."""
    with tempfile.TemporaryDirectory(prefix="megatron-scalerl-demo-") as name:
        run = Path(name) / "run"
        with zipfile.ZipFile(RECORDED) as archive:
            archive.extractall(run)
        recipe = read_run_recipe(run)
        recipe["policy"] |= {"path": str(run / "policy")}
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf8")
        yield run
