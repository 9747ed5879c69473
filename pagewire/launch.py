"""What the local cluster is told: the command lines of worker, scheduler and router, from the options of `pagewire up`.

The services are started by name, as any other user of this machine would; this room imports nothing of theirs.
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
# Options of `pagewire up` that are one fact for several services.
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
# What the launcher tells services itself, and a run that ends before it serves; and what to do instead.
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
# Addresses that peers can not share: the first of several has the one that is told, each other one the next port.
_UNSHARED_ADDRESSES = ("admin-listen", "metrics-listen")
# Files that they can not share: each has one that ends like its name.
_UNSHARED_FILES = ("record",)
# These begin TLS on a wire between our own services.
_INNER_TLS = (
    ("worker", "tls-certificate"),
    ("scheduler", "tls-certificate"),
    ("scheduler", "worker-tls-ca"),
    ("router", "scheduler-tls-ca"),
)
# What the launcher has to know of services that are told it by their environment, to go by it or to tell each its own.
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
# Services give live requests this long after SIGTERM unless told otherwise, and then take a moment to end.
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
            LaunchError: it is not of that form, names no service, or an option that is the launcher's to give.
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
        """The same for one of several peers, counted from 1, where they can not share what it says."""
        if self.option in _UNSHARED_FILES:
            return replace(self, value=f"{self.value}-{number}")
        host, colon, port = self.value.rpartition(":")
        if self.option not in _UNSHARED_ADDRESSES or not port.isdigit() or int(port) == 0:  # 0 is any free one
            return self
        return replace(self, value=f"{host}{colon}{int(port) + number - 1}")

    @property
    def argument(self) -> str:
        """As the service's command line takes it; true and false are given as --option and --no-option."""
        if self.value in ("true", "false"):
            return f"--{self.option}" if self.value == "true" else f"--no-{self.option}"
        return f"--{self.option}={self.value}"


# What services are told unless a setting says otherwise. Whoever asks them need not be waited for: at the end of the
# cluster it ends before them, and where one of them is restarted by itself it goes on with the successor.
_DEFAULTS = tuple(Setting(service, "drain-grace-s", "0") for service in ("worker", "scheduler"))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """A cluster to launch.

    Attributes:
        model: a checkpoint's folder or a hub name, as services take it.
        settings: what the services are told beside what connects them; the last one counts.
        log_file: where the launcher's output goes, for `status` to tell; None for a terminal.
        access: how the router lets a client in, which is asked for its health.
        routers: router processes, which share the port.
        replicas: schedulers, each of which has a worker; workers share out the machine.
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
        """Raises LaunchError for what a cluster can not be told.

        That is several peers that listen at one address, TLS that is not trusted or not for others, and in the
        environment what the launcher tells services itself.
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
                raise LaunchError(f"{service}.{option}: {num} {service}s can not share {told}; {remedy}")
        if self.value("router", "tls-certificate", "") and not self.access.is_tls:
            remedy = "say what to trust: `pagewire --ca FILE up ...`, or --tls for a well-known authority"
            raise LaunchError(f"router.tls-certificate: the router is asked for its health as clients ask; {remedy}")
        if self.access.is_tls and not self.value("router", "tls-certificate", ""):
            remedy = "set router.tls-certificate and router.tls-key, or leave out --tls, --ca and PAGEWIRE_CLIENT_*"
            raise LaunchError(f"the router has no TLS, and would be asked for its health by TLS: {remedy}")

    def num(self, service: str) -> int:
        """Processes of a service."""
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
        """What a service is told of an option; `default` if nothing."""
        values = [setting.value for setting in self.settings_of(service) if setting.option == option]
        return values[-1] if values else default

    def settings_of(self, service: str) -> list[Setting]:
        """What a service is told beside what connects it; the last one of an option counts."""
        told = (*_DEFAULTS, *_of_environment(service), *self.settings)
        return [setting for setting in told if setting.service == service]

    def arguments(self) -> list[str]:
        """The same as arguments of `pagewire up`."""
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
    """All services, each behind those that it needs, with their sockets in `directory`."""

    def sockets(service: str) -> dict[str, str]:
        """By the names of its processes, which have numbers where there are several."""
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
            # The worker takes longest to import, and the whole start takes as long: on two cores it shares one with
            # routers first, and with schedulers then.
            starts_behind="router" if service == "scheduler" else "",
        )

    workers, schedulers = sockets("worker"), sockets("scheduler")
    of_memory = [f"--memory-share={1 / options.replicas:.4f}"] if options.replicas > 1 else []
    behind = ("--scheduler", ",".join(schedulers.values()), "--model", options.model)
    if options.routers == 1:
        routers = [process("router", options.target, "--listen", options.address, *behind)]
    else:
        # On the shared port any of them answers; on a socket of its own each one for itself.
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
    """Raises LaunchError when the port is taken, and says by which cluster if it is one of ours."""
    running = state.load(options.port)
    if running is not None:
        remedy = f"`pagewire down --port {options.port}` stops it"
        raise LaunchError(f"a cluster runs on port {options.port} already (pid {running.launcher_pid}); {remedy}")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the router binds: connections of an earlier server that linger do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.host, options.port))
    except OSError as error:
        remedy = "choose another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "choose another --host"
        raise LaunchError(f"cannot listen on {options.address}: {error.strerror}; {remedy}") from error


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _of_environment(service: str) -> list[Setting]:
    names = {option: _variable(service, option) for option in _READ_FROM_ENVIRONMENT}
    return [Setting(service, option, os.environ[name]) for option, name in names.items() if name in os.environ]


def _variable(service: str, option: str) -> str:
    """Of the environment, by which a service is told an option."""
    return f"PAGEWIRE_{service}_{option}".upper().replace("-", "_")


def _drain_s(options: LaunchOptions, service: str) -> float:
    try:
        delay_s = float(options.value(service, "drain-delay-s", "0"))
        return delay_s + float(options.value(service, "drain-grace-s", str(_DRAIN_GRACE_S)))
    except ValueError:
        # The service itself refuses the value, in better words.
        return _DRAIN_GRACE_S


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
