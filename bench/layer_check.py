"""One layer each of GPT-2, Llama, BERT and GPT-NeoX on a CUDA GPU: are the numbers right, and is all of a layer in fused kernels?

    python -m bench.layer_check --json out/layers.json

Each case compiles a model of random weights with backend="dsi" and `library=False` (no cuBLAS, no library attention), and reports

* errors: relative, of all outputs and of the cache, over several inputs, against float64; eager's own error beside it is the bound;
* kernels: what torch.profiler saw in one call. A layer is the difference between a model of two layers and one of one. No library GEMM,
  norm or attention kernel may run anywhere in the call, and a layer may take six kernels at most.

Needs torch, triton, transformers and rich; dsi itself is taken from this checkout where it is not installed (bench/path.py).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import path
from bench.arguments import counts, output, some_of
from bench.generate import cache_argument, static_cache
from bench.kernels import cuda_kernels, is_generated, layer_kernels, library_kind
from bench.models import hot

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_KERNELS = 6
FP32_BOUND = 1e-5  # against eager
SLACK = 1.05  # error against float64 over eager's own: equal up to the noise of one sample
SANE = 0.05  # eager's own error against float64: above it the comparison is broken
PROMPT, CACHE, VOCAB = 128, 256, 8192
TRIALS = 8  # inputs whose errors are taken together: one decode step alone is a small sample


@dataclass
class Result:
    """One case: a model, a phase and a dtype."""

    model: str
    phase: str
    dtype: str
    batch: int
    error_eager: float = float("nan")  # dsi against eager
    error_exact: float = float("nan")  # dsi against float64
    eager_exact: float = float("nan")  # eager against float64
    kernels: list[str] = field(default_factory=list)  # of the call with one layer
    layer: list[str] = field(default_factory=list)  # of one layer
    library: list[str] = field(default_factory=list)  # library GEMM, norm and attention kernels seen
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def config_of(name: str, layers: int, small: bool) -> Any:
    """A model's configuration at a width that people deploy (`small`: at a toy's, to try this script without a GPU)."""
    import transformers as T

    base: dict[str, Any] = {"vocab_size": VOCAB if not small else 199, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    width, heads, inner = {"gpt2": (1600, 25, 6400), "llama": (4096, 32, 14336), "bert": (1024, 16, 4096), "neox": (2560, 32, 10240)}[name]
    if small:
        width, heads, inner = 64, 4, 96
    if name == "gpt2":
        return T.GPT2Config(**base, n_embd=width, n_head=heads, n_inner=inner, n_layer=layers, n_positions=1024)
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner, "num_hidden_layers": layers}
    if name == "bert":
        return T.BertConfig(**{k: v for k, v in base.items() if k != "bos_token_id"}, **sizes)
    sizes["max_position_embeddings"] = 1024
    if name == "neox":
        return T.GPTNeoXConfig(**base, **sizes, rotary_pct=0.25)
    return T.LlamaConfig(**base, **sizes, num_key_value_heads=heads // 4, tie_word_embeddings=False)


PHASES = {"gpt2": ("prefill", "decode"), "llama": ("prefill", "decode"), "neox": ("prefill", "decode"), "bert": ("encode",)}


def build(name: str, layers: int, dtype: torch.dtype, arguments: argparse.Namespace) -> nn.Module:
    """A model with hot random weights."""
    import transformers as T

    config = config_of(name, layers, arguments.small)
    kind = T.AutoModel if name == "bert" else T.AutoModelForCausalLM
    torch.manual_seed(0)
    model: nn.Module = kind.from_config(config, attn_implementation="sdpa")
    return hot(model.to(arguments.device)).to(dtype)


class Call:
    """One forward of a phase, repeatable: a decode call starts from the same filled cache each time."""

    def __init__(self, model: Any, phase: str, batch: int, arguments: argparse.Namespace):
        self.length, room = (PROMPT, CACHE) if not arguments.small else (9, 16)
        self.model, self.phase, self.batch = model, phase, batch
        self.cache = None if phase == "encode" else static_cache(model, room, batch)
        self.name = cache_argument(model)

    def prepare(self, trial: int = 0) -> None:
        """Draw this trial's tokens, and put the cache where the call begins."""
        g = torch.Generator().manual_seed(trial)
        ids = torch.randint(3, self.model.config.vocab_size, (self.batch, self.length + 1), generator=g).to(self.model.device)
        self.ids, self.step = ids[:, :-1].contiguous(), ids[:, -1:].contiguous()
        if self.cache is not None:
            self.cache.reset()
            if self.phase == "decode":
                self.model(input_ids=self.ids, **{self.name: self.cache})

    def run(self, forward: Callable[..., Any]) -> Any:
        """The call itself."""
        if self.phase == "encode":
            return forward(input_ids=self.ids, attention_mask=torch.ones_like(self.ids))
        return forward(input_ids=self.step if self.phase == "decode" else self.ids, **{self.name: self.cache})

    def values(self, forward: Callable[..., Any]) -> dict[str, Tensor]:
        """Everything that the call computes in each trial, stacked, in float64 on the CPU: outputs, and the cache that it leaves."""
        trials: list[dict[str, Tensor]] = []
        with torch.no_grad():
            for trial in range(TRIALS):
                self.prepare(trial)
                outputs = self.run(forward)
                found = {"output": outputs.last_hidden_state if self.phase == "encode" else outputs.logits}
                if self.cache is not None:
                    for number, layer in enumerate(self.cache.layers):
                        found |= {f"key {number}": layer.keys, f"value {number}": layer.values}
                trials.append({name: value.to("cpu", torch.float64, copy=True) for name, value in found.items()})
        return {name: torch.stack([trial[name] for trial in trials]) for name in trials[0]}


def worst(values: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest relative error (norm of the difference over the norm) of any value; NaN where one is not finite."""
    errors = [((values[name] - reference[name]).norm() / reference[name].norm()).item() for name in reference]
    return max(errors) if all(error == error for error in errors) else float("nan")


def check(name: str, phase: str, dtype: str, batch: int, arguments: argparse.Namespace) -> Result:
    """One case. Whatever goes wrong is a problem in its result, so that the other cases still run."""
    result = Result(name, phase, dtype, batch)
    began = time.monotonic()
    try:
        single = compiled_call(result, 1, arguments)
        measure_errors(result, *single, arguments)
        if arguments.device == "cuda":
            ones = kernels_of(*single)
            del single
            measure_kernels(result, ones, kernels_of(*compiled_call(result, 2, arguments)))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        result.problems.append(f"{type(error).__name__}: {str(error).strip()[:400]} ({Path(last.filename).name}:{last.lineno})")
        if arguments.trace:
            traceback.print_exc()
    result.seconds = time.monotonic() - began
    torch._dynamo.reset()
    gc.collect()
    return result


def compiled_call(result: Result, layers: int, arguments: argparse.Namespace) -> tuple[Call, Any]:
    """The call of a case and the model compiled for it."""
    model = build(result.model, layers, DTYPES[result.dtype], arguments)
    torch._dynamo.reset()
    options = {"library": arguments.library, **({"dump": str(arguments.dump)} if arguments.dump else {})}
    return Call(model, result.phase, result.batch, arguments), torch.compile(model, backend=path.backend(), options=options)


def measure_errors(result: Result, call: Call, compiled: Any, arguments: argparse.Namespace) -> None:
    """Errors of eager and of dsi, with the bound that the dtype has."""
    eager = call.values(call.model)
    ours = call.values(compiled)
    wide = Call(copy.deepcopy(call.model).double(), result.phase, result.batch, arguments)
    exact = wide.values(wide.model)
    result.error_eager, result.error_exact, result.eager_exact = worst(ours, eager), worst(ours, exact), worst(eager, exact)
    if not result.eager_exact <= SANE:
        result.problems.append(f"eager itself is {result.eager_exact:.1e} off float64: this case can prove nothing")
    fine = result.error_exact <= SLACK * result.eager_exact
    if result.dtype == "fp32":
        fine = fine or result.error_eager <= FP32_BOUND
    if not fine:
        result.problems.append(f"error {result.error_exact:.2e} against float64, eager's own {result.eager_exact:.2e}")


def kernels_of(call: Call, compiled: Any) -> list[str]:
    """The kernels of one call, after calls that compile and tune."""
    with torch.no_grad():
        for _ in range(3):
            call.prepare()
            call.run(compiled)
        call.prepare()
        return cuda_kernels(lambda: call.run(compiled))


def measure_kernels(result: Result, one: list[str], two: list[str]) -> None:
    """The kernels of a call and of a layer, from those of the models with one layer and with two, and the rules that they keep."""
    result.kernels, result.layer = one, layer_kernels(one, two)
    result.library = sorted({name for name in two if library_kind(name)})
    if result.library:
        result.problems.append(f"library kernels ran: {', '.join(short(name) for name in result.library)}")
    if not result.layer:
        result.problems.append("the profiler saw no kernel of a layer")
    if len(result.layer) > MOST_KERNELS:
        result.problems.append(f"{len(result.layer)} kernels a layer, more than {MOST_KERNELS}: {', '.join(map(short, result.layer))}")


def short(name: str) -> str:
    """A kernel's name without its template arguments."""
    return name if is_generated(name) else name.removeprefix("void ").split("<")[0][:60]


def table(results: list[Result]) -> Any:
    """The results as a rich table."""
    from rich.table import Table

    shown = Table("model", "phase", "batch", "dtype")
    for column in ("vs eager", "vs fp64", "eager vs fp64", "kernels a layer", "in the call", "seconds"):
        shown.add_column(column, justify="right")
    shown.add_column("verdict")
    for r in results:
        figures = [f"{value:.2e}" for value in (r.error_eager, r.error_exact, r.eager_exact)]
        counts = [str(len(r.layer)), str(len(r.kernels))]
        shown.add_row(r.model, r.phase, str(r.batch), r.dtype, *figures, *counts, f"{r.seconds:.0f}", "; ".join(r.problems) or "ok")
    return shown


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.layer_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=some_of(PHASES), default="gpt2,llama,bert,neox")
    parser.add_argument("--phases", type=some_of(("prefill", "decode", "encode")), default="prefill,decode,encode")
    parser.add_argument("--dtypes", type=some_of(DTYPES), default="fp16,bf16,fp32")
    parser.add_argument("--batches", type=counts, default="1", help="batch sizes, e.g. 1,4")
    parser.add_argument("--library", action="store_true", help="allow library kernels")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dump", type=Path, help="folder of dsi's debug dump")
    parser.add_argument("--json", type=output, help="write the results, kernel names included, to this file")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run the chosen cases; 0 where none has a problem."""
    from rich.console import Console

    arguments = parse(words)
    console = Console(width=200, highlight=False)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "the CPU (no kernels are counted here)"
    console.print(f"{where}, torch {torch.__version__}, library={arguments.library}")
    results = []
    for model in arguments.models:
        for phase in (p for p in PHASES[model] if p in arguments.phases):
            for batch in arguments.batches:
                for dtype in arguments.dtypes:
                    results.append(check(model, phase, dtype, batch, arguments))
                    last = results[-1]
                    console.print(f"{model} {phase} b{batch} {dtype}: {'; '.join(last.problems) or 'ok'} ({last.seconds:.0f} s)")
                    if arguments.json:  # after every case: a run that is cut short leaves what it found
                        text = json.dumps({"where": where, "torch": torch.__version__, "results": [asdict(r) for r in results]}, indent=1)
                        arguments.json.write_text(text)
    console.print(table(results))
    return 1 if any(r.problems for r in results) else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
