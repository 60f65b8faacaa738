"""What is in no graph is said, with Dynamo's reason: an explanation that is silent would read as if all were compiled."""

import re

import torch
from torch import nn

import dsi


class Peeks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        largest = h.max().item()
        return self.second(h.relu()) * largest


class Loops(Peeks):
    def forward(self, x):
        for _ in range(2):
            if x.sum() > 0:
                x = self.first(x)
        return x


class Disabled(Peeks):
    @torch.compiler.disable
    def forward(self, x):
        return self.first(x)


def notes(model):
    report = dsi.explain(model.eval(), torch.ones(2, 4))
    return len(report.graphs), report.notes, report


def test_a_graph_that_ends():
    graphs, (note, *_), report = notes(Peeks())
    assert graphs == 2
    assert re.match(r"a graph ends at test_breaks\.py:\d+, and what follows runs as it is up to the next one\. Dynamo says: .*item", note)
    assert note in str(report) and "Dynamo says" in report.html()


def test_a_function_that_is_given_up():
    graphs, found, _ = notes(Loops())
    assert graphs == 0
    assert found == [
        f"forward (test_breaks.py:{Loops.forward.__code__.co_firstlineno}) runs as it is, not in a graph. "
        "Dynamo says: Data-dependent branching"
    ]
    # Dynamo says it once.
    assert notes(Loops())[1] == [
        "nothing was compiled: Dynamo found no operator to take into a graph, or has given the function up in an earlier call"
    ]


def test_a_function_that_is_not_to_be_compiled():
    graphs, (note,), _ = notes(Disabled())
    assert graphs == 0 and re.match(r"nothing was compiled\. Dynamo says: Skip .*disable", note)


def test_a_whole_graph_has_no_note():
    assert notes(nn.Sequential(nn.Linear(4, 4), nn.GELU()))[1] == []
