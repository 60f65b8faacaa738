"""What is worked out of a linear once for all choices."""

from __future__ import annotations

from dataclasses import replace

import torch
from dsi.codegen.linear_work import linear_work

from . import plans
from .quantised import quantised
from .test_cost import on_meta


def test_a_step_that_lies_within_every_group_of_scales():
    """Of 64 and 48 elements: 16, not the less of them."""
    spec = on_meta(lambda: quantised(lambda: plans.gate_up(torch.bfloat16, 8, 192, 64), 64))
    (segment,) = spec.plan.segments
    for groups, found in (((64, 48), 16), ((64, 128), 64), ((64, 0), 64), ((0, 0), 0)):
        windows = tuple(replace(w, scale=replace(w.scale, group=group)) for w, group in zip(segment.windows, groups, strict=True))
        changed = replace(spec, plan=replace(spec.plan, segments=(replace(segment, windows=windows),)))
        assert linear_work(changed, 8, {}).group == found
    windows = (segment.windows[0], replace(segment.windows[1], scale=None))
    changed = replace(spec, plan=replace(spec.plan, segments=(replace(segment, windows=windows),)))
    assert linear_work(changed, 8, {}).group is None
