"""Hypothesis strategies for whole protobuf messages, made from their descriptors: new fields are covered automatically.

A message is tame or wild. Tame values are small, so that many requests are valid and go all the way; wild ones are
anything that a type can hold, extremes included.
"""

import struct

import hypothesis.strategies as st
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_MOST_REPEATED = 5
_TEXTS = ["", "a", "e", "The", "user", "fake", "quick brown"]
# So many that a message with a few long lists of these stays below 16 MiB.
_HUGE = 1 << 12
_INTEGER_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-31, 31),
    FieldDescriptor.CPPTYPE_UINT32: (None, 32),
    FieldDescriptor.CPPTYPE_INT64: (-63, 63),
    FieldDescriptor.CPPTYPE_UINT64: (None, 64),
}


def messages(kind: type[Message], *, wild: bool) -> st.SearchStrategy[Message]:
    """Any message of the type `kind`: each field set or not, none or one of each oneof."""
    return _fields(kind.DESCRIPTOR, wild).map(lambda values: kind(**values))


def _fields(descriptor: Descriptor, wild: bool) -> st.SearchStrategy[dict[str, object]]:
    @st.composite
    def draw_fields(draw: st.DrawFn) -> dict[str, object]:
        values: dict[str, object] = {}
        for field in descriptor.fields:
            alone = field.containing_oneof is None or len(field.containing_oneof.fields) == 1
            if alone and draw(st.integers(0, 3)) == 3:
                values[field.name] = draw(_field(field, wild))
        for oneof in descriptor.oneofs:
            # Mostly set: without a prompt a request does not get far.
            if len(oneof.fields) > 1 and draw(st.integers(0, 7)):
                field = draw(st.sampled_from(list(oneof.fields)))
                values[field.name] = draw(_field(field, wild))
        return values

    return draw_fields()


def _field(field: FieldDescriptor, wild: bool) -> st.SearchStrategy[object]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(_one(entry["key"], wild), _one(entry["value"], wild), max_size=_MOST_REPEATED)
    one = _one(field, wild)
    if not field.is_repeated:
        return one
    some = st.lists(one, min_size=0 if wild else 1, max_size=_MOST_REPEATED)
    return some | one.map(lambda value: [value] * 300) if wild else some


def _one(field: FieldDescriptor, wild: bool) -> st.SearchStrategy[object]:
    if field.message_type is not None:
        return _fields(field.message_type, wild)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            known = st.sampled_from([value.number for value in field.enum_type.values])
            return known | _integers(-31, 31) if wild else known
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32) if wild else _small_floats(32)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.floats() if wild else _small_floats(64)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary() if wild else st.binary(max_size=8)
        case FieldDescriptor.CPPTYPE_STRING:
            tame = st.sampled_from(_TEXTS)
            return tame | st.text() | st.characters().map(lambda one: one * _HUGE) if wild else tame
        case number:
            return _integers(*_INTEGER_BITS[number]) if wild else st.integers(0, 8)


def _small_floats(width: int) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 2, width=width)  # type: ignore[arg-type]


def _integers(low: int | None, high: int) -> st.SearchStrategy[int]:
    least, most = 0 if low is None else -(1 << -low), (1 << high) - 1
    return st.integers(least, most) | st.sampled_from([least, most, 0, 1, most // 2])


@st.composite
def damaged(draw: st.DrawFn, message: Message) -> bytes:
    """The bytes of `message`, some of them changed, removed, inserted or cut off."""
    data = bytearray(message.SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "insert", "delete", "truncate", "lie"])):
            case "change" if place < len(data):
                data[place] = draw(st.integers(0, 255))
            case "insert":
                data[place:place] = draw(st.binary(max_size=8))
            case "delete":
                del data[place : place + draw(st.integers(1, 8))]
            case "truncate":
                del data[place:]
            case "lie":  # a field of four gigabytes
                data[place:place] = b"\x0a" + struct.pack("<I", 0xFFFFFFFF) + b"\x0f"
    return bytes(data)
