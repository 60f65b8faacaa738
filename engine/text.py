"""Text in, text out: a model and its tokenizer loaded by name, and a continuation streamed. What `dsi generate` does."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from dsi.ir.errors import DsiError

from .dtypes import dtype_of
from .inference import init_inference
from .loading import pretrained


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; greedily where nothing is given."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def apply(self, config: Any) -> None:
        """Write it into a GenerationConfig, whose own ways of drawing give way."""
        drawn = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        config.do_sample = any(value is not None for value in drawn.values())
        fresh = type(config)()
        for name, value in drawn.items():
            setattr(config, name, getattr(fresh, name) if value is None else value)
        if self.repetition_penalty is not None:
            config.repetition_penalty = self.repetition_penalty


@dataclass
class Streamed:
    """What a call of `stream` made, and when: seconds since it began for each token."""

    text: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second by the median step: what is compiled on the way does not count. 0 where there is no step."""
        steps = [after - before for before, after in itertools.pairwise(self.times)]
        return 1 / max(statistics.median(steps), 1e-9) if steps else 0.0

    def __str__(self) -> str:
        if not self.times:
            return "no token"
        speed = f", {self.rate:.1f} tokens/s by the median step" if self.rate else ""
        return f"{len(self.times)} tokens in {self.times[-1]:.1f} s (the first after {self.times[0]:.1f} s{speed})"


def load(name: str, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """The model and tokenizer of a folder, or of a hub id. dtype "auto": the checkpoint's on a GPU, float32 on a CPU.

    Raises `DsiError`, a sentence, where there is no such model, none that generates, or none whose files are whole.
    """
    try:
        import transformers
    except ImportError as error:
        raise DsiError(f"generating needs transformers: pip install 'dsi[hf]' ({error})") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place = _device(device)
    wanted: Any = "auto"
    if dtype != "auto":
        try:
            wanted = dtype_of(dtype)
        except ValueError as error:
            raise DsiError(f"--dtype {dtype!r}: {error}") from None
    if place.type == "cpu" and wanted in ("auto", torch.int8):
        wanted = torch.float32
    elif wanted == torch.int8:
        wanted = "auto"  # what is left floating-point; the engine makes the rest int8
    model, tokenizer = pretrained(name, wanted)
    return model.to(place), tokenizer


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    write: Callable[[str], None],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    chat: bool = False,
    compiled: bool = True,
    dtype: torch.dtype | None = None,
) -> Streamed:
    """Continue `prompt`, handing the text to `write` as it is made.

    chat: the prompt is a user's message, put into the tokenizer's chat template. compiled: False runs transformers' own loop, uncompiled.
    dtype: what the engine casts to, None for what the model has. Raises `DsiError` for a prompt or settings that the model refuses.
    """
    inputs = _encoded(tokenizer, prompt, chat).to(model.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise DsiError(
            f"the tokenizer, which knows {len(tokenizer)} tokens, finds none in the prompt: are its files in the folder, too?"
            if prompt.strip()
            else "the prompt holds no token: say something"
        )
    given: dict[str, Any] = {"dtype": dtype, "replace_with_kernel_inject": compiled}
    if compiled:
        given["max_out_tokens"] = length + max_new_tokens + 1
    if model.device.type == "cpu" and torch.cuda.is_available():
        given["keep_module_on_host"] = True
    engine = init_inference(model, **given)
    settings = copy.deepcopy(engine.generation_config)
    settings.max_new_tokens, settings.max_length = max_new_tokens, None
    sampling = sampling or Sampling()
    sampling.apply(settings)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    made = Streamed()
    began = time.perf_counter()
    streamer = _streamer(tokenizer, made, write, lambda: time.perf_counter() - began)
    try:
        engine.generate(**inputs, generation_config=settings, streamer=streamer)
    except ValueError as error:
        raise DsiError(str(error)) from error
    return made


def _streamer(tokenizer: Any, made: Streamed, write: Callable[[str], None], clock: Callable[[], float]) -> Any:
    """A streamer that hands text on as words are complete, and notes when each token came."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            # The loop hands over the prompt first; an encoder-decoder's, the token that starts its decoder.
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:
                made.times += [clock()] * value.numel()
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            made.text += text
            write(text)

    return Streamer()


def _encoded(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        return tokenizer(prompt, return_tensors="pt")
    if not getattr(tokenizer, "chat_template", None):
        raise DsiError("this tokenizer has no chat template: leave --chat, and write the prompt as the model expects it")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DsiError(f"--device {name!r} names no device; give cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DsiError(f"--device {name}: torch sees no CUDA GPU here")
    return device
