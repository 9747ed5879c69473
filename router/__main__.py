"""`python -m router`: the router process."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from protos import process, telemetry
from protos.pagewire.v1 import generation_pb2, introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from protos.pagewire.v1.introspection_pb2_grpc import add_IntrospectionServiceServicer_to_server
from protos.rpc import PUBLIC_MESSAGE_BYTES, Server, Service
from router.calls import ClientCalls
from router.config import RouterSettings
from router.introspection import IntrospectionService
from router.metrics import metrics_of
from router.scheduler_link import SchedulerLink
from router.server import GenerationService
from router.tenants import ByToken, Tenants, TokenGate, tenants_of
from router.tokenizer import Tokenizer, find_checkpoint

log = logging.getLogger("router")


async def serve(settings: RouterSettings, tokenizer: Tokenizer, stop: asyncio.Event) -> None:
    """Serves clients until `stop` is set; health is SERVING while the chain behind is up."""
    changed = asyncio.Event()
    link = SchedulerLink(settings.scheduler, settings.health_stall_s, changed.set, settings.scheduler_tls)
    tracer = telemetry.start_tracer("router", settings)
    calls = ClientCalls(tracer)
    tenants = tenants_of(settings)
    generation = GenerationService(settings, tokenizer, link, tenants, calls)
    servers = _servers(settings, generation, link, tenants, calls, stop)
    metrics = telemetry.serve_metrics(settings, metrics_of(link, calls), link.labels, calls)
    await servers[0].start(settings.listen, settings.server_tls)
    if settings.admin_listen is not None:
        await servers[1].start(settings.admin_listen)
    log.info("listening", extra={"address": settings.listen, "scheduler": settings.scheduler})
    tasks = [asyncio.create_task(link.run()), asyncio.create_task(_mirror_health(link, servers, changed))]
    if settings.heartbeat_s:
        tasks.append(asyncio.create_task(generation.heartbeats.run()))
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    log.info("draining", extra={"live": link.num_live})
    for server in servers:
        await server.withdraw()
    grace_s = 0.0
    if stopped in done:
        await asyncio.sleep(settings.drain_delay_s)
        grace_s = settings.drain_grace_s
    await servers[0].stop(grace_s, end_live=link.break_off)
    for server in servers[1:]:  # the operators' last, who may look on while the clients' drains
        await server.stop(grace_s)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await link.close()
    await telemetry.close(metrics, tracer)
    log.info("stopped")
    for result in results:
        if isinstance(result, Exception):
            raise result


def _servers(
    settings: RouterSettings,
    generation: GenerationService,
    link: SchedulerLink,
    tenants: Tenants,
    calls: ClientCalls,
    stop: asyncio.Event,
) -> list[Server]:
    """The clients' server, and behind it the operators' where there is a port for one."""
    name = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    for_clients = [Service(name, add_GenerationServiceServicer_to_server, generation)]

    def introspection(visible: Tenants | None) -> list[Service]:
        if not settings.introspection:
            return []
        servicer = IntrospectionService(link, stop, settings.write_stall_s, visible)
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
    )
    if not has_admin:
        return [clients]
    return [clients, Server(introspection(None), max_message_bytes=PUBLIC_MESSAGE_BYTES, reflect=settings.reflection)]


async def _mirror_health(link: SchedulerLink, servers: Sequence[Server], changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        for server in servers:
            await server.set_serving(link.serving)


def main() -> None:
    """Entry point."""
    settings = RouterSettings.parse("router")
    process.start_logging("router", settings)
    try:
        tokenizer = Tokenizer(find_checkpoint(settings.model))
    except FileNotFoundError as error:
        log.error(str(error))
        sys.exit(1)
    process.run(lambda stop: serve(settings, tokenizer, stop))


if __name__ == "__main__":
    main()
