"""The demo fails where text or numbers differ, or where nothing was fused; and it prints what it promises."""

import json
import sys

import pytest
import torch
import zoo

from bench import demo
from bench.generate import Generation, greedy

LIMITS = {"new_tokens": 5, "cache_length": 12}
PROMPT = torch.tensor([[1, 5, 7, 11]])


class Tokenizer:
    """As much of a tokenizer as the demo uses."""

    def apply_chat_template(self, message, **_):
        return {"input_ids": PROMPT}

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The demo's command line on a model of two layers."""
    monkeypatch.setattr(demo.models, "smollm2", lambda dtype, device: zoo.decoder("llama_tied", dtype).to(device))
    monkeypatch.setattr(demo.models, "smollm2_tokenizer", Tokenizer)
    monkeypatch.setattr(demo, "console", demo.Console(width=140, highlight=False))
    words = ["--tokens", "5", "--rounds", "1", "--dump", str(tmp_path / "dump"), "--json", str(tmp_path / "demo.json")]
    monkeypatch.setattr(sys, "argv", ["demo", *words])
    return tmp_path


def test_demo_prints_regions_hits_error_speed_and_dump(tiny, capsys):
    assert demo.main() == 0
    printed = capsys.readouterr().out
    for part in (
        "rms_norm + 3 linear + rope + kv_write",
        "kv_write ",
        "torch.compile default",
        "tokens/s",
        "Largest relative error",
        "dump",
    ):
        assert part in printed
    figures = json.loads((tiny / "demo.json").read_text())
    assert figures["good"] and figures["regions"]["decode"]["attention"] == 2
    assert figures["largest_relative_error"]["eager"] <= demo.FP32_BOUND
    assert (tiny / "dump" / "graph_001" / "regions.json").exists()


def test_demo_fails_where_nothing_is_fused(tiny, monkeypatch, capsys):
    monkeypatch.setenv("DSI_FUEL", "0")
    assert demo.main() == 1
    assert "NO REGION" in capsys.readouterr().out


def test_other_text_or_other_numbers_are_no_success():
    model = zoo.decoder("llama_tied")
    eager = greedy(model, PROMPT, **LIMITS)
    assert demo.judge(eager, eager, model, PROMPT, LIMITS)[0]
    off = Generation(eager.tokens, [logits * (1 + 2e-5) for logits in eager.logits])
    assert not demo.judge(off, eager, model, PROMPT, LIMITS)[0]
    other = Generation([*eager.tokens[:-1], eager.tokens[-1] + 1], eager.logits)
    assert not demo.judge(other, eager, model, PROMPT, LIMITS)[0]


def test_half_precision_is_held_against_float64():
    model = zoo.decoder("llama_tied", torch.float16)
    eager = greedy(model, PROMPT, **LIMITS)
    good, _, error = demo.judge(eager, eager, model, PROMPT, LIMITS)
    assert good and error["float64"] == error["eager_float64"] > 0
    worse = Generation(eager.tokens, [logits * 1.01 for logits in eager.logits])
    assert not demo.judge(worse, eager, model, PROMPT, LIMITS)[0]


def test_only_a_tie_excuses_another_token():
    exact = Generation([0], [torch.tensor([1.0, 0.999, 0.0], dtype=torch.float64)])
    eager = Generation([0], [torch.tensor([1.001, 0.999, 0.0])])
    assert demo.rounding_tie(Generation([1], eager.logits), eager, exact)
    assert not demo.rounding_tie(Generation([2], eager.logits), eager, exact)
