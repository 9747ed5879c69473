"""`python -m router`: the router process."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from protos import process, telemetry
from protos.errors import CannotListen
from protos.pagewire.v1 import generation_pb2, introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from protos.pagewire.v1.introspection_pb2_grpc import add_IntrospectionServiceServicer_to_server
from protos.rpc import PUBLIC_MESSAGE_BYTES, Server, Service
from protos.xds import load_service_pb2
from protos.xds.load_service_pb2_grpc import add_OpenRcaServiceServicer_to_server
from router.calls import ClientCalls
from router.config import RouterSettings
from router.introspection import IntrospectionService
from router.load_reports import LoadMeter, OpenRcaService
from router.metrics import metrics_of
from router.schedulers import Schedulers
from router.server import GenerationService
from router.tenants import ByToken, Tenants, TokenGate, tenants_of
from router.tokenizer import Tokenizer, UnreadableFile, find_checkpoint

log = logging.getLogger("router")


async def serve(settings: RouterSettings, tokenizer: Tokenizer, stop: asyncio.Event) -> None:
    """Serves clients until `stop` is set; health is SERVING while the chain behind it is up."""
    changed = asyncio.Event()
    schedulers = Schedulers(settings, on_change=changed.set)
    meter = LoadMeter(schedulers) if settings.load_reports else None
    tracer = telemetry.start_tracer("router", settings)
    calls = ClientCalls(tracer)
    tenants = tenants_of(settings)
    generation = GenerationService(settings, tokenizer, schedulers, tenants, calls, meter)
    servers = _servers(settings, generation, schedulers, tenants, calls, stop)
    metrics = telemetry.serve_metrics(settings, metrics_of(schedulers, calls), schedulers.labels, calls)
    await servers[0].start(*settings.listen.split(","), tls=settings.server_tls)
    if settings.admin_listen is not None:
        try:
            admin_port = await servers[1].start(settings.admin_listen)
        except CannotListen:
            await servers[0].stop(0)
            raise
        log.info("listening for operators", extra={"address": settings.admin_listen, "port": admin_port})
    log.info("listening", extra={"address": settings.listen, "scheduler": settings.scheduler})
    tasks = [asyncio.create_task(schedulers.run()), asyncio.create_task(_mirror_health(schedulers, servers, changed))]
    if settings.heartbeat_s:
        tasks.append(asyncio.create_task(generation.heartbeats.run()))
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    log.info("draining", extra={"live": schedulers.num_live})
    for server in servers:
        await server.withdraw()
    grace_s = 0.0
    if stopped in done:
        await asyncio.sleep(settings.drain_delay_s)
        grace_s = settings.drain_grace_s
    await servers[0].stop(grace_s, end_live=schedulers.break_off)
    for server in servers[1:]:  # the operators' last: they may look on while the clients' drains
        await server.stop(grace_s)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await schedulers.close()
    await telemetry.close(metrics, tracer)
    log.info("stopped")
    for result in results:
        if isinstance(result, Exception):
            raise result


def _servers(
    settings: RouterSettings,
    generation: GenerationService,
    schedulers: Schedulers,
    tenants: Tenants,
    calls: ClientCalls,
    stop: asyncio.Event,
) -> list[Server]:
    """The clients' server, followed by the operators' if there is a port for one."""
    name = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    for_clients = [Service(name, add_GenerationServiceServicer_to_server, generation)]
    if generation.meter is not None:
        name = load_service_pb2.DESCRIPTOR.services_by_name["OpenRcaService"].full_name
        reports = OpenRcaService(generation.meter)
        for_clients.append(Service(name, add_OpenRcaServiceServicer_to_server, reports))

    def introspection(visible: Tenants | None) -> list[Service]:
        if not settings.introspection:
            return []
        servicer = IntrospectionService(schedulers, stop, settings.write_stall_s, visible)
        name = introspection_pb2.DESCRIPTOR.services_by_name["IntrospectionService"].full_name
        return [Service(name, add_IntrospectionServiceServicer_to_server, servicer)]

    has_admin = settings.admin_listen is not None
    clients = Server(
        [*for_clients, *([] if has_admin else introspection(tenants))],
        max_message_bytes=settings.max_message_bytes,
        reflect=settings.reflection and not has_admin,
        show_channels=not has_admin,
        interceptors=[TokenGate(tenants)] if isinstance(tenants, ByToken) else [],
        calls=calls,
        options=settings.connection_age_options,
        share_port=settings.share_port,
    )
    if not has_admin:
        return [clients]
    operators = Server(
        introspection(None), max_message_bytes=PUBLIC_MESSAGE_BYTES, reflect=settings.reflection, calls=calls
    )
    return [clients, operators]


async def _mirror_health(schedulers: Schedulers, servers: Sequence[Server], changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        for server in servers:
            await server.set_serving(schedulers.serving)


def main() -> None:
    """Entry point."""
    settings = RouterSettings.parse("router")
    process.start_logging("router", settings)
    try:
        tokenizer = Tokenizer(find_checkpoint(settings.model))
    except (FileNotFoundError, UnreadableFile) as error:
        log.error(str(error))
        sys.exit(1)
    process.run(lambda stop: serve(settings, tokenizer, stop))


if __name__ == "__main__":
    main()
