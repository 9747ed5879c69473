"""From Python arguments to the messages of the public API: prompts, options, and each option's place in the proto.

Values are passed on as they are; the server decides what is allowed, and names all violations at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import grpc

from pagewire.errors import RequestError, named
from protos.errors import Refusal, Violation
from protos.pagewire.v1 import generation_pb2 as pb


class Message(TypedDict):
    """One turn of a conversation. The model defines the roles: "system", "user" and "assistant" for most."""

    role: str
    content: str


# Text, token ids taken as they are, or a conversation for the model's chat template.
Prompt = str | Sequence[int] | Sequence[Message]


class Options(TypedDict, total=False):
    """The options of a generation, all by keyword. None or absent means the model's default, else the proto's."""

    # The request itself.
    request_id: str | None  # appears in answers, logs and errors; the server makes one if unset
    model: str | None
    priority: int | None  # higher goes first, in -10 .. 10
    cache_salt: str | None  # only requests with the same salt share cached prefixes
    adapter: str | None
    add_generation_prompt: bool | None  # chat only: whether the template opens the assistant's turn
    # How the next token is drawn.
    temperature: float | None  # 0 is greedy
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None  # above 1 discourages tokens that are in the prompt or output
    presence_penalty: float | None  # above 0 discourages tokens that are in the output
    frequency_penalty: float | None  # the same, once for each occurrence
    logit_bias: Mapping[int, float] | None  # added to the logits of these token ids
    seed: int | None
    n: int | None  # sequences that are returned
    best_of: int | None  # sequences sampled, of which the n most probable are returned
    beam_width: int | None
    length_penalty: float | None  # with beam_width only
    early_stopping: bool | Literal["never"] | None  # with beam_width only
    # When a sequence ends.
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_string: bool | None
    # What the answer carries besides text.
    logprobs: int | None  # of each token and of this many most probable ones
    prompt_logprobs: int | None  # the same for the prompt
    token_ids: bool | None
    echo: bool | None
    # The answer's form; at most one of these.
    json_schema: str | None
    regex: str | None
    grammar: str | None


_PARTS: dict[str, Any] = {
    "sampling": pb.SamplingParams,
    "stop": pb.StopConditions,
    "output": pb.OutputOptions,
    "structure": pb.Structure,
}
# Each option's place in GenerateRequest: the field of its own name, in the part that has one; except these four.
_PLACES = {field: f"{part}.{field}" for part, kind in _PARTS.items() for field in kind.DESCRIPTOR.fields_by_name}
_PLACES |= {
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "token_ids": "output.token_ids",
    "add_generation_prompt": "chat.add_generation_prompt",
}
_EARLY_STOPPING = {
    True: pb.EARLY_STOPPING_TRUE,
    False: pb.EARLY_STOPPING_FALSE,
    "never": pb.EARLY_STOPPING_NEVER,
}


def generate_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The request for Generate and Complete.

    Raises:
        TypeError: an option's name is unknown, or the option is for chat messages and the prompt is not.
        InvalidRequest: the prompt or an option's value is not of its field's type, or does not fit into it.
    """
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for option, value in options.items():
        if option not in Options.__annotations__:
            raise TypeError(f"unknown option {option!r}")
        if value is None:
            continue
        if option == "add_generation_prompt" and not request.HasField("chat"):
            raise TypeError("add_generation_prompt is for chat messages only")
        _set_option(request, option, value)
    return request


def tokenize_request(prompt: str | Sequence[Message], add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """The request for Tokenize, for a text or chat messages.

    Raises:
        InvalidRequest: the prompt is neither.
    """
    request = pb.TokenizeRequest()
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    _set_prompt(request, prompt)
    return request


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """The request for Detokenize.

    Raises:
        InvalidRequest: an id is not an unsigned 32-bit integer.
    """
    request = pb.DetokenizeRequest()
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    _assign(request, "token_ids", token_ids, path="token_ids")
    return request


def as_messages(prompt: str | Sequence[Message]) -> Sequence[Message]:
    """A conversation as it is, or a text as its one user turn.

    Raises:
        InvalidRequest: the conversation has no message; elsewhere it would be taken for token ids.
    """
    if not isinstance(prompt, str) and not prompt:
        raise invalid("chat.messages", "must not be empty")
    return [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt


def _set_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: object) -> None:
    if isinstance(prompt, str):
        _assign(request, "text", prompt, path="text")
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise invalid(
            "prompt", f"must be a str, a list of token ids, or a list of messages, not {type(prompt).__name__}"
        )
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.SetInParent()
        for index, message in enumerate(prompt):
            path = f"chat.messages[{index}]"
            is_complete = isinstance(message, Mapping) and message.keys() == Message.__annotations__.keys()
            try:
                if not is_complete or None in message.values():  # None would leave the field empty
                    raise TypeError
                request.chat.messages.add(**message)
            except TypeError as error:
                raise invalid(path, "must be a dict with the strings 'role' and 'content' only") from error
            except ValueError as error:  # text that UTF-8 cannot encode
                raise invalid(path, f"cannot be {_short(message)}: {error}") from error
    elif isinstance(request, pb.GenerateRequest):
        request.token_ids.SetInParent()
        _assign(request.token_ids, "ids", prompt, path="token_ids.ids")
    else:
        raise invalid("prompt", "must be a str or a list of messages")


def _set_option(request: pb.GenerateRequest, option: str, value: Any) -> None:
    path = _PLACES.get(option, option)
    *parts, field = path.split(".")
    if option == "stop" and isinstance(value, str):
        value = [value]
    elif option == "early_stopping":
        try:
            value = _EARLY_STOPPING[value]
        except (KeyError, TypeError) as error:  # TypeError: not hashable
            raise invalid(path, "must be True, False or 'never'") from error
    _assign(getattr(request, parts[0]) if parts else request, field, value, path)


def _assign(holder: Any, field: str, value: Any, path: str) -> None:
    """Sets a scalar, repeated or map field; names the field in errors, which protobuf's own do not."""
    try:
        if isinstance(value, Mapping):
            getattr(holder, field).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(holder, field).extend(value)
        else:
            setattr(holder, field, value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise invalid(path, f"cannot be {_short(value)}: {error}") from error


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than a few thousand digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def invalid(path: str, description: str) -> RequestError:
    """The InvalidRequest that a server would answer, for a violation found on this side."""
    message = f"{path}: {description}"
    code = grpc.StatusCode.INVALID_ARGUMENT
    return named(Refusal(code, "INVALID_REQUEST", message, violations=[Violation(path, description)]))
