"""Which file system a path is on, from /proc/self/mountinfo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")


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


def mount_of(path: Path, table: str | None = None) -> Mount | None:
    """The file system of an existing path; None if the table does not have it.

    table: contents of mountinfo, by default this process's. The last of several mounts at one point hides the others.
    """
    place = path.resolve()
    lines = (MOUNTINFO.read_text(encoding="utf8", errors="replace") if table is None else table).splitlines()
    found = [mount for mount in map(_parsed, lines) if mount and place.is_relative_to(mount.point)]
    return max(reversed(found), key=lambda mount: len(Path(mount.point).parts), default=None)


def _parsed(line: str) -> Mount | None:
    """Fields as in proc(5): ID parent device root POINT OPTIONS tags... - KIND source SUPER_OPTIONS."""
    before, separator, after = line.partition(" - ")
    first, last = before.split(), after.split()
    if not separator or len(first) < 6 or not last:
        return None
    options = first[5].split(",") + (last[2].split(",") if len(last) > 2 else [])
    return Mount(point=_unescaped(first[4]), kind=last[0], options=frozenset(options))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
