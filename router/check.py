"""Checks a GenerateRequest before anything is computed for it: all violations at once, nothing repaired in silence."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import grpc

from protos import session_pb2
from protos.errors import Refusal, Violation, invalid_argument, unsupported
from protos.pagewire.v1 import generation_pb2 as pb
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

# The scheduler's value for each of the client's; others are refused.
EARLY_STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: session_pb2.EARLY_STOPPING_FALSE,
    pb.EARLY_STOPPING_TRUE: session_pb2.EARLY_STOPPING_TRUE,
    pb.EARLY_STOPPING_FALSE: session_pb2.EARLY_STOPPING_FALSE,
    pb.EARLY_STOPPING_NEVER: session_pb2.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the operator of this router allows of what model and scheduler can do; None for all of it."""

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
        """The longest output, after the shortest prompt."""
        return _least(self.context_length - 1, self.limits.max_output_tokens)

    @property
    def max_n(self) -> int:
        """The most sequences of a request."""
        return _least(self.max_num_seqs, self.limits.max_n)

    @property
    def max_beam_width(self) -> int:
        """The widest beam search; 0 if none is allowed."""
        return _least(self.max_num_seqs, self.limits.max_beam_width)


def _least(most: int, limit: int | None) -> int:
    return most if limit is None else min(most, limit)


class Violations:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def require(self, field: str, holds: bool, description: str) -> None:
        """Notes a violation of a field that does not meet its condition."""
        if not holds:
            self.violations.append(Violation(field, description))


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
            are not supported yet.
    """
    check_model(request.model, model.name)
    found = Violations()
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


def check_token_ids(field: str, token_ids: Sequence[int], vocabulary_size: int) -> list[Violation]:
    """A violation for each of the first eight ids outside the vocabulary."""
    wrong = ((place, token_id) for place, token_id in enumerate(token_ids) if token_id >= vocabulary_size)
    return [Violation(f"{field}[{place}]", _outside(token_id, vocabulary_size)) for place, token_id in islice(wrong, 8)]


def _outside(token_id: int, vocabulary_size: int) -> str:
    return f"{token_id} is outside the vocabulary: 0 .. {vocabulary_size - 1}"


def check_tokenize(request: pb.TokenizeRequest, model: ServedModel, max_token_bytes: int) -> None:
    """Refuses what is no prompt, or surely has more tokens than one may: tokenizing that would take seconds."""
    found = Violations()
    _check_text_or_chat(request, model, max_token_bytes, found)
    if found.violations:
        raise invalid_argument(found.violations)


def _check_text_or_chat(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel, max_token_bytes: int, found: Violations
) -> None:
    most = model.max_prompt_tokens
    match request.WhichOneof("prompt"):
        case "text":
            fewest = len(request.text.encode()) // max_token_bytes
            found.require("text", fewest <= most, too_long(f"has at least {fewest} tokens", model))
        case "chat":
            messages = request.chat.messages
            found.require("chat.messages", bool(messages), "must not be empty")
            if len(messages) > most:
                too_many = too_long(f"are {len(messages)}, each a token at least", model)
                return found.require("chat.messages", False, too_many)
            num_bytes = 0
            for place, message in enumerate(messages):
                found.require(f"chat.messages[{place}].role", bool(message.role), "must not be empty")
                num_bytes += len(message.content.encode()) + len(message.role.encode())
            fewest = num_bytes // max_token_bytes
            found.require("chat", fewest <= most, too_long(f"has at least {fewest} tokens", model))
    return None


def too_long(what: str, model: ServedModel) -> str:
    """What is wrong with a prompt that is too long; `what` says how long it is."""
    most = model.max_prompt_tokens
    if most < model.context_length - 1:
        return f"{what}; prompts may have {most} tokens here: send a shorter one"
    return f"{what}; at most {most} fit into a context of {model.context_length} with one to sample"


def _check_printable(field: str, text: str, max_bytes: int, found: Violations) -> None:
    holds = len(text) <= max_bytes and text.isascii() and text.isprintable()
    found.require(field, holds, f"must be at most {max_bytes} bytes of printable ASCII")


def _check_prompt(request: pb.GenerateRequest, model: ServedModel, max_token_bytes: int, found: Violations) -> None:
    match request.WhichOneof("prompt"):
        case None:
            found.require("prompt", False, "is required: set text, token_ids or chat")
        case "text":
            found.require("text", bool(request.text), "must not be empty")
        case "token_ids":
            ids = request.token_ids.ids
            found.require("token_ids.ids", bool(ids), "must not be empty")
            found.require(
                "token_ids.ids", len(ids) <= model.max_prompt_tokens, too_long(f"are {len(ids)} tokens", model)
            )
            found.violations += check_token_ids("token_ids.ids", ids[: model.context_length], model.vocabulary_size)
    _check_text_or_chat(request, model, max_token_bytes, found)


def _check_sampling(sampling: pb.SamplingParams, model: ServedModel, found: Violations) -> None:
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
    # The entries of an over-long list are not looked at: that would hold up every stream.
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        return found.require("sampling.logit_bias", False, f"must be at most {MAX_LOGIT_BIASES}")
    for token_id, bias in sorted(sampling.logit_bias.items()):
        field, size = f"sampling.logit_bias[{token_id}]", model.vocabulary_size
        found.require(field, -100 <= bias <= 100, "must be in [-100, 100]")
        found.require(field, token_id < size, _outside(token_id, size))
    return None


def _check_search(request: pb.GenerateRequest, found: Violations) -> None:
    """Checks what only a beam search takes, and what a beam search does not take."""
    sampling, width = request.sampling, request.sampling.beam_width
    early_stopping = sampling.early_stopping
    known = early_stopping in EARLY_STOPPING
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
    found.require("sampling.best_of", unset, "cannot be combined with beam_width: leave it unset, and set n")
    require_unless_set("temperature", 0, "a beam search is greedy: leave it unset, or 0")
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("typical_p", 1)):
        require_unless_set(name, neutral, f"a beam search filters no tokens: leave it unset, or {neutral}")
    for name, neutral in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
        remedy = f"cannot be combined with beam_width: leave it unset, or {neutral}"
        require_unless_set(name, neutral, remedy)
    no_logprobs = not request.output.HasField("logprobs")
    found.require("output.logprobs", no_logprobs, "cannot be combined with sampling.beam_width: leave it unset")
    no_strings = not request.stop.strings
    found.require("stop.strings", no_strings, "cannot be combined with sampling.beam_width: use stop.token_ids")


def _check_output(output: pb.OutputOptions, model: ServedModel, found: Violations) -> None:
    most = min(MAX_LOGPROBS, model.vocabulary_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(output, name)
        found.require(f"output.{name}", 0 <= value <= most, f"is {value}; must be in 0 .. {most}")


def _check_stop(stop: pb.StopConditions, model: ServedModel, found: Violations) -> None:
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
    """Unsupported fields that are set to something that would have an effect."""
    fields = {"structure": request.HasField("structure"), "adapter": bool(request.adapter)}
    return [field for field, is_set in fields.items() if is_set]
