"""The local cluster's set-up: the command lines of worker, scheduler and router, from the options of `pagewire up`.

The services are started by name, as any user of this machine might do; this package imports nothing of theirs.
"""

import errno
import os
import socket
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Self

from pagewire import state
from pagewire.access import Access
from pagewire.cluster import LaunchError, ServiceProcess
from pagewire.processes import module_command
from pagewire.shares import Share, shares

SERVICES = ("worker", "scheduler", "router")
# Options of `pagewire up` that are passed on to services, and to which.
SHARED_OPTIONS = {
    "dtype": ("worker",),
    "kv_cache_bytes": ("worker",),
    "served_model_name": ("worker",),
    "max_num_seqs": ("scheduler",),
    "max_num_batched_tokens": ("scheduler", "worker"),
    "executor": ("worker",),
    "tensor_parallel_size": ("worker",),
    "pipeline_parallel_size": ("worker",),
    "record": ("scheduler",),
    "log_level": SERVICES,
    "log_format": SERVICES,
}
# Options that the launcher itself gives, or with which a service ends before it serves; and what to do instead.
_LAUNCHERS = {
    "worker.listen": "leave it out",
    "worker.model": "say --model",
    "worker.selftest": "run `python -m worker --selftest`",
    "scheduler.listen": "leave it out",
    "scheduler.worker": "leave it out",
    "router.listen": "say --host and --port",
    "router.scheduler": "leave it out",
    "router.model": "say --model",
    "router.share-port": "say --routers",
}
# Addresses that peers cannot share: the first peer has the given one, and each further peer the next port.
_UNSHARED_ADDRESSES = ("admin-listen", "metrics-listen")
# Files that peers cannot share: the name of each peer's file ends with the peer's number.
_UNSHARED_FILES = ("record",)
# Options that turn on TLS between our own services.
_INNER_TLS = (
    ("worker", "tls-certificate"),
    ("scheduler", "tls-certificate"),
    ("scheduler", "worker-tls-ca"),
    ("router", "scheduler-tls-ca"),
)
# Options that the launcher also reads from the services' environment, to act on them or to give each peer its own.
_READ_FROM_ENVIRONMENT = (
    "drain-delay-s",
    "drain-grace-s",
    "log-level",
    "log-format",
    "tls-certificate",
    "worker-tls-ca",
    "scheduler-tls-ca",
    *_UNSHARED_ADDRESSES,
    *_UNSHARED_FILES,
)
# Services let live requests run this long after SIGTERM unless told otherwise, and then take a moment to end.
_DRAIN_GRACE_S = 30.0
_STOP_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of one service, as in `--set worker.block-size=16`."""

    service: str
    option: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """A setting from "SERVICE.OPTION=VALUE".

        Raises:
            LaunchError: it is not of that form, or names no service, or an option that the launcher itself gives.
        """
        name, equals, value = text.partition("=")
        service, dot, option = name.partition(".")
        if not (equals and dot and option) or service not in SERVICES:
            raise LaunchError(f"--set {text}: write SERVICE.OPTION=VALUE, where SERVICE is {', '.join(SERVICES)}")
        option = option.replace("_", "-")
        if (remedy := _LAUNCHERS.get(f"{service}.{option.removeprefix('no-')}")) is not None:
            raise LaunchError(f"--set {text}: `pagewire up` gives this option itself; {remedy}")
        return cls(service, option, value)

    def __str__(self) -> str:
        return f"{self.service}.{self.option}={self.value}"

    def of_peer(self, number: int) -> "Setting":
        """The setting for one of several peers, counted from 1: another one if they cannot share its value."""
        if self.option in _UNSHARED_FILES:
            return replace(self, value=f"{self.value}-{number}")
        host, colon, port = self.value.rpartition(":")
        if self.option not in _UNSHARED_ADDRESSES or not port.isdigit() or int(port) == 0:  # 0: any free port
            return self
        return replace(self, value=f"{host}{colon}{int(port) + number - 1}")

    @property
    def argument(self) -> str:
        """The setting on the service's command line; true and false become --option and --no-option."""
        if self.value in ("true", "false"):
            return f"--{self.option}" if self.value == "true" else f"--no-{self.option}"
        return f"--{self.option}={self.value}"


# What services are told unless a setting says otherwise. These two need not wait for the services that call them: when
# the cluster stops, those end first, and when one of the two is restarted alone, they continue with its successor.
_DEFAULTS = tuple(Setting(service, "drain-grace-s", "0") for service in ("worker", "scheduler"))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """A cluster to launch.

    Attributes:
        model: a checkpoint's folder or a hub name, as services take it.
        settings: further options of the services, beyond those that connect them; the last one of an option counts.
        log_file: where the launcher's output goes, for `status` to show; None for a terminal.
        access: TLS for asking the router for its health, if it has TLS.
        routers: router processes, which share the port.
        replicas: schedulers, each with a worker; the workers divide the machine among themselves.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 50051
    settings: tuple[Setting, ...] = ()
    log_file: Path | None = None
    access: Access = Access()  # noqa: RUF009  # frozen
    routers: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Raises LaunchError for options that a cluster cannot have.

        Those are one address for several peers, TLS between our own services, TLS of the router without `access` by
        TLS or the reverse, and in the environment options that the launcher itself gives.
        """
        for name, remedy in _LAUNCHERS.items():
            if (variable := _variable(*name.split("."))) in os.environ:
                raise LaunchError(f"{variable}: `pagewire up` gives this option itself; {remedy}")
        for service, option in _INNER_TLS:
            if self.value(service, option, ""):
                remedy = "leave it out; behind the router, services speak over Unix sockets of this user"
                raise LaunchError(f"{service}.{option}: {remedy}")
        for service, option in product(SERVICES, _UNSHARED_ADDRESSES):
            told, num = self.value(service, option, ""), self.num(service)
            if num > 1 and told and not told.rpartition(":")[2].isdigit():
                remedy = f'write "host:port"; each {service} gets a port of its own from there on'
                raise LaunchError(f"{service}.{option}: {num} {service}s cannot share {told}; {remedy}")
        if self.value("router", "tls-certificate", "") and not self.access.is_tls:
            remedy = "say what to trust: `pagewire --ca FILE up ...`, or --tls for a well-known authority"
            raise LaunchError(f"router.tls-certificate: the router is asked for its health as clients ask; {remedy}")
        if self.access.is_tls and not self.value("router", "tls-certificate", ""):
            remedy = "set router.tls-certificate and router.tls-key, or leave out --tls, --ca and PAGEWIRE_CLIENT_*"
            raise LaunchError(f"the router has no TLS, and would be asked for its health by TLS: {remedy}")

    def num(self, service: str) -> int:
        """The number of processes of a service."""
        return self.routers if service == "router" else self.replicas

    @property
    def address(self) -> str:
        """Where the router listens."""
        return _address(self.host, self.port)

    @property
    def target(self) -> str:
        """Where clients on this machine connect."""
        return _address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)

    def value(self, service: str, option: str, default: str) -> str:
        """The value of a service's option; `default` if it is not set."""
        values = [setting.value for setting in self.settings_of(service) if setting.option == option]
        return values[-1] if values else default

    def settings_of(self, service: str) -> list[Setting]:
        """A service's settings, beyond those that connect it; the last one of an option counts."""
        told = (*_DEFAULTS, *_of_environment(service), *self.settings)
        return [setting for setting in told if setting.service == service]

    def arguments(self) -> list[str]:
        """These options as arguments of `pagewire up`, but for `access`."""
        log_file = ["--log-file", str(self.log_file)] if self.log_file else []
        settings = [argument for setting in self.settings for argument in ("--set", str(setting))]
        nums = ["--routers", str(self.routers), "--replicas", str(self.replicas)]
        return ["--model", self.model, "--host", self.host, "--port", str(self.port), *nums, *log_file, *settings]


def shared_settings(**values: str | int | None) -> tuple[Setting, ...]:
    """Settings for the options of `SHARED_OPTIONS` that are not None."""
    return tuple(
        Setting(service, option.replace("_", "-"), str(value))
        for option, value in values.items()
        if value is not None
        for service in SHARED_OPTIONS[option]
    )


def services(options: LaunchOptions, directory: str) -> list[ServiceProcess]:
    """All services, each after those that it needs, with their sockets in `directory`."""

    def sockets(service: str) -> dict[str, str]:
        """The sockets by process name; names have numbers if there are several processes."""
        num = options.num(service)
        names = [service] if num == 1 else [f"{service}-{number}" for number in range(1, num + 1)]
        return {name: f"unix:{directory}/{name}.sock" for name in names}

    def process(name: str, address: str, *arguments: str, share: Share = Share()) -> ServiceProcess:  # noqa: B008
        service, _, number = name.partition("-")
        told = options.settings_of(service)
        if number:
            told = [Setting(service, "log-name", name), *(setting.of_peer(int(number)) for setting in told)]
        return ServiceProcess(
            name,
            module_command(service, [*arguments, *(setting.argument for setting in told)]),
            address,
            _drain_s(options, service) + _STOP_MARGIN_S,
            options.access if service == "router" else Access(),
            peers=service,
            share=share,
            # The worker's imports take longest, and the whole start takes as long as they do: with two cores, routers
            # run beside it first, and schedulers after them.
            starts_behind="router" if service == "scheduler" else "",
        )

    workers, schedulers = sockets("worker"), sockets("scheduler")
    of_memory = [f"--memory-share={1 / options.replicas:.4f}"] if options.replicas > 1 else []
    behind = ("--scheduler", ",".join(schedulers.values()), "--model", options.model)
    if options.routers == 1:
        routers = [process("router", options.target, "--listen", options.address, *behind)]
    else:
        # On the shared port any of them answers; on its own socket, each answers for itself.
        routers = [
            process(name, own, "--listen", f"{options.address},{own}", "--share-port", *behind)
            for name, own in sockets("router").items()
        ]
    return [
        *(
            process(name, own, "--listen", own, "--model", options.model, *of_memory, share=share)
            for (name, own), share in zip(workers.items(), shares(options.replicas), strict=True)
        ),
        *(
            process(name, own, "--listen", own, "--worker", worker)
            for (name, own), worker in zip(schedulers.items(), workers.values(), strict=True)
        ),
        *routers,
    ]


def check_free(options: LaunchOptions) -> None:
    """Raises LaunchError if the port is taken, and says by which cluster if it is one of ours."""
    running = state.load(options.port)
    if running is not None:
        remedy = f"`pagewire down --port {options.port}` stops it"
        raise LaunchError(f"a cluster runs on port {options.port} already (pid {running.launcher_pid}); {remedy}")
    if not options.host:
        raise LaunchError("--host is empty: name an address of this machine, such as 127.0.0.1 or 0.0.0.0")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Binds as the router does: lingering connections of an earlier server do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.host, options.port))
    except OSError as error:
        remedy = "choose another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "choose another --host"
        raise LaunchError(f"cannot listen on {options.address}: {error.strerror}; {remedy}") from error
    except TypeError as error:
        raise LaunchError(f"cannot listen on {options.address}: {error}; choose another --host") from error


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _of_environment(service: str) -> list[Setting]:
    names = {option: _variable(service, option) for option in _READ_FROM_ENVIRONMENT}
    return [Setting(service, option, os.environ[name]) for option, name in names.items() if name in os.environ]


def _variable(service: str, option: str) -> str:
    """The environment variable that sets a service's option."""
    return f"PAGEWIRE_{service}_{option}".upper().replace("-", "_")


def _drain_s(options: LaunchOptions, service: str) -> float:
    try:
        delay_s = float(options.value(service, "drain-delay-s", "0"))
        return delay_s + float(options.value(service, "drain-grace-s", str(_DRAIN_GRACE_S)))
    except ValueError:
        # The service itself refuses the value, with a better message.
        return _DRAIN_GRACE_S


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
