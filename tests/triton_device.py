"""Where the tests of Triton kernels run them: on the GPU, or where there is none in Triton's interpreter on the CPU.

Import it before the kernels: a kernel is made for one of the two when it is imported.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

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
    """Makes Triton 3.6's interpreter work with numpy 2.4, and round to bfloat16 as the GPU does.

    It turns one-element arrays into numbers by int(), which numpy 2.4 refuses, and it cuts off the lower half of a
    float32, where the GPU rounds to the nearest, ties to even.
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


def _hasten_the_interpreter() -> None:
    """Caches what the interpreter looks up: builtins of whole modules at each call, and a table at each operation."""
    from triton import language as tl
    from triton.runtime import interpreter

    @cache
    def builtins_of(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_builtins(package, builder, scope):
        for name in builtins_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # and not patched for a caller
                interpreter._patch_attr(package, name, member, builder, scope)

    look_up = interpreter._get_np_dtype
    look_up_once = cache(look_up)

    def numpy_dtype_of(dtype):
        return (look_up if dtype.scalar.is_ptr() else look_up_once)(dtype.scalar)  # pointers have no hash

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtins, numpy_dtype_of


def _interpret_tritons_own_functions() -> None:
    """As if Triton were imported only now: transformers may have imported it before, for compiling."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))


# Operations that read a tensor's values on the host, or whose output's shape depends on them.
_READS = {"item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "is_nonzero"}
_READS |= {"__contains__", "equal", "allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
_READS |= {"bincount", "repeat_interleave"}
# Operations that copy from memory that is not pinned, for which the host waits; use `worker.transfer`.
_COPIES = {"tensor", "as_tensor", "cuda"}


class _Waiting(TorchFunctionMode):
    """Fails where code would wait if its tensors were on a GPU; a stand-in for `torch.cuda.set_sync_debug_mode`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        assert name not in _READS | _COPIES, f"{name} waits for the device"
        if name == "to":
            moves = any(isinstance(x, torch.device | str) for x in (*args[1:], kwargs.get("device")))
            assert not moves or kwargs.get("non_blocking"), "a copy waits for the device"
        if name in ("__getitem__", "__setitem__"):
            indexes = args[1] if isinstance(args[1], tuple) else (args[1],)
            for index in indexes:
                assert not isinstance(index, list | np.ndarray), "the host waits for a copy of the index"
                assert getattr(index, "dtype", None) != torch.bool, "the host waits for a count of the mask"
        return function(*args, **kwargs)


@contextmanager
def never_waits(device: torch.device) -> Iterator[None]:
    """Fails if the body makes the host wait for the device. On a CPU, what a kernel itself does is not counted."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def launch_unseen(executor, *args, **kwargs):
        with torch._C.DisableTorchFunction():
            return launch(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_unseen
    try:
        with _Waiting():
            yield
    finally:
        interpreter.GridExecutor.__call__ = launch


if not ON_GPU:
    _interpret_tritons_own_functions()
    _mend_the_interpreter()
    _hasten_the_interpreter()
