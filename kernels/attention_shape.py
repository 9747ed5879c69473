"""What the launches of one paged attention have in common, made once by its wrapper."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Numbers that the kernels are specialised for, and the scale.

    Attributes:
        group: query heads that share a K/V head.
        head_dim: as it is.
        padded_dim: the power of two that holds it.
        block_size: tokens of a block.
        window: tokens that a query sees, its own one included; 0: all.
        short_rows: rows of the smallest tile, queries times heads of a group.
        short_queries: a row of up to so many queries is short.
        precision: of the products, as `tl.dot` names it.
        score_scale: factor of the scores, which are taken to the base 2.
        cap: the bound of capped scores, to the base 2, whose `score_scale` makes them tanh's argument; 0: not capped.
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
