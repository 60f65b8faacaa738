"""What a call is made of, at toy sizes."""

from __future__ import annotations

import re

import torch
from torch import nn

from bench import calls


def test_a_table_has_each_side_of_a_region(capsys):
    assert calls.main(["--small", "--regions", "mlp_out,qkv"]) == 0
    head, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert head == "| region | eager | dsi | Dynamo, nothing | inside | over eager |"
    assert [row.split(",")[0] for row in rows] == ["| mlp_out", "| qkv"]
    assert all(len(re.findall(r"\d+\.\d, \d+\.\d", row)) == 4 and row.endswith("x |") for row in rows)


def test_sides_compute_what_eager_computes_but_the_one_that_does_nothing():
    modules = [nn.Linear(4, 3).eval() for _ in range(2)]
    x = torch.randn(2, 4)
    with torch.no_grad():
        found = {name: [call() for call in made()] for name, made in calls.sides_of(modules, [x]).items()}
    for value, wanted in zip(found["dsi"], found["eager"], strict=True):
        torch.testing.assert_close(value, wanted)
    assert torch.equal(found["Dynamo, nothing"][1], found["Dynamo, nothing"][0])  # of whichever came first
    (inside,) = found["inside"]  # one graph serves both modules; what it was called with last is called again
    torch.testing.assert_close(inside[0], found["eager"][1])
