"""A real encoder: MiniLM's sentence embeddings are the same compiled, in padded batches of changing shape."""

from collections import Counter

import pytest
import torch
import zoo

from bench import models

SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping by the window.",
    "Interest rates rose again in the third quarter, to nobody's surprise.",
    "She plays the violin.",
    "How do I reset my password?",
    "I forgot my login and can't get into my account any more; what should I do now?",
    "Rain.",
    "The committee will meet on Tuesday to discuss the budget for the coming year.",
    "Compilers translate programs.",
]
LAYERS = 6


def encode(forward, inputs):
    with torch.inference_mode():
        return models.sentence_embeddings(forward(**inputs).last_hidden_state, inputs["attention_mask"])


@pytest.fixture(scope="module")
def runs():
    """Eager's and dsi's embeddings of each batch, and the contexts of what was compiled for all of them."""
    from dsi.compiler.observe import collecting

    torch._dynamo.reset()
    model, tokenizer = models.minilm(), models.minilm_tokenizer()
    compiled = torch.compile(model, backend="dsi")
    batches = {"first": SENTENCES[:3], "more": SENTENCES[3:8], "other": SENTENCES[1:5], "all": SENTENCES, "unpadded": SENTENCES[3:4] * 2}
    found = {}
    with collecting() as contexts:
        for name, batch in batches.items():
            inputs = tokenizer(batch, padding=True, return_tensors="pt")
            found[name] = encode(model, inputs), encode(compiled, inputs)
    return found, contexts


def test_embeddings_are_eagers(runs):
    for eager, ours in runs[0].values():
        assert zoo.relative_error(ours, eager) <= 1e-5
        assert torch.nn.functional.cosine_similarity(ours, eager).min() > 1 - 1e-6


def test_batches_of_changing_shape_share_a_graph(runs):
    assert len(runs[1]) == 2, "one graph for the first shape, one for all others"


def test_regions(runs):
    for context in runs[1]:
        kinds = Counter(region.kind for region in context.report.regions)
        assert (kinds["linear"], kinds["attention"], kinds["embedding"]) == (4 * LAYERS + 1, LAYERS, 1), "the pooler is one more linear"
        assert context.report.unfused == []


def test_a_padded_sentence_has_the_embedding_that_it_has_alone(runs):
    together, alone = runs[0]["all"][1], runs[0]["unpadded"][1]
    assert zoo.relative_error(alone[0], together[3]) <= 1e-5
    assert torch.equal(alone[0], alone[1])


def test_embeddings_make_sense(runs):
    """Wrongly read weights would be wrong in eager and compiled alike."""
    together = runs[0]["all"][1]
    near, far = (together[0] @ together[1]).item(), (together[0] @ together[2]).item()
    assert near > 0.6 > 0.3 > far
