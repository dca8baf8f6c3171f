"""Digests by which nodes are compared: of the code that is imported here, of the recipe with all its defaults, and of
the policy's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import megatron_scalerl
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import dump_recipe

PACKAGE = Path(megatron_scalerl.__file__).parent
_CHARACTERS = 16


def code_digest(package: Path = PACKAGE) -> str:
    """SHA-256 of all files of the package with their names, without compiled ones; 16 hexadecimal digits.

    Raises OSError.
    """
    total = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
    for name in sorted(files):
        if "__pycache__" not in name and not name.endswith(".pyc"):
            content = hashlib.sha256(files[name].read_bytes()).hexdigest()
            total.update(f"{len(name)} {name} {content}\n".encode())
    return total.hexdigest()[:_CHARACTERS]


def names_digest(folder: Path) -> str:
    """SHA-256 of the names and sizes of all files of a folder; 16 hexadecimal digits, "" if there is no folder.

    Copies of a policy on the nodes' own disks are compared by it: reading the weights would take minutes. Raises
    OSError.
    """
    if not folder.is_dir():
        return ""
    files = sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in folder.rglob("*"))
    return hashlib.sha256(repr(files).encode()).hexdigest()[:_CHARACTERS]


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of the resolved recipe; 16 hexadecimal digits."""
    return hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()[:_CHARACTERS]
