"""The table of token embeddings of a model: what the loop asks of it, be it floating-point or int8."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from dsi.quantize.modules import QuantisedEmbedding


class Table(NamedTuple):
    """Rows and columns, where it is, and the dtype in which it hands out rows."""

    rows: int
    width: int
    device: torch.device
    dtype: torch.dtype


def described(table: Any) -> Table:
    """Of the module that `get_input_embeddings` returned. Raises AttributeError or ValueError for one that holds no matrix."""
    if isinstance(table, QuantisedEmbedding):  # it shares the int8 of a head
        return Table(table.num_embeddings, table.embedding_dim, table.head.weight.device, table.dtype)
    rows, width = table.weight.shape
    return Table(int(rows), int(width), table.weight.device, table.weight.dtype)
