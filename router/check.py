"""Checks a GenerateRequest and resolves its defaults: all violations at once, nothing repaired in silence."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import grpc

from protos import session_pb2
from protos.columns import pack, pack_floats
from protos.errors import Refusal, Violation, invalid_argument, unsupported
from protos.pagewire.v1 import generation_pb2 as pb
from protos.sampling_pb2 import Sampling
from router.received import check_resume
from router.tokenizer import GenerationDefaults

MAX_REQUEST_ID_BYTES = 128
MAX_CACHE_SALT_BYTES = 128
MAX_PRIORITY = 10
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
# Of all outputs: they are told in one message, which has 16 MiB at most.
MAX_ECHO_BYTES = 8 << 20
# Of a prompt's tokens and those beside them: 12 MB of the one message they come in. Likewise of an answer that is kept
# until all of it is there, and what the client of a stream may leave unread.
MAX_LOGPROBS_TOLD = 1_000_000

_EARLY_STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: session_pb2.EARLY_STOPPING_FALSE,
    pb.EARLY_STOPPING_TRUE: session_pb2.EARLY_STOPPING_TRUE,
    pb.EARLY_STOPPING_FALSE: session_pb2.EARLY_STOPPING_FALSE,
    pb.EARLY_STOPPING_NEVER: session_pb2.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the operator of this router allows beside what model and scheduler can; None for all of that."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_n: int | None = None
    max_beam_width: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against.

    Attributes:
        max_num_seqs: sequences that the scheduler runs together.
    """

    name: str
    context_length: int
    vocabulary_size: int
    max_num_seqs: int
    defaults: GenerationDefaults
    limits: RequestLimits = RequestLimits()

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt, which leaves room for one token of output."""
        return _least(self.context_length - 1, self.limits.max_prompt_tokens)

    @property
    def max_output_tokens(self) -> int:
        """The longest output, behind the shortest prompt."""
        return _least(self.context_length - 1, self.limits.max_output_tokens)

    @property
    def max_n(self) -> int:
        """The most sequences of a request."""
        return _least(self.max_num_seqs, self.limits.max_n)

    @property
    def max_beam_width(self) -> int:
        """The widest search; 0 where there is none."""
        return _least(self.max_num_seqs, self.limits.max_beam_width)


def _least(most: int, limit: int | None) -> int:
    return most if limit is None else min(most, limit)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request with every default resolved.

    Attributes:
        n: sequences that are answered.
        scoped_id: the request id that the scheduler knows, which tells tenants apart.
        resume: what the client has of the answer; None unless it takes it up again.
        num_sequences: sequences that the scheduler tells of; over n, the n best of them are answered.
        beam_search: None where tokens are sampled.
        stop_token_ids: of the client, and the model's own unless it ignores them.
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


def check_model(name: str, served: str) -> None:
    """Refuses a request for a model that is not served."""
    if name and name != served:
        message = f"model: {name[:128]!r} is not served here; leave it empty or send {served!r}"
        raise Refusal(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", message)


def check_before_tokenizing(
    request: pb.GenerateRequest, model: ServedModel, max_token_bytes: int, header_id: str = ""
) -> None:
    """Refuses what can be refused without the prompt's tokens; `header_id` is x-request-id, if the call has one.

    Raises:
        Refusal: NOT_FOUND for another model, INVALID_ARGUMENT with all violations, UNIMPLEMENTED with all fields that
            a later version will know what to do with.
    """
    check_model(request.model, model.name)
    found = _Violations()
    id_name, request_id = ("request_id", request.request_id) if request.request_id else ("x-request-id", header_id)
    _check_printable(id_name, request_id, MAX_REQUEST_ID_BYTES, found)
    _check_prompt(request, model, max_token_bytes, found)
    _check_sampling(request.sampling, model, found)
    _check_search(request, found)
    _check_output(request.output, model, found)
    _check_stop(request.stop, model, found)
    in_range = -MAX_PRIORITY <= request.priority <= MAX_PRIORITY
    found.require("priority", in_range, f"is {request.priority}; must be in -{MAX_PRIORITY} .. {MAX_PRIORITY}")
    _check_printable("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES, found)
    if request.HasField("resume"):
        found.violations += check_resume(request)
    if found.violations:
        raise invalid_argument(found.violations)
    later = _unsupported_fields(request)
    if later:
        raise unsupported(later)


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
    found = _Violations()
    num_prompt_tokens = len(prompt_token_ids)
    field = request.WhichOneof("prompt") or "prompt"
    # A tokenizer may know tokens that the model has no embedding for.
    found.violations += check_token_ids(field, prompt_token_ids, model.vocabulary_size)
    found.require(field, num_prompt_tokens > 0, "must not be empty: it gives no tokens")
    fits = num_prompt_tokens <= model.max_prompt_tokens
    found.require(field, fits, _too_long(f"has {num_prompt_tokens} tokens", model))
    stop = request.stop
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
    params = request.sampling
    n = params.n if params.HasField("n") else 1
    num_sequences = params.best_of if params.HasField("best_of") else n
    # What is told as it comes may be as much as it likes.
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


def check_token_ids(field: str, token_ids: Sequence[int], vocabulary_size: int) -> list[Violation]:
    """A violation for each of the first ids outside the vocabulary."""
    wrong = ((place, token_id) for place, token_id in enumerate(token_ids) if token_id >= vocabulary_size)
    return [Violation(f"{field}[{place}]", _outside(token_id, vocabulary_size)) for place, token_id in islice(wrong, 8)]


def _outside(token_id: int, vocabulary_size: int) -> str:
    return f"{token_id} is outside the vocabulary: 0 .. {vocabulary_size - 1}"


def check_tokenize(request: pb.TokenizeRequest, model: ServedModel, max_token_bytes: int) -> None:
    """Refuses what is no prompt, or can not have as few tokens as one may; it takes seconds to tokenize that."""
    found = _Violations()
    _check_text_or_chat(request, model, max_token_bytes, found)
    if found.violations:
        raise invalid_argument(found.violations)


def _check_text_or_chat(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel, max_token_bytes: int, found: "_Violations"
) -> None:
    most = model.max_prompt_tokens
    match request.WhichOneof("prompt"):
        case "text":
            fewest = len(request.text.encode()) // max_token_bytes
            found.require("text", fewest <= most, _too_long(f"has at least {fewest} tokens", model))
        case "chat":
            messages = request.chat.messages
            found.require("chat.messages", bool(messages), "must not be empty")
            if len(messages) > most:
                too_many = _too_long(f"are {len(messages)}, each a token at least", model)
                return found.require("chat.messages", False, too_many)
            num_bytes = 0
            for place, message in enumerate(messages):
                found.require(f"chat.messages[{place}].role", bool(message.role), "must not be empty")
                num_bytes += len(message.content.encode()) + len(message.role.encode())
            fewest = num_bytes // max_token_bytes
            found.require("chat", fewest <= most, _too_long(f"has at least {fewest} tokens", model))
    return None


class _Violations:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def require(self, field: str, holds: bool, description: str) -> None:
        if not holds:
            self.violations.append(Violation(field, description))


def _too_long(what: str, model: ServedModel) -> str:
    most = model.max_prompt_tokens
    if most < model.context_length - 1:
        return f"{what}; prompts may have {most} tokens here: send a shorter one"
    return f"{what}; at most {most} fit into a context of {model.context_length} with one to sample"


def _check_printable(field: str, text: str, max_bytes: int, found: _Violations) -> None:
    holds = len(text) <= max_bytes and text.isascii() and text.isprintable()
    found.require(field, holds, f"must be at most {max_bytes} bytes of printable ASCII")


def _check_prompt(request: pb.GenerateRequest, model: ServedModel, max_token_bytes: int, found: _Violations) -> None:
    match request.WhichOneof("prompt"):
        case None:
            found.require("prompt", False, "is required: set text, token_ids or chat")
        case "text":
            found.require("text", bool(request.text), "must not be empty")
        case "token_ids":
            ids = request.token_ids.ids
            found.require("token_ids.ids", bool(ids), "must not be empty")
            found.require(
                "token_ids.ids", len(ids) <= model.max_prompt_tokens, _too_long(f"are {len(ids)} tokens", model)
            )
            found.violations += check_token_ids("token_ids.ids", ids[: model.context_length], model.vocabulary_size)
    _check_text_or_chat(request, model, max_token_bytes, found)


def _check_sampling(sampling: pb.SamplingParams, model: ServedModel, found: _Violations) -> None:
    n, widest = sampling.n if sampling.HasField("n") else 1, model.max_beam_width
    fewest, of_n = (n, " (n)") if 1 <= n <= model.max_n else (1, "")
    ranges: tuple[tuple[str, Callable[[float], bool], str], ...] = (
        ("temperature", lambda value: 0 <= value <= 100, "must be in [0, 100]; 0 is greedy"),
        ("top_p", lambda value: 0 < value <= 1, "must be in (0, 1]; 1 keeps all tokens"),
        ("top_k", lambda value: value >= 0, "must be 0 (all tokens) or more"),
        ("min_p", lambda value: 0 <= value <= 1, "must be in [0, 1]"),
        ("typical_p", lambda value: 0 < value <= 1, "must be in (0, 1]"),
        ("repetition_penalty", lambda value: 0 < value < math.inf, "must be over 0; 1 is off"),
        ("presence_penalty", lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
        ("frequency_penalty", lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
        ("length_penalty", lambda value: -10 <= value <= 10, "must be in [-10, 10]"),
        ("n", lambda value: 1 <= value <= model.max_n, f"must be in 1 .. {model.max_n}"),
        ("best_of", lambda value: fewest <= value <= model.max_n, f"must be in {fewest}{of_n} .. {model.max_n}"),
        ("beam_width", lambda value: 0 <= value <= widest, f"must be in 0 (no beam search) .. {widest}"),
    )
    for name, holds, description in ranges:
        if sampling.HasField(name):
            value = getattr(sampling, name)
            found.require(f"sampling.{name}", holds(value), f"is {value:.6g}; {description}")
    # What is in a list that is too long is nobody's concern: to look at it all would stop everybody's streams.
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        return found.require("sampling.logit_bias", False, f"must be at most {MAX_LOGIT_BIASES}")
    for token_id, bias in sorted(sampling.logit_bias.items()):
        field, size = f"sampling.logit_bias[{token_id}]", model.vocabulary_size
        found.require(field, -100 <= bias <= 100, "must be in [-100, 100]")
        found.require(field, token_id < size, _outside(token_id, size))
    return None


def _check_search(request: pb.GenerateRequest, found: _Violations) -> None:
    """What goes with a beam search only, and what does not go with one."""
    sampling, width = request.sampling, request.sampling.beam_width
    early_stopping = sampling.early_stopping
    known = early_stopping in _EARLY_STOPPING
    found.require("sampling.early_stopping", known, f"is {early_stopping}; must be a value of EarlyStopping")

    def require_unless_set(name: str, neutral: float, description: str) -> None:
        value = getattr(sampling, name)
        is_neutral = not sampling.HasField(name) or value == neutral
        found.require(f"sampling.{name}", is_neutral, f"is {value:.6g}; {description}")

    if width <= 0:
        remedy = "applies to a beam search only: leave it unset, or set beam_width"
        require_unless_set("length_penalty", 1, remedy)
        unused = early_stopping in (pb.EARLY_STOPPING_UNSPECIFIED, pb.EARLY_STOPPING_FALSE)
        found.require("sampling.early_stopping", unused or not known, remedy)
        return
    found.require("sampling.n", sampling.n <= width, f"is {sampling.n}; must be at most beam_width ({width})")
    unset = not sampling.HasField("best_of")
    found.require("sampling.best_of", unset, "can not be combined with beam_width: leave it unset, and set n")
    require_unless_set("temperature", 0, "a beam search is greedy: leave it unset, or 0")
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("typical_p", 1)):
        require_unless_set(name, neutral, f"a beam search filters no tokens: leave it unset, or {neutral}")
    for name, neutral in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
        remedy = f"can not be combined with beam_width: leave it unset, or {neutral}"
        require_unless_set(name, neutral, remedy)
    no_logprobs = not request.output.HasField("logprobs")
    found.require("output.logprobs", no_logprobs, "can not be combined with sampling.beam_width: leave it unset")
    no_strings = not request.stop.strings
    found.require("stop.strings", no_strings, "can not be combined with sampling.beam_width: use stop.token_ids")


def _check_output(output: pb.OutputOptions, model: ServedModel, found: _Violations) -> None:
    most = min(MAX_LOGPROBS, model.vocabulary_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(output, name)
        found.require(f"output.{name}", 0 <= value <= most, f"is {value}; must be in 0 .. {most}")


def _check_num_logprobs(
    output: pb.OutputOptions, num_prompt_tokens: int, num_kept_sequences: int, max_tokens: int, found: _Violations
) -> None:
    fewer = ": set stop.max_tokens, or use Generate without best_of"
    told = {"prompt_logprobs": (1, num_prompt_tokens, ""), "logprobs": (num_kept_sequences, max_tokens, fewer)}
    for name, (times, num_tokens, remedy) in told.items():
        num = times * num_tokens * (1 + getattr(output, name)) if output.HasField(name) else 0
        too_many = f"asks for {num} with {times} x {num_tokens} tokens; at most {MAX_LOGPROBS_TOLD} are told{remedy}"
        found.require(f"output.{name}", num <= MAX_LOGPROBS_TOLD, too_many)


def _check_stop(stop: pb.StopConditions, model: ServedModel, found: _Violations) -> None:
    if stop.HasField("max_tokens"):
        found.require("stop.max_tokens", stop.max_tokens >= 1, f"is {stop.max_tokens}; must be at least 1")
        in_order = stop.min_tokens <= max(1, stop.max_tokens)
        found.require("stop.min_tokens", in_order, f"must be at most stop.max_tokens ({stop.max_tokens})")
    found.require("stop.min_tokens", stop.min_tokens >= 0, f"is {stop.min_tokens}; must be 0 or more")
    found.require("stop.strings", len(stop.strings) <= MAX_STOP_STRINGS, f"must be at most {MAX_STOP_STRINGS}")
    for place, text in enumerate(stop.strings[:MAX_STOP_STRINGS]):
        found.require(
            f"stop.strings[{place}]",
            0 < len(text) <= MAX_STOP_STRING_CHARS,
            f"must have 1 .. {MAX_STOP_STRING_CHARS} characters",
        )
    found.require("stop.token_ids", len(stop.token_ids) <= MAX_STOP_TOKEN_IDS, f"must be at most {MAX_STOP_TOKEN_IDS}")
    first_ids = stop.token_ids[:MAX_STOP_TOKEN_IDS]
    found.violations += check_token_ids("stop.token_ids", first_ids, model.vocabulary_size)


def _unsupported_fields(request: pb.GenerateRequest) -> list[str]:
    """Fields set to anything but what leaves them without effect."""
    fields = {"structure": request.HasField("structure"), "adapter": bool(request.adapter)}
    return [field for field, is_set in fields.items() if is_set]


def _sampling(
    request: pb.GenerateRequest, model: ServedModel, num_prompt_tokens: int, stop_token_ids: Sequence[int]
) -> Sampling:
    params, output = request.sampling, request.output
    # In one order, by which the same request is known again.
    biases = sorted(params.logit_bias.items())
    # Neither the model's own temperature, nor its filters and penalty apply to a beam search.
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
        early_stopping=_EARLY_STOPPING[params.early_stopping],
    )
