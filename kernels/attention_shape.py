"""What the launches of one paged attention call have in common, computed once by its wrapper."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Numbers that the kernels are specialised for, and the scale.

    Attributes:
        group: query heads that share a K/V head.
        head_dim: without padding.
        padded_dim: the power of two that holds it.
        block_size: tokens in a block.
        window: tokens that a query sees, including its own; 0: all.
        short_rows: rows of the smallest tile, queries times heads of a group.
        short_queries: the most queries of a short row.
        precision: of the products, as `tl.dot` names it.
        score_scale: factor that makes products scores to the base 2, or, if capped, tanh's argument.
        cap: the bound of capped scores, to the base 2; 0: not capped.
    """

    group: int
    head_dim: int
    padded_dim: int
    block_size: int
    window: int
    short_rows: int
    short_queries: int
    precision: str
    score_scale: float
    cap: float
