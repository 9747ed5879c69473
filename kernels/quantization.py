"""How weights are rounded to 8 and to 4 bits; every layer with quantized weights has the values that come of this."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.forms import form

# In 4 bits, see `Int4`: inputs of a group, the largest code and step, and what a base is multiplied by.
INT4_GROUP, _MOST_CODE, _MOST_STEP, _BASE_UNIT = 32, 15, 127, 8
# The largest mean size of a group's integers: ten groups' products with integers up to 8191 add up to less than 2^31
# (csrc/integers.hpp) if it is below 819, and rounding adds half a step to each.
_INT4_MOST_MEAN = 750
# Values that are rounded at once, since this takes several copies of them in float32.
_VALUES_AT_ONCE = 1 << 21


def in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127, [num_outputs, num_inputs] int8, and each output's factor, [num_outputs] float32.

    If a value of an output is not finite, its factor is not.
    """
    integers, scales = _some_rows_at_a_time(_rows_in_8_bits, weight)
    return integers, scales


def _rows_in_8_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.float()
    largest = rows.abs().amax(1)
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / 127)
    return (rows / scales[:, None]).round_().to(torch.int8), scales


class Int4(NamedTuple):
    """A weight of which each 32 inputs of an output are codes of 4 bits, with a step and a base of their own.

    A value is scale * (step * code + 8 * base). Codes go from the least to the largest value, as in llama.cpp's Q4_1,
    but steps and bases are integers too. If a value of an output is not finite, its scale is not.

    Attributes:
        codes: 0 to 15, [num_outputs, num_inputs] uint8.
        steps: 1 to 127, [num_outputs, num_inputs / 32] int8.
        bases: [num_outputs, num_inputs / 32] int8.
        scales: [num_outputs] float32.
    """

    codes: Tensor
    steps: Tensor
    bases: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "Int4":
        """Rounds a weight, [num_outputs, num_inputs].

        Raises:
            ValueError: its inputs do not come in groups of 32.
        """
        if weight.shape[1] % INT4_GROUP != 0:
            raise ValueError(f"weight {form(weight)} has no groups of {INT4_GROUP} inputs")
        return cls(*_some_rows_at_a_time(cls._of_rows, weight))

    @classmethod
    def _of_rows(cls, rows: Tensor) -> "Int4":
        groups = rows.float().view(len(rows), -1, INT4_GROUP)
        least, most = groups.amin(2), groups.amax(2)
        scales = torch.maximum(
            (most - least).amax(1) / (_MOST_CODE * _MOST_STEP), least.abs().amax(1) / (_BASE_UNIT * 127)
        )
        scales = torch.maximum(scales, groups.abs().mean(2).amax(1) / _INT4_MOST_MEAN)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        bases = (least / scales[:, None] / _BASE_UNIT).floor_()
        steps = (most / scales[:, None] - _BASE_UNIT * bases).div_(_MOST_CODE).round_().clamp_(1, _MOST_STEP)
        codes = (groups / scales[:, None, None] - _BASE_UNIT * bases[:, :, None]) / steps[:, :, None]
        codes = codes.round_().clamp_(0, _MOST_CODE)
        return cls(codes.to(torch.uint8).view(rows.shape), steps.to(torch.int8), bases.to(torch.int8), scales)

    def values(self) -> Tensor:
        """The values, [num_outputs, num_inputs] float32."""
        codes = self.codes.view(*self.steps.shape, INT4_GROUP).float()
        integers = self.steps[:, :, None] * codes + _BASE_UNIT * self.bases[:, :, None].float()
        return integers.view(self.codes.shape) * self.scales[:, None]


def _some_rows_at_a_time(of_rows: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> list[Tensor]:
    """What the rows of a weight are rounded to."""
    rows = weight.split(max(1, _VALUES_AT_ONCE // weight.shape[1]))
    return [torch.cat(parts) for parts in zip(*map(of_rows, rows), strict=True)]
