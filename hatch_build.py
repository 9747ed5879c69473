"""The build hook: generates the gRPC stubs into `protos/` on every install, editable ones too.

`python hatch_build.py` does the same by hand (`make protos`).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent


def generate_stubs() -> None:
    """Runs protoc over every .proto below `protos/`, from the repository's root.

    The root is the include path, so that a file's import path, its Python module and its folder have one name
    (`protos/session.proto`, `protos.session_pb2`), and no generated import needs mending.
    """
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    out = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *out, *sources]) != 0:
        raise RuntimeError("protoc failed; its message stands above")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build
    pass
else:

    class StubsHook(BuildHookInterface):
        """Runs before hatchling collects files."""

        def initialize(self, version: str, build_data: dict) -> None:
            """Generates the stubs for every kind of build."""
            generate_stubs()


if __name__ == "__main__":
    sys.exit(generate_stubs())
