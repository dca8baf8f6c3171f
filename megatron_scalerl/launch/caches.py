"""Cache folders for the code that ranks and engines compile.

Compilers write to folders in MSRL_LOCAL, a folder of the Slurm job on the node's own disk. With one cache on a
network file system, many processes would wait for the cache's locks.
"""

import contextlib
import functools
import logging
import os
from pathlib import Path

_warn = functools.cache(logging.getLogger(__name__).warning)
"""Log a warning; a text that was logged before is not logged again."""
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def cache_variables(name: str) -> dict[str, str]:
    """Environment variables that name a process's cache folders. name: the process's name, such as engine-3."""
    local = os.environ.get("MSRL_LOCAL", "")
    if not local or not _is_private(Path(local)):
        return {}
    caches = {key: f"{local}/{name}/{folder}" for key, folder in CACHES.items()}
    return {key: folder for key, folder in caches.items() if key not in os.environ}


def _is_private(folder: Path) -> bool:
    """Make a folder. True if no other user may write to the folder or its parent and so change the code."""
    private = False
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        states = [path.lstat() for path in (folder, folder.parent)]
        private = all(state.st_uid == os.getuid() and not state.st_mode & 0o022 for state in states)
    if not private:
        _warn(f"MSRL_LOCAL is not used for compiled code: other users can write to {folder} or its parent folder")
    return private
