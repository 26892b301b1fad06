"""Available memory of the machine or its container, and a check before work that needs much of it."""

from __future__ import annotations

import os
from pathlib import Path

# Memory that a partition needs besides its points, as a multiple of them: a sorted and scaled copy, the copy that
# processes share, and blocks of rows.
PARTITION_COPIES = 3


def check_memory(needed: int, work: str, advice: str, available: int | None = None) -> None:
    """Raise MemoryError if work needs more bytes than are available; do nothing where that is unknown."""
    available = available_memory() if available is None else available
    if available is not None and needed > available:
        sizes = f"about {needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are available"
        raise MemoryError(f"{work} needs {sizes}. {advice}")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the machine and the control groups (cgroup v2) leave free; None where the system does not say."""
    found = [_machine(root / "proc" / "meminfo"), *_control_groups(root)]
    known = [size for size in found if size is not None]
    return min(known) if known else None


def _machine(meminfo: Path) -> int | None:
    text = _read(meminfo)
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows and macOS
        return None


def _control_groups(root: Path) -> list[int]:
    """Free bytes of every limit on the way from the process's control group to the root of the hierarchy."""
    mount = root / "sys" / "fs" / "cgroup"
    own = next((line[3:] for line in _read(root / "proc" / "self" / "cgroup").splitlines() if line[:3] == "0::"), "")
    group = mount / own.strip("/")
    free = []
    for folder in [group, *group.parents]:
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():  # the file holds "max" where there is no limit
            free.append(max(0, int(limit) - int(used) + _file_cache(folder / "memory.stat")))
        if folder == mount:
            break
    return free


def _file_cache(stat: Path) -> int:
    """Bytes of cached files: they count as used, but the system drops them when a process needs memory."""
    fields = dict(line.split() for line in _read(stat).splitlines())
    return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))


def _read(path: Path) -> str:
    """The text of a file, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
