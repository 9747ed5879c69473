"""What commands say to a person: on which console, and of an error one line that says what to do, with status 1."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from pagewire.access import Access
from pagewire.errors import DeadlineExceeded, PagewireError, RequestError, Unavailable

if TYPE_CHECKING:
    from rich.console import Console


class ReportingGroup(typer.core.TyperGroup):
    """Shows the errors that this package raises on purpose, and the system's, as a line, and exits with status 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _reported(ctx):  # since --help and --version print here
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _reported(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _reported(ctx: Any) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # typer ends without a word
    # The system's are such as a full disk; the last are of arguments that are not UTF-8, and terminals that are not.
    except (PagewireError, OSError, UnicodeEncodeError) as error:
        make_console(stderr=True).print("error:", explained(error, ctx.obj), style="red", markup=False)
        raise typer.Exit(1) from error


def explained(error: PagewireError | OSError | UnicodeEncodeError, access: Access | None) -> str:
    """The error's own text, and what to do if that is known."""
    if isinstance(error, Unavailable) and not error.reason:
        from pagewire.health import not_let_in

        nobody = "no server answers; `pagewire up` starts one, --target names another, --tls is for one with TLS"
        return (access is not None and not_let_in(str(error), access)) or f"{nobody} ({error})"
    if isinstance(error, DeadlineExceeded):
        return f"not done within --timeout ({error})"
    if isinstance(error, RequestError) and error.reason == "TOKEN_MISSING":
        return f"{error}; --token, before the command, sends it"
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        return f"{error}; try again in {error.retry_after_s:g} s"
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[error.start : error.end]!r} cannot be written in {error.encoding}"
    return str(error)


def make_console(*, stderr: bool = False) -> "Console":
    """A console for what a command says; rich is imported here, so that `pagewire --help` starts fast."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)
