"""From columns to indices: 2 sequences in blocks of 4 tokens, small enough to check by hand."""

import numpy as np
import pytest
import torch
from worker_fakes import Row, step

from kernels.batch_bounds import BatchBounds
from protos.columns import pack
from worker.inputs import MalformedStep, StepLimits, entered_blocks, make_inputs, read_step

LIMITS = StepLimits(
    vocabulary_size=100, context_length=20, max_num_batched_tokens=16, block_size=4, num_blocks=10, num_cpu_blocks=2
)
CPU = torch.device("cpu")
# A chunk of 3 tokens behind 6 others, and the decode of a sequence of 4.
CHUNK = Row(1, [11, 12, 13], blocks=[7, 2, 5], computed=6)
DECODE = Row(2, [21], blocks=[9], computed=3)


def inputs_of(*rows, **options):
    return make_inputs(read_step(step(*rows), LIMITS), 4, CPU, **options)[0]


def test_indices_of_a_chunk_and_a_decode():
    inputs = inputs_of(CHUNK, DECODE)
    assert inputs.token_ids.tolist() == [11, 12, 13, 21]
    assert inputs.positions.tolist() == [6, 7, 8, 3]
    # Positions 6 and 7 are the last of logical block 1, which is block 2; position 8 is the first of block 5.
    assert inputs.attention.slot_mapping.tolist() == [4 * 2 + 2, 4 * 2 + 3, 4 * 5 + 0, 4 * 9 + 3]
    assert inputs.attention.query_starts.tolist() == [0, 3, 4]
    assert inputs.attention.context_lengths.tolist() == [9, 4]
    assert inputs.attention.block_tables.tolist() == [[7, 2, 5], [9, 9, 9]]
    assert (inputs.token_ids.dtype, inputs.positions.dtype) == (torch.int64, torch.int64)
    assert inputs.attention.slot_mapping.dtype == torch.int64


def test_the_host_keeps_bounds_of_what_the_device_knows():
    assert inputs_of(CHUNK, DECODE).attention.bounds == BatchBounds(9, 9 + 4, 1, 3)
    assert inputs_of().attention.bounds == BatchBounds()


def test_a_step_without_rows_has_empty_indices():
    inputs = make_inputs(read_step(step(finished=[3]), LIMITS), 4, CPU)[0]
    assert inputs.token_ids.tolist() == []
    assert inputs.attention.query_starts.tolist() == [0]
    assert inputs.attention.block_tables.shape == (0, 0)


def test_tables_are_cut_to_what_the_contexts_need():
    assert inputs_of(Row(1, [5], blocks=[3, 4, 6])).attention.block_tables.tolist() == [[3]]


def test_padding_is_rows_of_one_token_without_a_context_and_a_slot():
    inputs, plain = inputs_of(DECODE, num_padding=2), inputs_of(DECODE)
    assert inputs.tokens.tolist() == [[21, 0, 0], [3, 0, 0], [4 * 9 + 3, -1, -1]]
    assert inputs.attention.query_starts.tolist() == [0, 1, 2, 3]
    assert inputs.attention.context_lengths.tolist() == [4, 0, 0]
    assert inputs.attention.block_tables.tolist() == [[9], [0], [0]]
    for name in ("slot_mapping", "query_starts", "context_lengths", "block_tables"):
        assert getattr(inputs.attention, name).dtype == getattr(plain.attention, name).dtype


def test_other_arrays_travel_along():
    others = (np.arange(3), np.empty(0, dtype=np.int64))
    sent = make_inputs(read_step(step(DECODE), LIMITS), 4, CPU, *others)[1]
    assert [tensor.tolist() for tensor in sent] == [[0, 1, 2], []]


@pytest.mark.parametrize(
    "row, entered",
    [
        (Row(1, [5], blocks=[3, 4, 6]), [3]),
        (Row(1, [5] * 8, blocks=[1, 2]), [2]),
        (Row(1, [5], blocks=[1, 2], computed=4), [2]),
        (Row(1, [5], blocks=[1, 2], computed=5), []),
        (Row(1, [5] * 2, blocks=[1, 2], computed=3), [2]),
        (CHUNK, [5]),
    ],
)
def test_only_a_last_block_whose_first_slot_is_written_is_entered(row, entered):
    assert entered_blocks(read_step(step(row), LIMITS), 4).tolist() == entered


def test_pairs_of_blocks_come_out_as_pairs():
    found = read_step(step(swap_out=[9, 1], swap_in=[0, 3, 1, 4], copy=[1, 2]), LIMITS)
    assert found.blocks_to_swap_out.tolist() == [[9, 1]]
    assert found.blocks_to_swap_in.tolist() == [[0, 3], [1, 4]]
    assert found.blocks_to_copy.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "field, value",
    [
        ("request_ids", b"abc"),
        ("request_ids", pack([1])),
        ("sequence_indexes", pack([0, 0, 0])),
        ("sequence_indexes", pack([0, -1])),
        ("num_computed_tokens", pack([6, -1])),
        ("num_computed_tokens", pack([6, 20])),
        ("num_computed_tokens", pack([18, 3])),
        ("num_new_tokens", pack([4, 0])),
        ("num_new_tokens", pack([3, 2])),
        ("num_new_tokens", pack([2**31 - 1, 2**31 - 1])),
        ("token_ids", pack([11, 12, 13])),
        ("token_ids", pack([11, 12, 13, 100])),
        ("token_ids", pack([11, 12, 13, -2])),
        ("block_table_lengths", pack([2, 2])),
        ("block_table_lengths", pack([4, 0])),
        ("block_table_lengths", pack([2**31 - 1, 2**31 - 1])),
        ("block_tables", pack([7, 2, 5])),
        ("block_tables", pack([7, 2, 5, 10])),
        ("block_tables", pack([7, 2, 5, -1])),
        ("sample_rows", pack([0, 2])),
        ("sample_rows", pack([0, -1])),
        ("sample_sequence_indexes", pack([0])),
        ("sample_sequence_indexes", pack([0, -1])),
        ("blocks_to_swap_out", pack([1])),
        ("blocks_to_swap_out", pack([1, 2])),
        ("blocks_to_swap_in", pack([2, 1])),
        ("blocks_to_copy", pack([1, 10])),
        ("finished_request_ids", b"x"),
    ],
)
def test_a_malformed_column_is_refused(field, value):
    request = step(CHUNK, DECODE)
    read_step(request, LIMITS)
    setattr(request, field, value)
    with pytest.raises(MalformedStep):
        read_step(request, LIMITS)


def test_a_step_beyond_the_token_budget_is_refused():
    rows = [Row(number, [5] * 9, blocks=[0, 1, 2]) for number in range(2)]
    with pytest.raises(MalformedStep, match="18 tokens; a step has 16 at most"):
        read_step(step(*rows), LIMITS)
