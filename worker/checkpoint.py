"""Where a model's files are, and what config.json says of any architecture; `worker.weights` reads the weights."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

# Weights without pickle, and the numbers that describe them; the router fetches the tokenizer's files.
_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json"]
_DUPLICATES = ["original/*", "consolidated*"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ModelError(Exception):
    """The model cannot be loaded; the message tells the person who named it why."""


class UnsupportedModel(ModelError):
    """The checkpoint asks for something that is not built."""


def find_checkpoint(model: str) -> Path:
    """The directory of a model: `model` itself, or the local snapshot of that name on the hub, fetched when needed.

    Raises:
        ModelError: there is no such directory and no such hub name, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.startswith(("/", ".", "~")):
        raise ModelError(f"there is no directory {path}")
    try:
        # Named in full, so that what it needs is imported only now: an HTTP client of 8 MB.
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_DUPLICATES))
    except (OSError, ValueError) as error:  # the hub's own errors are of these two types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{model!r} is neither a directory here nor a model that the hub gives us: {reason}"
        ) from error


def checkpoint_name(model: str) -> str:
    """What to call a model that was given no name: the last part of its directory or hub name."""
    return Path(model).expanduser().resolve().name


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of config.json.

    Raises:
        ModelError: it is missing, or not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{directory} is no Hugging Face checkpoint: it holds no readable config.json") from error
    except ValueError as error:
        remedy = "it is damaged or cut short, so fetch or save the model again"
        raise ModelError(f"{path} is not JSON: {error}; {remedy}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def checkpoint_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that the checkpoint was saved in (float32 if it does not say, as in Hugging Face).

    Raises:
        UnsupportedModel: the model does not run in it.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise UnsupportedModel(f"the checkpoint's dtype is {name!r}: choose by --dtype one of {', '.join(DTYPES)}")
    return DTYPES[name]
