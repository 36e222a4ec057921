"""Memory of the host that decoded pictures may take. Needs no torch: some are decoded before that is there."""

import os
from pathlib import Path

CGROUPS = (  # of a container, in both versions: folder, limit, what is used, and what of that are files
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
SHARE = 0.25  # of the memory that is free: the rest is the model's, and others'


def room_on_host() -> int:
    """Bytes that decoded pictures of a process may take."""
    return int(SHARE * free_host_memory()) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_host_memory() -> int:
    """Bytes that programs can still have, of the machine or of the container that this runs in."""
    free = []
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(1024 * int(line.split()[1]))
    for folder, limit_file, used_file, cache in CGROUPS:
        limit, used = (next(iter(_lines(f"{folder}/{name}")), "") for name in (limit_file, used_file))
        if limit.isdigit() and used.isdigit():
            # Files that were read and not looked at again go as soon as a program wants their memory.
            given_back = (line.split()[1] for line in _lines(f"{folder}/memory.stat") if line.startswith(f"{cache} "))
            free.append(int(limit) - int(used) + sum(map(int, given_back)))
    if not free and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(free, default=0))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split("\n")
    except OSError:
        return []
