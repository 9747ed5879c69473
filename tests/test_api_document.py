"""docs/api.md and docs/errors.md say what the code says."""

import ast
import re
from pathlib import Path

import pytest

from docs import api

ROOT = Path(__file__).parents[1]
ROOMS = ("protos", "router", "scheduler", "worker")
# The functions that make an error from a reason.
NAMING = ("Refusal", "unavailable", "unauthenticated", "_exhausted", "_broken_off")
REASON = re.compile(r"[A-Z][A-Z_]+")


def reasons_in(path: Path) -> set[str]:
    """Reasons that a file gives to its errors."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in NAMING:
            texts = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            found |= {text for text in texts if REASON.fullmatch(text)}
    return found


def test_the_committed_page_is_what_the_proto_comments_say():
    assert (ROOT / "docs" / "api.md").read_text() == api.document(api.read()), "run `make docs`"


@pytest.mark.parametrize("file", api.read(), ids=lambda file: Path(file.file.name).stem)
def test_every_method_has_a_comment_and_an_example(file):
    for name, commands in api.examples(file).items():
        assert len(commands) == 1, name
        assert commands[0].startswith("grpcurl -plaintext "), name
        assert commands[0].endswith(f"/{name}"), name


def test_the_table_has_every_reason_that_the_code_gives_and_no_other():
    used = set().union(*(reasons_in(path) for room in ROOMS for path in (ROOT / room).glob("*.py")))
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert {reason for reason, _ in rows} == used
    assert all(re.fullmatch(r"`[A-Z_]+`(, `[A-Z_]+`)*", codes) for _, codes in rows)
