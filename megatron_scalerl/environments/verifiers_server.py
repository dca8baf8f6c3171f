"""The program that `environments.verifiers` runs in the virtual environment of the library verifiers.

    verifiers_server.py check NAME            installs the packages of the environment's harness (the library's
                                              agent program); exits with a line on stderr if this fails
    verifiers_server.py rows NAME             prints a row for each task, as JSON lines
    verifiers_server.py serve NAME ADDRESS    serves the environment

The program does not import megatron_scalerl, which the library's virtual environment does not have.
"""

import asyncio
import json
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any


def tables(name: str) -> dict[str, Any]:
    """The library's settings, with tables env and client: from the TOML file `name`, or for the taskset `name`."""
    if name.endswith(".toml"):
        return tomllib.loads(Path(name).read_text(encoding="utf8"))
    return {"env": {"taskset": {"id": name}}}


def configured(name: str) -> tuple[Any, Any, Any]:
    """The library's configurations (environment, harness, runtime). The default runtime is a process on this host.

    Exits with a line on stderr if the settings cannot be used, or if the harness would execute the policy's text on
    this host.
    """
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import harness_class, resolve_env_config

    try:
        config = resolve_env_config(tables(name)["env"])
    except ValueError as problem:
        # The exit message has to be one line.
        sys.exit(" ".join(str(problem).split()))
    harnesses = config.agent_harnesses()
    if len(harnesses) != 1 or config.id == "best-of-n":
        sys.exit(
            f"env.id {config.id!r} has several agents or attempts in an episode, and training needs a "
            "single agent: leave env.id out, or take an environment with one agent"
        )
    [(agent, harness)] = harnesses.items()
    settings = getattr(config, agent)
    if "runtime" not in settings.model_fields_set:
        if harness_class(harness.id).EXECUTES_CODE:
            sys.exit(
                f"the harness {harness.id!r} would execute the policy's code on this host; set env.{agent}.runtime "
                'in a TOML file, or a harness without tools, {id = "null"}'
            )
        settings.runtime = SubprocessConfig()
    return config, harness, settings.runtime


def check(name: str) -> None:
    """Install the harness's packages before the first episode. Exits with a line on stderr if something fails."""
    from verifiers.v1.runtimes import provision_runtime
    from verifiers.v1.utils.loaders import load_harness

    _, harness, settings = configured(name)

    async def install() -> None:
        async with provision_runtime(settings) as runtime:
            await load_harness(harness).setup(runtime)

    try:
        if settings.type == "subprocess":
            asyncio.run(install())
    except RuntimeError as problem:
        sys.exit(
            f"the harness {harness.id!r} cannot install its packages with uv: {' '.join(str(problem).split())}; if "
            "the network needs variables such as HTTPS_PROXY, name the variables in environment.variables"
        )


def rows(name: str) -> None:
    """Print the tasks as rows of a prompts file. A row's answer is the task's key: the taskset has the answers."""
    from verifiers.v1.utils.loaders import load_taskset

    # With the default action of SIGPIPE, a pipe into `head` ends the program without an error.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    config, _, _ = configured(name)
    for task in load_taskset(config.taskset):
        row = {"prompt": task.data.prompt_text or task.key, "answer": task.key}
        print(json.dumps({**row, "task_data": task.data.model_dump(mode="json")}))


def serve(name: str, address: str) -> None:
    """Serve runs of the environment until the process is killed."""
    from verifiers.v1.serve import EnvServer

    config, _, _ = configured(name)
    asyncio.run(EnvServer(config, address).run())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
