"""The tiny models are what the tests think they are: deterministic, and with no term of the arithmetic at zero."""

import pytest
import torch
import zoo


@pytest.mark.parametrize("name", sorted(zoo.decoder_configs()))
def test_decoder_is_deterministic_and_hot(name):
    model, again = zoo.decoder(name), zoo.decoder(name)
    ids, mask, _ = zoo.padded_batch()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        assert torch.equal(logits, again(ids, attention_mask=mask).logits)
    assert logits.shape == (3, 24, zoo.VOCAB)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    assert all(b.abs().min() > 0 for b in biases)


@pytest.mark.parametrize("name", sorted(zoo.encoder_configs()))
def test_encoder_runs(name):
    ids, mask, _ = zoo.padded_batch()
    with torch.no_grad():
        assert zoo.encoder(name)(ids, attention_mask=mask).last_hidden_state.shape == (3, 24, zoo.HIDDEN)


def test_padding_is_on_the_left_and_positions_count_from_the_first_token():
    ids, mask, positions = zoo.padded_batch()
    assert mask.sum(1).tolist() == [24, 19, 13]
    assert ids[2, :11].tolist() == [0] * 11
    assert positions[2, 11].item() == 0 and positions[2, -1].item() == 12
