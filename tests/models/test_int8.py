"""int8 on real weights: what rounding costs a language model and an encoder."""

import pytest
import torch

import dsi
from bench import models, quality, texts


@pytest.fixture(scope="module")
def text():
    return texts.reference_text()


def test_rounding_weights_hardly_changes_a_language_model(text):
    """Outliers among activations, which random weights do not have, spoil W8A8 and neither int8 weights nor digits."""
    windows = torch.tensor(models.smollm2_tokenizer()(text[20_000:21_000]).input_ids[:96])[None]
    model = models.smollm2()
    exact = quality.perplexity(model, windows)
    dsi.quantise_model(model)
    ratio = quality.perplexity(model, windows) / exact
    digits = quality.perplexity(quality.by_digits(model), windows) / exact
    assert 0.99 < ratio < 1.01 and abs(digits - ratio) < 1e-3


def test_sentences_keep_their_places(text):
    sentences = texts.sentences(text, 25)
    exact = quality.embeddings(models.minilm(), sentences)
    found = {
        "row": quality.cosines(quality.embeddings(dsi.quantise_model(models.minilm()), sentences), exact),
        "W8A8": quality.cosines(quality.embeddings(dsi.quantise_model(models.minilm(), activations="int8"), sentences), exact),
    }
    assert found["row"]["mean cosine"] > 0.9994 > found["W8A8"]["mean cosine"] > 0.98
