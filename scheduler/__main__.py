"""`python -m scheduler`: the scheduler process."""

import asyncio
import errno
import logging
import secrets
import sys
from pathlib import Path

from protos import process, session_pb2, telemetry
from protos.rpc import Server, Service
from protos.session_pb2_grpc import add_SessionServiceServicer_to_server
from scheduler.config import SchedulerSettings
from scheduler.loop import SchedulerLoop
from scheduler.metrics import metrics_of
from scheduler.observer import Observer
from scheduler.recorder import Recorder
from scheduler.server import SessionService
from scheduler.sessions import Sessions
from scheduler.watchdog import Watchdog

# A change of health that comes while another is being reported is reported within this time.
_HEALTH_INTERVAL_S = 1.0
log = logging.getLogger("scheduler")


async def serve(settings: SchedulerSettings, stop: asyncio.Event, recorder: Recorder | None = None) -> None:
    """Serves routers until `stop` is set; health is SERVING while steps complete, or could."""
    tracer = telemetry.start_tracer("scheduler", settings)
    observer = Observer(tracer)
    sessions = Sessions(observer.added, observer.ended)
    loop = SchedulerLoop(settings, sessions, observer, recorder=recorder)
    service = SessionService(settings, loop, sessions, epoch=secrets.randbits(63))
    name = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
    server = Server([Service(name, add_SessionServiceServicer_to_server, service)])
    metrics = telemetry.serve_metrics(settings, metrics_of(loop, observer), loop.labels, server.calls)
    await server.start(settings.listen, tls=settings.server_tls)
    log.info("listening", extra={"address": settings.listen, "worker": settings.worker})
    tasks = [
        asyncio.create_task(loop.run()),
        asyncio.create_task(Watchdog(loop, settings.health_stall_s).run()),
        asyncio.create_task(service.report_load()),
        asyncio.create_task(_mirror_health(loop, server)),
    ]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    log.info("draining")
    await server.withdraw()
    service.drain(settings.drain_grace_s)
    if stopped in done:
        await loop.drained(settings.drain_grace_s)
    service.close()
    await server.stop(grace_s=1.0)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await loop.close()
    sessions.leave()
    await telemetry.close(metrics, tracer)
    log.info("stopped")
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _mirror_health(loop: SchedulerLoop, server: Server) -> None:
    while True:
        await server.set_serving(loop.serving)
        await loop.wait_for_change(_HEALTH_INTERVAL_S)


def main() -> None:
    """Entry point."""
    settings = SchedulerSettings.parse("scheduler")
    process.start_logging("scheduler", settings)
    recorder = None if settings.record is None else _open(settings.record)
    process.run(lambda stop: serve(settings, stop, recorder))


def _open(path: Path) -> Recorder | None:
    """A recorder; None if the disk is full: a scheduler that is started again has to serve all the same."""
    try:
        return Recorder.open(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            log.error("--record: nothing is recorded", extra={"file": path, "error": error.strerror})
            return None
        print(f"python -m scheduler: --record: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
