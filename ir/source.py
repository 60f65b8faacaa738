"""Where in the model and in its source an FX node comes from."""

from __future__ import annotations

import functools
import os
import re

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)', re.MULTILINE)
_TORCH = os.path.dirname(torch.__file__) + os.sep


@functools.lru_cache(4096)
def _last_frame(trace: str) -> tuple[str, int, str]:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return "", 0, ""
    # `nn.Linear.forward` tells nothing about the model: the innermost frame outside torch does.
    outside = [f for f in frames if not f["file"].startswith(_TORCH)]
    frame = (outside or frames)[-1]
    return frame["file"], int(frame["line"]), frame["code"].strip()


_INDEX = re.compile(r"\['?(\w+)'?\]")  # "layers[0]" or "['layers']", as Dynamo spells the way to a module
_ROOT = re.compile(r"^L(\.(self|args|kwargs|fn|mod|\d+)\b)*\.?")  # how it reached the model itself


def module_path(node: fx.Node) -> str:
    """The module of the model that made `node`, "model.layers.0.mlp"; "" where it is not known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = _INDEX.sub(r".\1", str(list(stack.values())[-1][0]).replace("._modules", ""))
    return _ROOT.sub("", path)


def captured_as(node: fx.Node) -> str:
    """What Dynamo called the node of its graph that `node` is, or comes from; "" where it is not known. Its name may have changed since."""
    stack = node.meta.get("source_fn_stack")
    return str(stack[-1][0]) if stack else ""


def source_frame(node: fx.Node) -> tuple[str, int, str]:
    """(file, line, code) of the model's line that made `node`; ("", 0, "") where it is not known."""
    return _last_frame(node.meta.get("stack_trace") or "")


def source_line(node: fx.Node) -> str:
    """ "file.py:12" of the model's line that made `node`, "" where it is not known. The form that `Refusal.where` has."""
    file, line, _ = source_frame(node)
    return f"{os.path.basename(file)}:{line}" if file else ""
