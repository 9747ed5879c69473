"""Where the tests of Triton kernels run them: on the GPU, or where there is none in Triton's interpreter on the CPU.

To be imported before the kernels are, since a kernel is made for one of the two when it is imported.
"""

import os
import sys

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ

if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    if any(name.startswith("kernels.") and hasattr(module, "triton") for name, module in sys.modules.items()):
        raise RuntimeError("kernels were imported before Triton's interpreter could be asked for")

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's `tl.dot` gives garbage for bfloat16 operands; those are compiled, and run on the GPU.
DOT_DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]

_IN_INTERPRETER = pytest.param(
    torch.device("cpu"),
    id="interpreter",
    marks=pytest.mark.skipif(ON_GPU, reason="the kernels run on the GPU in this process"),
)
_ON_GPU = pytest.param(
    torch.device("cuda"),
    id="gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="NO GPU: kernels ran in the interpreter only")],
)
everywhere = pytest.mark.parametrize("device", [_IN_INTERPRETER, _ON_GPU])


def _mend_the_interpreter() -> None:
    """Makes Triton 3.6's interpreter count under numpy 2.4, and round to bfloat16 as the GPU does.

    It turns a one-element array into a number by int(), which numpy 2.4 refuses, and cuts the lower half of a float32
    off where the GPU rounds it to the nearest, ties to even.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def convert_and_round(values, from_dtype, to_dtype, rounding_mode):
        if (from_dtype, to_dtype) != (tl.float32, tl.bfloat16):
            return convert(values, from_dtype, to_dtype, rounding_mode)
        rounded = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy().reshape(values.shape)

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_and_mend, convert_and_round


def _interpret_tritons_own_functions() -> None:
    """As if Triton had been imported just now: transformers may have imported it before, to be compiled."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))


if not ON_GPU:
    _interpret_tritons_own_functions()
    _mend_the_interpreter()
