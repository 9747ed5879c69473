"""The command line: `pagewire up|down|restart|status|health|model|generate|chat|tokenize|top|...`.

Options and help are defined here; what the commands do, in modules that they import when they run, so that
`pagewire --help` and `pagewire health` start fast.
"""

import dataclasses
import math
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pagewire.access import DEFAULT_TARGET, Access
from pagewire.reporting import ReportingGroup, explained, make_console
from protos import logs

if TYPE_CHECKING:
    from pagewire.launch import LaunchOptions


app = typer.Typer(
    cls=ReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pagewire serves large language models over gRPC. Access options, such as --token, go before the command.",
)


class Service(StrEnum):
    """A kind of process of a cluster; an enum, since typer takes no list of literals."""

    worker = "worker"
    scheduler = "scheduler"
    router = "router"


def _as_number(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("must be a number")
    return value


_EARLY_STOPPING: dict[str | None, Any] = {None: None, "true": True, "false": False, "never": "never"}

# Options that several commands share.
Target = Annotated[str, typer.Option(envvar="PAGEWIRE_CLIENT_TARGET", help="The server, as HOST:PORT or unix:PATH.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The cluster's port.")]
ModelName = Annotated[str, typer.Option(help="A checkpoint's folder, a hub name, or smollm2-135m, which is fetched.")]
Routers = Annotated[
    int, typer.Option(min=1, max=64, help="Router processes; they share the port, and each connection goes to one.")
]
Replicas = Annotated[
    int, typer.Option(min=1, max=64, help="Schedulers, each with a worker; the workers divide cores and GPUs.")
]
TensorParallelSize = Annotated[int | None, typer.Option(min=1, help="Ranks of each worker that split every layer.")]
PipelineParallelSize = Annotated[int | None, typer.Option(min=1, help="Stages of each worker that split the layers.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens in an answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the most probable tokens that together reach this probability.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from this many most probable tokens.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this fraction of the best one's probability.")]
TypicalP = Annotated[
    float | None, typer.Option(help="Sample from the most typical tokens that together reach this probability.")
]
Seed = Annotated[int | None, typer.Option(help="Same request, same seed, same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End an answer at this text; may be repeated.")]
Timeout = Annotated[float | None, typer.Option(callback=_as_number, help="Seconds for the whole request.")]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"pagewire {version('pagewire')}")
        raise typer.Exit


@app.callback()
def access(
    ctx: typer.Context,
    tls: Annotated[bool, typer.Option("--tls", envvar="PAGEWIRE_CLIENT_TLS", help="Connect with TLS.")] = False,
    ca: Annotated[
        Path | None, typer.Option(envvar="PAGEWIRE_CLIENT_CA", help="CA certificates to trust; implies --tls.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(envvar="PAGEWIRE_CLIENT_CERTIFICATE", help="Shown to a server that asks for one.")
    ] = None,
    key: Annotated[Path | None, typer.Option(envvar="PAGEWIRE_CLIENT_KEY", help="The certificate's key.")] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="PAGEWIRE_CLIENT_TOKEN", help="Sent with each call; other users can see arguments."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Access options go before the command, and apply to all commands that talk to a server."""
    ctx.obj = Access(tls, ca, certificate, key, token)


token_app = typer.Typer(no_args_is_help=True, help="Tokens for `router --auth-tokens`.")
app.add_typer(token_app, name="token")


@token_app.command("new")
def token_new(name: Annotated[str, typer.Argument(help="The tenant's name.")]) -> None:
    """Make a token: its token-file entry goes to standard output, the token, shown only once, to standard error."""
    from pagewire.tokens import new

    token, entry = new(name)
    typer.echo(entry)
    typer.echo(f"the token, which is not kept anywhere: {token}", err=True)


@app.command()
def up(
    ctx: typer.Context,
    model: ModelName = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Where the router listens.")] = "127.0.0.1",
    port: Port = 50051,
    dtype: Annotated[
        str | None, typer.Option(help="Type of weights and KV cache, such as bfloat16 or float32.")
    ] = None,
    kv_cache_bytes: Annotated[
        str | None, typer.Option(help="Size of the KV cache at each rank, such as 512MiB.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences that run together, at each scheduler.")
    ] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in a step.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name that requests may carry.")] = None,
    routers: Routers = 1,
    replicas: Replicas = 1,
    executor: Annotated[
        Literal["auto", "uni", "mp", "ray"] | None, typer.Option(help="How each worker runs its ranks.")
    ] = None,
    tensor_parallel_size: TensorParallelSize = None,
    pipeline_parallel_size: PipelineParallelSize = None,
    log_level: Annotated[logs.LogLevel | None, typer.Option(help="Least severe level logged.")] = None,
    log_format: Annotated[logs.LogFormat | None, typer.Option(help="Text, or a JSON object per line.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="File for all that a scheduler decides, for `replay`; contains prompts.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SERVICE.OPTION=VALUE", help="Any other option of a service.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background once it serves.")] = False,
    log_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start a cluster on this machine: worker, scheduler and router, or several of each. Ctrl-C drains it."""
    from pagewire import early_worker, models
    from pagewire.launch import LaunchOptions, Setting, check_free, shared_settings
    from pagewire.up import up as run

    shared = shared_settings(
        dtype=dtype,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        served_model_name=served_model_name,
        executor=executor,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        log_level=log_level,
        log_format=log_format,
        record=None if record is None else str(record),
    )
    told = (*shared, *map(Setting.parse, settings or ()))
    options = LaunchOptions(model, host, port, told, log_file, ctx.obj, routers, replicas)
    # Before a download rather than after it.
    check_free(options)
    options = dataclasses.replace(options, model=models.resolve(model, make_console()))
    if detach:
        _detach(options)
    else:
        raise typer.Exit(run(options, early_worker.started))


def _detach(options: "LaunchOptions") -> None:
    from pagewire import background, state

    console = make_console()
    options = dataclasses.replace(options, log_file=state.log_path(options.port))
    process = background.start(options)
    with console.status("starting worker, scheduler and router"):
        background.wait_until_serving(process, options)
    console.print(f"serves on {options.target} (pid {process.pid}), log in {options.log_file}", markup=False)


@app.command()
def down(port: Port = 50051) -> None:
    """Stop the cluster on this machine; live requests may finish first."""
    from pagewire import background, state

    console = make_console()
    running = state.load(port)
    if running is None:
        console.print(f"nothing runs on port {port} that this user's `pagewire up` started")
        return
    with console.status("finishing live requests"):
        background.stop(running)
    console.print(f"stopped the cluster on port {port}")


@app.command("restart")
def restart_(
    ctx: typer.Context,
    services: Annotated[list[Service], typer.Argument(help="Replaced one after the other, in this order.")],
    port: Port = 50051,
    timeout: Annotated[
        float, typer.Option(min=0, callback=_as_number, help="Seconds for each process to end and be replaced.")
    ] = 300.0,
) -> None:
    """Replace processes of the cluster on this machine, one by one; streams go on. Exit 1 if one does not come back."""
    from pagewire.restart import restart

    restart(port, services, make_console(), ctx.obj, timeout)


@app.command()
def status(ctx: typer.Context, port: Port = 50051) -> None:
    """Show the cluster on this machine: processes, health, model, free blocks. Exit 1 if it does not serve."""
    from pagewire.status import show

    if not show(port, make_console(), ctx.obj):
        raise typer.Exit(1)


@app.command()
def health(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(envvar="PAGEWIRE_CLIENT_TARGET", help="HOST:PORT or unix:PATH.")
    ] = DEFAULT_TARGET,
    service: Annotated[str, typer.Option(help="One service's full name; without it, the whole server.")] = "",
    timeout: Annotated[float, typer.Option(callback=_as_number, help="Seconds to wait for an answer.")] = 2.0,
) -> None:
    """Exit 0 if a server is SERVING, else 1."""
    from pagewire.health import SERVING, check

    answer = check(target, service, timeout, ctx.obj)
    typer.echo(answer)
    if answer != SERVING:
        raise typer.Exit(1)


@app.command("model")
def model_(name: Annotated[str, typer.Argument(help="As for `up --model`.")] = "smollm2-135m") -> None:
    """Print what services load for a model, and fetch the built-in one if need be."""
    from pagewire.models import resolve

    typer.echo(resolve(name, make_console(stderr=True)))


@app.command()
def generate(
    ctx: typer.Context,
    prompt: str,
    target: Target = DEFAULT_TARGET,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    typical_p: TypicalP = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages tokens seen before.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Above 0 discourages tokens in the answer.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, for each occurrence of a token.")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit.")] = None,
    seed: Seed = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Number of answers to the prompt.")] = None,
    best_of: Annotated[int | None, typer.Option(help="Sample this many and show the n most probable.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="Search with this many beams instead of sampling.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Higher favours longer answers of a beam search.")
    ] = None,
    early_stopping: Annotated[
        Literal["true", "false", "never"] | None, typer.Option(help="When a beam search ends.")
    ] = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False,
    priority: Annotated[int | None, typer.Option(help="Higher goes first, in -10 .. 10.")] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Share cached prefixes only with requests of this salt.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Names the request in logs, and for `explain`.")] = None,
    timeout: Timeout = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Show log-probabilities of each token and of this many most probable ones.")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with everything.")] = False,
) -> None:
    """Continue a text, printed as it is generated. Exit 1 if the prompt can never fit into the KV cache."""
    from pagewire import logprobs as table
    from pagewire import terminal
    from pagewire.client import Client
    from pagewire.request import Options
    from pagewire.results import FinishReason

    options = Options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias),
        seed=seed,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=_EARLY_STOPPING[early_stopping],
        stop=stop or None,
        ignore_eos=ignore_eos,
        priority=priority,
        cache_salt=cache_salt,
        request_id=request_id,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        token_ids=json,
    )
    with Client(target, ctx.obj) as client:
        if json:
            completion = client.generate(prompt, timeout=timeout, **options)
            typer.echo(terminal.as_json(completion))
        else:
            several = n is not None and n > 1
            completion = terminal.show(client.stream(prompt, timeout=timeout, **options), headings=several)
            for line in table.lines(completion, lambda id_: client.detokenize([id_], skip_special_tokens=False)):
                typer.echo(line)
    console = make_console(stderr=True)
    terminal.remark(completion, console)
    if not json:
        streamed = not beam_width and (best_of or 1) <= (n or 1)
        console.print(terminal.summary(completion, streamed=streamed), style="dim")
    if any(output.finish_reason is FinishReason.IGNORED for output in completion.outputs):
        raise typer.Exit(1)


def _biases(words: list[str] | None) -> dict[int, float] | None:
    try:
        return {int(id_): float(bias) for id_, bias in (word.split("=") for word in words or ())} or None
    except ValueError as error:
        raise typer.BadParameter("must be ID=BIAS, as 17=-100", param_hint="--logit-bias") from error


@app.command()
def chat(
    ctx: typer.Context,
    target: Target = DEFAULT_TARGET,
    system: Annotated[str | None, typer.Option(help="What the assistant is told first.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talk with the model, or answer each line of standard input."""
    from pagewire.client import Client
    from pagewire.request import Options
    from pagewire.terminal import Conversation

    options = Options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
    )
    with Client(target, ctx.obj) as client:
        Conversation(client, system, options, make_console(stderr=True), partial(explained, access=ctx.obj)).run()


@app.command()
def tokenize(ctx: typer.Context, text: str, target: Target = DEFAULT_TARGET) -> None:
    """Print the token ids of a text as JSON."""
    from pagewire.client import Client

    with Client(target, ctx.obj) as client:
        typer.echo(client.tokenize(text))


@app.command()
def top(
    ctx: typer.Context,
    target: Target = DEFAULT_TARGET,
    interval: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds between two states.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and exit.")] = False,
) -> None:
    """Watch queues, blocks and steps; a line for each state if standard output is not a terminal."""
    from pagewire import top

    top.run(target, interval, once=once, console=make_console(), access=ctx.obj)


@app.command()
def explain(ctx: typer.Context, request_id: str, target: Target = DEFAULT_TARGET) -> None:
    """Explain why a live request has its status."""
    from pagewire.explain import show

    show(target, request_id, make_console(), ctx.obj)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="What a scheduler wrote with --record.")],
    check: Annotated[bool, typer.Option("--check", help="Check the scheduler's invariants after each call.")] = False,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Tell the story of one request.")] = None,
) -> None:
    """Make a scheduler's decisions again. Exit 1 if any of them differs, 2 if that cannot be told."""
    import subprocess

    from pagewire.processes import environment, module_command

    told = ["--check"] * check + ([f"--request={request}"] if request is not None else [])
    command = module_command("scheduler.replay", [*told, "--", str(file)])
    raise typer.Exit(subprocess.run(command, env=environment(), check=False).returncode)


@app.command()
def bench(
    ctx: typer.Context,
    workload: Annotated[Path, typer.Option(help="The workload's JSON file.", exists=True, dir_okay=False)],
    tests: Annotated[str, typer.Option(help="Tests of the workload, separated by commas.")] = "w1,w2,w3,w4",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, for w4.")] = 4.2,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each test.")] = 3,
    target: Target = DEFAULT_TARGET,
    memory_of: Annotated[int | None, typer.Option(help="Process whose tree's peak memory is reported.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="File for all figures and conditions.", dir_okay=False, writable=True)
    ] = None,
) -> None:
    """Measure throughput, TTFT, TPOT and ITL of a server under a workload."""
    from pagewire import bench_report

    bench_report.run(
        target,
        workload,
        [test.strip() for test in tests.split(",")],
        rate=rate,
        repetitions=repeat,
        memory_of=memory_of,
        json_file=json,
        console=make_console(),
        access=ctx.obj,
    )


@app.command()
def demo(model: ModelName = "smollm2-135m") -> None:
    """Show it all once: fetch the model, start a cluster, complete, chat, stop."""
    from pagewire import demo

    demo.run(model, make_console())
