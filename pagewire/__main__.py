"""The command line, as `pagewire` and as `python -m pagewire`. It begins with what takes longest: a worker."""

import signal
import sys

from pagewire import early_worker

_STARTS_NO_WORKER = {"-d", "--detach", "--help"}


def main() -> None:
    """Runs the command of this process's arguments."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        # Ctrl-C among imports: nothing runs that is to end in order, and where they stood is of no interest.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Behind options of access, as `pagewire --token T up`, the worker is started when its turn comes.
    if sys.argv[1:2] == ["up"] and _STARTS_NO_WORKER.isdisjoint(sys.argv):
        early_worker.started = early_worker.EarlyWorker()
    from pagewire.cli import app

    signal.signal(signal.SIGINT, interrupt)
    app()


if __name__ == "__main__":
    main()
