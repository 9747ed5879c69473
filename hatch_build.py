"""The build hook: generates the gRPC stubs into `protos/` and compiles the CPU kernels into `kernels/`.

On every install, editable ones too. `python hatch_build.py` does the same by hand (`make protos`).
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent


def generate_stubs() -> None:
    """Runs protoc over every .proto below `protos/`, from the repository's root.

    The root is the include path, so that a file's import path, its Python module and its folder have one name
    (`protos/session.proto`, `protos.session_pb2`), and no generated import needs mending.
    """
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    protoc(*(f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")), *sources)


def protoc(*arguments: str, root: Path = ROOT) -> None:
    """Runs protoc with the include path that our files need: `root`, protobuf's own files, and Google's common ones.

    Their folders come from packages: grpcio-tools ships google/protobuf, googleapis-common-protos ships google/api.
    """
    import google.api
    import grpc_tools.protoc

    common = Path(next(iter(google.api.__path__))).parents[1]
    built_in = Path(grpc_tools.__file__).parent / "_proto"
    if grpc_tools.protoc.main(["protoc", f"-I{root}", f"-I{built_in}", f"-I{common}", *arguments]) != 0:
        raise RuntimeError("protoc failed; its message stands above")


def build_kernels() -> bool:
    """Compiles `kernels/csrc/`, unless nothing has changed since it was last done; whether there is a library now.

    Nothing fails without a compiler: router, scheduler and GPUs need none of it, and on a CPU the worker then runs the
    slower torch reference, and says so in its log.
    """
    # By its path: a build has no package `kernels` on its path.
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    try:
        print(f"CPU kernels: {builder.build()}", file=sys.stderr)
    except builder.BuildError as problem:
        print(f"warning: the CPU kernels are not built, so a worker on a CPU will be slow: {problem}", file=sys.stderr)
        return False
    return True


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build
    pass
else:

    class GeneratedFilesHook(BuildHookInterface):
        """Runs before hatchling collects files."""

        def initialize(self, version: str, build_data: dict) -> None:
            """Generates the stubs for every kind of build, and the kernels for all but a source distribution."""
            generate_stubs()
            if self.target_name == "wheel" and build_kernels():
                # The library belongs to this kind of machine, but to no version of Python: it does not use its API.
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _platform_tag() -> str:
        import sysconfig

        return sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    generate_stubs()
    build_kernels()
