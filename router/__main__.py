"""`python -m router`: the router process."""

import asyncio
import logging
import sys

from protos import process
from protos.pagewire.v1 import generation_pb2, introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from protos.pagewire.v1.introspection_pb2_grpc import add_IntrospectionServiceServicer_to_server
from protos.rpc import PUBLIC_MESSAGE_BYTES, Server, Service
from protos.xds import load_service_pb2
from protos.xds.load_service_pb2_grpc import add_OpenRcaServiceServicer_to_server
from router.config import RouterSettings
from router.introspection import IntrospectionService
from router.load_reports import LoadMeter, OpenRcaService
from router.schedulers import Schedulers
from router.server import GenerationService
from router.tokenizer import Tokenizer, find_checkpoint

log = logging.getLogger("router")


async def serve(settings: RouterSettings, tokenizer: Tokenizer, stop: asyncio.Event) -> None:
    """Serves clients until `stop` is set; health is SERVING while the chain behind is up."""
    changed = asyncio.Event()
    schedulers = Schedulers(settings, on_change=changed.set)
    meter = LoadMeter(schedulers) if settings.load_reports else None
    services = [
        Service(
            generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
            add_GenerationServiceServicer_to_server,
            GenerationService(settings, tokenizer, schedulers, meter),
        )
    ]
    if settings.introspection:
        services.append(
            Service(
                introspection_pb2.DESCRIPTOR.services_by_name["IntrospectionService"].full_name,
                add_IntrospectionServiceServicer_to_server,
                IntrospectionService(schedulers, stop, settings.write_stall_s),
            )
        )
    if meter is not None:
        services.append(
            Service(
                load_service_pb2.DESCRIPTOR.services_by_name["OpenRcaService"].full_name,
                add_OpenRcaServiceServicer_to_server,
                OpenRcaService(meter),
            )
        )
    server = Server(
        services,
        max_message_bytes=PUBLIC_MESSAGE_BYTES,
        reflect=settings.reflection,
        share_port=settings.share_port,
    )
    await server.start(*settings.listen.split(","))
    log.info("listening", extra={"address": settings.listen, "scheduler": settings.scheduler})
    tasks = [asyncio.create_task(schedulers.run()), asyncio.create_task(_mirror_health(schedulers, server, changed))]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    log.info("draining", extra={"live": schedulers.num_live})
    if stopped in done:
        await server.stop(settings.drain_grace_s, settings.drain_delay_s)
    else:
        await server.stop(0)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await schedulers.close()
    log.info("stopped")
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _mirror_health(schedulers: Schedulers, server: Server, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        await server.set_serving(schedulers.serving)


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
