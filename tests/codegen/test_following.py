"""What a kernel asks the cache for behind its own weights: in the text, in the compiled code, and never in a result."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from dsi.codegen import Choice, generate
from dsi.codegen.devices import H200
from dsi.codegen.following import PITCH, ROWS

from . import plans
from .quantised import quantised
from .support import resources, run
from .test_cost import on_meta

BF16 = torch.bfloat16
SKINNY = Choice("skinny", 8, 8, 32, 64, 128, 4, 3, following=4096)


def constant(case):
    case.spec.constants = frozenset(window.weight for segment in case.spec.plan.segments for window in segment.windows)
    return case


@pytest.mark.parametrize("more", [{}, {"split": 2}, {"peel": "last"}, {"peel": "first", "split": 2}])
def test_weights_are_asked_for_when_the_last_products_are_under_way(more):
    (kernel,) = generate(constant(plans.projection(BF16, 5, 256, 64, strided=False)).spec, replace(SKINNY, **more), H200)
    lines = [line.strip() for line in kernel.source.split("def projection")[1].splitlines()]
    asked = [number for number, line in enumerate(lines) if line.startswith("ask(")]
    assert len(asked) == 3 and lines[asked[0] - 2] == "if PDL:" and all("4194304)" in lines[number] for number in asked)
    stored = next(number for number, line in enumerate(lines) if line.startswith("tl.store("))
    assert max(number for number, line in enumerate(lines) if "tl.dot(" in line) < asked[0] < stored
    (launch,) = kernel.launches
    assert [a.number for a in launch.arguments if a.kind == "following"] == [0, 1, 2]
    assert {a.expr for a in launch.arguments if a.kind == "size"} == {*ROWS, PITCH}


def test_other_schedules_ask_for_nothing():
    for choice in (Choice("gemv", 1, 1, 16, 64, 256, 4, 1, following=4096), Choice("tiled", None, 64, 64, 32, 64, 4, 3, following=4096)):
        (kernel,) = generate(plans.projection(BF16, 1, 256, 64).spec, choice, H200)
        assert "ask(" not in kernel.source and not any(a.kind == "following" for a in kernel.launches[0].arguments)


def test_each_branch_of_a_kernel_asks():
    spec = on_meta(lambda: plans.llama_qkv(BF16, 1, 8, 32, 8, 128, 4096, 1024))
    (kernel,) = generate(spec, replace(SKINNY, block_k=128, split=5), H200)
    assert kernel.source.count("        ask(following_0_ptr") == 3 and kernel.source.count("def ask(") == 1


def test_results_are_those_of_a_kernel_that_asks_for_nothing(interpreter):
    for case in (plans.projection(BF16, 5, 256, 64), quantised(lambda: plans.gate_up(BF16, 5, 128, 64))):
        choice = replace(SKINNY, apart=True)
        one, other = (run(case, interpreter, choice=way) for way in (choice, replace(choice, following=0)))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_it_compiles_to_requests_and_costs_no_stack():
    texts = {}
    case = constant(plans.projection(BF16, 5, 4096, 64, strided=False))
    (kernel,) = generate(case.spec, replace(SKINNY, block_k=256, split=2), H200)
    found = resources(case, kernel, 90, texts=texts)
    assert len(re.findall(r"prefetch\.global\.L2 \[", texts["ptx"])) == 3 and found["STACK"] == found["LOCAL"] == 0
