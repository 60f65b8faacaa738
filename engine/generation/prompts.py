"""What can be wrong with a prompt, said in a sentence before anything runs: on a GPU, a wrong token id ends the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import GenerationMixin

from .tables import described

TEXT = ("inputs", "input_ids")
# What a text comes with. Beside anything else (images, say) a token id may be a mark that is never looked up.
BESIDES = {"attention_mask", "position_ids", "token_type_ids", "decoder_attention_mask", "decoder_position_ids"}
CACHES = ("cache", "past_key_values")


def check_prompt(model: Any, given: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for a prompt among the arguments of `generate` that is no tensor [rows, tokens] of token ids, is empty,
    has a mask of other sizes, or holds ids outside of the vocabulary. One look at the tokens, for the whole call."""
    name = next((name for name in TEXT if given.get(name) is not None), None)
    if name is not None and given.get("inputs_embeds") is None:
        ids = _reads_ids(model) and _generates_plainly(model)
        _check_kind(name, given[name], ids)
        if ids:
            _check_mask(name, given[name], given.get("attention_mask"), all(given.get(cache) is None for cache in CACHES))
    plain = not any(isinstance(value, Tensor) and key not in {*TEXT, "decoder_input_ids", *BESIDES} for key, value in given.items())
    if not plain:
        return
    both = model.config.is_encoder_decoder
    if name is not None:
        check_ids(name, given[name], vocabulary(model, "get_encoder" if both else None))
    if both and isinstance(given.get("decoder_input_ids"), Tensor):
        check_ids("decoder_input_ids", given["decoder_input_ids"], vocabulary(model, "get_decoder"))


def check_source(model: Any, given: Mapping[str, Any], most: int | None) -> None:
    """Raise ValueError where the encoder would read more token ids than the `most` positions that its table has, if it has one."""
    name = next((name for name in TEXT if given.get(name) is not None), None)
    if most is None or name is None or given.get("encoder_outputs") is not None:
        return
    if not isinstance(given[name], Tensor) or (n := given[name].shape[-1]) <= most:
        return
    raise ValueError(
        f"dsi: {name} has rows of {n} tokens, and the encoder of {type(model).__name__} has a table of {most} positions: give fewer "
        "(truncation=True, where a tokenizer makes them)"
    )


def check_ids(name: str, ids: Tensor, size: int | None) -> None:
    """Raise ValueError where `ids`, given as `name`, holds what is none of `size` tokens."""
    if size is None or ids.is_floating_point() or ids.numel() == 0 or ids.is_meta:
        return
    ids = ids.cpu()  # one copy takes less time than operators on the device
    least, most = (int(bound) for bound in torch.aminmax(ids))
    if least >= 0 and most < size:
        return
    place = ((ids < 0) | (ids >= size)).nonzero()[0].tolist()
    raise ValueError(
        f"dsi: {name} holds token id {int(ids[tuple(place)])} (row {place[0]}, place {place[-1]}), and {size} tokens are in the "
        "vocabulary: is the tokenizer this model's, and was the model resized (resize_token_embeddings) for tokens that were added?"
    )


def check_padding(model: Any, config: Any, rows: int, ends: bool) -> None:
    """Raise ValueError where rows that have ended would go on with a token that is none."""
    pad, size = getattr(config, "pad_token_id", None), vocabulary(model)
    if rows > 1 and ends and isinstance(pad, int) and size is not None and not 0 <= pad < size:
        raise ValueError(
            f"dsi: pad_token_id = {pad} is outside of the vocabulary of {size} tokens, and rows that have ended go on with it while others "
            "have not: give a pad_token_id that is a token"
        )


def check_cache(given: Mapping[str, Any], implementation: str | None) -> None:
    """Raise ValueError for a cache that moves between devices while the model runs: no compiled forward can follow that."""
    moving = implementation is not None and "offloaded" in implementation
    if moving or any(getattr(given.get(name), "offloading", False) for name in CACHES):
        what = f"cache_implementation = {implementation!r}" if moving else "a cache with offloading=True"
        raise ValueError(
            f"dsi: {what} moves keys and values between devices while the model runs, which a compiled forward cannot do: leave it out "
            "(the engine's cache stays on the device), or call engine.module.generate, which is transformers' own"
        )


def check_room(given: Mapping[str, Any], prompt: int, total: int) -> None:
    """Raise ValueError for a caller's cache of fixed size that has no room for all but the newest of `total` tokens: a kernel does not
    look where a cache ends."""
    for name in CACHES:
        cache = getattr(given.get(name), "self_attention_cache", given.get(name))
        sizes = [layer.max_cache_len for layer in getattr(cache, "layers", ()) if type(layer) is StaticLayer]
        if sizes and min(sizes) < total - 1:
            raise ValueError(
                f"dsi: a prompt of {prompt} tokens and {total - prompt} new ones are {total} tokens, and the cache that is given has "
                f"room for {min(sizes)}: make it larger (max_cache_len), ask for fewer, or leave it out (the engine has one of its own)"
            )


def prompt_length(model: Any, given: Mapping[str, Any]) -> int | None:
    """Tokens of the prompt, or those that a decoder behind an encoder starts with; None where it cannot be seen."""
    if model.config.is_encoder_decoder:
        ids = given.get("decoder_input_ids")
    else:
        ids = next((given[name] for name in TEXT if given.get(name) is not None), None)
        embeds = given.get("inputs_embeds")
        if isinstance(embeds, Tensor) and embeds.dim() == 3:
            return embeds.shape[1]
    if ids is None:
        return 1
    return ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 else None


def total_length(model: Any, given: Mapping[str, Any], prompt: int) -> int:
    """Tokens of a row at most, as transformers will work it out: arguments, then the call's configuration, then the model's."""

    def value(name: str) -> int | None:
        configs = (given.get("generation_config"), model.generation_config)
        found = (given.get(name), *(getattr(config, name, None) for config in configs))
        return next((number for number in found if number is not None), None)

    if (new := value("max_new_tokens")) is not None:
        return prompt + new
    if (length := value("max_length")) is not None:
        return length
    default = prompt + 20
    positions = getattr(model.config, "max_position_embeddings", None)
    return default if positions is None else min(default, positions)


def _check_kind(name: str, value: Any, ids: bool) -> None:
    if isinstance(value, Mapping):
        raise TypeError(f"dsi: {name} is a {type(value).__name__}, which holds several inputs: call generate(**inputs)")
    if not isinstance(value, Tensor):
        raise TypeError(
            f"dsi: {name} is a {type(value).__name__}; give a tensor of token ids [rows, tokens], such as a tokenizer makes with "
            'return_tensors="pt" (padding=True for several prompts)'
        )
    if not ids:
        return
    if value.dim() != 2:
        raise ValueError(f"dsi: {name} is {tuple(value.shape)}; give [rows, tokens] (one prompt is one row: {name}[None])")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"dsi: {name} is {value.dtype}; token ids are integers, such as torch.int64")
    if value.numel() == 0:
        raise ValueError(
            f"dsi: {name} is {tuple(value.shape)}: the prompt holds no token; say something, if only a beginning-of-text token"
        )


def _check_mask(name: str, ids: Tensor, mask: Any, alone: bool) -> None:
    """A mask [rows, tokens] is as long as the prompt, or longer by what a cache holds."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    if mask.shape[0] != ids.shape[0] or mask.shape[1] < ids.shape[1] or (alone and mask.shape[1] != ids.shape[1]):
        beside = "" if alone else " (more columns for what the cache holds)"
        raise ValueError(f"dsi: attention_mask is {tuple(mask.shape)}, and {name} {tuple(ids.shape)}: give one entry a token{beside}")


def _reads_ids(model: Any) -> bool:
    return getattr(model, "main_input_name", "input_ids") == "input_ids"


def _generates_plainly(model: Any) -> bool:
    """Whether `generate` is transformers' general one: a model's own may take prompts of another form (several codebooks, say)."""
    return getattr(type(model), "generate", None) is GenerationMixin.generate


def vocabulary(model: Any, part: str | None = None) -> int | None:
    """Rows of the table of token embeddings of a model, or of a part of it (the method that returns that), those of added tables beside it
    included; None where it cannot be seen."""
    try:
        table = (getattr(model, part)() if part else model).get_input_embeddings()
        size, width = described(table)[:2]
        added = [part for part in table.children() if isinstance(part, nn.Embedding) and part.embedding_dim == width]
        return size + sum(part.num_embeddings for part in added)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
