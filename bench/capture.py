"""CUDA graphs of compiled kernels, captured by hand: a sweep makes thousands, one a choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Captured:
    """What was called once, as a CUDA graph, with the scratch memory that it uses; `result` is written anew by each replay."""

    graph: Any
    result: Any
    used: list[Tensor] = field(default_factory=list)

    def replay(self) -> None:
        self.graph.replay()


def captured(call: Callable[[], Any], stream: Any) -> Captured:
    """Captures a call on `stream`. It has run before: what is kept for each stream must be there."""
    from dsi.runtime.workspaces import recording, stream_of

    place = stream_of(torch.device("cuda", torch.cuda.current_device()))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # a library's scratch memory must be the graph's own
    # Not by torch.cuda.graph, which collects garbage first.
    with torch.cuda.stream(stream), recording(place) as used:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = call()
        finally:
            graph.capture_end()
    torch._C._cuda_clearCublasWorkspaces()
    return Captured(graph, result, used)
