"""Files that may be replaced while we run, such as certificates and tokens: whether they have changed."""

import os
from collections.abc import Iterable
from pathlib import Path


class WatchedFiles:
    """Compares size, time and inode: a file that is written anew, or renamed or linked into place, has changed."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: object = None

    def changed(self) -> bool:
        """Whether any file looks different from the last call, or is gone since then; True on the first call."""
        seen = [_look(path) for path in self._paths]
        if seen == self._seen:
            return False
        self._seen = seen
        return True


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
