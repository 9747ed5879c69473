"""`python -m protos.descriptors FILE`: writes the public API as a descriptor set, imports included.

That is how a proxy learns the API without .proto files: Envoy's JSON transcoder reads the set, and so do grpcurl
(`-protoset`) and buf.
"""

import argparse
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.rpc import error_details_pb2, status_pb2

from protos.pagewire.v1 import generation_pb2, introspection_pb2

PUBLIC_FILES = (generation_pb2.DESCRIPTOR, introspection_pb2.DESCRIPTOR)
# No file of ours imports these: errors carry them.
_OF_ERRORS = (status_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR)


def descriptor_set() -> FileDescriptorSet:
    """The public API, the details of its errors and what both import; each file after its own imports."""
    files: dict[str, FileDescriptorProto] = {}

    def add(file: FileDescriptor) -> None:
        if file.name not in files:
            for imported in file.dependencies:
                add(imported)
            files[file.name] = FileDescriptorProto.FromString(file.serialized_pb)

    for file in (*PUBLIC_FILES, *_OF_ERRORS):
        add(file)
    return FileDescriptorSet(file=files.values())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m protos.descriptors", description=__doc__)
    parser.add_argument("file", type=Path, help="where to write it; an existing file is replaced")
    try:
        parser.parse_args().file.write_bytes(descriptor_set().SerializeToString())
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
