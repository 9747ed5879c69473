"""Copies a checkpoint's tensors straight into a model's: safetensors only, in one file or in shards, never pickle."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.cache_size import in_words, most_memory
from worker.checkpoint import ModelError
from worker.shares import Part, Target

_INDEX = "model.safetensors.index.json"

# A file is mapped while it is open, and what was read of it counts as this process's memory until it is closed: so it
# is reopened after this many bytes.
_BYTES_AT_ONCE = 64 << 20

# Packed weights take at least this share of what their values take: some instruction sets compute with 12 bits of 16.
_LEAST_PACKED_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model that is filled and packed before the next one takes memory for its own tensors.

    Attributes:
        tensors: returns the name of each tensor in the checkpoint -> where its values, or this rank's part of them, are
            put in place. It takes the memory for them.
        pack: puts what was filled into the layout that the device multiplies fastest, and lets the plain weights go.
    """

    tensors: Callable[[], dict[str, Target]]
    pack: Callable[[], None]


def load_weights(
    directory: Path,
    pieces: Iterable[Piece],
    leaves_out: Callable[[str], bool],
    one_name: Callable[[str], str] = str,
) -> None:
    """Fills and packs every piece, converting to its dtypes on the way. In memory besides what is packed are one piece
    and 64 MiB of the checkpoint, or one tensor if that is larger.

    Args:
        directory: of the checkpoint.
        pieces: of the model, in order.
        leaves_out: whether a tensor of that name in the checkpoint may be of no use to the model.
        one_name: turns the checkpoint's name of a tensor into the one that `pieces` and `leaves_out` know.

    Raises:
        ModelError: a tensor is missing, unexpected or of another shape, or a file cannot be read.
    """
    left: dict[str, tuple[Path, str]] = {}
    unexpected, missing = [], []
    for path in _weight_files(directory):
        for stored_name in _names(path):
            name = one_name(stored_name)
            if name in left and not leaves_out(name):
                unexpected.append(stored_name)
            left[name] = (path, stored_name)
    for piece in pieces:
        tensors = piece.tensors()
        missing += [name for name in tensors if name not in left]
        of_files: dict[Path, dict[str, Target]] = {}
        for name in tensors.keys() & left.keys():
            path, stored_name = left.pop(name)
            of_files.setdefault(path, {})[stored_name] = tensors[name]
        for path, targets in of_files.items():
            for stored_name, tensor in _read(path, targets):
                _fill(targets[stored_name], tensor, stored_name)
        if not missing:
            piece.pack()
    if missing:
        raise ModelError(f"{directory} lacks {listed(missing)}")
    unexpected += [stored_name for name, (_, stored_name) in left.items() if not leaves_out(name)]
    if unexpected:
        raise ModelError(f"{directory} holds {listed(unexpected)}, which this architecture has no place for")


def check_files(directory: Path) -> None:
    """Checks every file of weights, for callers that read them by other means.

    Raises:
        ModelError: there are none, or one cannot be read.
    """
    for path in _weight_files(directory):
        _names(path)


def check_memory(directory: Path, value_bytes: float, num_ranks: int) -> None:
    """Refuses weights that cannot be held by a CPU's memory before they are read: the system would kill this process.

    Args:
        directory: of the checkpoint.
        value_bytes: bytes that a value is kept in.
        num_ranks: those that share the weights; the other ones are taken to be on other hosts.

    Raises:
        ModelError: there is not enough memory, even if all free swap space is taken.
    """
    sizes = {name: size for path in _weight_files(directory) for name, size in _sizes(path).items()}
    sizes.pop("lm_head.weight", None)  # it may be the embedding once more
    least_bytes = int(_LEAST_PACKED_SHARE * value_bytes * sum(sizes.values())) // num_ranks
    most_bytes = most_memory()
    if most_bytes is not None and least_bytes > most_bytes:
        raise ModelError(
            f"the weights of {directory} take {in_words(least_bytes)} of memory or more, and {in_words(most_bytes)} "
            "are left with all swap space: take a narrower --dtype, --quantization int8 or int4, or a smaller model, "
            "or end what else uses memory"
        )


@contextlib.contextmanager
def memory_for_weights(directory: Path) -> Iterator[None]:
    """To be put around what takes memory for a checkpoint's weights.

    Raises:
        ModelError: there is not enough.
    """
    try:
        yield
    except RuntimeError as error:
        # torch has a class of its own for a GPU that lacks memory, and only a message for a host that does.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        reason = str(error).rpartition("DefaultCPUAllocator: ")[2].splitlines()[0]
        raise ModelError(
            f"no memory for the weights of {directory}: {reason}; take a narrower --dtype or a smaller model, or end "
            "what else uses memory"
        ) from error


def not_finite(directory: Path, dtype: torch.dtype) -> ModelError:
    """Why a model's logits are not finite: which of its checkpoint's tensors hold NaN or infinity as `dtype`.

    It reads all of them, which takes longer than loading: call it only for such a model.
    """
    names = [
        name
        for path in _weight_files(directory)
        for name, tensor in _read(path, _names(path))
        if not tensor.to(dtype).isfinite().all()
    ]
    reason = f"NaN or infinity is in {listed(names)} of {directory}" if names else "a value overflows"
    return ModelError(
        f"the model's logits are not finite: {reason} as {str(dtype).removeprefix('torch.')}; choose another --dtype, "
        "or fetch or save it again"
    )


def listed(names: Iterable[str]) -> str:
    """The first few of the names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more tensors" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def has_own_head(directory: Path, embedding: str) -> bool:
    """Whether a checkpoint holds a head whose values are not those of its embedding.

    Args:
        directory: of the checkpoint.
        embedding: how the name of the embedding ends there.

    Raises:
        ModelError: a file cannot be read.
    """
    files = {name: path for path in _weight_files(directory) for name in _names(path)}
    embeddings = [name for name in files if name.endswith(embedding)]
    if "lm_head.weight" not in files or not embeddings:
        return False
    head, vectors = (dict(_read(files[name], [name]))[name] for name in ("lm_head.weight", embeddings[0]))
    return not torch.equal(head, vectors)


def weight_bytes(directory: Path) -> int:
    """The size of a checkpoint's weights.

    Raises:
        ModelError: there are none.
    """
    return sum(path.stat().st_size for path in _weight_files(directory))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of tensors, which is mapped while it is open."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        remedy = "it is damaged or cut short, so fetch or save the model again"
        raise ModelError(f"{path} cannot be read: {error}; {remedy}") from error


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _sizes(path: Path) -> dict[str, int]:
    """The name of each tensor of a file -> its number of values."""
    with _opened(path) as file:
        names = file.keys()
        return {name: math.prod(file.get_slice(name).get_shape()) for name in names}


def _read(path: Path, stored_names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, which is mapped: each is read when it is looked at."""
    names = iter(sorted(stored_names))
    name = next(names, None)
    while name is not None:
        num_bytes = 0
        with _opened(path) as file:
            while name is not None and num_bytes < _BYTES_AT_ONCE:
                tensor = file.get_tensor(name)
                num_bytes += tensor.nbytes
                yield name, tensor
                del tensor  # or it would keep the mapping
                name = next(names, None)


def _fill(target: Target, source: Tensor, name: str) -> None:
    """Copies a checkpoint's tensor to its target; for a part, only its pages of the file are read."""
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
