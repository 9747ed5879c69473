"""The worker as a process: serves at once, answers NOT_SERVING until the model is loaded, drains on SIGTERM."""

import asyncio
import logging
import os
import sys

from protos import telemetry
from protos.process import run, start_logging
from protos.rpc import Server, Service
from protos.worker_pb2 import DESCRIPTOR
from protos.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.choose import is_follower, make_executor
from worker.executor.executor import RankLost
from worker.executor.external import follow
from worker.executor.rank import start_rank_logging
from worker.observer import Observer
from worker.server import WorkerService

# A step that is running when the worker leaves has this long to end: one that is cut off counts as lost, and its
# requests as suspects. `pagewire up` kills 10 s after the grace.
_LAST_STEP_S = 7.0
log = logging.getLogger("worker")


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> int:
    """Serves until `stop` is set, the model turns out not to load, or the device fails; returns the exit status."""
    tracer = telemetry.start_tracer("worker", settings)
    observer = Observer(tracer)
    service = WorkerService(observer, settings.hang_timeout_s)
    name = DESCRIPTOR.services_by_name["WorkerService"].full_name
    server = Server([Service(name, add_WorkerServiceServicer_to_server, service)])
    metrics = telemetry.serve_metrics(settings, observer.metrics(), observer.labels, server.calls)
    port = await server.start(settings.listen, tls=settings.server_tls)
    log.info("listening", extra={"address": settings.listen, "port": port})

    loading = asyncio.ensure_future(_load(service, settings))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        try:
            loading.result()
        except (ModelError, RankLost) as error:
            log.error("cannot load the model: %s", error)
            return 1
        except Exception:
            log.exception("cannot load the model")
            return 1
        await server.set_serving(True)
        log.info("serving")
        lost = asyncio.ensure_future(service.device_lost.wait())
        await asyncio.wait((stopped, lost), return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            log.error("the device has failed or hangs, and cannot be used again by this process")
            return 1
    log.info("stopping")
    await server.stop(settings.drain_grace_s, end_live=service.leave, end_within_s=_LAST_STEP_S)
    await telemetry.close(metrics, tracer)
    return 0


async def _load(service: WorkerService, settings: WorkerSettings) -> None:
    await service.load(make_executor(settings))


def main(settings: WorkerSettings) -> None:
    """Serves, or tests itself, until the process ends."""
    if settings.selftest and "log_level" not in settings.model_fields_set:
        settings = settings.model_copy(update={"log_level": "error"})  # what a log would say is in the report
    if not settings.selftest and is_follower(settings, os.environ):
        start_rank_logging(settings, os.environ["RANK"])
        try:
            follow(settings)
        except ModelError as error:
            log.error("cannot load the model: %s", error)
            sys.exit(1)
    start_logging("worker", settings)
    if settings.selftest:
        from worker.selftest import run_selftest

        sys.exit(run_selftest(settings))
    status = 0

    async def until(stop: asyncio.Event) -> None:
        nonlocal status
        status = await serve(settings, stop)

    run(until)
    # The interpreter would wait for a thread that may be in the middle of a download or of a long step.
    logging.shutdown()
    os._exit(status)
