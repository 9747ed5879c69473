"""Copies a checkpoint's tensors straight into a model's: safetensors only, in one file or in shards, never pickle."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.checkpoint import ModelError
from worker.shares import Part, Target

_INDEX = "model.safetensors.index.json"

# A file is mapped while it is open, and what was read of it counts as this process's memory until it is closed: it is
# opened anew after so many bytes.
_BYTES_AT_ONCE = 64 << 20


def load_weights(
    directory: Path,
    tensors: Mapping[str, Target],
    leaves_out: Callable[[str], bool],
    one_name: Callable[[str], str] = str,
) -> None:
    """Fills every tensor of `tensors`, converting to its dtype on the way; at most 64 MiB, or one tensor if that is
    larger, are in memory twice at a time.

    Args:
        directory: of the checkpoint.
        tensors: name in the checkpoint -> where its values, or this rank's part of them, go, in place.
        leaves_out: whether a tensor of that name in the checkpoint is of no use to the model.
        one_name: from the checkpoint's name of a tensor to the one that `tensors` and `leaves_out` know.

    Raises:
        ModelError: a tensor is missing, unexpected or of another shape, or a file can not be read.
    """
    missing = dict(tensors)
    unexpected = []
    for path in _weight_files(directory):
        for stored_name, tensor in _read(path):
            name = one_name(stored_name)
            if leaves_out(name):
                continue
            if name not in missing:
                unexpected.append(stored_name)
                continue
            _fill(missing.pop(name), tensor, stored_name)
    if missing:
        raise ModelError(f"{directory} lacks {_list(missing)}")
    if unexpected:
        raise ModelError(f"{directory} holds {_list(unexpected)}, which this architecture has no place for")


def weight_bytes(directory: Path) -> int:
    """The size of a checkpoint's weights.

    Raises:
        ModelError: there are none.
    """
    return sum(path.stat().st_size for path in _weight_files(directory))


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, as it maps them: each is read when it is looked at."""
    try:
        with safe_open(path, framework="pt") as file:
            names = iter(list(file.keys()))
        name = next(names, None)
        while name is not None:
            num_bytes = 0
            with safe_open(path, framework="pt") as file:
                while name is not None and num_bytes < _BYTES_AT_ONCE:
                    tensor = file.get_tensor(name)
                    num_bytes += tensor.nbytes
                    yield name, tensor
                    del tensor  # or it would keep the mapping
                    name = next(names, None)
    except (OSError, SafetensorError) as error:
        remedy = "it is damaged or cut short, so fetch or save the model again"
        raise ModelError(f"{path} can not be read: {error}; {remedy}") from error


def _fill(target: Target, source: Tensor, name: str) -> None:
    """Of a part, only its pages of the file are read."""
    tensor, shape = (target.tensor, target.whole_shape) if isinstance(target, Part) else (target, list(target.shape))
    if shape != list(source.shape):
        raise ModelError(f"{name} is {list(source.shape)} in the checkpoint, but config.json means {shape}")
    if isinstance(target, Part):
        sizes = [end - start for start, end in target.share.ranges]
        for piece, (start, end) in zip(tensor.split(sizes, target.dim), target.share.ranges, strict=True):
            piece.copy_(source.narrow(target.dim, start, end - start))
    else:
        tensor.copy_(source)


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
