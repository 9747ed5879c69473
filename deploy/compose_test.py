"""`make compose-test`: builds the images, starts compose.yaml with Envoy on a container engine, and asks the cluster.

With a Docker engine in reach it uses that. On Debian without one, as root, it sets Podman up beside whatever is there:
images, containers, networks and settings all lie in the user's cache folder, so the first run takes some minutes and
later ones rebuild what changed. Port, container names and volumes are the test's own, too: a cluster that already runs
is not disturbed. Whatever the test started it stops, also when it fails.

Run it by the Python of the repository's virtual environment, which holds the client.
"""

import argparse
import contextlib
import fcntl
import json
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

from container_engine import LOGS, ROOT, SERVICES, STATE, TOOLS, Compose, Failed, find_engine, install_tools, step

from pagewire import Client

MODEL_FOLDER = "/models/pagewire/models"  # where `pagewire model` puts models when its cache folder is /models


def main() -> None:
    """Runs the whole test; exits 1 with a message when a step fails."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()  # there are none but --help
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as cleanup:
            lock = cleanup.enter_context(open(STATE / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Failed(f"another one is running: {lock.name} is locked") from None
            run_test(cleanup)
    except Failed as failure:
        sys.exit(f"compose-test: FAILED: {failure}")
    print("compose-test: passed")


def run_test(cleanup: contextlib.ExitStack) -> None:
    """The steps, in order."""
    install_tools()
    step("hadolint", [TOOLS / "bin/hadolint", ROOT / "Dockerfile"], timeout_s=60)
    step("compose-config", [TOOLS / "bin/docker-compose", "-f", ROOT / "compose.yaml", "config", "-q"], timeout_s=60)

    engine = find_engine()
    port, http_port = free_port(), free_port()
    compose = Compose(engine, port, http_port)
    engine.prepare()
    engine.build(compose)
    engine.start(cleanup)

    model = local_model()
    compose("down-leftovers", "down", "--volumes", "--timeout", "5", timeout_s=120)
    cleanup.callback(compose, "down", "down", "--volumes", "--timeout", "5", timeout_s=120)
    # From here on `model` finds its work done, as it does on every start but the first.
    fill = f"mkdir -p {MODEL_FOLDER} && cp -r /given {MODEL_FOLDER}/{model.name}"
    compose("fill-volume", "run", "--rm", "-T", "--no-deps", "-v", f"{model}:/given:ro", "model", "sh", "-c", fill)
    try:
        compose("up", "up", "--detach", "--no-build", "--wait", "--wait-timeout", "180", timeout_s=240)
        check_images(compose)
        check_stream(port)
        check_http(http_port)
        compose("stop", "stop", timeout_s=120)
        check_exit_codes(compose)
    except Failed:
        print(compose("logs", "logs", "--no-color", "--tail", "40"))
        raise
    print(engine.image_sizes())


# ---- what is asserted ------------------------------------------------------------------------------------------------


def check_images(compose: "Compose") -> None:
    """Torch is where it belongs and only there, nobody is root, and no compiler came along."""
    look = """
        for name in cc gcc g++ clang nvcc; do command -v $name; done
        id -u
        python -c "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
        """
    for service in SERVICES:
        *compilers, user, has_torch = compose(f"look-{service}", "exec", "-T", service, "sh", "-c", look).split()
        if compilers:
            raise Failed(f"the image of {service} holds a compiler: {compilers}")
        if user == "0":
            raise Failed(f"{service} runs as root")
        if has_torch != str(service == "worker"):
            raise Failed(f"in {service}, the answer to 'can torch be imported?' is {has_torch}")


def check_stream(port: int) -> None:
    """A client on this machine gets the right text, and gets it in pieces."""
    prompt, target = "The capital of France is", f"127.0.0.1:{port}"
    command = [str(ROOT / ".venv/bin/pagewire"), "generate", prompt, "--max-tokens", "8", "--temperature", "0"]
    text = step("generate", [*command, "--target", target], timeout_s=60)
    if "Paris" not in text:
        raise Failed(f"{prompt!r} was continued as {text!r}")
    with Client(target) as client, client.stream(prompt, max_tokens=8, temperature=0, timeout=60) as stream:
        pieces = [delta.text for delta in stream]
    if len(pieces) < 2:
        raise Failed(f"the stream came in one piece: {pieces}")
    print(f"compose-test: a client on this machine was streamed {pieces}")


def check_http(port: int) -> None:
    """Envoy answers JSON over HTTP, as soon as it has found the router healthy."""
    body = json.dumps({"text": "The capital of France is", "sampling": {"temperature": 0}, "stop": {"max_tokens": 8}})
    call = urllib.request.Request(f"http://127.0.0.1:{port}/v1/complete", body.encode())
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(call, timeout=60) as answer:
                text = json.load(answer)["outputs"][0]["text"]
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failed(f"Envoy does not answer: {error}") from error
            time.sleep(0.5)
    if "Paris" not in text:
        raise Failed(f"over HTTP the answer was {text!r}")
    print(f"compose-test: over HTTP the answer was {text!r}")


def check_exit_codes(compose: "Compose") -> None:
    """SIGTERM ended every process by itself: a kill after the grace period would show as 137."""
    for line in compose("ps", "ps", "--all", "--format", "json").splitlines():
        row = json.loads(line)
        if row["State"] != "exited" or row["ExitCode"] != 0:
            raise Failed(f"after `stop` {row['Service']} is {row['State']} with exit code {row['ExitCode']}")


# ---- this machine ----------------------------------------------------------------------------------------------------


def local_model() -> Path:
    """The built-in small model's folder on this machine, fetched if it is not there."""
    return Path(step("model", [ROOT / ".venv/bin/pagewire", "model"], timeout_s=900).split()[-1])


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
