"""A real language model: SmolLM2-135M says the same compiled as eager, with the same logits, out of five regions a layer."""

from collections import Counter

import pytest
import torch

from bench import models
from bench.generate import greedy, largest_error

LAYERS = 30
BOUND = 1e-5  # largest relative error of a step's logits against eager, fp32


@pytest.fixture(scope="module")
def runs():
    """Eager's and dsi's generation for one question, a second one for another question, and the contexts of what was compiled for each."""
    from dsi.compiler.observe import collecting

    torch._dynamo.reset()
    model, tokenizer = models.smollm2(), models.smollm2_tokenizer()
    compiled = torch.compile(model, backend="dsi")
    questions = ["What is a compiler? Answer in one sentence.", "What is a river? Answer in two sentences."]
    found = []
    for question in questions:
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        limits = {"new_tokens": 16, "cache_length": 64}
        with collecting() as contexts:
            ours = greedy(model, prompt, prefill=compiled, decode=compiled, **limits)
        found.append((prompt, greedy(model, prompt, **limits), ours, contexts, tokenizer))
    assert found[0][0].shape == found[1][0].shape
    return found


@pytest.mark.parametrize("question", [0, 1])
def test_text_and_logits_are_eagers(runs, question):
    _, eager, ours, _, tokenizer = runs[question]
    assert tokenizer.decode(ours.tokens) == tokenizer.decode(eager.tokens)
    assert ours.tokens == eager.tokens
    assert largest_error(ours, eager) <= BOUND


def test_text_makes_sense(runs):
    """Wrongly read weights would be wrong in eager and compiled alike."""
    _, eager, _, _, tokenizer = runs[0]
    assert tokenizer.decode(eager.tokens).startswith("A compiler is a")


def test_prompt_and_step_compile_once_and_a_second_answer_compiles_nothing(runs):
    assert len(runs[0][3]) == 2
    assert runs[1][3] == []


def test_five_anchored_regions_a_layer(runs):
    for context in runs[0][3]:
        report = context.report
        kinds = Counter(region.kind for region in report.regions)
        assert kinds["linear"] == 4 * LAYERS + 1
        assert kinds["attention"] == LAYERS
        assert kinds["embedding"] == 1
        assert report.unfused == []
        labels = Counter(region.label for region in report.regions)
        assert labels["rms_norm + 3 linear + rope + kv_write"] == LAYERS
        assert labels["rms_norm + 2 linear + gated"] == LAYERS
        assert labels["linear + add"] == 2 * LAYERS
        assert labels["rms_norm + linear"] == 1
        hits = report.hits
        assert (hits["rms_norm"], hits["rope"], hits["kv_write"], hits["gated"]) == (2 * LAYERS + 1, 2 * LAYERS, 2 * LAYERS, LAYERS)


def test_caches_are_written_in_place(runs):
    """A cache that is copied at each step costs more than the layer."""
    for context in runs[0][3]:
        assert context.report.notes == []
        writers = [r for r in context.report.regions if "kv_write" in r.label]
        assert all(len(r.in_place) == 2 for r in writers)
