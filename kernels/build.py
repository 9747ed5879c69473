"""Compiles `csrc/` into one shared library, for the install hook and by hand (`python -m kernels.build`).

It needs no torch, neither to compile against nor to import. One source is compiled once for each instruction-set level,
with that level's flags; which level runs is chosen when the library is loaded, so it may be built on another machine.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "cpu_kernels.so"

_X86_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_X86_AVX512 = (*_X86_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# From the level that runs everywhere to the most demanding one; a CPU that runs one also runs those before it.
X86_LEVELS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _X86_AVX2,
    "avx512": _X86_AVX512,
    "avx512_bf16": (*_X86_AVX512, "-mavx512bf16"),
    "amx_bf16": (*_X86_AVX512, "-mavx512bf16", "-DTILES"),
}
OTHER_LEVELS: dict[str, tuple[str, ...]] = {"portable": ()}
# For tests only: the kernels of a level that few machines have, on a model of its instructions.
MODELS: dict[str, tuple[str, ...]] = {"amx_model": ("-DTILES", "-DTILE_MODEL")}

# Sums must not be reordered, so no -ffast-math: a result depends on the level, but on nothing else. And no -O3: the
# loops that matter are written with vectors, so it would make the code half as large again and no faster.
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"),
    "-Wno-maybe-uninitialized",  # in GCC 12's own headers
)


class BuildError(Exception):
    """The library was not built; the message says why."""


def levels() -> dict[str, tuple[str, ...]]:
    """The levels of this machine's architecture, and the compiler's flags for each."""
    return X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else OTHER_LEVELS


def source_digest() -> str:
    """A digest of all that the library is built from, so that one built from something else is recognized."""
    digest = hashlib.sha256(repr((FLAGS, levels(), MODELS)).encode())
    for path in sorted(SOURCES.glob("*.?pp")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Path:
    """Compiles the library, unless the existing one was built from the same sources.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    digest = source_digest()
    if is_built_from(digest):
        return LIBRARY
    compiler = _find_compiler()
    compiled = {**levels(), **MODELS}
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{name}.o" for name in (*compiled, "library")]
        commands = [
            [compiler, *FLAGS, *flags, f"-DLEVEL={level}", "-c", str(SOURCES / "level.cpp"), "-o", str(target)]
            for (level, flags), target in zip(compiled.items(), objects[:-1], strict=True)
        ]
        define = f'-DSOURCE_DIGEST="{digest}"'
        commands.append([compiler, *FLAGS, define, "-c", str(SOURCES / "library.cpp"), "-o", str(objects[-1])])
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
            list(pool.map(_run, commands))
        # Written beside the old one and then moved into its place: a process that has the old one loaded keeps it.
        unfinished = LIBRARY.with_name(f".{LIBRARY.name}.{os.getpid()}")
        try:
            _run([compiler, "-shared", *map(str, objects), "-o", str(unfinished)])
            unfinished.replace(LIBRARY)
        finally:
            unfinished.unlink(missing_ok=True)
    return LIBRARY


def is_built_from(digest: str) -> bool:
    """Whether the library exists and was built from sources of this digest; does not load it."""
    return LIBRARY.exists() and digest.encode() in LIBRARY.read_bytes()


def _find_compiler() -> str:
    """The compiler that $CXX names, or else g++, clang++ or c++."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++", "c++"]:
        if (found := shutil.which(name)) is not None:
            return found
    raise BuildError(f"no C++ compiler: {named or 'g++ and clang++'} not found (CXX may name another one)")


def _run(command: Iterable[str]) -> None:
    run = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{run.stderr.strip()}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as problem:
        sys.exit(str(problem))
