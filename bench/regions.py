"""Regions and rule hits of five architectures, per layer and per model, as Markdown tables. Needs no GPU: nothing is run but references.

python -m bench.regions [--hits]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from bench.arguments import some_of
from bench.generate import cache_argument, static_cache
from bench.models import hot

MODELS = ("GPT-2", "OPT", "Llama", "BERT", "GPT-NeoX")


def model_of(name: str, layers: int) -> Any:
    """A toy of the architecture with hot random weights: regions do not depend on the width."""
    import transformers as T

    tokens: dict[str, Any] = dict(vocab_size=199, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    sizes: dict[str, Any] = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=layers)
    config = {
        "GPT-2": lambda: T.GPT2Config(**tokens, n_embd=64, n_head=4, n_layer=layers, n_positions=64),
        "OPT": lambda: T.OPTConfig(**tokens, **sizes, ffn_dim=96, max_position_embeddings=64, word_embed_proj_dim=64),
        "Llama": lambda: T.LlamaConfig(**tokens, **sizes, intermediate_size=96, num_key_value_heads=2),
        "BERT": lambda: T.BertConfig(vocab_size=199, **sizes, intermediate_size=96),
        "GPT-NeoX": lambda: T.GPTNeoXConfig(**tokens, **sizes, intermediate_size=96, rotary_pct=0.25),
    }[name]()
    torch.manual_seed(0)
    return hot((T.AutoModel if name == "BERT" else T.AutoModelForCausalLM).from_config(config))


def report_of(name: str, phase: str, layers: int) -> Any:
    """What dsi reports of the one graph of a phase: "encode", or "prefill" or "decode" with a static cache."""
    import dsi

    model = model_of(name, layers)
    ids = torch.randint(3, 199, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids}
    if phase == "encode":
        inputs["attention_mask"] = torch.ones_like(ids)
    else:
        # Mask and positions are given, as generate gives them: without, OPT reads the cache's length into Python, which breaks the graph.
        positions = torch.arange(9).expand(2, 9)
        inputs |= {cache_argument(model): static_cache(model, 16, 2), "position_ids": positions, "attention_mask": torch.ones(2, 9).long()}
    if phase == "decode":
        with torch.no_grad():
            model(**inputs)
        last = {"input_ids": ids[:, :1].contiguous(), "position_ids": torch.full((2, 1), 9)}
        inputs |= {**last, "attention_mask": torch.ones(2, 10).long()}
    torch._dynamo.reset()  # many models share transformers' wrappers, and Dynamo compiles each function only so often
    explanation = dsi.explain(model, options={"executor": "reference", "library": False}, **inputs)
    (graph,) = explanation.graphs
    return graph


def kinds_of(report: Any) -> Counter[str]:
    """Regions by kind."""
    return Counter(region.kind for region in report.regions)


def more(two: Counter[str], one: Counter[str]) -> dict[str, int]:
    """What `two` counts more than `one` (less: negative), entry by entry."""
    return {key: two[key] - one[key] for key in sorted({*two, *one}) if two[key] != one[key]}


def spoken(counts: Mapping[str, int]) -> str:
    """Counts in words: "4 linear, 1 attention"."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count)


def main(words: list[str] | None = None) -> int:
    """Print the tables; 0 where every layer is four linear regions and one of attention, and leaves no operator alone."""
    parser = argparse.ArgumentParser(prog="python -m bench.regions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=some_of(MODELS), default=MODELS, help="some of the five, by commas")
    parser.add_argument("--hits", action="store_true", help="the hits of each rule too")
    arguments = parser.parse_args(words)
    good = True
    rows, hits, left = [], [], {}
    for name in arguments.models:
        for phase in ("encode",) if name == "BERT" else ("prefill", "decode"):
            one, two = report_of(name, phase, 1), report_of(name, phase, 2)
            layer = more(kinds_of(two), kinds_of(one))
            once = more(kinds_of(one), Counter(layer))
            good = good and layer == {"linear": 4, "attention": 1} and len(one.unfused) == len(two.unfused)
            rows.append([name, phase, spoken(layer), spoken(once), str(len(two.unfused))])
            hits.append([name, phase, spoken(more(two.hits, one.hits))])
            left |= {refusal.reason: refusal for refusal in two.unfused}
    print_table(["model", "phase", "regions a layer", "regions once a model", "operators left alone"], rows)
    for refusal in left.values():
        print(f"\nLeft alone: {refusal}")
    if arguments.hits:
        print()
        print_table(["model", "phase", "rules that fire in a layer"], hits)
    return 0 if good else 1


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """A Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    sys.exit(main())
