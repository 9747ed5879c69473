"""What each of several workers on this machine may use of it: cores and GPUs, divided as evenly as possible.

Neighbours stay together: cores by socket, and the hardware threads of a core side by side, so that two workers do not
compete for one core while another one idles.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

_CPUS = Path("/sys/devices/system/cpu")
_DEVICES = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """A part of what this process may use; no cores, or no GPUs, means all of them, as a child inherits them.

    Attributes:
        cores: by the operating system's number.
        gpus: by CUDA's number or name.
    """

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that let a process see its GPUs only."""
        return {_VISIBLE: ",".join(self.gpus)} if self.gpus else {}


def shares(num: int) -> list[Share]:
    """`num` shares of this machine; a single one is all of it."""
    if num == 1:
        return [Share()]
    split = zip(parts(_cores(), num), parts(_gpus(), num), strict=True)
    return [Share(cores, gpus) for cores, gpus in split]


def parts(things: Sequence[T], num: int) -> list[tuple[T, ...]]:
    """`num` parts of neighbouring things; if there are fewer things than parts, parts share things in turn."""
    if len(things) < num:
        return [tuple(things[part % len(things) :][:1]) if things else () for part in range(num)]
    ends = [len(things) * part // num for part in range(num + 1)]
    return [tuple(things[begin:end]) for begin, end in pairwise(ends)]


def _cores() -> list[int]:
    """The cores that this process may use, neighbours side by side."""

    def place(core: int) -> tuple[int, int, int]:
        topology = _CPUS / f"cpu{core}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            first_sibling = int((topology / "thread_siblings_list").read_text().replace("-", ",").split(",")[0])
        except (OSError, ValueError):
            return 0, core, core
        return socket, first_sibling, core

    return sorted(os.sched_getaffinity(0), key=place)


def _gpus() -> list[str]:
    """The GPUs that this process may use; CUDA numbers those of a machine or a container from 0 on."""
    told = os.environ.get(_VISIBLE)
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(_DEVICES.glob("nvidia[0-9]*"))]
