"""Linear layers in C++: weights packed once, in the layout that `csrc/linear.hpp` reads, and their products.

A weight stands in panels of 32 outputs: [panel, inputs / unit, 32] units of 2 bfloat16, or of 1 value of another dtype;
the last panel is filled up with zeros.
"""

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.forms import form

_PANEL = 32
ARGUMENTS = (c_int, c_void_p, c_int64, *[c_void_p] * 4, *[c_int] * 5, c_void_p, c_int)


class CpuLinear:
    """y = x W^T + b for one weight, in one dtype; see `reference.linear`.

    Args:
        run: the library's function.
        dtype: as the library numbers it.
        unit: values of a unit.
        weight: [num_outputs, num_inputs]; copied.
        bias: [num_outputs], or None.
        widened: whether y is float32, the sums as they are, in place of the weight's dtype.
        threads: what the library's functions end with.
    """

    def __init__(
        self,
        run: Callable[..., int],
        dtype: int,
        unit: int,
        weight: Tensor,
        bias: Tensor | None,
        *,
        widened: bool,
        threads: tuple[int | None, int],
    ) -> None:
        num_outputs, num_inputs = weight.shape
        if weight.device.type != "cpu" or num_inputs % unit != 0:
            raise ValueError(f"weight {form(weight)} on {weight.device} is not packed in pairs of inputs on the CPU")
        if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != weight.dtype):
            raise ValueError(f"bias {form(bias)} does not fit weight {form(weight)}")
        self._run = run
        self._dtype = dtype
        self._kind = weight.dtype
        self._num_outputs, self._num_inputs = num_outputs, num_inputs
        self._panels = _panels(weight, unit)
        self._bias = None if bias is None else bias.contiguous()
        self._out_kind = torch.float32 if widened else weight.dtype
        self._tail = (num_outputs, num_inputs, 0, int(widened), *threads)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, num_inputs], dense in its last dimension -> [num_tokens, num_outputs]."""
        num_tokens, num_inputs = x.shape
        if num_inputs != self._num_inputs or x.dtype != self._kind or x.stride(1) != 1 or x.device.type != "cpu":
            raise ValueError(
                f"x {form(x)} on {x.device} is not {self._kind} of {self._num_inputs} values, side by side"
            )
        out = torch.empty(num_tokens, self._num_outputs, dtype=self._out_kind)
        status = self._run(
            self._dtype,
            x.data_ptr(),
            x.stride(0),
            self._panels.data_ptr(),
            None,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            num_tokens,
            *self._tail,
        )
        if status != -1:
            raise MemoryError("no memory for the rows of a product")
        return out


def _panels(weight: Tensor, unit: int) -> Tensor:
    units = weight.contiguous().view(torch.int32 if unit == 2 else weight.dtype)  # [N, K / unit]
    num_whole, num_left = divmod(len(units), _PANEL)
    panels = units.new_empty(num_whole + (num_left > 0), units.shape[1], _PANEL)
    for panel, of_panel in zip(panels, units.split(_PANEL), strict=True):
        panel[:, : len(of_panel)] = of_panel.T
    panels[-1, :, num_left or _PANEL :] = 0
    return panels
