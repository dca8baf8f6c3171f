"""Folders for the code that ranks and engines compile.

Compilers write below MSRL_LOCAL, a folder of the Slurm job on the node's own disk: many processes that share one
cache on a network file system wait for the cache's locks.
"""

import contextlib
import functools
import logging
import os
from pathlib import Path

_warn = functools.cache(logging.getLogger(__name__).warning)
"""Log a warning, each text only once."""
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def cache_variables(name: str) -> dict[str, str]:
    """Environment variables that name a process's cache folders. name: engine-3, trainer-0."""
    local = os.environ.get("MSRL_LOCAL", "")
    if not local or not _is_private(Path(local)):
        return {}
    caches = {key: f"{local}/{name}/{folder}" for key, folder in CACHES.items()}
    return {key: folder for key, folder in caches.items() if key not in os.environ}


def _is_private(folder: Path) -> bool:
    """Make a folder, and return whether only this user may write to it and to the parent: code in the folder is
    executed."""
    private = False
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        states = [path.lstat() for path in (folder, folder.parent)]
        private = all(state.st_uid == os.getuid() and not state.st_mode & 0o022 for state in states)
    if not private:
        _warn(f"MSRL_LOCAL is not used for compiled code: other users can write to {folder} or its parent folder")
    return private
