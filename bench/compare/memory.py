"""Peak memory of several processes, with what they share counted once."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from pagewire.processes import peak_resident_bytes, with_descendants

# The line that begins a mapping in /proc/PID/smaps: addresses, rights, offset, device and inode; 0 is no file.
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ (\S+ [0-9]+)")


def peak_memory_bytes(pids: Iterable[int]) -> int:
    """The greatest memory of these processes and their descendants since their start.

    Their greatest resident sizes (VmHWM) added up, less what several of them share now, so that nothing has to watch a
    process while it is measured. Of a file's pages, what is taken off is all but the share of the process that has the
    most, whoever else maps the file; of memory from before a fork, what a proportional set size leaves to the others.
    """
    pids = list(pids)
    files: defaultdict[str, list[int]] = defaultdict(list)
    inherited = 0
    for pid in with_descendants(pids):
        inherited += _inherited_bytes(pid)
        for file, size in _file_bytes(pid).items():
            files[file].append(size)
    return peak_resident_bytes(pids) - inherited - sum(sum(sizes) - max(sizes) for sizes in files.values())


def _inherited_bytes(pid: int) -> int:
    """Anonymous memory that a process shares with one that it forked; 0 where the kernel does not tell."""
    sizes = dict(map(_size, _lines(pid, "smaps_rollup")[1:]))
    return sizes["Anonymous"] - sizes["Pss_Anon"] if "Pss_Anon" in sizes else 0


def _file_bytes(pid: int) -> Mapping[str, int]:
    """Bytes of each file that a process has in memory unchanged; shared memory without a name counts as a file."""
    files: defaultdict[str, int] = defaultdict(int)
    file = ""
    for line in _lines(pid, "smaps"):
        if mapping := _MAPPING.match(line):
            file = mapping[1]
        elif not file.endswith(" 0"):
            name, size = _size(line)
            files[file] += size if name == "Rss" else -size if name == "Anonymous" else 0
    return files


def _size(line: str) -> tuple[str, int]:
    """Name and bytes of a line such as `Rss:  8 kB`; 0 bytes for a line of another kind."""
    name, _, rest = line.partition(":")
    return name, int(rest.split()[0]) << 10 if rest.endswith("kB") else 0


def _lines(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return []
