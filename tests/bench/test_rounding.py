"""Where two sides' tokens part, the bench says whether rounding explains it: a token that lies as close as rounding reaches is no fault,
one that the model would not pick is, whichever side picked it, and however late."""

import json

import pytest
import torch

from bench import generation, rounding, shapes
from bench.report import Settings

PROMPT = torch.tensor([[5, 9, 33, 7, 101]])
BF16 = torch.bfloat16


def made(name, dtype=BF16):
    return shapes.build(shapes.SHAPES[name].small(), 2, 64, dtype, "cpu")


def text(model, new=6):
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=new, do_sample=False, eos_token_id=None)[:, 5:]


def other_than(tokens, at):
    """The same text with a token of its own at a place."""
    changed = tokens.clone()
    changed[0, at] = (changed[0, at] + 50) % 199
    return changed


def twins(model, token):
    """Has another token whose logit is `token`'s up to the last places of its weights; gives it."""
    twin = (token + 1) % 199
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[token]
        head[twin, 0] = head[token, 0] * (1 + 2**-7)
    return twin


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_what_the_model_makes_itself_is_within_rounding(name, dtype):
    model = made(name, dtype)
    before = list(model.parameters())
    judged = rounding.judge(model, PROMPT[0], text(model)[0])
    assert judged.by == "float64" and judged.beyond == 0 and judged.complaint() == ""
    assert bool((judged.rounding > 0).all()) and judged.rounding.max() < (0.5 if dtype == BF16 else 1e-5) * judged.logits.std()
    assert all(one is other and one.dtype == dtype for one, other in zip(before, model.parameters(), strict=True)), "the model is as it was"


@pytest.mark.parametrize("memory", [2.0**40, 0.0], ids=["wider", "no room for more"])
def test_two_tokens_that_rounding_cannot_tell_apart(monkeypatch, memory):
    monkeypatch.setattr(rounding, "free", lambda device: memory)
    model = made("llama-3-8b")
    first = int(text(model)[0, 0])
    twin = twins(model, first)
    eager, side = torch.tensor([[first, 8]]), torch.tensor([[twin, 8]])
    found = rounding.verdicts(model, PROMPT, {"eager": eager[:, :1], "side": side[:, :1]}, "eager")
    assert found["side"]["parts at"] == 0 and found["side"]["wrong"] == "" == found["eager"]["wrong"]
    assert found["side"]["gap"] <= found["side"]["rounding"]
    assert found["side"]["by"] == ("float64" if memory else "bfloat16 with its cache")


@pytest.mark.parametrize("memory", [2.0**40, 0.0], ids=["wider", "no room for more"])
def test_a_token_that_the_model_would_not_pick(monkeypatch, memory):
    monkeypatch.setattr(rounding, "free", lambda device: memory)
    model = made("llama-3-8b")
    right = text(model)
    wrong = other_than(right, 2)
    found = rounding.verdicts(model, PROMPT, {"eager": right, "side": wrong}, "eager")
    assert found["side"]["parts at"] == 2 and found["side"]["gap"] > found["side"]["rounding"] > 0
    assert found["side"]["wrong"].startswith(
        f"the tokens differ by more than rounding: side picks {int(wrong[0, 2])} as token 2 where eager"
    )
    assert found["eager"]["wrong"] == ""
    turned = rounding.verdicts(model, PROMPT, {"static": wrong, "side": right}, "static")
    assert "token 2, is" in turned["static"]["wrong"] and turned["side"]["wrong"] == "", "the one that is held against may be wrong"


def test_a_fault_behind_a_parting_that_rounding_explains():
    model = made("llama-3-8b")
    first = int(text(model)[0, 0])
    twin = twins(model, first)
    after = model.generate(torch.cat([PROMPT, torch.tensor([[twin]])], 1), max_new_tokens=3, do_sample=False, eos_token_id=None)[:, 5:]
    side = other_than(after, 3)
    found = rounding.verdicts(model, PROMPT, {"eager": text(model, 4), "side": side}, "eager")["side"]
    assert found["parts at"] == 0 and found["gap"] <= found["rounding"]
    assert found["beyond rounding"] == 1 and "token 3, is" in found["wrong"]


def test_texts_part_where_a_row_differs_soonest():
    ours, theirs = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4]]), torch.tensor([[1, 2, 3, 5], [1, 2, 3, 4]])
    assert rounding.parting(ours, theirs) == (1, 2)
    assert rounding.parting(ours[:1, :3], theirs[:1]) is None, "one that ends sooner"
    assert rounding.verdicts(None, PROMPT, {"eager": ours, "dsi": ours}, "eager") == {}, "no model is run for equal texts"


def test_a_made_up_side_is_marked_wrong(tmp_path, monkeypatch, capsys):
    made = generation._side

    def side(name, work, options):
        eager = made("eager", work, options)
        if name != "static":
            return eager
        return generation.Side(name, lambda *given, **how: torch.cat([PROMPT, other_than(eager.generate(*given, **how)[:, 5:], 1)], 1))

    monkeypatch.setattr(generation, "_side", side)
    file = tmp_path / "generate.json"
    generation.run(Settings(blocks=1, small=True, json=file), ["llama-3-8b"], ["eager", "static"], 4, 5, 1, None)
    (row,) = json.loads(file.read_text())["rows"]
    wrong = row["sides"]["static"]
    assert (wrong["tokens as eager"], wrong["parts at"], wrong["tokens as"]) == (1, 1, "eager") and wrong["gap"] > wrong["rounding"]
    assert row["sides"]["eager"]["wrong"] == "" and "parts at" not in row["sides"]["eager"]
    out = " ".join(capsys.readouterr().out.split())
    assert "Where tokens part" in out and f"float64 {wrong['beyond rounding']} wrong" in out
    assert "static: wrong: the tokens differ by more than rounding" in out


def test_a_model_that_does_not_run_in_another_dtype_leaves_the_row(monkeypatch, capsys):
    def fails(*arguments):
        raise RuntimeError("float64 is not for this model")

    monkeypatch.setattr(rounding, "verdicts", fails)
    report = generation.run(Settings(blocks=1, small=True), ["gpt2"], ["eager"], 4, 5, 1, None)
    assert "not for this model" in report.rows[0]["sides"]["eager"]["tokens not judged because"]
    assert "not for this model" in capsys.readouterr().out and report.rows[0]["sides"]["eager"]["wall"] > 0
