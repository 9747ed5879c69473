"""`python -m router`: the router process."""

import asyncio
import logging
import sys

from protos import process
from protos.pagewire.v1 import generation_pb2, introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from protos.pagewire.v1.introspection_pb2_grpc import add_IntrospectionServiceServicer_to_server
from protos.rpc import PUBLIC_MESSAGE_BYTES, Server, Service
from router.config import RouterSettings
from router.introspection import IntrospectionService
from router.scheduler_link import SchedulerLink
from router.server import GenerationService
from router.tokenizer import Tokenizer, find_checkpoint

log = logging.getLogger("router")


async def serve(settings: RouterSettings, tokenizer: Tokenizer, stop: asyncio.Event) -> None:
    """Serves clients until `stop` is set; health is SERVING while the chain behind is up."""
    changed = asyncio.Event()
    link = SchedulerLink(settings.scheduler, settings.health_stall_s, on_change=changed.set)
    services = [
        Service(
            generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
            add_GenerationServiceServicer_to_server,
            GenerationService(settings, tokenizer, link),
        )
    ]
    if settings.introspection:
        services.append(
            Service(
                introspection_pb2.DESCRIPTOR.services_by_name["IntrospectionService"].full_name,
                add_IntrospectionServiceServicer_to_server,
                IntrospectionService(link, stop, settings.write_stall_s),
            )
        )
    server = Server(
        services,
        max_message_bytes=PUBLIC_MESSAGE_BYTES,
        reflect=settings.reflection,
        options=settings.connection_age_options,
    )
    await server.start(settings.listen)
    log.info("listening", extra={"address": settings.listen, "scheduler": settings.scheduler})
    tasks = [asyncio.create_task(link.run()), asyncio.create_task(_mirror_health(link, server, changed))]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    log.info("draining", extra={"live": link.num_live})
    await server.withdraw()
    if stopped in done:
        await asyncio.sleep(settings.drain_delay_s)
        await server.stop(settings.drain_grace_s, end_live=link.break_off)
    else:
        await server.stop(0)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await link.close()
    log.info("stopped")
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _mirror_health(link: SchedulerLink, server: Server, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
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
