"""Compiles the Triton kernels as for a GPU, and prints what the binaries need; it needs no GPU itself.

Run it as a program, in a process that does not ask for Triton's interpreter. Prints a JSON object: the case's name
-> registers a thread, bytes of stack (spilled registers), shared memory, and instructions that matter, by their count.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One specialisation: where the kernel is, the types of its arguments, and what it is specialised for."""

    kernel: str
    capability: int
    constants: dict
    types: dict = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3


_INDICES = dict.fromkeys(("block_tables", "query_starts", "context_lengths"), "*i32")
_ATTENTION = {**_INDICES, "partials": "*fp32", "log_sums": "*fp32", "score_scale": "fp32", "cap": "fp32"}
_FLOATS = ("out", "q", "k", "v", "x", "k_cache", "v_cache", "heads", "cos", "sin", "residual", "weight")
_SAMPLING = {
    **dict.fromkeys(
        (
            *("best_values", "drawn_values", "bounds", "sifted", "logits"),
            *("temperatures", "top_p", "least_scaled", "typical_p"),
        ),
        "*fp32",
    ),
    **dict.fromkeys(("best_ids", "drawn_ids"), "*i32"),
    **dict.fromkeys(("seeds", "positions", "sequence_indexes", "top_k", "token_ids"), "*i64"),
}
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _attention(
    short, dtype, head_dim, group, block_size, capability, window=0, capped=False, queries=1, cache_dtype=None
):
    """A case with the tile that the wrapper chooses for it."""
    import torch

    from kernels.decode_attention import short_tile
    from kernels.paged_attention import precision_of
    from kernels.prefill_attention import long_tile

    padded_dim = max(16, 1 << (head_dim - 1).bit_length())
    cache_dtype = cache_dtype or dtype
    dtypes = [getattr(torch, _TORCH_NAMES[name]) for name in (dtype, cache_dtype)]
    if short:
        rows, (tile, num_warps, num_stages) = 16, short_tile(padded_dim, torch.promote_types(*dtypes))
    else:
        rows, tile, num_warps, num_stages = long_tile(padded_dim, *dtypes)
    constants = {
        "GROUP": group,
        "QUERIES": queries if short else 16 // group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "CAPPED": capped,
        "ROWS": rows,
        "TILE": tile,
        "PRECISION": precision_of(*dtypes),
    }
    kernel = "decode_attention:_short_rows_kernel" if short else "prefill_attention:_long_rows_kernel"
    types = {**_ATTENTION, **dict.fromkeys(_FLOATS, f"*{dtype}")}
    types |= dict.fromkeys(("k_cache", "v_cache"), f"*{cache_dtype}")
    return Case(kernel, capability, constants, types, num_warps, num_stages)


def cases() -> dict[str, Case]:
    """Every case by its name."""
    found = {}
    shapes = [("bf16", 128, 4), ("bf16", 128, 8), ("fp16", 64, 3), ("bf16", 80, 1), ("bf16", 256, 2), ("fp32", 128, 4)]
    for capability in (80, 90):
        for dtype, head_dim, group in shapes:
            name = f"{dtype} {head_dim} group {group} sm_{capability}"
            found[f"short rows {name}"] = _attention(True, dtype, head_dim, group, 16, capability)
            found[f"long rows {name}"] = _attention(False, dtype, head_dim, group, 16, capability)
        for dtype, cache_dtype in (("fp32", "bf16"), ("bf16", "fp16")):
            name = f"{dtype} 64 group 3, cache {cache_dtype} sm_{capability}"
            for short in (True, False):
                kind = "short" if short else "long"
                found[f"{kind} rows {name}"] = _attention(short, dtype, 64, 3, 16, capability, cache_dtype=cache_dtype)
        name = f"window and cap sm_{capability}"
        found[f"short rows {name}"] = _attention(True, "bf16", 128, 4, 32, capability, 4096, True, queries=4)
        found[f"long rows {name}"] = _attention(False, "bf16", 128, 4, 64, capability, 4096, True)
        bf16 = dict.fromkeys(_FLOATS, "*bf16")
        found[f"merge sm_{capability}"] = Case(
            "decode_attention:_merge_kernel",
            capability,
            {"QUERIES": 1, "HEAD_DIM": 128, "PADDED_DIM": 128, "WINDOW": 0, "TILE": 64, "PADDED_SPLITS": 64},
            {**_ATTENTION, **bf16},
        )
    # Nothing in these depends on the architecture.
    others = {
        "reshape_and_cache:_reshape_and_cache_kernel": (
            {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "HEAD_DIM": 128, "PADDED": 1024},
            {"slot_mapping": "*i64"},
            4,
        ),
        "reshape_and_cache:_rotate_and_cache_kernel": (
            {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "PADDED_HALF": 64, "BLOCK_SIZE": 16, "HEADS": 16},
            {"slot_mapping": "*i64"},
            4,
        ),
        "rotary_embedding:_rotary_embedding_kernel": ({"HALF": 64, "PADDED_HALF": 64}, {}, 1),
        "rms_norm:_rms_norm_kernel": ({"SIZE": 8192, "PADDED": 8192, "ADD": True}, {"epsilon": "fp32"}, 16),
        "activation:_activation_kernel": ({"KIND": "none", "GATED": True, "COLUMNS": 1024}, {}, 4),
        "copy_blocks:_copy_pieces_kernel": (
            {"PIECE": 4096, "NUM_PARTS": 64, "WORDS": 2048},
            {"source": "*i64", "destination": "*i64", "block_pairs": "*i64"},
            8,
        ),
        "sampling:_parts_kernel": ({"PART": 8192, "TILE": 1024}, _SAMPLING, 4),
        "thresholds:_bounds_kernel": ({"PADDED_PARTS": 16, "TILE": 4096, "DEPTH": 8}, _SAMPLING, 16),
        "sampling:_draws_kernel": (
            {"FILTERED": True, "PADDED_PARTS": 16, "PART": 8192, "COUNTERS": 256},
            _SAMPLING,
            4,
        ),
        "sampling:_choice_kernel": ({"PADDED_PARTS": 16}, _SAMPLING, 4),
    }
    for kernel, (constants, types, num_warps) in others.items():
        name = f"{kernel.split(':')[1].strip('_')} sm_90"
        found[name] = Case(kernel, 90, constants, {**dict.fromkeys(_FLOATS, "*bf16"), **types}, num_warps)
    return found


def compile_case(case: Case) -> dict[str, int]:
    """What the binary needs. Pointers, strides and sizes count as divisible by 16, as they are in practice."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case.kernel.split(":")
    kernel = getattr(importlib.import_module(f"kernels.{module}"), name)
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        kind = "constexpr" if parameter.is_constexpr else case.types.get(parameter.name, "i32")
        signature[parameter.name] = kind
        if kind.startswith("*") or (parameter.name.endswith(("stride", "size")) and not parameter.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    binary = triton.compile(
        ASTSource(kernel, signature, constexprs=case.constants, attrs=attributes),
        target=GPUTarget("cuda", case.capability, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    ptx = binary.asm["ptx"]
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
    return {
        "registers": registers,
        "stack": stack,
        "shared": binary.metadata.shared,
        "threads": 32 * case.num_warps,
        "async_copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[24]\.b(?:32|64)", ptx)),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps({name: compile_case(case) for name, case in cases().items()}))
