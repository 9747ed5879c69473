"""From the columns of an ExecuteModelRequest to the tensors that a model takes.

`read_step` checks everything that could make the worker read or write where it must not; `make_inputs` computes
indices; both use numpy on whole columns. Only the runner knows what a request has sampled: it fills in the ids of -1.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch_bounds import BatchBounds
from protos.worker_pb2 import ExecuteModelRequest, NewRequest
from worker.layers.attention import AttentionMetadata
from worker.transfer import Array, to_device

# Stands in for the id of the token that the row's sequence sampled last.
LAST_SAMPLED = -1

# Up to this many entries, Python finds the least and the greatest before numpy has begun. The cost of reading a small
# step is that of its numpy calls, since a pass over the weights has emptied the CPU's caches.
_FEW = 64
_MOST_ENTRIES = 2**31 - 1

Integers = npt.NDArray[np.int32]
_NONE: Integers = np.empty(0, dtype=np.int32)


class MalformedStep(Exception):
    """A step that none of our schedulers would send; nothing was computed.

    Args:
        field: the request's field at fault.
        description: what is wrong with it.
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the ids and sizes of a step have to keep within."""

    vocabulary_size: int
    context_length: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_cpu_blocks: int


@dataclass(frozen=True, slots=True)
class Step:
    """The checked columns of a request.

    Rows are sequences. `query_starts` and `table_starts` have one entry more than there are rows. Pairs are
    [num_pairs, 2]. Only `token_ids` may be written to. `samples` has (request id, sequence index, position) for each
    token that the step samples.
    """

    request_ids: Integers
    sequence_indexes: Integers
    num_computed_tokens: Integers
    query_starts: Integers
    context_lengths: Integers
    token_ids: Integers
    table_starts: Integers
    block_tables: Integers
    sample_rows: Integers
    samples: list[tuple[int, int, int]]
    blocks_to_swap_out: Integers
    blocks_to_swap_in: Integers
    blocks_to_copy: Integers
    finished_request_ids: Integers
    prompt_logprob_rows: Integers
    prompt_logprob_starts: Integers


def read_step(request: ExecuteModelRequest, limits: StepLimits) -> Step:
    """The columns of `request`.

    Raises:
        MalformedStep: they do not fit together, or leave the limits.
    """
    request_ids = read_column(request, "request_ids")
    num_rows = len(request_ids)
    sequence_indexes = read_column(request, "sequence_indexes", num_rows)
    num_computed_tokens = read_column(request, "num_computed_tokens", num_rows)
    num_new_tokens = read_column(request, "num_new_tokens", num_rows)
    table_lengths = read_column(request, "block_table_lengths", num_rows)
    _check_range("sequence_indexes", sequence_indexes, 0, None)
    _check_range("num_computed_tokens", num_computed_tokens, 0, limits.context_length - 1)
    _check_range("num_new_tokens", num_new_tokens, 1, limits.max_num_batched_tokens)
    _check_range("block_table_lengths", table_lengths, 1, None)

    query_starts, table_starts = _starts(num_new_tokens), _starts(table_lengths)
    token_ids = read_column(request, "token_ids", int(query_starts[-1])).copy()
    block_tables = read_column(request, "block_tables", int(table_starts[-1]))
    context_lengths = num_computed_tokens + num_new_tokens
    if len(token_ids) > limits.max_num_batched_tokens:
        raise MalformedStep("token_ids", f"{len(token_ids)} tokens; a step has {limits.max_num_batched_tokens} at most")
    _check_range("token_ids", token_ids, LAST_SAMPLED, limits.vocabulary_size - 1)
    _check_range("num_new_tokens (the row's context with them)", context_lengths, 1, limits.context_length)
    _check_range("block_tables", block_tables, 0, limits.num_blocks - 1)
    if (table_lengths.astype(np.int64) * limits.block_size < context_lengths).any():
        raise MalformedStep("block_table_lengths", "a row's blocks do not hold its tokens")

    sample_rows = read_column(request, "sample_rows")
    sample_sequence_indexes = read_column(request, "sample_sequence_indexes", len(sample_rows))
    _check_range("sample_rows", sample_rows, 0, num_rows - 1)
    _check_range("sample_sequence_indexes", sample_sequence_indexes, 0, None)
    prompt_rows, prompt_starts = _read_prompt_rows(request, num_computed_tokens, context_lengths)
    return Step(
        request_ids=request_ids,
        sequence_indexes=sequence_indexes,
        num_computed_tokens=num_computed_tokens,
        query_starts=query_starts,
        context_lengths=context_lengths,
        token_ids=token_ids,
        table_starts=table_starts,
        block_tables=block_tables,
        sample_rows=sample_rows,
        samples=_samples(request_ids, context_lengths, sample_rows, sample_sequence_indexes),
        blocks_to_swap_out=_pairs(request, "blocks_to_swap_out", limits.num_blocks, limits.num_cpu_blocks),
        blocks_to_swap_in=_pairs(request, "blocks_to_swap_in", limits.num_cpu_blocks, limits.num_blocks),
        blocks_to_copy=_pairs(request, "blocks_to_copy", limits.num_blocks, limits.num_blocks),
        finished_request_ids=read_column(request, "finished_request_ids"),
        prompt_logprob_rows=prompt_rows,
        prompt_logprob_starts=prompt_starts,
    )


def _samples(
    request_ids: Integers, context_lengths: Integers, rows: Integers, sequence_indexes: Integers
) -> list[tuple[int, int, int]]:
    ids, positions = request_ids.tolist(), context_lengths.tolist()
    pairs = zip(rows.tolist(), sequence_indexes.tolist(), strict=True)
    return [(ids[row], index, positions[row]) for row, index in pairs]


def _read_prompt_rows(
    request: ExecuteModelRequest, num_computed_tokens: Integers, context_lengths: Integers
) -> tuple[Integers, Integers]:
    rows = read_column(request, "prompt_logprob_rows")
    starts = read_column(request, "prompt_logprob_starts", len(rows))
    if len(rows) == 0:
        return rows, starts
    _check_range("prompt_logprob_rows", rows, 0, len(context_lengths) - 1)
    if np.any((starts < num_computed_tokens[rows]) | (starts >= context_lengths[rows])):
        raise MalformedStep("prompt_logprob_starts", "a start is not among its row's tokens")
    return rows, starts


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One step as a model takes it.

    Attributes:
        tokens: [3, num_tokens] int64: each token's id, its position, 0-based in its own sequence, and its slot.
        attention: where the tokens are in the cache.
    """

    tokens: Tensor
    attention: AttentionMetadata

    @property
    def token_ids(self) -> Tensor:
        """[num_tokens] int64; those of `LAST_SAMPLED` are still to be filled in."""
        return self.tokens[0]

    @property
    def positions(self) -> Tensor:
        """[num_tokens] int64."""
        return self.tokens[1]


def make_inputs(
    step: Step, block_size: int, device: torch.device, *others: Array, num_padding: int = 0
) -> tuple[ModelInputs, list[Tensor]]:
    """The tensors of a step, and of other arrays; the device gets them all in one transfer.

    Args:
        step: as `read_step` returned it.
        block_size: tokens in a block.
        device: of the model.
        others: other arrays that the step needs there.
        num_padding: rows to add, each of one token that has no context and no slot: it writes nothing, and kernels
            that are recorded as a CUDA graph return zeros for it.
    """
    num_rows, num_tokens = len(step.context_lengths), len(step.token_ids)
    bounds = _batch_bounds(step)
    positions, table_starts = step.num_computed_tokens, step.table_starts[:-1]
    if num_tokens > num_rows:
        rows = np.repeat(np.arange(num_rows), np.diff(step.query_starts))  # the row of each token
        positions = positions[rows] + np.arange(num_tokens) - step.query_starts[rows]
        table_starts = table_starts[rows]
    blocks = step.block_tables[table_starts + positions // block_size].astype(np.int64)
    tokens = np.zeros((3, num_tokens + num_padding), dtype=np.int64)
    tokens[0, :num_tokens] = step.token_ids
    tokens[1, :num_tokens] = positions
    tokens[2, :num_tokens] = blocks * block_size + positions % block_size
    tokens[2, num_tokens:] = -1

    # Tables as a matrix, as wide as the longest context needs; shorter rows repeat their last block.
    columns = np.arange(-(-(bounds.longest_context or 0) // block_size))
    indices = step.table_starts[:-1, None] + np.minimum(columns, _last_blocks(step, block_size)[:, None])
    tables, starts, contexts = step.block_tables[indices], step.query_starts, step.context_lengths
    if num_padding > 0:
        tables = np.pad(tables, [(0, num_padding), (0, 0)])
        starts = np.concatenate([starts, starts[-1] + np.arange(1, num_padding + 1, dtype=np.int32)])
        contexts = np.pad(contexts, (0, num_padding))

    sent, sent_tables, sent_starts, sent_contexts, *sent_others = to_device(
        device, tokens, tables, starts, contexts, *others
    )
    attention = AttentionMetadata(sent[2], sent_tables, sent_starts, sent_contexts, bounds)
    return ModelInputs(sent, attention), sent_others


def entered_blocks(step: Step, block_size: int) -> npt.NDArray[np.int64]:
    """The last block of each row, if it holds no KV of its sequence before this step.

    Only the last block of a row can have slots beyond the context; it is new if this step writes its first slot.
    """
    last = _last_blocks(step, block_size)
    blocks = step.block_tables[step.table_starts[:-1] + last]
    return blocks[last * block_size >= step.num_computed_tokens].astype(np.int64)


def _last_blocks(step: Step, block_size: int) -> Integers:
    """The index of each row's last block in its table."""
    return (step.context_lengths - 1) // block_size


def _batch_bounds(step: Step) -> BatchBounds:
    """What is known of the rows' lengths here, and would later have to be read back from the device."""
    if len(step.context_lengths) == 0:
        return BatchBounds()
    fewest_queries, most_queries = _extremes(step.query_starts[1:] - step.query_starts[:-1])
    return BatchBounds(
        longest_context=_extremes(step.context_lengths)[1],
        total_context=int(step.context_lengths.sum(dtype=np.int64)),
        fewest_queries=fewest_queries,
        most_queries=most_queries,
    )


def read_column(request: ExecuteModelRequest | NewRequest, field: str, length: int | None = None) -> Integers:
    data: bytes = getattr(request, field)
    if len(data) % 4 != 0:
        raise MalformedStep(field, f"{len(data)} bytes are no column of int32")
    column = np.frombuffer(data, dtype=np.int32) if data else _NONE
    if length is not None and len(column) != length:
        raise MalformedStep(field, f"{len(column)} entries; the other columns mean {length}")
    return column


def check_token_ids(field: str, token_ids: Integers, limits: StepLimits) -> None:
    """Raises MalformedStep unless all are in the vocabulary."""
    _check_range(field, token_ids, 0, limits.vocabulary_size - 1)


def _pairs(request: ExecuteModelRequest, field: str, from_limit: int, to_limit: int) -> Integers:
    column = read_column(request, field)
    if len(column) % 2 != 0:
        raise MalformedStep(field, f"{len(column)} entries are no pairs")
    pairs = column.reshape(-1, 2)
    if len(pairs) > 0:
        _check_range(field, pairs[:, 0], 0, from_limit - 1)
        _check_range(field, pairs[:, 1], 0, to_limit - 1)
    return pairs


def _starts(lengths: Integers) -> Integers:
    """0, then the running sums of `lengths`; computed with Python's integers, so that no int32 sum wraps around."""
    starts = [0, *accumulate(lengths.tolist())]
    if starts[-1] > _MOST_ENTRIES:
        raise MalformedStep("num_new_tokens, block_table_lengths", "more entries than int32 counts")
    return np.array(starts, dtype=np.int32)


def _check_range(field: str, column: Integers, least: int, most: int | None) -> None:
    if len(column) == 0:
        return
    low, high = _extremes(column)
    if low < least:
        raise MalformedStep(field, f"{low} is less than {least}")
    if most is not None and high > most:
        raise MalformedStep(field, f"{high} is more than {most}")


def _extremes(column: Integers) -> tuple[int, int]:
    """The least and the greatest entry; there has to be at least one."""
    if len(column) > _FEW:
        return int(column.min()), int(column.max())
    entries = column.tolist()
    return min(entries), max(entries)
