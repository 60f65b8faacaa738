"""Tiny models of many families through expansion, without C++: numbers equal eager's, caches are written in place, nothing cache-sized is
made.
"""

from __future__ import annotations

import os
import subprocess
import sys

import dsi.runtime.inductor_api as inductor_api
import pytest
import torch
import zoo

from bench.generate import cache_argument, static_cache

CACHE = 37
FAMILIES = ["llama", "gpt2", "gpt_neox", "bloom", "mistral_window"]


@pytest.fixture
def expanded(monkeypatch):
    """The expanded graphs, which run as they are instead of through Inductor."""
    graphs = []

    def keep(gm, inputs, patches, written):
        graphs.append(gm)
        return inductor_api.boxed(gm.forward)

    monkeypatch.setattr(inductor_api, "compile_graph", keep)
    return graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_equal_eager(family, expanded):
    model = zoo.decoder(family)
    compiled = torch.compile(model, backend="dsi", fullgraph=True)
    ids = torch.randint(3, zoo.VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        caches = [{cache_argument(model): static_cache(model, CACHE, 2)} for _ in range(2)]
        for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:9]):
            expected = model(input_ids=part, **caches[0]).logits
            got = compiled(input_ids=part, **caches[1]).logits
            assert zoo.relative_error(got, expected) < 2e-6
    layers = zip(caches[0][cache_argument(model)].layers, caches[1][cache_argument(model)].layers, strict=True)
    for mine, theirs in layers:
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-5, atol=1e-5)
    decode = expanded[-1]
    for node in decode.graph.nodes:
        if node.op == "call_function":
            assert "provenance" in node.meta, node
    if family != "mistral_window":  # a rolling window moves every entry at each step, in eager as here
        keys = caches[0][cache_argument(model)].layers[0].keys
        copies = {torch.ops.aten.clone.default, torch.ops.aten.copy.default, torch.ops.aten.index_put.default, torch.ops.aten.copy_.default}
        made = [node for node in decode.graph.nodes if node.target in copies and node.meta["val"].numel() >= keys.numel()]
        assert not made, made
        assert len(decode.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put_.default)) == 2 * 2


def test_without_a_compiler_torch_compile_still_runs():
    code = """
import warnings, torch
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    linear = torch.nn.Linear(5, 3)
    x = torch.randn(4, 5)
    for function in (lambda x: linear(x).relu(), lambda x: linear(x) * 2):
        torch.testing.assert_close(torch.compile(function, backend="dsi")(x), function(x))
print(sum("no C++ compiler" in str(w.message) for w in caught))
"""
    environment = {**os.environ, "CXX": "/nowhere/g++"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1"]
