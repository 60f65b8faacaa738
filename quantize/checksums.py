"""CRC-32 of what the file of a quantised model says and holds: a bit that changed on a disk or on the way is found when it is read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Of the bytes of each tensor in the order of its entries. Several at once: zlib leaves other threads their turn."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(_of_tensor, tensors.values()), strict=True))


def _of_tensor(tensor: Tensor) -> int:
    with torch.no_grad():
        return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def of_metadata(said: Mapping[str, Any]) -> int:
    """Of metadata, less the entry that holds this number."""
    return zlib.crc32(json.dumps({key: value for key, value in said.items() if key != "checksum"}, sort_keys=True).encode())
