"""A real Envoy with deploy/envoy.yaml, in which only the addresses are changed, and what a test changes."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from cluster import free_port
from deployment import START_TIMEOUT_S

from pagewire.processes import tied
from protos.descriptors import descriptor_set

CONFIG = Path(__file__).parents[1] / "deploy" / "envoy.yaml"
BINARY = Path(sys.executable).parent / "envoy"


@dataclass(frozen=True)
class Envoy:
    """A running one."""

    port: int
    admin_port: int

    @property
    def target(self) -> str:
        """The address at which it takes calls."""
        return f"127.0.0.1:{self.port}"

    def stat(self, name: str) -> int:
        """One of its counters or gauges; 0 as long as it has none of this name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/stats?format=json", timeout=10) as answer:
            stats = {row["name"]: row["value"] for row in json.load(answer)["stats"] if "name" in row}
        return stats.get(name, 0)

    def wait_for_healthy(self, num_routers: int) -> None:
        """Returns when that many routers have passed its health check."""
        end = time.monotonic() + START_TIMEOUT_S
        while self.stat("cluster.router.membership_healthy") != num_routers:
            assert time.monotonic() < end, "Envoy does not see the routers as healthy"
            time.sleep(0.02)


def configuration(router_ports: list[int], port: int, admin_port: int, descriptors: Path) -> dict:
    """The shipped file with other addresses."""
    config = yaml.safe_load(CONFIG.read_text())
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    config["admin"]["address"]["socket_address"]["port_value"] = admin_port
    endpoints = router_cluster(config)["load_assignment"]["endpoints"][0]["lb_endpoints"]
    addresses = [{"address": "127.0.0.1", "port_value": router_port} for router_port in router_ports]
    endpoints[:] = [{"endpoint": {"address": {"socket_address": address}}} for address in addresses]
    for http_filter in listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]:
        if "proto_descriptor" in http_filter["typed_config"]:
            http_filter["typed_config"]["proto_descriptor"] = str(descriptors)
    return json.loads(json.dumps(config))  # without what YAML's anchors share: a test changes one place at a time


def router_cluster(config: dict) -> dict:
    """The part of a configuration about the routers."""
    return config["static_resources"]["clusters"][0]


def routes(config: dict) -> list[dict]:
    """The part of a configuration about where calls go."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return manager["route_config"]["virtual_hosts"][0]["routes"]


@contextlib.contextmanager
def envoy(router_ports: list[int], change: Callable[[dict], None] = lambda config: None) -> Iterator[Envoy]:
    """Starts it; returns once it answers. `change` edits the configuration."""
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        descriptors, path, log = (Path(directory, name) for name in ("api.pb", "envoy.json", "envoy.log"))
        descriptors.write_bytes(descriptor_set().SerializeToString())
        running = Envoy(free_port(), free_port())
        config = configuration(router_ports, running.port, running.admin_port, descriptors)
        change(config)
        path.write_text(json.dumps(config))
        command = [str(BINARY), "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
        with log.open("wb") as output:
            process = subprocess.Popen(tied(command), stdout=output, stderr=output)
        try:
            _wait_until_ready(running, process, log)
            yield running
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_ready(running: Envoy, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{running.admin_port}/ready", timeout=5)
            return
        time.sleep(0.02)
