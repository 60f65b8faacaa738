"""Which CUDA kernels a call runs, read from torch.profiler, and what kind each is."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

# What library kernels call themselves. Looked for only in names with a namespace or a vendor's prefix: a generated kernel's name is a plain
# identifier, and may well say what it computes.
LIBRARY = {
    "attention": r"flash|fmha|attention|mem_eff|softmax|cudnn.*sdpa",
    "norm": r"layer_?norm|rms_?norm|rowwisemoments|batch_?norm",
    "gemm": r"gemm|gemv|cutlass|xmma|nvjet|cublas|splitk|wgrad|sm\d\d_",
}
VENDOR_PREFIX = re.compile(r"^(void |nvjet|sm\d\d_|ampere_|cutlass|cublas|cudnn|fmha|flash|gemv|splitk)", re.IGNORECASE)


def traced(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of torch.profiler's trace of one call of `call`, CUDA's included."""
    from torch.profiler import ProfilerActivity, profile

    # Else CUPTI stays, and each launch of the process is dearer from then on: wall times of what has most launches would suffer most.
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of cycles, of which there is one
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def kernel_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels among the events of a trace, in order of their start. Copies and fills by the driver are not kernels."""
    return sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])


def cuda_kernels(call: Callable[[], Any]) -> list[str]:
    """The names of the kernels that one call of `call` runs, in order of their start."""
    return [event["name"] for event in kernel_events(traced(call))]


def is_generated(name: str) -> bool:
    """Whether a kernel is one that Triton compiled: its name is a plain identifier without a vendor's prefix."""
    return re.fullmatch(r"\w+", name) is not None and not VENDOR_PREFIX.match(name)


def library_kind(name: str) -> str | None:
    """ "gemm", "attention" or "norm" if `name` is a library kernel that a fused region should have replaced, else None."""
    if is_generated(name):
        return None
    return next((kind for kind, pattern in LIBRARY.items() if re.search(pattern, name, re.IGNORECASE)), None)


def layer_kernels(one: list[str], two: list[str]) -> list[str]:
    """The kernels of one layer: what a model of two layers runs more than the same model with one."""
    extra = Counter(two) - Counter(one)
    # Where the two runs chose different kernels for the same work, names do not cancel; the count does.
    missing = sum((Counter(one) - Counter(two)).values())
    names = sorted(extra.elements(), key=two.index)
    return names[: len(names) - missing] if missing else names
