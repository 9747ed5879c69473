"""Text to token ids and back, the chat template, and what the checkpoint says about generation.

Uses Hugging Face's `tokenizers` and a Jinja sandbox set up as transformers sets up its own: transformers itself would
add 200 MB and two seconds of startup to a process that needs only these two.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json"]


class ChatTemplateError(ValueError):
    """The model's chat template does not take these messages, or there is none."""


class UnreadableFile(Exception):
    """One of the model's files is not what its name says; the message names it and the remedy."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(
            f"{path} cannot be read: {error}; it is damaged or cut short, so fetch or save the model again"
        )


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the checkpoint's generation_config sets; None where it sets nothing."""

    eos_token_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


class Tokenizer:
    """One model's tokenizer, with its files read from `directory`.

    Attributes:
        backend: the `tokenizers.Tokenizer`, which streams decode with.
        max_token_bytes: the most bytes of text that a token stands for: no text of b bytes has fewer than
            b / max_token_bytes tokens.

    Raises:
        FileNotFoundError: the directory holds no tokenizer.json.
        UnreadableFile: a file is there, but damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: save the model's fast tokenizer with save_pretrained")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing more precise
            raise UnreadableFile(path, error) from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.max_token_bytes = max(len(token.encode()) for token in self.backend.get_vocab())
        config = _read_json(directory / "tokenizer_config.json")
        self._special_tokens = {
            name: _content(config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name) is not None
        }
        self._template = _compile(directory, config)
        self.defaults = _generation_defaults(directory)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        # Of the library's encode methods, only the batched ones release the GIL for other threads.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no character become U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The chat template's text for `messages`, special tokens included.

        Raises:
            ChatTemplateError: with the template's own words where it has some.
        """
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; send text or token ids")
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


def find_checkpoint(model: str) -> Path:
    """The folder with the tokenizer files of `model`: a directory, or a hub name, whose files are fetched.

    Raises:
        FileNotFoundError: it is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(f"{model!r} is no directory, and no model that can be fetched: {reason}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UnreadableFile(path, error) from error
    if not isinstance(content, dict):
        raise UnreadableFile(path, ValueError("it is no JSON object"))
    return content


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _generation_defaults(directory: Path) -> GenerationDefaults:
    generation = _read_json(directory / "generation_config.json")
    eos = generation.get("eos_token_id", _read_json(directory / "config.json").get("eos_token_id"))
    eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
    named = {name: generation.get(name) for name in names}
    return GenerationDefaults(eos_token_ids, **named)


def _compile(directory: Path, config: dict[str, Any]) -> jinja2.Template | None:
    path = directory / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UnreadableFile(path if path.is_file() else directory / "tokenizer_config.json", error) from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model said, for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
