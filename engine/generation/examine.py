"""What the engine's loop has to know of a model, found out from the model: its arguments, and what its layers keep of a token."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
from transformers.generation.utils import GenerationMixin

from .decoder import Decoder, NotOurs
from .hooks import Preparation
from .seq2seq import Seq2Seq, behind_encoder
from .trial import compare_with_no_cache, first_line, trial

# Where a class has one of these of its own, generating with it is more than calling its forward on ids, positions and a mask.
# A prepare_inputs_for_generation of its own is looked into (hooks.py).
HOOKS = ("_sample", "_prefill", "_update_model_kwargs_for_generation")


def examine(model: Any, states: Tensor | None = None) -> Decoder:
    """The model as the loop calls it. `states` [rows, places, width]: such as its encoder makes, where it has one. Raises `NotOurs` for a
    model that the loop cannot run."""
    name = type(model).__name__
    if not isinstance(model, GenerationMixin):
        raise NotOurs(f"{name} is no transformers model that generates")
    if getattr(model, "_is_stateful", False):
        raise NotOurs(f"{name} keeps a state that is no KV cache")
    for hook in HOOKS:
        if getattr(type(model), hook, None) is not getattr(GenerationMixin, hook, None):
            raise NotOurs(f"{name} has a {hook} of its own")
    number = _layers(model.config.get_text_config(decoder=True))
    accepted = inspect.signature(model.forward).parameters
    cache_name = next((argument for argument in ("cache", "past_key_values") if argument in accepted), None)
    if cache_name is None or "attention_mask" not in accepted:
        raise NotOurs(f"the forward of {name} takes no cache, or no attention mask")
    # transformers says which models are right with free slots behind the newest token; no trial call could tell.
    stays = bool(getattr(model, "_can_compile_fullgraph", False))
    if model.config.is_encoder_decoder:
        if not stays or states is None or not {"decoder_input_ids", "encoder_outputs"} <= accepted.keys():
            raise NotOurs(f"{name} has an encoder, and a decoder that is not made for a cache whose sizes do not change")
        return _behind_encoder(model, cache_name, "logits_to_keep" in accepted, states)
    prepares = Preparation(model, cache_name)
    draft = Decoder(model, (), cache_name, "position_ids" in accepted, "logits_to_keep" in accepted, False, False, prepares)
    for masked, rolls in [*([(False, False), (True, False)] if stays else []), (True, True)]:
        decoder = dataclasses.replace(draft, always_masked=masked, rolls=rolls)
        try:
            # What a caller's autocast would make of keys and values is not what the model keeps.
            with torch.autocast(model.device.type, enabled=False):
                decoder = dataclasses.replace(decoder, layers=trial(decoder, number))
                if decoder.rolls or prepares.own:
                    compare_with_no_cache(decoder)
            return decoder
        except NotOurs:
            raise
        except Exception as error:  # whatever the model's code raises where it looks at numbers that a compiled graph does not have
            problem = error
    raise NotOurs(f"a trial call of {name} with a cache of fixed size failed: {type(problem).__name__}: {first_line(problem)}")


def _behind_encoder(model: Any, cache_name: str, keeps: bool, states: Tensor) -> Seq2Seq:
    draft = Seq2Seq(model, (), cache_name, False, keeps, False, False, Preparation(model, cache_name))
    try:
        with torch.autocast(model.device.type, enabled=False):
            return behind_encoder(draft, states)
    except NotOurs:
        raise
    except Exception as error:  # whatever the model's code raises where it looks for more than a text has
        what = f"a trial call of {type(model).__name__} behind its encoder failed"
        raise NotOurs(f"{what}: {type(error).__name__}: {first_line(error)}") from error


def position_limit(model: Any, config: Any) -> int | None:
    """How many positions a table of the model has; None where positions are computed (rotary ones, slopes).

    A table is an embedding other than the input's, or a buffer, as long as the configuration says that positions are: a few rows longer
    where some are reserved.
    """
    names = ("max_position_embeddings", "max_target_positions")
    most = next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None)
    if most is None:
        return None
    inputs = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    lengths = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding) and part is not inputs]
    lengths += [size for buffer in model.buffers() for size in buffer.shape if buffer.dim() >= 2]
    return most if any(most <= length <= most + 8 for length in lengths) else None


def source_limit(model: Any) -> int | None:
    """How many positions a table of the encoder has for the token ids that it reads; None where there is no such table."""
    most = getattr(model.config, "max_position_embeddings", None)
    if not model.config.is_encoder_decoder or getattr(model, "main_input_name", "") != "input_ids" or not isinstance(most, int):
        return None
    encoder = model.get_encoder()
    inputs = [part.get_input_embeddings() for part in (model, encoder)]
    tables = [part for part in encoder.modules() if isinstance(part, nn.Embedding) and not any(part is table for table in inputs)]
    return most if any(most <= table.num_embeddings <= most + 8 for table in tables) else None


def _layers(config: Any) -> int:
    """The number of layers, all of which must keep keys and values and nothing else."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise NotOurs(f"some layers are of the kind {', '.join(sorted(other))}")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise NotOurs("attention is in chunks")
    layers = StaticCache(config=config, max_cache_len=1).layers
    for number, layer in enumerate(layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise NotOurs(f"layer {number} keeps more than keys and values ({type(layer).__name__})")
    return len(layers)
