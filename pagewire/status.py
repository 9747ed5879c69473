"""`pagewire status`: the processes of a local cluster, their health, what is served, and how full it is."""

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pagewire import health, state
from pagewire.access import OPEN, Access
from pagewire.client import Client
from pagewire.errors import RequestError
from pagewire.introspection import in_a_line, introspection
from pagewire.processes import resident_bytes, uptime_s
from pagewire.state import ClusterState
from protos.pagewire.v1 import introspection_pb2

_TIMEOUT_S = 2.0


def show(port: int, console: Console, access: Access) -> bool:
    """Prints what runs on a port of this machine, asked with `access`; returns whether it serves."""
    running = state.load(port)
    target = running.target if running else f"127.0.0.1:{port}"
    answer = health.check(target, access=access)
    if running:
        console.print(_processes(running, access))
    elif answer.startswith(health.NO_ANSWER):
        console.print(f"nothing answers on port {port}; `pagewire up` starts a cluster")
        return False
    console.print(f"target   {target}, {with_remedy(answer, access)}", markup=False)
    if answer == health.SERVING:
        _show_model(target, access, console)
        _show_load(target, access, console)
    if running and running.log_file:
        console.print(f"log      {running.log_file}", markup=False)
    return answer == health.SERVING


def health_of(running: ClusterState, name: str, access: Access) -> str:
    """What one service of a cluster says about its health; `access` is for the routers."""
    return health.check(running.addresses[name], access=access if name.startswith("router") else OPEN)


def with_remedy(answer: str, access: Access) -> str:
    """What a router says about its health, and what to do if it may require TLS."""
    may_want_tls = answer.startswith(health.NO_ANSWER) and not access.is_tls
    return f"{answer}; --ca FILE or --tls, before the command, is for one with TLS" if may_want_tls else answer


def _processes(running: ClusterState, access: Access) -> Table:
    table = Table("process", "pid", "up", "memory", "health", box=None, pad_edge=False, header_style="bold")
    pids = {"launcher": running.launcher_pid} | running.service_pids
    for name in ("launcher", *running.addresses):
        pid = pids.get(name)
        up_s = None if pid is None else uptime_s(pid)
        if pid is None or up_s is None:
            table.add_row(name, "-", "-", "-", "not running")
            continue
        # The services are the launcher's descendants; only their own rows count them.
        memory = resident_bytes(pid) - (
            sum(map(resident_bytes, running.service_pids.values())) if name == "launcher" else 0
        )
        answer = health_of(running, name, access) if name in running.addresses else ""
        table.add_row(name, str(pid), _duration(up_s), decimal(memory), answer)
    return table


def _show_model(target: str, access: Access, console: Console) -> None:
    with Client(target, access) as client:
        try:
            model = client.model(timeout=_TIMEOUT_S)
        except RequestError as error:
            console.print(f"model    unknown: {error}", markup=False)
            return
    console.print(f"model    {model.model}, {model.dtype}, {model.context_length} tokens of context", markup=False)


def _show_load(target: str, access: Access, console: Console) -> None:
    try:
        with introspection(target, access) as stub:
            answer = stub.GetState(introspection_pb2.GetStateRequest(), timeout=_TIMEOUT_S, metadata=access.metadata)
    except RequestError as error:
        console.print(f"load     unknown: {error}", markup=False)
        return
    now = answer.state
    pool = now.block_pool
    available = pool.num_free + pool.num_cached
    console.print(f"blocks   {available} of {pool.num_total} available, {pool.num_cached} of them cached")
    console.print(f"requests {now.num_running} running, {now.num_waiting} waiting, {now.num_swapped} swapped")
    for each in answer.schedulers:
        console.print(f"         {in_a_line(each)}", markup=False)


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
