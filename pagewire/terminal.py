"""How `pagewire generate` and `pagewire chat` show answers: text on standard output as it comes, remarks apart."""

import dataclasses
import json
import sys
from collections.abc import Callable

from rich.console import Console

from pagewire.client import Client, Stream
from pagewire.errors import RequestError
from pagewire.request import Message, Options
from pagewire.results import Completion

_PROMPT = "> "


def show(stream: Stream, *, headings: bool) -> Completion:
    """Writes an answer as it is generated, or with headings each sequence once it is done; returns all of it."""
    try:
        with stream:
            for delta in stream:
                if not headings:
                    _write(delta.text)
                elif delta.finish_reason is not None:
                    done = next(output for output in stream.completion.outputs if output.index == delta.index)
                    _write(f"--- {delta.index}: {delta.finish_reason.value} ---\n{done.text}\n")
    except RequestError:  # it is reported on a line of its own
        if not headings and stream.completion.text:
            _write("\n")
        raise
    if not headings:
        _write("\n")
    return stream.completion


def summary(completion: Completion, *, streamed: bool = True) -> str:
    """How fast an answer came, in a line; "" if it is not complete. Without `streamed` it has no TTFT and no rate."""
    usage, timings = completion.usage, completion.timings
    if usage is None or timings is None:
        return ""
    cached = f", {usage.cached_prompt_tokens} cached" if usage.cached_prompt_tokens else ""
    parts = [f"TTFT {timings.ttft_ms:.0f} ms"] if streamed else []
    rate = tokens_per_second(completion) if streamed else None
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    parts.append(f"{usage.completion_tokens} tokens in {timings.total_ms / 1000:.2f} s")
    parts.append(f"prompt of {usage.prompt_tokens}{cached}")
    return ", ".join(parts[:-1]) + f" ({parts[-1]})"


def tokens_per_second(completion: Completion) -> float | None:
    """Tokens after each sequence's first, over the time after the first token; None if there is no such token."""
    usage, timings = completion.usage, completion.timings
    if usage is None or timings is None:
        return None
    later = usage.completion_tokens - len(completion.outputs)
    decode_s = (timings.total_ms - timings.ttft_ms) / 1000
    return later / decode_s if later > 0 and decode_s > 0 else None


def remark(completion: Completion, console: Console) -> None:
    """Says why sequences ended, if the request alone does not tell."""
    for words in dict.fromkeys(output.finish_message for output in completion.outputs if output.finish_message):
        console.print(words, style="yellow", markup=False)


def as_json(completion: Completion) -> str:
    """Everything in an answer as one JSON object."""
    return json.dumps(dataclasses.asdict(completion), default=lambda reason: reason.value, ensure_ascii=False)


class Conversation:
    """A chat in the terminal: keeps what was said, and sends it all with every turn.

    Args:
        client: to the server that answers.
        system: what the assistant is told first, if anything.
        options: of every turn.
        remarks: shows what is not an answer.
        explained: an error in words.
    """

    def __init__(
        self,
        client: Client,
        system: str | None,
        options: Options,
        remarks: Console,
        explained: Callable[[RequestError], str],
    ) -> None:
        self._client = client
        self._options = options
        self._remarks = remarks
        self._explained = explained
        self._messages = [Message(role="system", content=system)] if system else []

    def run(self) -> None:
        """Answers lines from standard input until it ends. On a terminal Ctrl-C and errors end a turn, not the chat."""
        if not sys.stdin.isatty():
            for line in sys.stdin:
                self._turn(line.strip())
            return
        import readline  # noqa: F401 # gives `input` its line editing

        self._remarks.print("[dim]Ctrl-C interrupts an answer, Ctrl-D leaves.[/]")
        while True:
            try:
                self._turn(input(_PROMPT).strip())
            except EOFError:
                _write("\n")
                return
            except KeyboardInterrupt:
                _write("\n")
            except RequestError as error:
                self._remarks.print("error:", self._explained(error), style="red", markup=False)

    def _turn(self, text: str) -> None:
        if not text:
            return
        asked = Message(role="user", content=text)
        stream = self._client.stream([*self._messages, asked], **self._options)
        try:
            completion = show(stream, headings=False)
            remark(completion, self._remarks)
            self._remarks.print(summary(completion), style="dim", markup=False)
        finally:
            # What was said before an interruption is kept; a turn that got no answer is forgotten.
            if answer := stream.completion.text:
                self._messages += [asked, Message(role="assistant", content=answer)]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
