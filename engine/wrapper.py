"""The engine: a module in eval mode behind DeepSpeed's face, with the module's own attributes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .config import InferenceConfig
from .errors import warn
from .generation.compiled import compiled, loudly
from .generation.progress import compiling
from .generation.stand_in import stand_in, stand_in_class
from .quantised import compiler_options


class InferenceEngine(nn.Module):
    """What `dsi.init_inference` returns. It takes the place of its module: in a transformers pipeline too.

    * `engine(...)` is the module's forward, without gradients: same arguments, same output types.
    * `engine.generate(...)` takes what transformers' `generate` takes, or the module's own; there is none where the module has none.
    * `engine.module` is the module that was given, prepared in place; `engine.inference_config` what was asked for; `engine.generator`
      what generates (None where nothing of dsi's does), which knows why a call did not run in its own loop (`why_not_ours`).
    * Every other attribute (`config`, `generation_config`, `can_generate`, ...) is the module's, to read and to write.

    An engine is always in eval mode.
    """

    inference_config: InferenceConfig
    _wraps = "module"  # names of weights in files, and of those to be skipped, are this one's

    def __init__(self, module: nn.Module, config: InferenceConfig) -> None:
        """`module` is prepared already (`init_inference` does both). Nothing is compiled before the first call."""
        super().__init__()
        self.inference_config = config
        self.module = module
        run, generate, generator = _runners(module, config, self.device)

        # Functions of the instance, so that their signatures are the module's: pipelines look at those.
        @functools.wraps(module.forward, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return run(*args, **kwargs)

        self.forward = forward
        # The engine's own, where an assignment could go to the module.
        self.__dict__["generator"] = generator
        if generate is not None:
            self.__dict__["generate"] = generate
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where the module's weights are."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first floating-point weight, torch's default where it has none."""
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floats, torch.get_default_dtype())

    def train(self, mode: bool = True) -> InferenceEngine:
        """Eval mode, whatever `mode` is: a model around the engine may switch between the two. `engine.module.train()` obeys."""
        if mode:
            warn("dsi: an inference engine stays in eval mode; train its module instead (engine.module)")
        return super().train(False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
        if name == "generate" and not hasattr(module, "generate"):
            raise AttributeError(
                f"this engine has no generate: {type(module).__name__} is no transformers model that can (engine(...) runs its forward)"
            )
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(module, name):
            if name == "module" and module is not None:
                raise AttributeError("an engine keeps the module that it compiled: call init_inference on the other one")
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the module and the configuration; what was compiled is compiled again."""
        return type(self), (self.module, self.inference_config)


_Call = Callable[..., Any]


def _runners(module: Any, config: InferenceConfig, device: torch.device) -> tuple[_Call, _Call | None, Any]:
    """What `engine(...)` and `engine.generate(...)` call, and the generator behind them."""
    generates = hasattr(module, "generate") and hasattr(module, "can_generate") and module.can_generate()
    if not config.replace_with_kernel_inject:
        return module, module.generate if generates else None, None
    graphs, given = device.type == "cuda" and config.enable_cuda_graph, compiler_options(config)
    if not generates:
        options = ({"mode": "reduce-overhead"} if graphs else {}) | given
        return _compiled(module, options), _own_generate(module, options) if hasattr(module, "generate") else None, None
    from .generation import Generator

    # The loop owns every buffer that a recorded graph reads, so that there graphs are the rule and False the exception.
    wanted = device.type == "cuda" and (graphs or "enable_cuda_graph" not in config.model_fields_set)
    generator = Generator(
        module,
        max_out_tokens=config.max_out_tokens,
        min_out_tokens=config.min_out_tokens,
        options=given or None,
        cuda_graph=wanted,
    )
    return generator.forward, generator.generate, generator


def _own_generate(module: Any, options: dict[str, Any]) -> _Call:
    """`generate` of a module that is none of transformers': its own code, which calls the compiled forward where it calls the module."""
    run, calls = _compiled(module, options, hooks=False), 0

    @functools.wraps(module.forward, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*args, **kwargs)

    kind = stand_in_class(module, forward)

    @functools.wraps(module.generate, updated=())
    def generate(*args: Any, **kwargs: Any) -> Any:
        before = calls
        with torch.no_grad():
            made = stand_in(module, kind).generate(*args, **kwargs)
        if calls == before:
            warn(
                f"dsi: nothing of this generation was compiled: the generate of {type(module).__name__} does not call the module's forward"
            )
        return made

    return generate


def _compiled(module: nn.Module, options: dict[str, Any], *, hooks: bool = True) -> Callable[..., Any]:
    """`module`, compiled for this engine alone. A call with too many shapes is an error: Dynamo would go on uncompiled in silence.
    hooks: run those of the module, too; without, whoever calls does."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs) if hooks else module.forward(*args, **kwargs)

    run = compiled(forward, options, whole=False)
    called = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        new, called = not called, True
        with loudly, compiling("forward", new):
            return run(*args, **kwargs)

    return call
