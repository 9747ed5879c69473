"""The command line, as `pagewire` and as `python -m pagewire`. It first starts what takes longest: a worker."""

import os
import signal
import sys

from pagewire import early_worker

_STARTS_NO_WORKER = {"-d", "--detach", "--help"}


def main() -> None:
    """Runs the command that this process's arguments name."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        # Ctrl-C during the imports: nothing runs that needs an orderly end, and a traceback would be of no interest.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # gRPC's own messages, such as one for each failed handshake, would only stand before what we say about it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # After access options, as in `pagewire --token T up`, the worker is started only when its turn comes.
    if sys.argv[1:2] == ["up"] and _STARTS_NO_WORKER.isdisjoint(sys.argv):
        early_worker.started = early_worker.EarlyWorker()
    from pagewire.cli import app

    signal.signal(signal.SIGINT, interrupt)
    app()


if __name__ == "__main__":
    main()
