"""Engines of a run on "other hosts", which are this one under other addresses, and what is left of them."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import psutil
from launch.stand_ins import gone_processes
from own_processes import own_processes

from megatron_scalerl.launch.control_folder import secret_file
from megatron_scalerl.launch.engines import Engines
from megatron_scalerl.launch.hosts import hosts_of
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.processes.secret_file import write_secret
from megatron_scalerl.recipe.file import dump_recipe, load_recipe

SECRET = "the secret of this run"
STAND_IN_HOST = Path(__file__).parent / "stand_in_host.py"


@contextlib.asynccontextmanager
async def engines_of(recipe, folder, record=lambda member: None, *, incarnation="local.0", start=True):
    """The engines of a run: engine-0 on host b, engine-1 on host c."""
    file = folder / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    attempts = folder / "attempts.jsonl"
    attempts.write_text(json.dumps({"run_id": "run", "incarnation": incarnation, "unix_time": 0.0}) + "\n")
    write_secret(secret_file(folder), SECRET)
    run_on = f"{sys.executable} {STAND_IN_HOST} {{host}}"
    hosts = hosts_of("a,b,c", slots=1, run_on=run_on, address="127.0.0.1")
    attempt = Attempt(run_id="run", incarnation=incarnation, folder=folder, recipe_file=file)
    placement = Placement.of(recipe, hosts)
    engines = Engines(recipe, placement=placement, hosts=hosts, attempt=attempt, secret=SECRET, record=record)
    try:
        if start:
            await engines.start()
        yield engines
    finally:
        await engines.stop()


def agents(folder):
    """The agents of this run, by name of their engine."""
    found = {}
    for process in own_processes(lambda process: process.environ().get("MSRL_LOGS") == f"{folder}/logs"):
        with contextlib.suppress(psutil.NoSuchProcess):
            *program, name = process.cmdline()
            if "agent" in " ".join(program[:3]):
                found[name] = process
    return found


def with_children(process):
    """A process and all below it."""
    return [process, *process.children(recursive=True)]


async def none_left(processes):
    """Wait until all of `processes` are gone."""
    assert await asyncio.to_thread(gone_processes, [process.pid for process in processes])


async def main(folder):
    """Serve engines until this process is killed, as a controller; prints `up` once all are."""
    async with engines_of(load_recipe(str(folder / "given.yaml")), folder) as engines:
        print("up", flush=True)
        await engines.watch()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
