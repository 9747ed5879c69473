"""What lies in deploy/ before the tools that read it: compose, Kubernetes, Prometheus, Grafana."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
import yaml
from cluster import cluster, free_port

from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from router.config import RouterSettings
from scheduler.config import SchedulerSettings
from worker.config import WorkerSettings

ROOT = Path(__file__).parents[1]
KUBERNETES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "pagewire.json"
SETTINGS = {"router": RouterSettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}


def tool(name: str) -> Path:
    """A program that pip installed beside Python."""
    return Path(sys.executable).parent / name


def ran(*command: str | Path, **options: object) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def resources() -> dict[tuple[str, str], dict]:
    """Kubernetes' resources by kind and name."""
    found = [resource for path in KUBERNETES for resource in yaml.safe_load_all(path.read_text())]
    return {(resource["kind"], resource["metadata"]["name"]): resource for resource in found}


def pods() -> Iterator[tuple[str, dict]]:
    """Name and specification of every Pod that is meant to run."""
    for (_, name), resource in resources().items():
        if "template" in resource["spec"]:
            yield name, resource["spec"]["template"]["spec"]


def containers(*names: str) -> Iterator[tuple[str, dict]]:
    """Name and specification of the containers in these Pods, or in all."""
    for name, pod in pods():
        for container in pod["containers"] + pod.get("initContainers", []):
            if not names or name in names:
                yield container["name"], container


def composed() -> dict:
    """compose.yaml with all profiles, as compose understands it."""
    profiles = ("--profile", "envoy", "--profile", "observability", "--profile", "ray")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWIRE_")}
    command = (tool("docker-compose"), "--file", ROOT / "compose.yaml", *profiles, "config", "--format", "json")
    return json.loads(ran(*command, env=clean))


def settings_of(service: str, words: list[str]) -> object:
    """What a service makes of its command line; a mistake ends the test."""
    return SETTINGS[service].parse(service, words)


def options(words: list[str]) -> dict[str, str]:
    """What follows each option, be it by a blank or by an equals sign."""
    parts = [part for word in words for part in word.split("=", 1)]
    return {word: value for word, value in pairwise(parts) if word.startswith("--")}


def ray_services(file: str) -> tuple[dict, dict, dict]:
    """Head of Ray, node, and the container of a node and the worker's front, as compose or Kubernetes has them."""
    if file == "compose":
        services = composed()["services"]
        return services["ray-head"], services["ray-node"], services["ray-worker"]
    found = dict(containers("ray-head", "ray-node", "scheduler-ray"))
    return found["ray-head"], found["ray-node"], found["worker"]


def words_of(container: dict) -> list[str]:
    return [*container["command"], *container.get("args", [])]


def commands_in(container: dict) -> list[list[str]]:
    """Of a container whose command is a script of a line: `A && exec B`."""
    shell, flag, script = words_of(container)
    assert (shell, flag) == ("sh", "-c")
    return [shlex.split(command) for command in script.split(" && exec ")]


def test_compose_accepts_every_profile():
    services = composed()["services"]
    assert {"envoy", "descriptors", "prometheus", "grafana", "ray-head", "ray-node", "ray-worker"} < services.keys()
    for name in ("worker", "scheduler", "router"):
        assert "profiles" not in services[name]
        assert services[name]["read_only"]


@pytest.mark.parametrize("service", SETTINGS)
def test_every_command_in_compose_is_one_that_the_service_takes(service):
    words = composed()["services"][service]["command"]
    assert words[:3] == ["python", "-m", service]
    settings_of(service, words[3:])


def test_who_asks_the_compose_test_for_help_gets_help_and_no_images():
    assert "usage: compose_test.py" in ran(sys.executable, ROOT / "deploy" / "compose_test.py", "--help")


def test_compose_gives_a_router_the_time_that_its_drain_takes():
    service = composed()["services"]["router"]
    settings = settings_of("router", service["command"][3:])
    assert settings.drain_delay_s >= 5
    assert settings.drain_delay_s + settings.drain_grace_s + 5 <= int(service["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_knows_every_field_of_the_manifests(path):
    ran(tool("kubernetes-validate"), "--kubernetes-version", "1.31", "--strict", path)


def test_every_command_in_the_manifests_is_one_that_the_service_takes():
    served = [*containers("router", "scheduler"), ("scheduler", dict(containers("scheduler-ray"))["scheduler"])]
    assert {name for name, _ in served} == SETTINGS.keys()
    for name, container in served:
        assert container["command"] == ["python", "-m", name]
        settings_of(name, container["args"])


@pytest.mark.parametrize("file", ["compose", "kubernetes"])
def test_a_worker_takes_what_it_is_told_of_ray(file):
    *_, front = ray_services(file)
    _, command = commands_in(front)
    assert command[:3] == ["python", "-m", "worker"]
    assert settings_of("worker", command[3:]).executor == "ray"


@pytest.mark.parametrize("file", ["compose", "kubernetes"])
def test_nodes_of_ray_meet_at_the_head_and_have_a_place_for_each_rank(file):
    head, node, front = ray_services(file)
    start, command = commands_in(front)
    meeting, worker = options(words_of(head)), options(command)
    nodes = [options(words_of(node)), options(start)]
    assert {each["--address"] for each in nodes} == {worker["--ray-address"]} == {f"ray-head:{meeting['--port']}"}
    assert meeting["--num-cpus"] == "0", "ranks are where the memory for them is"
    assert [int(each["--num-cpus"]) for each in nodes] == [1] * int(worker["--tensor-parallel-size"])


def test_compose_names_the_worker_on_ray_like_the_one_whose_place_it_takes():
    services = composed()["services"]
    assert services["ray-worker"]["networks"]["default"]["aliases"] == ["worker"]
    host, _, port = options(services["scheduler"]["command"])["--worker"].partition(":")
    _, command = commands_in(services["ray-worker"])
    assert (host, options(command)["--listen"]) == ("worker", f"0.0.0.0:{port}")


def test_no_container_may_do_more_than_it_must():
    for name, container in containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False, name


def test_no_container_gets_variables_from_kubernetes_that_it_would_refuse():
    """Of a Service `pagewire` with an address, Kubernetes makes PAGEWIRE_PORT and others, unless a Pod wants none."""
    for name, pod in pods():
        assert pod["enableServiceLinks"] is False, name


def test_probes_ask_for_names_and_ports_that_are_served():
    for pod, name in (("router", "router"), ("scheduler", "scheduler"), ("scheduler-ray", "scheduler")):
        container = dict(containers(pod))[name]
        port = next(row["containerPort"] for row in container["ports"] if row["name"] == "grpc")
        assert container["startupProbe"]["grpc"] == {"port": port, "service": "liveness"}
        assert container["livenessProbe"]["grpc"] == {"port": port, "service": "liveness"}
        assert container["readinessProbe"]["grpc"] == {"port": port}
        assert settings_of(name, container["args"]).listen == f"0.0.0.0:{port}"


def test_a_pod_outlives_the_drain_of_its_containers():
    for name in ("router", "scheduler"):
        pod = dict(pods())[name]
        (container,) = pod["containers"]
        settings = settings_of(name, container["args"])
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = before + getattr(settings, "drain_delay_s", 0) + settings.drain_grace_s
        for sidecar in pod.get("initContainers", []):
            needed += settings_of(sidecar["name"], sidecar["args"]).drain_grace_s
        assert needed + 5 <= pod["terminationGracePeriodSeconds"], name


def test_what_selects_pods_finds_them_and_their_ports():
    found = resources()
    kept = [resource for (kind, _), resource in found.items() if kind in ("Deployment", "StatefulSet")]
    for (kind, name), resource in found.items():
        if kind != "Service":
            continue
        selector = resource["spec"]["selector"].items()
        templates = [resource["spec"]["template"] for resource in kept]
        (template,) = [template for template in templates if selector <= template["metadata"]["labels"].items()]
        ports = {port["name"] for row in template["spec"]["containers"] for port in row["ports"]}
        assert {port["targetPort"] for port in resource["spec"]["ports"]} <= ports, name
    target = found["HorizontalPodAutoscaler", "scheduler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in found


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; Debian's package `prometheus` has it")
    return found


def test_prometheus_takes_its_configuration_and_rules(promtool):
    ran(promtool, "check", "config", PROMETHEUS / "prometheus.yml")


def test_each_alert_fires_when_it_should(promtool):
    ran(promtool, "test", "rules", PROMETHEUS / "rules_test.yml")
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    fired = {row["alertname"] for test in tests for row in test.get("alert_rule_test", []) if row["exp_alerts"]}
    assert fired == alerts


def rules() -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def scraped(port: int) -> set[str]:
    """Names of the samples that a service exports."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {re.split("[{ ]", line)[0] for line in answer.read().decode().splitlines() if not line.startswith("#")}


@pytest.mark.slow
def test_rules_and_dashboard_ask_for_what_one_service_exports_and_say_which_where_several_do():
    ports = {"router": free_port(), "scheduler": free_port()}
    listen = {name: ("--metrics-listen", f"127.0.0.1:{port}") for name, port in ports.items()}
    with cluster(*listen["router"], scheduler_options=listen["scheduler"]) as running:
        with grpc.insecure_channel(running.target) as channel:
            GenerationServiceStub(channel).Complete(pb.GenerateRequest(text="p", stop=pb.StopConditions(max_tokens=4)))
        exported = {name: scraped(port) for name, port in ports.items()}
    queries = " ".join([*dashboard_queries(), *(rule["expr"] for rule in rules())])
    asked = re.findall(r"\b((?:pagewire|grpc_server)_\w+)(?:{([^}]*)})?", queries)
    assert len(asked) > 20
    for name, selector in asked:
        job = re.search('job="(.*?)"', selector)
        jobs = [job[1]] if job else list(exported)
        assert len([job for job in jobs if name in exported[job]]) == 1, (name, selector)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert set(re.findall(r"\bpagewire:\w+(?::\w+)?", queries)) <= recorded


def test_prometheus_scrapes_what_the_services_are_told_to_serve():
    services = composed()["services"]
    scrapes = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert {scrape["job_name"] for scrape in scrapes} == SETTINGS.keys()
    for scrape in scrapes:
        name, (discovery,) = scrape["job_name"], scrape["dns_sd_configs"]
        assert discovery["names"] == [name]
        assert settings_of(name, services[name]["command"][3:]).metrics_listen == f"0.0.0.0:{discovery['port']}"
        container = dict(containers("router", "scheduler"))[name]
        (port,) = [row["containerPort"] for row in container["ports"] if "metrics" in row["name"]]
        assert settings_of(name, container["args"]).metrics_listen == f"0.0.0.0:{port}"


def test_the_dashboard_is_laid_out_without_overlaps():
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
