"""The limit on open files is raised to the need of a run, or the run is refused in one line."""

import sys

import pytest
from launch.stand_ins import environment
from programs import ended
from recipe_files import small_recipe

from megatron_scalerl.launch.hosts import files_needed

SCRIPT = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
from megatron_scalerl.launch.hosts import allow_open_files
from megatron_scalerl.recipe import Recipe
recipe = Recipe.model_validate_json(sys.argv[2])
try:
    allow_open_files(recipe)
except ValueError as error:
    sys.exit(f"refused: {error}")
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
subprocess.run([sys.executable, "-c", child], check=True)
"""


@pytest.fixture
def recipe():
    """Four engines with the default 256 completions each."""
    return small_recipe(engine={"count": 4})


def limited(recipe, hard):
    """Run SCRIPT under a soft limit of 256 open files."""
    return ended(sys.executable, "-c", SCRIPT, hard, recipe.model_dump_json(), **environment())


@pytest.mark.parametrize("times", [1, 4])
def test_the_soft_limit_is_raised_for_the_children_too_and_beyond_the_need_if_allowed(recipe, times):
    allowed = times * files_needed(recipe)
    assert allowed > 2 * 4 * 256
    done = limited(recipe, allowed)
    assert (done.returncode, done.stdout.strip()) == (0, str(allowed)), done.stderr


def test_a_hard_limit_below_the_need_is_refused_in_one_line(recipe):
    done = limited(recipe, 1024)
    line = (
        "refused: open files: the hard limit of 1024 (ulimit -Hn) is too low: engine.count 4 x "
        f"rollouts.max_in_flight 256 take {files_needed(recipe)}; raise the limit or lower one"
    )
    assert (done.returncode, done.stderr.strip()) == (1, line)
