"""`python -m docs.api > docs/api.md`: the page of the public API, from the comments in its .proto files.

For developers, from the repository's root: it runs protoc, since what is compiled into our stubs holds no comments.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.api import annotations_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from hatch_build import protoc
from protos.descriptors import PUBLIC_FILES

# Numbers of fields in descriptor.proto, of which the paths in SourceCodeInfo are made.
_SYNTAX, _FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 12, 4, 5, 6
_MESSAGE_FIELD, _MESSAGE_ONEOF, _ENUM_VALUE, _SERVICE_METHOD = 2, 8, 2, 2
_INTRODUCTION = """# API

What clients call, field by field. This page is made from the comments in [protos/pagewire/v1](../protos/pagewire/v1)
by `make docs`; edit those. [errors.md](errors.md) has every error's code and reason, [mesh.md](mesh.md) how to put a
proxy in front, which is what answers the HTTP paths below.

The examples need no .proto file: a router describes itself by gRPC reflection."""


@dataclass(frozen=True)
class Documented:
    """A .proto file with what stands in its comments."""

    file: FileDescriptorProto
    comments: dict[tuple[int, ...], str]
    lines: dict[tuple[int, ...], int]

    def comment(self, *path: int) -> str:
        """What stands above the thing that `path` leads to, or behind it."""
        lines = self.comments.get(path, "").splitlines()
        return "\n".join(line.removeprefix(" ") for line in lines if not line.startswith(" buf:lint:")).strip("\n")


def read() -> list[Documented]:
    """The public files, compiled with their comments."""
    with tempfile.NamedTemporaryFile() as out:
        names = [file.name for file in PUBLIC_FILES]
        protoc("--include_source_info", f"--descriptor_set_out={out.name}", *names)
        files = {file.name: file for file in FileDescriptorSet.FromString(Path(out.name).read_bytes()).file}
    found = []
    for file in map(files.__getitem__, names):  # protoc puts what is imported first
        locations = {tuple(location.path): location for location in file.source_code_info.location}
        comments = {path: row.leading_comments or row.trailing_comments for path, row in locations.items()}
        found.append(Documented(file, comments, {path: row.span[0] for path, row in locations.items()}))
    return found


def examples(documented: Documented) -> dict[str, list[str]]:
    """The commands in the comments of each RPC, by its name."""
    found = {}
    for place, service in enumerate(documented.file.service):
        for index, method in enumerate(service.method):
            comment = documented.comment(_FILE_SERVICE, place, _SERVICE_METHOD, index)
            found[method.name] = [text for is_code, text in _paragraphs(comment) if is_code]
    return found


def document(files: list[Documented]) -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION]
    for file in files:
        parts.append(_prose(file.comment(_SYNTAX)))
        for place, service in enumerate(file.file.service):
            parts += _service(file, place, service)
        parts += _types(file)
    return "\n\n".join(filter(None, parts)) + "\n"


def _service(file: Documented, place: int, service: ServiceDescriptorProto) -> Iterator[str]:
    yield f"## {service.name}"
    yield _prose(file.comment(_FILE_SERVICE, place))
    for index, method in enumerate(service.method):
        yield f"### {method.name}"
        yield _signature(method)
        yield _prose(file.comment(_FILE_SERVICE, place, _SERVICE_METHOD, index))


def _signature(method: MethodDescriptorProto) -> str:
    http = method.options.Extensions[annotations_pb2.http]
    path = f"`POST {http.post}`" if http.post else f"`GET {http.get}`"
    stream = "a stream of " if method.server_streaming else ""
    return f"{_link(method.input_type)} → {stream}{_link(method.output_type)}; over HTTP {path}"


def _types(file: Documented) -> list[str]:
    """Messages and enums in the order of the file."""
    sections = []
    for place, message in enumerate(file.file.message_type):
        sections.append((file.lines[_FILE_MESSAGE, place], _message(file, place, message)))
    for place, enum in enumerate(file.file.enum_type):
        sections.append((file.lines[_FILE_ENUM, place], _enum(file, place, enum)))
    return [text for _, text in sorted(sections)]


def _message(file: Documented, place: int, message: DescriptorProto) -> str:
    parts = [f"### {message.name}", _prose(file.comment(_FILE_MESSAGE, place))]
    if not message.field:
        return "\n\n".join([*filter(None, parts), "No fields."])
    rows = ["| field | type | |", "|---|---|---|"]
    for index, field in enumerate(message.field):
        meaning = _cell(file.comment(_FILE_MESSAGE, place, _MESSAGE_FIELD, index))
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = message.oneof_decl[field.oneof_index].name
            meaning = f"One of `{oneof}`. {meaning}".rstrip()
        rows.append(f"| `{field.name}` | {_type(message, field)} | {meaning} |")
    notes = [
        f"`{oneof.name}`: {note}"
        for index, oneof in enumerate(message.oneof_decl)
        if (note := _cell(file.comment(_FILE_MESSAGE, place, _MESSAGE_ONEOF, index)))
    ]
    return "\n\n".join(filter(None, [*parts, "\n".join(rows), *notes]))


def _enum(file: Documented, place: int, enum: EnumDescriptorProto) -> str:
    rows = ["| value | |", "|---|---|"]
    for index, value in enumerate(enum.value):
        rows.append(f"| `{value.name}` | {_cell(file.comment(_FILE_ENUM, place, _ENUM_VALUE, index))} |")
    parts = [f"### {enum.name}", _prose(file.comment(_FILE_ENUM, place)), "\n".join(rows)]
    return "\n\n".join(filter(None, parts))


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    maps = {f".{nested.name}": nested for nested in message.nested_type if nested.options.map_entry}
    entry = next((nested for end, nested in maps.items() if field.type_name.endswith(end)), None)
    if entry is not None:
        return f"map of {_scalar(entry.field[0])} to {_scalar(entry.field[1])}"
    kind = _link(field.type_name) if field.type_name else _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _paragraphs(comment: str) -> Iterator[tuple[bool, str]]:
    """(whether it is a command, text) of each block between blank lines; commands are indented."""
    for block in filter(None, comment.split("\n\n")):
        lines = block.strip("\n").splitlines()
        if all(line.startswith("    ") for line in lines):
            yield True, "\n".join(line.removeprefix("    ") for line in lines)
        else:
            yield False, "\n".join(lines)


def _prose(comment: str) -> str:
    return "\n\n".join(f"```sh\n{text}\n```" if is_code else text for is_code, text in _paragraphs(comment))


def _cell(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(document(read()))
