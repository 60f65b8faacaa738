"""`python -m bench deepspeed`: GPT-2's layers, without embedding and head, by DeepSpeed's own fused layers beside dsi and torch.compile.

DeepSpeed keeps its keys and values in one workspace a process, made for the first width that it sees: one width a process. Its extension is
compiled at the first use (a minute and more; `TORCH_CUDA_ARCH_LIST` says for which chips). It counts the tokens itself: more than one token
at once are a prompt, which begins the count anew; each single token after them adds one.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench import shapes, timing
from bench.comparators import DTYPES, WIDER, Workload, compare
from bench.decode import STEPS, Cache
from bench.estimates import Size
from bench.memory import held
from bench.report import Report, Settings
from bench.sides import SIDES, Side
from bench.tables import summary

MISSING = "DeepSpeed is not installed here (pip install deepspeed): its layers are left out"


@dataclass
class Sizes:
    """The layers that are compared: `layers` of width `width`, whose cache has room for `room` tokens, `live` of them there."""

    width: int
    heads: int
    layers: int
    room: int
    live: int


def run(settings: Settings, sizes: Sizes) -> Report:
    """Benchmark one width."""
    report = Report("deepspeed", settings)
    if "deepspeed" in settings.against and importlib.util.find_spec("deepspeed") is None:
        report.say(MISSING)
        report.skipped.append(MISSING)
        settings.against = tuple(side for side in settings.against if side != "deepspeed")
    report.measure_rates()
    compare(workload(settings, sizes), report)
    summary(report)
    return report


class Layers(nn.Module):
    """GPT-2's blocks over a static cache."""

    def __init__(self, model: Any):
        super().__init__()
        self.config, self.blocks = model.config, model.transformer.h

    def forward(self, x: Tensor, position: Tensor, cache: Any) -> Tensor:
        """x [1, S, width] at `position` [S] -> [1, S, width]."""
        mask = torch.arange(cache.layers[0].keys.shape[2], device=x.device) <= position[:, None]
        for block in self.blocks:
            found = block(x, cache, attention_mask=mask[None, None])
            x = found[0] if isinstance(found, tuple) else found
        return x


def workload(settings: Settings, sizes: Sizes) -> Workload:
    """A step of the layers on every side. ValueError where a block goes over the cache: DeepSpeed would write beyond its own."""
    if not 1 < sizes.live <= sizes.room - STEPS:
        raise ValueError(
            f"a block of {STEPS} steps needs 1 < live <= {sizes.room - STEPS}; {sizes.live} tokens of {sizes.room} were asked for"
        )
    dtype = DTYPES[settings.dtype or ("fp32" if settings.small else "fp16")]
    shape = replace(shapes.SHAPES["gpt2"], width=sizes.width, heads=sizes.heads, inner=4 * sizes.width, vocab=199)
    model = shapes.build(shape, sizes.layers, sizes.room, dtype, settings.device)
    layers = Layers(model)
    generator = torch.Generator(settings.device).manual_seed(0)
    x = torch.randn(1, sizes.live + 1, sizes.width, generator=generator, device=settings.device).to(dtype)
    prompt, step = x[:, :-1].contiguous(), x[:, -1:].contiguous()
    position = torch.tensor([sizes.live], device=settings.device)
    cache = Cache(model, 1, sizes.room, 0)
    theirs: list[Any] = []  # DeepSpeed's layers, once they are made

    with torch.no_grad():
        layers(prompt, torch.arange(sizes.live, device=settings.device), cache.cache)
    cache.start_at(sizes.live)

    def prepare() -> None:
        cache.rewind()
        if theirs:
            through(theirs, prompt)  # what sets their count of tokens

    def compile_for(side: Side) -> list[Callable[[], Tensor]]:
        if side is SIDES["deepspeed"]:
            made = deepspeed_layers(model, sizes, dtype)
            through(made, prompt)  # where they cannot run, the other sides' `prepare` must not run them
            theirs[:] = made
            return [lambda: through(theirs, step)] * STEPS
        forward = side.compile(layers)
        return [lambda: forward(step, position, cache.cache)] * STEPS

    def reference() -> Tensor:
        wide = copy.deepcopy(model).to(WIDER[dtype])
        own = Cache(wide, 1, sizes.room, 0)
        Layers(wide)(prompt.to(WIDER[dtype]), torch.arange(sizes.live, device=settings.device), own.cache)
        return Layers(wide)(step.to(WIDER[dtype]), position, own.cache)[None]

    weights = sum(p.numel() * p.element_size() for p in layers.blocks.parameters())
    return Workload(
        title=f"{sizes.layers} layers of width {sizes.width}, {sizes.live} of {sizes.room} tokens",
        facts={**vars(sizes), "case": f"GPT layers, width {sizes.width}", "batch": 1},
        dtype=dtype,
        compile_for=compile_for,
        reference=reference,
        prepare=prepare,
        moved=weights + shapes.cache_bytes(model, 1, sizes.live),
        size=Size(sizes.layers),
        held=held(model, cache.cache),
    )


def through(layers: list[Any], x: Tensor) -> Tensor:
    """`x` [1, S, width] through DeepSpeed's layers -> [1, S, width].

    A layer adds to its input in place and returns it: the layers get a copy, so that `x` is the same for the next call. In a decoder that
    input is what the embedding has just made; the copy, of S rows, is one launch that DeepSpeed's side has here and not there.
    """
    x = x.clone()
    for layer in layers:
        x = layer(x)[0]
    return x


def deepspeed_layers(model: Any, sizes: Sizes, dtype: torch.dtype) -> list[Any]:
    """DeepSpeed's inference layers with the weights of GPT-2's blocks."""
    if torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
    from deepspeed.model_implementations.transformers.ds_gpt import DeepSpeedGPTInference
    from deepspeed.ops.transformer.inference.config import DeepSpeedInferenceConfig

    made = []
    for block in model.transformer.h:
        config = DeepSpeedInferenceConfig(
            hidden_size=sizes.width,
            heads=sizes.heads,
            layer_norm_eps=model.config.layer_norm_epsilon,
            dtype=dtype,
            pre_layer_norm=True,
            max_out_tokens=sizes.room,
        )
        layer = DeepSpeedGPTInference(config)
        for name, value in weights_of(block).items():
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, nn.Parameter(value.detach().contiguous(), requires_grad=False))
        made.append(layer.eval())
    timing.synchronize()
    return made


def weights_of(block: Any) -> dict[str, Tensor]:
    """The parameters of a block by DeepSpeed's names. Both store linears as [inputs, outputs]."""
    attention, mlp = block.attn, block.mlp
    return {
        "norm_w": block.ln_1.weight,
        "norm_b": block.ln_1.bias,
        "attention.attn_qkvw": attention.c_attn.weight,
        "attention.attn_qkvb": attention.c_attn.bias,
        "attention.attn_ow": attention.c_proj.weight,
        "attention.attn_ob": attention.c_proj.bias,
        "mlp.attn_nw": block.ln_2.weight,
        "mlp.attn_nb": block.ln_2.bias,
        "mlp.inter_w": mlp.c_fc.weight,
        "mlp.inter_b": mlp.c_fc.bias,
        "mlp.output_w": mlp.c_proj.weight,
        "mlp.output_b": mlp.c_proj.bias,
    }
