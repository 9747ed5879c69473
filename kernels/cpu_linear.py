"""Linear layers in C++: weights packed once, in the layout that `csrc/linear.hpp` reads, and their products.

A weight is packed in panels of 32 outputs: [panel, inputs / unit, 32] units of 2 bfloat16, or of 1 value of another
dtype; int8 as [panel, inputs, 32]; 4 bits as `csrc/int4.hpp` says; bfloat16 as integers, with AVX2 but no tile
registers and if the weight allows it, as `csrc/integers.hpp` says, or coded, if few values are exceptions, as
`csrc/coded.hpp` says. The last panel is padded with zeros. If the layer is gated, a panel is 16 gates and the 16 values
that they gate.
"""

import enum
from collections.abc import Callable
from ctypes import Structure, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.forms import form
from kernels.quantization import INT4_GROUP, Int4, in_8_bits

_PANEL = 32
# Products of 16-bit integers take inputs by as many as these (csrc/integer_rows.hpp).
INTEGER_INPUTS = 64
# The bytes of CodedPanel and CodedPair in csrc/coded.hpp, of IntegerPair in csrc/integers.hpp, of ScreenPanel in
# csrc/screening.hpp, and of Int4Group in csrc/int4.hpp.
_CODED_HEAD, _CODED_PAIR, _INTEGER_PAIR, _SCREEN_HEAD, _INT4_GROUP_BYTES = 64, 192, 192, 128, 576
# An exception takes 8 bytes and some nanoseconds: with more than one in this many values, coding would not pay.
_FEWEST_PER_EXCEPTION = 256
ARGUMENTS = (c_int, c_void_p, c_int64, c_int, *[c_void_p] * 5, *[c_int] * 5, c_void_p, c_int)
SCORE = (c_int, c_void_p, c_int64, c_int, *[c_void_p] * 9, *[c_int] * 3, c_void_p, c_int)
WRITE_SCREEN = (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p, c_int)
ENCODE = (c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p, c_int)
ENCODE_INTEGERS = (c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p, c_int)
PACK_INT4 = (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p, c_int)


class Weights(Structure):
    """A packed weight as csrc/decoder.hpp takes it."""

    _fields_ = [
        ("form", c_int),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("exceptions", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int),
        ("num_inputs", c_int),
    ]


class Form(enum.IntEnum):
    """The layout of a packed weight, as csrc/linear.hpp numbers it."""

    PLAIN = 0
    INT8 = 1
    CODED = 2  # csrc/coded.hpp
    INTEGERS = 3  # csrc/integers.hpp
    INT4 = 4  # csrc/int4.hpp


class Panels(NamedTuple):
    """A packed weight.

    Attributes:
        form: of the panels.
        values: the panels.
        scales: one per output, padded with zeros to whole panels, if the values are quantized or integers.
        exceptions: if the values are coded.
    """

    form: Form
    values: Tensor
    scales: Tensor | None = None
    exceptions: Tensor | None = None


class Functions(NamedTuple):
    """The library's functions for a layer's dtype.

    Attributes:
        multiply: computes the outputs.
        score: computes the scores of the outputs as logits.
        write_screen: makes the screen by which `score` knows which outputs it needs; None at levels without screens.
    """

    multiply: Callable[..., int]
    score: Callable[..., int]
    write_screen: Callable[..., int] | None


class CpuLinear:
    """y = x W^T + b for one weight, in one dtype; see `reference.linear`.

    Args:
        functions: the library's, for the dtype.
        weight: [num_outputs, num_inputs], before packing.
        bias: [num_outputs], or None.
        panels: the packed weight.
        widened: see `reference.linear`.
        gated: see there.
        threads: the last arguments of the library's functions.

    Attributes:
        shape: of the weight.
        dtype: of x, of the bias, and of the weight before packing.
        is_gated: see `gated`.
        form: of the packed weight.
    """

    def __init__(
        self,
        functions: Functions,
        weight: Tensor,
        bias: Tensor | None,
        panels: Panels,
        *,
        widened: bool,
        gated: bool,
        threads: tuple[int | None, int],
    ) -> None:
        num_outputs, num_inputs = self.shape = weight.shape
        self.dtype, self.is_gated, self.form = weight.dtype, gated, panels.form
        if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != weight.dtype):
            raise ValueError(f"bias {form(bias)} does not fit weight {form(weight)}")
        self._multiply, self._score, self._write_screen = functions
        self._bias = None if bias is None else _interleaved(bias) if gated else bias.contiguous()
        self._panels = panels
        self._out_size = num_outputs // 2 if gated else num_outputs
        self._out_dtype = torch.float32 if widened else weight.dtype
        tensors = (*panels[1:], self._bias)
        self._addresses = (int(panels.form), *(None if each is None else each.data_ptr() for each in tensors))
        # For `score`: see `make_screen`.
        self._screen: tuple[Tensor, Tensor] | None = None
        self._threads = threads
        self._tail = (num_outputs, num_inputs, int(gated), int(widened), *threads)

    @property
    def has_screen(self) -> bool:
        """Whether `make_screen` made one."""
        return self._screen is not None

    @property
    def weights(self) -> Weights:
        """The packed weight's addresses, valid as long as this object lives."""
        return Weights(*self._addresses, *self.shape)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_tokens, num_inputs], dense in its last dimension -> [num_tokens, num_outputs], or half as wide if gated.

        Args:
            x: the input.
            out: contiguous memory for the result; None: the result gets memory of its own.
        """
        num_tokens = self._check(x)
        if out is None:
            out = torch.empty(num_tokens, self._out_size, dtype=self._out_dtype)
        elif out.shape != (num_tokens, self._out_size) or out.dtype != self._out_dtype or not out.is_contiguous():
            raise ValueError(f"out {form(out)} is no room for [{num_tokens}, {self._out_size}] {self._out_dtype}")
        if self._multiply(x.data_ptr(), x.stride(0), *self._addresses, out.data_ptr(), num_tokens, *self._tail) != -1:
            raise MemoryError("no memory for the rows of a product")
        return out

    def make_screen(self) -> None:
        """Lets `score` find the best outputs without computing all, where that is possible (`csrc/screening.hpp`).

        It takes a byte per weight. The best outputs stay the same; normalizers are then off by some thousandths, since
        what the other outputs add to them is computed in 8 bits.
        """
        if self._write_screen is None or self.form != Form.INTEGERS or self._bias is not None:
            return
        num_outputs, num_inputs = self.shape
        num_panels = -(-num_outputs // _PANEL)
        panels = torch.empty(num_panels, _SCREEN_HEAD + num_inputs * _PANEL, dtype=torch.uint8)
        norms = torch.empty(num_inputs + 2 * num_panels)
        _, weight, scales, *_ = self._addresses
        addresses = (weight, scales, panels.data_ptr(), norms.data_ptr())
        if self._write_screen(*addresses, *self.shape, *self._threads) != -1:
            raise MemoryError("no memory for some rows of a weight")
        self._screen = panels, norms

    def score(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The result of `normalizers_and_best` on the outputs, which must be float32; they take no memory themselves.

        Args:
            x: [num_tokens, num_inputs], dense in its last dimension.

        Returns:
            The normalizers, [num_tokens] float32; the best, [num_tokens] int64; their outputs, [num_tokens] float32.
        """
        if self._out_dtype != torch.float32 or self.is_gated:
            raise ValueError("outputs are to be float32 and no gate's to be logits")
        num_tokens = self._check(x)
        normalizers, most = torch.empty(num_tokens), torch.empty(num_tokens)
        best = torch.empty(num_tokens, dtype=torch.int64)
        screen = (None, None) if self._screen is None else tuple(each.data_ptr() for each in self._screen)
        results = (*screen, normalizers.data_ptr(), best.data_ptr(), most.data_ptr())
        sizes = (num_tokens, *self.shape)
        if self._score(x.data_ptr(), x.stride(0), *self._addresses, *results, *sizes, *self._threads) != -1:
            raise MemoryError("no memory for the rows of a product")
        return normalizers, best, most

    def _check(self, x: Tensor) -> int:
        num_tokens, num_inputs = x.shape
        if num_inputs != self.shape[1] or x.dtype != self.dtype or x.stride(1) != 1 or x.device.type != "cpu":
            raise ValueError(f"x {form(x)} on {x.device} is not of {self.shape[1]} {self.dtype}, side by side")
        return num_tokens


def takes(weight: Tensor, *, gated: bool) -> bool:
    """Whether a weight can be packed: on the CPU, with pairs of inputs, and gates that fill panels."""
    return weight.device.type == "cpu" and weight.shape[1] % 2 == 0 and not (gated and len(weight) % _PANEL)


def in_order(weight: Tensor, *, gated: bool) -> Tensor:
    """The weight with its outputs in the order of the panels; raises ValueError if it cannot be packed."""
    if not takes(weight, gated=gated):
        shape = "gates by 16 and inputs in pairs" if gated else "inputs in pairs"
        raise ValueError(f"weight {form(weight)} on {weight.device} cannot be packed: {shape}, on the CPU")
    return (_interleaved(weight) if gated else weight).contiguous()


def packed_plainly(weight: Tensor, unit: int) -> Panels:
    """Packs a weight that is `in_order` in units of `unit` inputs."""
    return Panels(Form.PLAIN, _panels(weight.view(torch.int32 if unit == 2 else weight.dtype)))


def packed_as_int8(weight: Tensor) -> Panels:
    """Quantizes and packs a weight that is `in_order`."""
    integers, scales = in_8_bits(weight)
    panels = _panels(integers)
    return Panels(Form.INT8, panels, scales=_of_whole_panels(scales))


def packed_as_int4(pack: Callable[..., int], weight: Tensor) -> Panels:
    """Quantizes and packs a bfloat16 weight that is `in_order`.

    Args:
        pack: the library's function, with its threads, of a level with integers.
        weight: [num_outputs, num_inputs], with inputs by `INTEGER_INPUTS`.
    """
    num_outputs, num_inputs = weight.shape
    codes, steps, bases, scales = Int4.of(weight)
    num_panels = -(-num_outputs // _PANEL)
    values = torch.empty(num_panels, num_inputs // INT4_GROUP, _INT4_GROUP_BYTES, dtype=torch.uint8)
    addresses = (each.data_ptr() for each in (codes, steps, bases, values))
    packed = pack(*addresses, num_outputs, num_inputs)
    assert packed, "this level has no integers"
    return Panels(Form.INT4, values, scales=_of_whole_panels(scales))


def coded(encode: Callable[..., int], weight: Tensor) -> Panels | None:
    """Packs a bfloat16 weight that is `in_order`, coded; None if too many of its values would be exceptions.

    Args:
        encode: the library's function, with its threads.
        weight: [num_outputs, num_inputs].
    """
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // _PANEL)
    # Whole cache lines: torch's memory begins at one, and the kernels read vectors that lie within one.
    values = torch.empty(num_panels, _CODED_HEAD + -(-num_inputs // 4) * _CODED_PAIR, dtype=torch.uint8)
    exceptions = torch.empty(num_panels + weight.numel() // _FEWEST_PER_EXCEPTION, dtype=torch.int64)
    addresses = (weight.data_ptr(), values.data_ptr(), exceptions.data_ptr())
    num_exceptions = encode(*addresses, len(exceptions), num_outputs, num_inputs)
    if num_exceptions > len(exceptions):
        return None
    return Panels(Form.CODED, values, exceptions=exceptions[:num_exceptions].clone())


def as_integers(encode: Callable[..., int], weight: Tensor) -> Panels | None:
    """Packs a bfloat16 weight that is `in_order` as integers; None if it is not to be multiplied that way.

    Args:
        encode: the library's function, with its threads.
        weight: [num_outputs, num_inputs].
    """
    num_outputs, num_inputs = weight.shape
    values = torch.empty(-(-num_outputs // _PANEL), num_inputs // 4, _INTEGER_PAIR, dtype=torch.uint8)
    scales = torch.zeros(len(values) * _PANEL)
    if not encode(weight.data_ptr(), values.data_ptr(), scales.data_ptr(), num_outputs, num_inputs):
        return None
    return Panels(Form.INTEGERS, values, scales=scales)


def _of_whole_panels(scales: Tensor) -> Tensor:
    return pad(scales, (0, -len(scales) % _PANEL))


def _interleaved(x: Tensor) -> Tensor:
    """Turns gates followed by values into 16 gates, 16 values, 16 gates, and so on."""
    return x.view(2, -1, _PANEL // 2, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def _panels(units: Tensor) -> Tensor:
    """[num_outputs, n] -> [panels, n, 32]."""
    num_whole, num_left = divmod(len(units), _PANEL)
    panels = units.new_empty(num_whole + (num_left > 0), units.shape[1], _PANEL)
    for panel, of_panel in zip(panels, units.split(_PANEL), strict=True):
        panel[:, : len(of_panel)] = of_panel.T
    panels[-1, :, num_left or _PANEL :] = 0
    return panels
