"""Which file system a path is on, from /proc/self/mounts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system. Produced by `mount_of`."""

    point: str
    """Where it is mounted; absolute."""
    kind: str
    """Its type: ext4, nfs4, lustre, fuse.NAME."""
    options: frozenset[str]
    """Options of the mount and of its superblock."""

    @property
    def local_locks(self) -> str:
        """The option with which the locks of this host are not seen by others; "" without one."""
        local = {"nolock", "localflock", "local_lock=flock", "local_lock=all"}
        return min(local & self.options, default="")


def mount_of(path: Path, table: str | None = None) -> Mount:
    """The file system of an existing path.

    table: as /proc/self/mounts, by default this process's. The last of several mounts at one point hides the others.
    """
    place = path.resolve()
    nearest = Mount(point="/", kind="unknown", options=frozenset())
    for line in (MOUNTS.read_text(encoding="utf8", errors="replace") if table is None else table).splitlines():
        _, point, kind, options = line.split(" ")[:4]  # the source may be empty
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        if place.is_relative_to(point) and Path(point).is_relative_to(nearest.point):
            nearest = Mount(point=point, kind=kind, options=frozenset(options.split(",")))
    return nearest
