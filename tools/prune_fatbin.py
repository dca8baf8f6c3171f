"""Zero the GPU code of other architectures in shared libraries, so that they compress to a part of their size.

    python tools/prune_fatbin.py ARCH LIBRARY [...]        ARCH: 90 keeps sm_90 and sm_90a; 100 those of Blackwell

The driver walks the headers of a fat binary and loads the entry for its chip; it never reads the payload of another.
Only bytes of such payloads become zero: headers, sizes and offsets stay. Where a container has no entry for ARCH, its
PTX of that or an older architecture is kept, which the driver can compile. Prints what each library holds, in MiB.
"""

import argparse
import mmap
import struct
import subprocess
from collections import Counter

from checkout import explained

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2


def section(path, name=".nv_fatbin"):
    """Offset and bytes of a section of an ELF file; (0, 0) without it."""
    for line in subprocess.check_output(["readelf", "-SW", path], text=True).splitlines():
        words = line.replace("[", " ").replace("]", " ").split()
        if len(words) > 6 and words[1] == name:
            return int(words[4], 16), int(words[5], 16)
    return 0, 0


def containers(data, start, size):
    """(kind, architecture, offset, bytes) of each payload, a list for each container. Raises ValueError."""
    at = start
    while at < start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:  # padding
            at += 8
            continue
        entry, end, found = at + header, at + header + length, []
        while entry < end:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            if not head or not payload:
                raise ValueError(f"expected a fat binary's entry at offset {entry:#x}, found none")
            found.append((kind, arch, entry + head, payload))
            entry += head + payload
        yield found
        at = end


def prune(path, arch):
    """Zero what a chip of this architecture never reads; bytes by what they are for."""
    held = Counter()
    start, size = section(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in containers(data, start, size):
            ours = any(kind == CUBIN and of == arch for kind, of, *_ in entries)
            for kind, of, place, payload in entries:
                held[f"{'ptx' if kind == PTX else 'sm'}_{of}"] += payload
                wanted = (kind == CUBIN and of == arch) if ours else (kind != CUBIN and of <= arch)
                if not wanted:
                    data[place : place + payload] = bytes(payload)
    return held


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", metavar="ARCH", type=int)
    parser.add_argument("libraries", metavar="LIBRARY", nargs="+")
    with explained():
        options = parser.parse_args()
        for library in options.libraries:
            table = prune(library, options.arch)
            print(
                f"{library}: {', '.join(f'{k} {v / 2**20:.1f}' for k, v in sorted(table.items())) or 'no GPU code'}"
            )
