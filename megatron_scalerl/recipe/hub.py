"""Resolves names on the Hugging Face hub that stand for paths: `org/name`, `org/name@revision`, `org/name/folder`.

A name becomes a folder of the local cache when a recipe is loaded, so that no other process asks the hub.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_scalerl.recipe.recipe import Recipe
from megatron_scalerl.recipe.sections import PromptsSection, TaskSection

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?P<folder>(/\w[\w.-]*)*)(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|gz|csv|parquet|arrow|ya?ml)")


def local_path(path: str, kind: Kind, *, download: bool = False) -> str:
    """Return the folder in the Hugging Face cache if `path` is a name on the hub; else, or if the name is not cached,
    `path` unchanged.

    download: fetch a name that is not cached, unless HF_HUB_OFFLINE is set. Raises ValueError, in one line, if the
    download fails.
    """
    name = _NAME.fullmatch(path)
    if name is None or Path(path).exists() or _FILE.fullmatch(path) or find_spec("huggingface_hub") is None:
        return path  # plans and forecasts need no huggingface_hub
    from huggingface_hub import constants, snapshot_download  # imported only for a missing path
    from huggingface_hub.errors import LocalEntryNotFoundError

    online = download and not constants.HF_HUB_OFFLINE
    try:
        folder = snapshot_download(
            name["repo"], repo_type=kind, revision=name["revision"], local_files_only=not online
        )
    except (OSError, ValueError) as error:
        # huggingface_hub raises LocalEntryNotFoundError also while online, if the hub cannot be reached
        if online and not isinstance(error, LocalEntryNotFoundError):
            raise ValueError(f"{path}: the download failed: {str(error).strip().splitlines()[0]}") from None
        # the name is not in the cache: a later check refuses the path, and tells the command for a download (`hint`)
        return path
    return folder + name["folder"]


def hint(path: str, kind: Kind) -> str:
    """The advice at the end of an error about a path that cannot be used: for a GGUF file, a pattern such as *.json,
    or a name on the hub; else empty."""
    if kind == "model" and (path.endswith(".gguf") or any(Path(path).glob("*.gguf"))):
        return "; convert weights in a GGUF file to a Hugging Face folder first: docs/checkpoints.md#gguf"
    if path.startswith("~") or any(sign in path for sign in "*?["):
        return "; ~ and patterns are not expanded: name one file, or a folder of files"
    name = _NAME.fullmatch(path)
    # a path whose first part is a folder of the working directory is a path with a mistake, not a name on the hub
    if name is None or _FILE.fullmatch(path) or Path(path.partition("/")[0]).exists():
        return ""
    # a policy's name is org/name, so a path with three parts, such as runs/tiny/policy, is not a name on the hub
    if kind == "model" and name["folder"]:
        return ""
    command = f"hf download {name['repo']}"
    if kind == "dataset":
        command += " --repo-type dataset"
    if name["revision"]:
        command += f" --revision {name['revision']}"
    return f"; the Hugging Face cache does not have it either: run {command}, or set download: true in the recipe"


def local_recipe(recipe: Recipe, *, download: bool = False) -> Recipe:
    """The recipe with `local_path` applied to the paths of policy, prompts, teachers and the KL section's policy."""

    def resolved(path: str | None, kind: Kind = "dataset") -> str | None:
        return path and local_path(path, kind, download=download)

    def files(section: PromptsSection | TaskSection) -> dict[str, str | None]:
        return {"path": resolved(section.path), "held_out_path": resolved(section.held_out_path)}

    tasks = recipe.prompts.tasks
    tasks = tasks and {name: task.model_copy(update=files(task)) for name, task in tasks.items()}
    algorithm = recipe.algorithm
    teachers = {
        name: teacher.model_copy(update={"path": resolved(teacher.path, "model")})
        for name, teacher in algorithm.teachers.items()
    }
    kl = algorithm.kl and algorithm.kl.model_copy(update={"to": resolved(algorithm.kl.to, "model")})
    return recipe.with_settings(
        policy={"path": resolved(recipe.policy.path, "model")},
        prompts={"tasks": tasks, **files(recipe.prompts)},
        algorithm={"teachers": teachers, "kl": kl},
    )
