"""What dsi makes of every architecture that it covers: regions, what is left unfused, and how far its numbers are from eager's.

python -m bench.families [--families LLaMA,T5] [--others] [--left]

References are eager runs without a cache. Nothing is compiled to kernels: regions run as their operators' references.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.family_models import FAMILIES, HIDDEN, OTHERS, VOCAB, Family, build
from bench.generate import cache_argument

LENGTH, STEPS = 11, 2  # tokens of the prompt, and decode steps after it
CACHES = ("static", "dynamic", "none")
PADDINGS = ("none", "left", "right")

# Operators by which one sees, in a graph, that a GEMM, a norm or an attention was not recognised.
MARKS = {
    "gemm": (
        "aten.mm.",
        "aten.addmm.",
        "aten.bmm.",
        "aten.baddbmm.",
        "aten.matmul.",
        "aten.linear.",
        "aten.dot.",
        "aten.mv.",
        "linear",
        "dsi.linear.",
    ),
    "norm": (
        "aten.native_layer_norm.",
        "aten.layer_norm.",
        "aten.rms_norm.",
        "aten._fused_rms_norm.",
        "aten.rsqrt.",
        "aten.var",
        "dsi.layer_norm.",
        "dsi.rms_norm.",
    ),
    "attention": (
        "aten._softmax.",
        "aten.softmax.",
        "aten.scaled_dot_product",
        "aten._scaled_dot_product",
        "scaled_dot_product_attention",
        "dsi.attention.",
    ),
}


@dataclass(frozen=True)
class Case:
    """One way of running a family."""

    family: str
    attention: str
    cache: str = "static"
    dtype: torch.dtype = torch.float32
    hot_init: bool = True
    padding: str = "none"
    layers: int = 2


@dataclass
class Outcome:
    """What came of it, a phase each: reports of the graphs, and (dsi's error, eager's own error) against float64."""

    reports: dict[str, list[Any]] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def unfused(self) -> Counter[str]:
        """GEMMs, norms and attentions that are in no region, or unrecognised in one; over all graphs of both phases."""
        return sum((unfused(report) for reports in self.reports.values() for report in reports), Counter())


def unfused(report: Any) -> Counter[str]:
    """GEMMs, norms and attentions that one graph left to ATen, or that are in a region by their parts only."""
    counts: Counter[str] = Counter()
    names = [str(refusal.reason).split(" ")[0] for refusal in report.unfused]
    for region in report.regions:
        names += [str(node.target) for node in region.members if not str(node.target).startswith("dsi.")]
    for name in names:
        for kind, marks in MARKS.items():
            counts[kind] += name.startswith(marks)
    return +counts


# ------------------------------------------------------------------------------------------------------------------- inputs


@dataclass
class Batch:
    """Inputs of all phases. `keep` [B, S + STEPS] marks what counts; rows are compared with themselves alone."""

    ids: Tensor
    keep: Tensor

    @property
    def positions(self) -> Tensor:
        return (self.keep.long().cumsum(-1) - 1).clamp(min=0)


def batch_of(padding: str, length: int = LENGTH, steps: int = STEPS) -> Batch:
    """Two rows of ids [2, S + steps], the second padded by three tokens."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (2, length + steps), generator=g)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if padding == "left":
        keep[1, :3] = False
    elif padding == "right":
        keep[1, length - 3 : length] = False
    return Batch(ids.masked_fill(~keep, 0), keep)


def accepts(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def logits_of(output: Any) -> Tensor:
    """The tensor that is compared: logits, or the last hidden state."""
    if isinstance(output, Tensor):
        return output
    value = getattr(output, "logits", None)
    return value if value is not None else output.last_hidden_state


# ------------------------------------------------------------------------------------------------------------------ running


def compiled_and_reports(model: Callable[..., Any], options: dict[str, Any] | None = None) -> tuple[Callable[..., Any], list[Any]]:
    """`model` compiled by dsi, run by the reference executor, and the list to which the report of each graph is added."""
    from dsi.compiler.backend import dsi
    from dsi.compiler.observe import collecting

    reports: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        with collecting() as contexts:
            compiled = dsi(gm, example_inputs, options={"executor": "reference", **(options or {})})
        reports.extend(context.report for context in contexts)
        return compiled

    return torch.compile(model, backend=backend), reports


def run(case: Case, options: dict[str, Any] | None = None, length: int = LENGTH, steps: int = STEPS) -> Outcome:
    """Builds the model, runs it eager and by dsi, and compares."""
    torch._dynamo.reset()
    start = time.perf_counter()
    family = FAMILIES.get(case.family) or OTHERS[case.family]
    outcome = Outcome()
    with torch.no_grad():
        model = build(case.family, case.attention, layers=case.layers, dtype=case.dtype, hot_init=case.hot_init)
        exact = build(case.family, case.attention, layers=case.layers, dtype=case.dtype, hot_init=case.hot_init)
        if family.runs_in_float64:
            exact = exact.double()
        _RUNNERS[family.kind](family, case, model, exact, outcome, options, length, steps)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _note(outcome: Outcome, phase: str, got: Tensor, eager: Tensor, exact: Tensor) -> None:
    def error(a: Tensor) -> float:
        if not bool(a.isfinite().all()):
            return float("inf")
        return float((a.double() - exact).norm() / exact.norm())

    old = outcome.errors.get(phase, (0.0, 0.0))
    outcome.errors[phase] = (max(old[0], error(got)), max(old[1], error(eager)))


def decodes(case: Case) -> bool:
    """Whether the case has decode steps. Slots behind a padded prompt are not where a window, which counts slots, looks for tokens."""
    return case.cache != "none" and not (case.padding == "right" and (FAMILIES.get(case.family) or OTHERS[case.family]).window)


def _decoder(
    family: Family, case: Case, model: Any, exact: Any, outcome: Outcome, options: dict[str, Any] | None, length: int, steps: int
) -> None:
    import transformers as T

    batch = batch_of(case.padding, length, steps)
    room = length + steps + 3  # of a static cache
    keep, total = batch.keep, length + (steps if decodes(case) else 0)

    def arguments(first: int, last: int, rows: slice = slice(None), padded: bool = True) -> dict[str, Any]:
        ids, positions = batch.ids[rows, first:last], batch.positions[rows, first:last]
        if not padded:  # one row, without its padding
            seen = keep[rows, first:last][0]
            ids, positions = ids[:, seen], positions[:, seen]
        given: dict[str, Any] = {"input_ids": ids.contiguous()}
        if accepts(model, "position_ids"):
            given["position_ids"] = positions.contiguous()
        if padded and accepts(model, "attention_mask"):
            given["attention_mask"] = F.pad(
                keep[rows, :last].long(), (0, (room if family.whole_mask and case.cache == "static" else last) - last)
            )
        return given

    def alone(which: Any) -> list[Tensor]:
        """Logits [S', V] of each row by itself, unpadded, without a cache."""
        own = {"use_cache": False} if accepts(which, "use_cache") else {}
        return [logits_of(which(**arguments(0, total, slice(i, i + 1), padded=False), **own))[0] for i in range(len(keep))]

    eager, right = alone(model), alone(exact)
    if family.wrong_with_static_cache and case.cache == "static":
        eager, right = (_with_cache(which, arguments, case, keep, room, length, total) for which in (model, exact))

    def compare(phase: str, got: Tensor, first: int, last: int) -> None:
        for i in range(len(keep)):
            seen = keep[i, first:last]
            before = int(keep[i, :first].sum())
            part = slice(before, before + int(seen.sum()))
            _note(outcome, phase, got[i][seen], eager[i][part], right[i][part])

    forward, reports = compiled_and_reports(model, options)
    if case.cache == "none":
        own = {"use_cache": False} if accepts(model, "use_cache") else {}
        compare("prefill", logits_of(forward(**arguments(0, length), **own)), 0, length)
        outcome.reports["prefill"] = list(reports)
        return
    if case.cache == "static":
        cache: Any = T.StaticCache(config=model.config, max_cache_len=room)
        if case.padding != "left":
            _allocate(cache, model, len(keep))
    else:
        cache = T.DynamicCache(config=model.config)
    name = cache_argument(model)
    compare("prefill", logits_of(forward(**arguments(0, length), **{name: cache}, use_cache=True)), 0, length)
    outcome.reports["prefill"] = list(reports)
    reports.clear()
    if not decodes(case):
        return
    for step in range(steps):
        at = length + step
        compare("decode", logits_of(forward(**arguments(at, at + 1), **{name: cache}, use_cache=True)), at, at + 1)
    outcome.reports["decode"] = list(reports)


def _with_cache(
    which: Any, arguments: Callable[..., dict[str, Any]], case: Case, keep: Tensor, room: int, length: int, total: int
) -> list[Tensor]:
    """Logits [S', V] of each row by an eager run with a StaticCache, for the one family whose eager run without gives others."""
    import transformers as T

    cache = T.StaticCache(config=which.config, max_cache_len=room)
    parts = [(0, length), *((at, at + 1) for at in range(length, total))]
    name = cache_argument(which)
    logits = torch.cat([logits_of(which(**arguments(*part), **{name: cache}, use_cache=True)) for part in parts], 1)
    return [row[seen[:total]] for row, seen in zip(logits, keep, strict=True)]


def _allocate(cache: Any, model: Any, batch: int) -> None:
    """The memory of a StaticCache at once."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1
    elif getattr(config, "new_decoder_architecture", False):
        heads = config.num_attention_heads  # repeated before they are kept
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch, heads, size, model.dtype, model.device)


def _simple(arguments: Callable[[Any, Case, int], dict[str, Any]]) -> Callable[..., None]:
    """One call without a cache; where there is a mask, rows are compared with themselves alone."""

    def runner(
        family: Family, case: Case, model: Any, exact: Any, outcome: Outcome, options: dict[str, Any] | None, length: int, steps: int
    ) -> None:
        given = arguments(model, case, length)
        forward, reports = compiled_and_reports(model, options)
        got = logits_of(forward(**given))
        outcome.reports["prefill"] = list(reports)
        mask = given.get("attention_mask")
        if mask is None or case.padding == "none":
            wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
            _note(outcome, "prefill", got, logits_of(model(**given)), logits_of(exact(**wide)))
            return
        for i in range(len(mask)):
            seen = mask[i].bool()
            own = {k: v[i : i + 1][:, seen] for k, v in given.items() if k != "attention_mask"}
            _note(outcome, "prefill", got[i][seen], logits_of(model(**own))[0], logits_of(exact(**own))[0])

    return runner


def _encoder_arguments(model: Any, case: Case, length: int) -> dict[str, Any]:
    batch = batch_of(case.padding, length, 0)
    pad = getattr(model.config, "pad_token_id", None)
    ids = batch.ids.masked_fill(~batch.keep, 0 if pad is None else pad)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": batch.keep.long()}
    if case.padding == "left" and accepts(model, "position_ids"):
        # RoBERTa counts positions from behind its padding token.
        given["position_ids"] = batch.positions + (pad + 1 if type(model).__name__.startswith(("Roberta", "MPNet")) else 0)
    if case.padding == "left" and accepts(model, "token_type_ids") and "position_ids" not in given:
        raise ValueError("left padding needs position_ids")
    return given


def _vision_arguments(model: Any, case: Case, length: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1)).to(case.dtype)}


def _plain_arguments(model: Any, case: Case, length: int) -> dict[str, Any]:
    return {"ids": batch_of("none", length, 0).ids}


def _embedded(
    family: Family, case: Case, model: Any, exact: Any, outcome: Outcome, options: dict[str, Any] | None, length: int, steps: int
) -> None:
    x = torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    keep = batch_of(case.padding, length, 0).keep
    mask = {} if case.padding == "none" else {"src_key_padding_mask": ~keep}
    forward, reports = compiled_and_reports(model, options)
    got = forward(x, **mask)
    outcome.reports["prefill"] = list(reports)
    for i in range(2):
        own = x[i : i + 1][:, keep[i]]
        _note(outcome, "prefill", got[i][keep[i]], model(own)[0], exact(own.double())[0])


def _seq2seq(
    family: Family, case: Case, model: Any, exact: Any, outcome: Outcome, options: dict[str, Any] | None, length: int, steps: int
) -> None:
    import transformers as T

    batch = batch_of(case.padding if case.padding == "right" else "none", length, 0)
    g = torch.Generator().manual_seed(3)
    decoder_ids = torch.randint(3, VOCAB, (2, 7 + steps), generator=g)
    audio = model.main_input_name == "input_features"
    if audio:
        source: dict[str, Any] = {"input_features": torch.randn(2, 8, 24, generator=g).to(case.dtype)}
    else:
        source = {"input_ids": batch.ids, "attention_mask": batch.keep.long()}
    wide = {k: v.double() if v.is_floating_point() else v for k, v in source.items()}

    def whole(which: Any, given: dict[str, Any]) -> Tensor:
        if audio or case.padding == "none":
            return which(**given, decoder_input_ids=decoder_ids, use_cache=False).logits
        rows = []
        for i in range(2):
            ids = given["input_ids"][i : i + 1, batch.keep[i]]
            rows.append(which(input_ids=ids, decoder_input_ids=decoder_ids[i : i + 1], use_cache=False).logits)
        return torch.cat(rows)

    eager, right = whole(model, source), whole(exact, wide)
    forward, reports = compiled_and_reports(model, options)
    if case.cache == "none":
        got = forward(**source, decoder_input_ids=decoder_ids[:, :7].contiguous(), use_cache=False).logits
        _note(outcome, "prefill", got, eager[:, :7], right[:, :7])
        outcome.reports["prefill"] = list(reports)
        return
    config = model.config
    if case.cache == "static":
        own = T.StaticCache(config=config, max_cache_len=7 + steps + 3)
        cross = T.StaticCache(config=config, max_cache_len=12 if audio else length)
        cache = T.EncoderDecoderCache(own, cross)
    else:
        cache = T.EncoderDecoderCache(T.DynamicCache(config=config), T.DynamicCache(config=config))
    name = cache_argument(model)
    encoded = model.get_encoder()(**(source if not audio else {"input_features": source["input_features"]}))
    more = {} if audio else {"attention_mask": source["attention_mask"]}
    got = forward(
        encoder_outputs=encoded, decoder_input_ids=decoder_ids[:, :7].contiguous(), **more, **{name: cache}, use_cache=True
    ).logits
    _note(outcome, "prefill", got, eager[:, :7], right[:, :7])
    outcome.reports["prefill"] = list(reports)
    reports.clear()
    for step in range(steps):
        at = 7 + step
        ids = decoder_ids[:, at : at + 1].contiguous()
        got = forward(encoder_outputs=encoded, decoder_input_ids=ids, **more, **{name: cache}, use_cache=True).logits
        _note(outcome, "decode", got, eager[:, at : at + 1], right[:, at : at + 1])
    outcome.reports["decode"] = list(reports)


_RUNNERS: dict[str, Callable[..., None]] = {
    "decoder": _decoder,
    "encoder": _simple(_encoder_arguments),
    "vision": _simple(_vision_arguments),
    "plain": _simple(_plain_arguments),
    "embedded": _embedded,
    "seq2seq": _seq2seq,
}


def spoken(reports: list[Any]) -> str:
    """Regions of the graphs of a phase by kind."""
    kinds = Counter(region.kind for report in reports for region in report.regions)
    return " ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) + (f" ({len(reports)} graphs)" if len(reports) > 1 else "")


def main(words: list[str] | None = None) -> int:
    """Print the table; 0 where nothing of the listed families is left unfused and every number is right."""
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", help="by commas; left out: all that are covered")
    parser.add_argument("--others", action="store_true", help="architectures beyond those that are covered, too")
    parser.add_argument("--attention", help="sdpa or eager; left out: both")
    parser.add_argument("--cache", default="static", choices=CACHES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--padding", default="none", choices=PADDINGS)
    parser.add_argument("--left", action="store_true", help="each operator that is left alone, and why")
    parser.add_argument("--misses", action="store_true", help="nearest misses of rules")
    a = parser.parse_args(words)
    torch.set_num_threads(1)
    names = a.families.split(",") if a.families else [*FAMILIES, *(OTHERS if a.others else ())]
    rows, good = [], True
    print("| family | attention | regions prefill | regions decode | unfused | other ATen | error prefill | error decode | s |", flush=True)
    print("|" + " --- |" * 9, flush=True)
    for name in names:
        family = FAMILIES.get(name) or OTHERS[name]
        for attention in family.attentions:
            if a.attention not in (None, attention):
                continue
            case = Case(name, attention, a.cache, getattr(torch, a.dtype), padding=a.padding)
            try:
                outcome = run(case)
            except Exception as error:
                rows.append([name, attention, f"{type(error).__name__}: {str(error)[:300]!r}", "", "", "", "", "", ""])
                print(f"| {' | '.join(rows[-1])} |", flush=True)
                good = False
                continue
            left = outcome.unfused()
            reports = [r for rs in outcome.reports.values() for r in rs]
            others = sum(len(r.unfused) for r in reports)
            rows.append(
                [
                    name,
                    attention,
                    spoken(outcome.reports.get("prefill", [])),
                    spoken(outcome.reports.get("decode", [])),
                    " ".join(f"{n} {k}" for k, n in left.items()) or "0",
                    str(others),
                    *(
                        f"{outcome.errors[p][0]:.1e} ({outcome.errors[p][1]:.1e})" if p in outcome.errors else ""
                        for p in ("prefill", "decode")
                    ),
                    f"{outcome.seconds:.1f}",
                ]
            )
            print(f"| {' | '.join(rows[-1])} |", flush=True)
            if a.left:
                for reason, count in Counter((str(u.reason), u.where, u.rule) for r in reports for u in r.unfused).items():
                    print("      ", count, reason, flush=True)
                for note in {n for r in reports for n in r.notes}:
                    print("       note:", note, flush=True)
            if a.misses:
                for r in reports:
                    for k, v in r.misses.items():
                        print("       miss", k, v)
            good = good and not (left and name in FAMILIES)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
