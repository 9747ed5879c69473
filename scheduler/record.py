"""The format of a record: every call that changed a core, with its arguments and what it decided, as lines of JSON.

The first line says what the core was made from. Then come two lines for each call: its name and arguments, written
before the call, and the digest of its outcome, written after. So the record of a scheduler that was killed ends with
the last call that it made or was about to make, and a line without a newline was cut off.

Calls are written as they are, whatever their parameters: JSON's own values as such, everything else under a tag, such
as {"$i": base64 of int32s}. Only the types named here can be read back, so that a stranger's file can do no harm.
"""

import dataclasses
import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from zlib import crc32

from google.protobuf.message import Message

from protos.sampling_pb2 import LogprobColumns, Sampling
from scheduler.beam import BeamParams, EarlyStopping
from scheduler.block_manager import BlockManager
from scheduler.plan import Finished, Plan, StepOutputs, StepResult
from scheduler.policy import Policy, PreemptionMode
from scheduler.preemption import Preemption
from scheduler.sequence import Progress, SequenceGroup
from scheduler.suspects import Conviction

VERSION = 2
# The calls that change a core, or may. `tests/test_record.py` demands a decision on each public method.
INPUTS = (
    "submit",
    "set_deadline",
    "abort",
    "stop",
    "preempt",
    "requeue_running",
    "replace_pool",
    "set_num_concurrent_steps",
    "note_swap",
    "schedule",
    "update",
)
# The figures that begin the digests of plans and of steps' outputs; a checksum of the whole comes last.
PLAN_FIGURES = ("step", "rows", "tokens", "preempted")
OUTPUT_FIGURES = ("tokens", "finished", "failed")
_DATACLASSES = (BeamParams, Policy, Progress, StepResult)
_TYPES: dict[str, type] = {
    type_.__name__: type_ for type_ in (*_DATACLASSES, EarlyStopping, PreemptionMode, LogprobColumns, Sampling)
}


def _default(field: "dataclasses.Field[object]") -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


_DEFAULTS: dict[type, list[tuple[str, object]]] = {
    type_: [(field.name, _default(field)) for field in dataclasses.fields(type_)] for type_ in _DATACLASSES
}


def to_line(value: object) -> bytes:
    """A value as a line; raises TypeError if it contains a type that has no place in a record."""
    return _ENCODER.encode(value).encode() + b"\n"


def reader(find: Callable[[str, int], object] | None = None) -> json.JSONDecoder:
    """A decoder that reads lines back.

    Args:
        find: returns the "group" or "plan" that a call named by its number. None where no calls are read.
    """

    def decode(value: dict[str, object]) -> object:
        if len(value) == 1:
            (tag, content), *_ = value.items()
            if tag.startswith("$"):
                return _from_tag(tag[1:], content, find)
        return value

    return json.JSONDecoder(object_hook=decode)


def digest(outcome: object) -> object:
    """What a call decided, as a few figures and a checksum that another decision is unlikely to share."""
    match outcome:
        case None:
            return None
        case Plan():
            return [outcome.step_id, len(outcome.rows), outcome.num_tokens, len(outcome.preempted), _checksum(outcome)]
        case StepOutputs():
            return _digest_of_outputs(outcome)
        case SequenceGroup():
            return outcome.number
        case Finished():
            return [outcome.group.number, *_end(outcome)]
        case Preemption():
            return [outcome.group.number, outcome.mode.value]
        case Conviction():
            return [outcome.group.number, outcome.num_workers]
        case list() | tuple():
            return [digest(part) for part in outcome]
    raise TypeError(f"a {type(outcome).__name__} has no digest")


def failure(error: Exception) -> str:
    """The digest of a call that raised."""
    return f"{type(error).__name__}: {error}"


def _encode(value: object) -> object:
    """A value that JSON cannot express, under its tag."""
    match value:
        case array():
            return {f"${value.typecode}": b64encode(value.tobytes()).decode()}
        case SequenceGroup():
            return {"$group": value.number}
        case Plan():
            return {"$plan": value.step_id}
        case BlockManager():
            return {"$pool": [value.num_blocks, value.block_size, value.num_swap_blocks]}
    name = type(value).__name__
    if type(value) in _DEFAULTS:
        fields = [(field, getattr(value, field), default) for field, default in _DEFAULTS[type(value)]]
        return {f"${name}": {field: told for field, told, default in fields if not _is_default(told, default)}}
    if name in _TYPES and isinstance(value, Message):
        return {f"${name}": b64encode(value.SerializeToString()).decode()}
    if name in _TYPES and isinstance(value, Enum):
        return {f"${name}": value.name}
    if isinstance(value, Collection):  # a repeated field, a set; an iterator would be used up
        return list(value)
    raise TypeError(f"a {name} has no place in a record")


_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_encode)


def _is_default(value: object, default: object) -> bool:
    """Whether a field can be left out: most columns of most steps are empty."""
    if isinstance(value, array) and not value:
        return default == ()
    return value == default


def _from_tag(tag: str, content: object, find: Callable[[str, int], object] | None) -> object:
    """The value from which `_encode` made the content; raises ValueError if it cannot have made it."""
    match tag, content:
        case (("i" | "f"), str()):
            column: array[int] | array[float] = array(tag)
            column.frombytes(b64decode(content))
            return column
        case (("group" | "plan"), int()) if find is not None:
            return find(tag, content)
        case "pool", [int(), int(), int()]:
            return BlockManager(*content)
    type_ = _TYPES.get(tag)
    if type_ is not None and isinstance(content, str):
        return type_[content] if issubclass(type_, Enum) else type_.FromString(b64decode(content))  # type: ignore[attr-defined]
    if type_ in _DATACLASSES and isinstance(content, Mapping):
        return type_(**content)
    raise ValueError(f"${tag} is not known here")


def _checksum(plan: Plan) -> int:
    """A checksum of all that a plan says."""
    rows = plan.rows  # a column at a time, which takes half as long as a row at a time
    numbers = [row.group.number for row in rows] + [row.sequence.index for row in rows]
    extents = [row.start for row in rows] + [row.num_new_tokens for row in rows] + [len(row.samples) for row in rows]
    drafts = [row.draft for row in rows if row.draft is not None]
    crc = crc32(b"".join([row.sequence.block_table for row in rows]), crc32(array("i", numbers + extents + drafts)))
    rest = (
        plan.blocks_to_swap_out,
        plan.blocks_to_swap_in,
        plan.blocks_to_copy,
        plan.forget,
        plan.telling,
        [group.number for group in plan.new_groups],
        [group.number for group in plan.resumed],
        [digest(preemption) for preemption in plan.preempted],
        [dropped.group.number for dropped in plan.dropped],
        [digest(end) for end in plan.finished],
        [(new.group.number, new.sequence.index, new.first_index) for new in plan.new_tokens],
    )
    return crc32(to_line(rest), crc) if any(rest) else crc


def _digest_of_outputs(outputs: StepOutputs) -> list[int]:
    new_tokens, finished, failed = outputs.new_tokens, outputs.finished, outputs.failed
    numbers = [new.group.number for new in new_tokens] + [new.sequence.index for new in new_tokens]
    numbers += [number for end in finished for number in (end.group.number, *_end(end))]
    numbers += [group.number for group in failed]
    tokens = b"".join([new.sequence.output_token_ids[new.first_index :] for new in new_tokens])
    return [len(new_tokens), len(finished), len(failed), crc32(tokens, crc32(array("i", numbers)))]


def _end(end: Finished) -> tuple[int, int, int]:
    return end.sequence.index, end.sequence.status.value, len(end.sequence.output_token_ids)
