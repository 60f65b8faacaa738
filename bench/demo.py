"""`make demo`: SmolLM2-135M compiled with backend="dsi", beside eager PyTorch and torch.compile's default.

Exits with 1 where the compiled model's text or numbers differ from eager's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import models
from bench.arguments import count, output
from bench.generate import Generation, greedy, largest_error

PROMPT = "What is a compiler? Answer in one sentence."
FP32_BOUND = 1e-5  # largest relative error of a step's logits against eager, where eager is fp32
HALF_SLACK = 1.1  # largest error against float64 over eager's own, where eager is fp16

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


@dataclass
class Compiled:
    """One way of running the model: what runs the prompt and the steps, and how long its first run took."""

    name: str
    prefill: Any
    decode: Any
    first: Generation
    seconds: float


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """One line of progress, with its time."""
    console.print(f"[dim]{what} ...[/dim]")
    began = time.monotonic()
    yield
    console.print(f"[dim]  {time.monotonic() - began:.1f} s[/dim]")


def first_run(name: str, prompt: Tensor, limits: dict[str, int], model: Any, prefill: Any, decode: Any) -> Compiled:
    """The first generation, which compiles."""
    began = time.monotonic()
    made = greedy(model, prompt, prefill=prefill, decode=decode, **limits)
    return Compiled(name, prefill, decode, made, time.monotonic() - began)


def default_compile(model: Any, prompt: Tensor, limits: dict[str, int]) -> Compiled | None:
    """torch.compile's default for the decode step; None, said in a sentence, where it cannot run here. The prompt runs eager."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        return first_run("torch.compile default", prompt, limits, model, model, torch.compile(model))
    except BackendCompilerFailed as error:
        console.print(f"[yellow]torch.compile's default backend does not run here: {str(error).splitlines()[0]}[/yellow]")
        return None


def interleaved(runs: list[Compiled], model: Any, prompt: Tensor, limits: dict[str, int], rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each run, one figure a round, the runs taking turns so that a busy machine is busy for all of them."""
    speeds: dict[str, list[float]] = {run.name: [] for run in runs}
    for turn in range(rounds):
        for run in runs if turn % 2 == 0 else reversed(runs):
            speeds[run.name].append(greedy(model, prompt, decode=run.decode, **limits).tokens_per_second)
    return speeds


def median(values: list[float]) -> float:
    """The middle value, the upper one of two."""
    return sorted(values)[len(values) // 2]


def rounding_tie(ours: Generation, eager: Generation, exact: Generation) -> bool:
    """Whether the first token on which two half-precision runs part is one that eager's own rounding decides.

    `exact` holds float64 logits along eager's tokens. The two candidates are tied if they lie no further apart there than twice eager's own
    largest error of a logit at that step.
    """
    at = next(i for i, (a, b) in enumerate(zip(ours.tokens, eager.tokens, strict=False)) if a != b)
    gap = abs(float(exact.logits[at][ours.tokens[at]] - exact.logits[at][eager.tokens[at]]))
    return gap <= 2 * float((eager.logits[at] - exact.logits[at]).abs().max())


def titled(title: str) -> Table:
    """A plain table under a bold title, which a narrow table does not wrap."""
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    table.min_width = len(title) + 2
    return table


def region_table(graphs: dict[str, list[Any]]) -> Table:
    """Regions per kind of each graph."""
    table = titled("Fused regions: one kernel each")
    kinds = sorted({region.kind for contexts in graphs.values() for context in contexts for region in context.report.regions})
    for column in ("graph", *kinds, "operators left alone"):
        table.add_column(column, justify="left" if column == "graph" else "right")
    for name, contexts in graphs.items():
        counts = Counter(region.kind for context in contexts for region in context.report.regions)
        unfused = sum(len(context.report.unfused) for context in contexts)
        table.add_row(name, *(str(counts[kind]) for kind in kinds), str(unfused))
    return table


def label_table(contexts: list[Any]) -> Table:
    """What the regions of one graph hold, equal ones counted together."""
    table = titled("What a decode step's regions hold")
    table.add_column("times", justify="right")
    table.add_column("region")
    labels = Counter(region.label for context in contexts for region in context.report.regions)
    for label, times in labels.items():
        table.add_row(str(times), label)
    return table


def hit_table(graphs: dict[str, list[Any]]) -> Table:
    """How often each rule fired in each graph."""
    table = titled("Rules that fired")
    table.add_column("rule")
    hits = {name: sum((context.report.hits for context in contexts), Counter()) for name, contexts in graphs.items()}
    for name in graphs:
        table.add_column(name, justify="right")
    for rule in sorted(set().union(*hits.values())):
        table.add_row(rule, *(str(hits[name][rule]) for name in graphs))
    return table


def speed_table(runs: list[Compiled], speeds: dict[str, list[float]]) -> Table:
    """Tokens a second, and the ratio to each other run as the median of the rounds' ratios."""
    table = titled("Decode speed, batch 1, interleaved rounds")
    for column in ("", "tokens/s", "dsi is", "first run (compiles)"):
        table.add_column(column, justify="right" if column else "left")
    for run in runs:
        ratio = median([a / b for a, b in zip(speeds["dsi"], speeds[run.name], strict=True)])
        table.add_row(run.name, f"{median(speeds[run.name]):.1f}", "" if run.name == "dsi" else f"{ratio:.2f}x", f"{run.seconds:.1f} s")
    return table


def main() -> int:
    """Run the demo; 0 where text and numbers agree with eager's."""
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    for old in arguments.dump.glob("graph_[0-9][0-9][0-9]"):  # nothing else that may lie there
        shutil.rmtree(old)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"[bold]dsi[/bold] on {where}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}")

    with step("loading SmolLM2-135M"):
        model, tokenizer = models.smollm2(dtype, device), models.smollm2_tokenizer()
        message = [{"role": "user", "content": arguments.prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"].to(
            device
        )
    limits = {"new_tokens": arguments.tokens, "cache_length": prompt.shape[1] + arguments.tokens}
    with step("generating with eager PyTorch"):
        eager = first_run("eager", prompt, limits, model, model, model)
    with step('compiling with torch.compile(model, backend="dsi") and generating'):
        ours, graphs = compile_with_dsi(model, prompt, limits, arguments.dump)
    with step("compiling the decode step with torch.compile's default and generating"):
        default = default_compile(model, prompt, limits)
    runs = [run for run in (eager, default, ours) if run]
    with step(f"timing {', '.join(run.name for run in runs)} in turns"):
        speeds = interleaved(runs, model, prompt, limits, arguments.rounds)

    console.print(f"\n[bold]{arguments.prompt}[/bold]\n{tokenizer.decode(ours.first.tokens, skip_special_tokens=True)}\n")
    for table in (region_table(graphs), label_table(graphs["decode"]), hit_table(graphs), speed_table(runs, speeds)):
        console.print(table)
    for note in dict.fromkeys(note for contexts in graphs.values() for context in contexts for note in context.report.notes):
        console.print(f"[yellow]note: {note}[/yellow]")
    good, verdict, error = judge(ours.first, eager.first, model, prompt, limits)
    if not all(any(context.report.regions for context in contexts) for contexts in graphs.values()):
        good, verdict = False, f"{verdict} NO REGION WAS FUSED: the model ran as it is."
    console.print(f"\n{verdict}", style="green" if good else "bold red")
    console.print(f"The debug dump lies in {arguments.dump}/ (README.md says how to read it).")
    if arguments.json:
        write_json(arguments.json, where, graphs, runs, speeds, error, good)
    return 0 if good else 1


def compile_with_dsi(model: Any, prompt: Tensor, limits: dict[str, int], dump: Path) -> tuple[Compiled, dict[str, list[Any]]]:
    """The first run under dsi, and what was reported of its prefill and decode graphs."""
    from dsi.compiler.observe import collecting

    compiled = torch.compile(model, backend="dsi", options={"dump": str(dump)})
    graphs: dict[str, list[Any]] = {"prefill": [], "decode": []}

    def watched(phase: str) -> Any:
        def forward(**inputs: Any) -> Any:
            with collecting() as contexts:
                outputs = compiled(**inputs)
            graphs[phase] += contexts
            return outputs

        return forward

    began = time.monotonic()
    made = greedy(model, prompt, prefill=watched("prefill"), decode=watched("decode"), **limits)
    return Compiled("dsi", compiled, compiled, made, time.monotonic() - began), graphs


def judge(ours: Generation, eager: Generation, model: Any, prompt: Tensor, limits: dict[str, int]) -> tuple[bool, str, dict[str, float]]:
    """Whether text and numbers agree, the sentence that says so, and the errors."""
    same = ours.tokens == eager.tokens
    text = "The text is eager's, token for token." if same else "THE TEXT DIFFERS FROM EAGER'S."
    between = largest_error(ours, eager)
    if model.dtype == torch.float32:
        good = same and between <= FP32_BOUND
        return (
            good,
            f"{text} Largest relative error of the logits against eager: {between:.2e} (bound {FP32_BOUND:.0e}).",
            {"eager": between},
        )
    exact = along(model, prompt, eager.tokens, limits)
    mine, theirs = largest_error(ours, exact), largest_error(eager, exact)
    if not same and rounding_tie(ours, eager, exact):
        same, text = True, "The text parts from eager's at a tie that half precision cannot decide."
    good = same and mine <= HALF_SLACK * theirs
    sentence = (
        f"{text} Largest relative error of the logits: {between:.2e} against eager; against float64 {mine:.2e}, eager's own {theirs:.2e}."
    )
    return good, sentence, {"eager": between, "float64": mine, "eager_float64": theirs}


def along(model: Any, prompt: Tensor, tokens: list[int], limits: dict[str, int]) -> Generation:
    """Float64 logits along given tokens, in one forward."""
    import copy

    ids = torch.cat([prompt, torch.tensor([tokens[:-1]], device=prompt.device, dtype=prompt.dtype)], 1)
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(input_ids=ids).logits[0, prompt.shape[1] - 1 :]
    return Generation(list(tokens), list(logits.cpu()))


def write_json(
    path: Path,
    where: str,
    graphs: dict[str, list[Any]],
    runs: list[Compiled],
    speeds: dict[str, list[float]],
    error: dict[str, float],
    good: bool,
) -> None:
    """The figures, for bench/RESULTS.md."""
    figures = {
        "where": where,
        "torch": torch.__version__,
        "good": good,
        "largest_relative_error": error,
        "tokens_per_second": speeds,
        "first_run_seconds": {run.name: run.seconds for run in runs},
        "regions": {name: Counter(r.kind for c in contexts for r in c.report.regions) for name, contexts in graphs.items()},
        "hits": {name: sum((c.report.hits for c in contexts), Counter()) for name, contexts in graphs.items()},
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT, help="the user's message")
    parser.add_argument("--tokens", type=count, default=48, help="generate at most so many tokens")
    parser.add_argument("--rounds", type=count, default=5, help="rounds of timing")
    parser.add_argument("--dump", type=Path, default=Path("out/demo"), help="folder of the debug dump; a former one's graphs are replaced")
    parser.add_argument("--json", type=output, help="write the figures to this file too")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning)
    sys.exit(main())
