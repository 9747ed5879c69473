"""The command line, as `pagewire` and as `python -m pagewire`. It begins with what takes longest: a worker."""

import sys

from pagewire import early_worker

_STARTS_NO_WORKER = {"-d", "--detach", "--help"}


def main() -> None:
    """Runs the command of this process's arguments."""
    # Behind options of access, as `pagewire --token T up`, the worker is started when its turn comes.
    if sys.argv[1:2] == ["up"] and _STARTS_NO_WORKER.isdisjoint(sys.argv):
        early_worker.started = early_worker.EarlyWorker()
    from pagewire.cli import app

    app()


if __name__ == "__main__":
    main()
