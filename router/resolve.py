"""What a checked GenerateRequest means: its defaults, and what can be checked when its prompt's tokens are known."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from protos import session_pb2
from protos.columns import pack, pack_floats
from protos.errors import invalid_argument
from protos.pagewire.v1 import generation_pb2 as pb
from protos.sampling_pb2 import Sampling
from router.check import EARLY_STOPPING, ServedModel, Violations, check_token_ids, too_long
from router.tokenizer import GenerationDefaults

# For all outputs together: they are sent in one message, which has 16 MiB at most.
MAX_ECHO_BYTES = 8 << 20
# For a prompt's tokens and their alternatives: 12 MB of the one message they come in. The same limit holds for an
# answer that is kept until it is complete, and for what the client of a stream may leave unread.
MAX_LOGPROBS_TOLD = 1_000_000


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request with every default resolved.

    Attributes:
        n: sequences that the client gets.
        scoped_id: the request id as the scheduler knows it, which tells tenants apart.
        resume: what the client already has of the answer; None unless it resumes one.
        num_sequences: sequences that the scheduler reports; if they are more than n, the client gets the n best.
        beam_search: None where tokens are sampled.
        stop_token_ids: the client's, and the model's own unless the client ignores them.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    n: int
    num_sequences: int
    beam_search: session_pb2.BeamSearch | None
    priority: int
    cache_salt: str
    max_tokens: int
    min_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_string: bool
    with_token_ids: bool
    echo: str
    resume: pb.Resume | None = None
    scoped_id: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0


def resolve(
    request: pb.GenerateRequest,
    request_id: str,
    prompt_token_ids: Sequence[int],
    echo: str,
    model: ServedModel,
    *,
    whole: bool,
) -> CheckedRequest:
    """The request with its prompt's tokens, checked against the context length, and its defaults.

    It is answered in one message if `whole`.

    Raises:
        Refusal: INVALID_ARGUMENT: an empty or too long prompt, or more max_tokens than the context has room for.
    """
    found = Violations()
    stop, num_prompt_tokens = request.stop, len(prompt_token_ids)
    max_tokens = _max_tokens(request, prompt_token_ids, model, found)
    params = request.sampling
    n = params.n if params.HasField("n") else 1
    num_sequences = params.best_of if params.HasField("best_of") else n
    # Log-probabilities that are sent as they come are not limited here.
    num_kept = num_sequences if whole or num_sequences > n else 0
    _check_num_logprobs(request.output, num_prompt_tokens, num_kept, max_tokens, found)
    num_echoed = n * len(echo.encode())
    too_much = f"would repeat {num_echoed} bytes for {n} outputs, of at most {MAX_ECHO_BYTES}: leave it out, or lower n"
    found.require("output.echo", num_echoed <= MAX_ECHO_BYTES, too_much)
    if found.violations:
        raise invalid_argument(found.violations)
    eos = () if stop.ignore_eos else model.defaults.eos_token_ids
    stop_token_ids = tuple(dict.fromkeys((*stop.token_ids, *eos)))
    return CheckedRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_sampling(request, model, num_prompt_tokens, stop_token_ids),
        n=n,
        num_sequences=num_sequences,
        beam_search=_beam_search(params) if params.beam_width else None,
        priority=request.priority,
        cache_salt=request.cache_salt,
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        stop_strings=tuple(stop.strings),
        stop_token_ids=stop_token_ids,
        include_stop_string=stop.include_stop_string,
        with_token_ids=request.output.token_ids,
        echo=echo,
        resume=request.resume if request.HasField("resume") else None,
    )


def _max_tokens(
    request: pb.GenerateRequest, prompt_token_ids: Sequence[int], model: ServedModel, found: Violations
) -> int:
    """The most output tokens that are wanted; checks them and the prompt against the context."""
    stop, num_prompt_tokens = request.stop, len(prompt_token_ids)
    field = request.WhichOneof("prompt") or "prompt"
    # A tokenizer may know tokens that the model has no embedding for.
    found.violations += check_token_ids(field, prompt_token_ids, model.vocabulary_size)
    found.require(field, num_prompt_tokens > 0, "must not be empty: it gives no tokens")
    fits = num_prompt_tokens <= model.max_prompt_tokens
    found.require(field, fits, too_long(f"has {num_prompt_tokens} tokens", model))
    left = model.context_length - num_prompt_tokens
    room = min(left, model.max_output_tokens)
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else room
    if fits:
        why = (
            f"the prompt's {num_prompt_tokens} tokens and the output share a context of {model.context_length}"
            if room == left
            else "outputs may not be longer here"
        )
        found.require("stop.max_tokens", max_tokens <= room, f"is {max_tokens}; must be at most {room}: {why}")
        if not stop.HasField("max_tokens"):
            too_many = f"is {stop.min_tokens}; must be at most {room}: {why}"
            found.require("stop.min_tokens", stop.min_tokens <= room, too_many)
    return max_tokens


def _check_num_logprobs(
    output: pb.OutputOptions, num_prompt_tokens: int, num_kept_sequences: int, max_tokens: int, found: Violations
) -> None:
    fewer = ": set stop.max_tokens, or use Generate without best_of"
    told = {"prompt_logprobs": (1, num_prompt_tokens, ""), "logprobs": (num_kept_sequences, max_tokens, fewer)}
    for name, (times, num_tokens, remedy) in told.items():
        num = times * num_tokens * (1 + getattr(output, name)) if output.HasField(name) else 0
        too_many = f"asks for {num} with {times} x {num_tokens} tokens; at most {MAX_LOGPROBS_TOLD} are told{remedy}"
        found.require(f"output.{name}", num <= MAX_LOGPROBS_TOLD, too_many)


def _sampling(
    request: pb.GenerateRequest, model: ServedModel, num_prompt_tokens: int, stop_token_ids: Sequence[int]
) -> Sampling:
    params, output = request.sampling, request.output
    # In a fixed order, so that the same request is recognized when it comes again.
    biases = sorted(params.logit_bias.items())
    # The model's own temperature, filters and penalty do not apply to a beam search.
    defaults = GenerationDefaults(eos_token_ids=(), temperature=0.0) if params.beam_width else model.defaults

    def first_set(name: str, fallback: float) -> float:
        if params.HasField(name):
            return getattr(params, name)
        named = getattr(defaults, name)
        return fallback if named is None else named

    return Sampling(
        temperature=first_set("temperature", 1.0),
        top_p=first_set("top_p", 1.0),
        top_k=int(first_set("top_k", 0)),
        min_p=first_set("min_p", 0.0),
        seed=_seed(request),
        stop_token_ids=stop_token_ids,
        min_tokens=request.stop.min_tokens,
        num_prompt_tokens=num_prompt_tokens,
        typical_p=first_set("typical_p", 1.0),
        repetition_penalty=first_set("repetition_penalty", 1.0),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_token_ids=pack(token_id for token_id, _ in biases),
        biases=pack_floats(bias for _, bias in biases),
        num_top_logprobs=output.logprobs if output.HasField("logprobs") else None,
        num_prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
    )


def _seed(request: pb.GenerateRequest) -> int:
    if request.HasField("resume"):
        return request.resume.seed
    return request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(64)


def _beam_search(params: pb.SamplingParams) -> session_pb2.BeamSearch:
    return session_pb2.BeamSearch(
        width=params.beam_width,
        length_penalty=params.length_penalty if params.HasField("length_penalty") else 1.0,
        early_stopping=EARLY_STOPPING[params.early_stopping],
    )
