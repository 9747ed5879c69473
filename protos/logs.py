"""Log lines of all our processes. Imports only the standard library: the launcher logs like this, too."""

import json
import logging
import time
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def start(name: str, level: str, form: str) -> None:
    """Logs to standard error, one line per event; keyword facts are given as `extra={...}`.

    Args:
        name: stands in every line.
        level: the least severe one that is logged; a `LogLevel`.
        form: how lines look, a `LogFormat`: like logfmt, or a JSON object each.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(name) if form == "json" else _TextFormatter(name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "debug":  # gRPC's own lines are about its event loop, several a second
        logging.getLogger("grpc").setLevel(logging.INFO)


_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _TextFormatter(logging.Formatter):
    """`12:01:02.123 INFO  router     request finished request_id=r1 total_ms=12.5`.

    Nothing that a client sends can end a line or begin one: what is not plain is quoted, and tracebacks are indented.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = "".join(f" {name}={_plain(value)}" for name, value in vars(record).items() if name not in _PLAIN)
        event = record.getMessage()
        if not event.isprintable():
            event = json.dumps(event)
        level = record.levelname.replace("WARNING", "WARN")
        line = f"{clock}.{int(record.msecs):03d} {level:<5.5} {self._service:<9} {event}{facts}"
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            line += "".join(f"\n    {_printable(row)}" for row in traceback.splitlines())
        return line


def _plain(value: object) -> str:
    """A fact's value, quoted where it could be taken for something else."""
    text = str(value)
    ambiguous = isinstance(value, str) and any(character in text for character in ' "=')
    return json.dumps(text) if ambiguous or not text.isprintable() else text


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, with the facts as members."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname.lower(), "service": self._service}
        line |= {"event": record.getMessage()} | {k: v for k, v in vars(record).items() if k not in _PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
