"""The command line, as `pagewire` and as `python -m pagewire`. It begins with what takes longest: `pagewire.early`."""

import sys

from pagewire import early

_STARTS_NO_WORKER = {"-d", "--detach", "--help"}


def main() -> None:
    """Runs the command of this process's arguments."""
    command, *options = sys.argv[1:] or [""]
    if command == "up" and _STARTS_NO_WORKER.isdisjoint(options):
        early.worker = early.EarlyWorker()
    from pagewire.cli import app

    app()


if __name__ == "__main__":
    main()
