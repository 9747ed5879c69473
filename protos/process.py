"""What our processes do alike at their start and end: settings, logs, event loop, signals."""

import argparse
import asyncio
import gc
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NoReturn, Self

import uvloop
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from protos import pollers  # what follows imports grpc
from protos.errors import CannotListen, CannotTrace

# Whose settings may stand in one environment; CLIENT stands for the command line's.
_SERVICES = ("ROUTER", "SCHEDULER", "WORKER", "CLIENT")
_ADDRESSES = {
    "metrics_listen": (r".+:\d+", "127.0.0.1:9464"),
    "otlp_endpoint": (r"https?://.+", "http://127.0.0.1:4317"),
}


class Settings(BaseSettings):
    """The base of each service's settings: flags, then `PAGEWIRE_<SERVICE>_*`, then defaults; unknown ones fail."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True, cli_avoid_json=True
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line logged")
    log_format: Literal["text", "json"] = Field("text", description="logfmt-like text, or a JSON object per line")
    log_name: str = Field(
        "", pattern=r"^[\w.-]*$", description="what signs log lines (default: the kind of service); tells several apart"
    )
    metrics_listen: str = Field("", description='address that Prometheus scrapes: "host:port"; empty for none')
    otlp_endpoint: str = Field("", description='collector of spans, OTLP over gRPC: "http://host:4317"; empty for none')

    @field_validator("metrics_listen", "otlp_endpoint")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        form, example = _ADDRESSES[str(info.field_name)]
        if value and not re.fullmatch(form, value):
            facts = {"value": value, "example": example}
            raise PydanticCustomError("address", "{value} is no address here; write it like {example}", facts)
        return value

    @classmethod
    def parse(cls, service: str, arguments: Sequence[str] | None = None) -> Self:
        """Settings from `arguments` (default: the command line) and environment; a mistake ends the process with 2."""
        prefix = f"PAGEWIRE_{service.upper()}_"
        known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
        others = tuple(f"PAGEWIRE_{name}_" for name in _SERVICES if name != service.upper())
        unknown = [
            name
            for name in os.environ
            if name.startswith("PAGEWIRE_") and not name.startswith(others) and name not in known
        ]
        if unknown:
            _usage_error(service, f"unknown environment variable {', '.join(sorted(unknown))}")

        class WithSources(cls):  # type: ignore[misc, valid-type]
            model_config = SettingsConfigDict(env_prefix=prefix, cli_prog_name=f"python -m {service}")

        WithSources.__doc__ = cls.__doc__
        try:
            return CliApp.run(WithSources, cli_args=list(sys.argv[1:] if arguments is None else arguments))
        except ValidationError as error:
            for row in error.errors():
                option = (
                    "--" + "-".join(str(part) for part in row["loc"]).replace("_", "-") if row["loc"] else "options"
                )
                print(f"python -m {service}: {option}: {row['msg']}", file=sys.stderr)
            sys.exit(2)


def _usage_error(service: str, message: str) -> NoReturn:
    argparse.ArgumentParser(prog=f"python -m {service}").error(message)


def start_logging(service: str, settings: Settings) -> None:
    """Logs to standard error, one line per event; keyword facts are given as `extra={...}`."""
    handler, name = logging.StreamHandler(), settings.log_name or service
    handler.setFormatter(_JsonFormatter(name) if settings.log_format == "json" else _TextFormatter(name))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)


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
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<5.5} {self._service:<9} {event}{facts}"
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


def calm_collector() -> None:
    """Lets the garbage collector look less often, and no more at what is there when a service starts.

    Its full collections walk all that lives: behind a thousand running sequences they held up a step of the scheduler
    for 15 ms one time in a hundred. Reference counts free nearly everything; cycles, which come with errors, wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stop)` on uvloop.

    The first SIGTERM or SIGINT sets `stop`, after which main drains and returns; a second one ends the process at once
    with status 1.
    """

    async def supervised() -> None:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                os._exit(1)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        await main(stop)

    calm_collector()
    pollers.keep()
    try:
        uvloop.run(supervised())
    except (CannotListen, CannotTrace) as error:
        logging.getLogger(__name__).error(str(error))
        sys.exit(1)
