"""`python -m bench memory`: bytes that the engine holds for a model, in its dtype and with int8 weights, after it has generated."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench import estimates, memory, path, shapes
from bench.comparators import DTYPES, reset
from bench.report import Report, Settings, figure

NEW, PROMPT = 4, 16
FORMS = ("plain", "int8")


def run(settings: Settings, cases: Sequence[str], layers: int | None, options: dict[str, Any] | None = None) -> Report:
    """Every case in both forms. Ratios are of bytes that stay: weights resident once, without the cache. `options`: the compiler's."""
    report = Report("memory", settings)
    for name in cases:
        found: dict[str, dict[str, Any]] = {}
        shape = shapes.SHAPES[name]
        least = estimates.LIKELY * estimates.engine(shape.parameters(layers or shape.layers))
        for form in FORMS:
            if report.fits(f"{name}, {form}", 0 if settings.small else least):
                reset()
                try:
                    found[form] = measured(name, form, settings, layers, options or {})
                except Exception as error:
                    found[form] = {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                gc.collect()
                said = found[form].get("problem") or f"weights {found[form]['weights'] / 1e9:.3f} GB"
                report.say(f"{name}, {form}: {said}")
        sizes = [found.get(form, {}).get("weights") for form in FORMS]
        ratio = sizes[1] / sizes[0] if all(sizes) else None  # type: ignore[operator]
        report.add({"title": f"{name}, engine", "case": name, "layers": layers or shape.layers, "ratio": ratio, "forms": found})
    lines = [
        (
            row["title"],
            *(
                figure(row["forms"].get(form, {}).get(what), ".3e")
                for form in FORMS
                for what in ("weights", "held", "preparing", "running")
            ),
            figure(row["ratio"], ".3f"),
        )
        for row in report.rows
    ]
    columns = ("case", *(f"{form} {what}" for form in FORMS for what in ("weights", "held", "prep", "run")), "int8/plain")
    report.table("Bytes: parameters and buffers; held, cache included; at most while prepared, and while it runs", columns, lines)
    return report


def measured(name: str, form: str, settings: Settings, layers: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one engine: `weights` its parameters and buffers; on a device `held` after generating, its cache included, and the most at
    once while it was `preparing` and while it was `running`."""
    path.backend()
    import dsi

    shape = shapes.SHAPES[name].small() if settings.small else shapes.SHAPES[name]
    dtype = DTYPES[settings.dtype or shape.dtype]
    before = memory.allocated()
    memory.forget_peak()
    model = shapes.build(shape, layers or shape.layers, PROMPT + NEW, dtype, settings.device)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    built = sum(tensors.values())
    memory.forget_peak()
    kind = torch.int8 if form == "int8" else dtype
    engine = dsi.init_inference(model, dtype=kind, replace_with_kernel_inject=True, max_out_tokens=64, options=options)
    found: dict[str, Any] = {"built": built, "preparing": memory.peak() - before}
    memory.forget_peak()
    ids: Tensor = torch.randint(3, shape.vocab, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(settings.device)
    engine.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*engine.module.parameters(), *engine.module.buffers())}
    gc.collect()
    return {**found, "weights": sum(held.values()), "running": memory.peak() - before, "held": memory.allocated() - before}


def good(report: Report) -> bool:
    """Whether every case was measured in both forms."""
    return bool(report.rows) and not report.skipped and all(row["ratio"] for row in report.rows)
