"""Copies a checkpoint's tensors straight into a model's: safetensors only, in one file or in shards, never pickle."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.checkpoint import ModelError

_INDEX = "model.safetensors.index.json"


def load_weights(
    directory: Path,
    tensors: Mapping[str, Tensor],
    leaves_out: Callable[[str], bool],
    one_name: Callable[[str], str] = str,
) -> None:
    """Fills every tensor of `tensors`, converting to its dtype on the way; one tensor is in memory twice at a time.

    Args:
        directory: of the checkpoint.
        tensors: name in the checkpoint -> where its values go, in place.
        leaves_out: whether a tensor of that name in the checkpoint is of no use to the model.
        one_name: from the checkpoint's name of a tensor to the one that `tensors` and `leaves_out` know.

    Raises:
        ModelError: a tensor is missing, unexpected or of another shape, or a file can not be read.
    """
    missing = dict(tensors)
    unexpected = []
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for stored_name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    name = one_name(stored_name)
                    if leaves_out(name):
                        continue
                    if name not in missing:
                        unexpected.append(stored_name)
                        continue
                    _fill(missing.pop(name), file.get_tensor(stored_name), stored_name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} can not be read: {error}") from error
    if missing:
        raise ModelError(f"{directory} lacks {_list(missing)}")
    if unexpected:
        raise ModelError(f"{directory} holds {_list(unexpected)}, which this architecture has no place for")


def _fill(target: Tensor, source: Tensor, name: str) -> None:
    if target.shape != source.shape:
        raise ModelError(
            f"{name} is {list(source.shape)} in the checkpoint, but config.json means {list(target.shape)}"
        )
    target.copy_(source)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        try:
            return [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no index of safetensors files") from error
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    raise ModelError(f"{directory} holds neither model.safetensors nor {_INDEX} (pickled weights are not read)")


def _list(names: Iterable[str]) -> str:
    """The first few of the names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more tensors" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
