"""What all our processes do at their start and end: settings, event loop, signals."""

import asyncio
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn, Self

import uvloop
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from protos import logs, pollers  # what follows imports grpc
from protos.errors import CannotListen, CannotServe, CannotTrace
from protos.logs import LogFormat, LogLevel

# Programs whose settings may share one environment; CLIENT is the command line.
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

    log_level: LogLevel = Field("info", description="least severe line logged")
    log_format: LogFormat = Field("text", description="logfmt-like text, or a JSON object per line")
    log_name: str = Field(
        "", pattern=r"^[\w.-]*$", description="what signs log lines, to tell several apart; empty for its kind"
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
        """Settings from `arguments` (default: the command line) and environment; a mistake exits with status 2."""
        prefix = f"PAGEWIRE_{service.upper()}_"
        known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
        others = tuple(f"PAGEWIRE_{name}_" for name in _SERVICES if name != service.upper())
        unknown = [
            name
            for name in os.environ
            if name.startswith("PAGEWIRE_") and not name.startswith(others) and name not in known
        ]
        if unknown:
            ours = f"ours begin with {prefix}, and those of compose.yaml are for `docker compose` alone"
            if any(name.endswith("_SERVICE_HOST") for name in unknown):
                ours = "Kubernetes makes it of a Service's name, but not in a Pod with `enableServiceLinks: false`"
            _refuse(service, f"unknown environment variable {', '.join(sorted(unknown))}: {ours}")

        class WithSources(cls):  # type: ignore[misc, valid-type]
            model_config = SettingsConfigDict(
                env_prefix=prefix, cli_prog_name=f"python -m {service}", cli_exit_on_error=False
            )

        WithSources.__doc__ = cls.__doc__
        try:
            return CliApp.run(WithSources, cli_args=list(sys.argv[1:] if arguments is None else arguments))
        except SettingsError as error:
            _refuse(service, _with_remedy(service, str(error).removeprefix("error parsing CLI: "), cls.model_fields))
        except ValidationError as error:
            rows = [(_option("-".join(map(str, row["loc"]))) or "options", row["msg"]) for row in error.errors()]
            _refuse(service, *(f"{option}: {said.removeprefix('Value error, ')}" for option, said in rows))


def _refuse(service: str, *messages: str) -> NoReturn:
    for message in messages:
        print(f"python -m {service}: error: {message}", file=sys.stderr)
    sys.exit(2)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name else ""


def _with_remedy(service: str, message: str, names: Iterable[str]) -> str:
    """Why a command line was refused, and the options that may have been meant."""
    known = [_option(name) for name in names]
    meant = [near for word in re.findall(r"--[\w-]+", message) for near in get_close_matches(word, known, n=1)]
    if message.startswith("unrecognized") and meant:
        return f"{message}; did you mean {', '.join(meant)}?"
    return f"{message}; `python -m {service} --help` lists all"


def start_logging(service: str, settings: Settings) -> None:
    """Logs as the settings say; see `protos.logs`."""
    logs.start(settings.log_name or service, settings.log_level, settings.log_format)


def calm_collector() -> None:
    """Makes the garbage collector run less often, and leave out what exists when a service starts.

    Its full collections walk all live objects: with a thousand running sequences they held up a step of the scheduler
    for 15 ms one time in a hundred. Reference counts free nearly everything; cycles, which come with errors, wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stop)` on uvloop.

    The first SIGTERM or SIGINT sets `stop`, after which main drains and returns; SIGINT then ends the process at once
    with status 1. A second SIGTERM does not: its sender may not know of the first, and live streams would break.
    """

    async def supervised() -> None:
        stop = asyncio.Event()

        def on_signal(number: int) -> None:
            if stop.is_set() and number == signal.SIGINT:
                os._exit(1)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        await main(stop)

    calm_collector()
    pollers.keep()
    try:
        uvloop.run(supervised())
    except (CannotListen, CannotServe, CannotTrace) as error:
        logging.getLogger(__name__).error(str(error))
        sys.exit(1)
