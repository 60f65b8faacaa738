"""Run as a script in a process with TRITON_INTERPRET=1: a tiny model through `torch.compile(backend="dsi")`, every region by its generated
kernel.

    python generated_model.py FAMILY static|dynamic

Prints one JSON line: the errors of prefills and decode steps against eager, the steps of each program, and what ran by references.
"dynamic" compiles for symbolic sizes and changes batch and length between calls.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

assert os.environ["TRITON_INTERPRET"] == "1"
TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402

torch.set_num_threads(1)

import dsi.runtime.cpu as cpu  # noqa: E402
import zoo  # noqa: E402
from dsi.runtime.cuda import compile_interpreted  # noqa: E402

from bench.generate import cache_argument, static_cache  # noqa: E402


def mend_interpreter() -> None:
    found = importlib.util.spec_from_file_location("interpret", TESTS / "codegen" / "interpret.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.mend_interpreter()


def main(family: str, sizes: str) -> None:
    mend_interpreter()
    programs, contexts = [], []

    def compile_by_kernels(gm, example_inputs, context):
        programs.append(compile_interpreted(gm, example_inputs, context))
        contexts.append(context)
        return programs[-1]

    cpu.compile_cpu = compile_by_kernels
    # With dynamic=True Dynamo would pass every float attribute (a norm's eps) as an input; sizes are what is to vary here.
    torch._dynamo.config.specialize_float = True
    model = zoo.decoder(family)
    compiled = torch.compile(model, backend="dsi", fullgraph=True, dynamic=sizes == "dynamic")
    errors = []
    with torch.no_grad():
        for batch, prompt in ((2, 7), (3, 5)) if sizes == "dynamic" else ((2, 7),):
            ids = torch.randint(3, 199, (batch, prompt + 2), generator=torch.Generator().manual_seed(1))
            caches = [{cache_argument(model): static_cache(model, 32, batch)} for _ in range(2)]
            for part in (ids[:, :prompt], ids[:, prompt : prompt + 1], ids[:, prompt + 1 : prompt + 2]):
                expected = model(input_ids=part, **caches[0]).logits
                got = compiled(input_ids=part, **caches[1]).logits
                errors.append(float((got - expected).norm() / expected.norm()))
    print(
        json.dumps(
            {
                "errors": errors,
                "steps": [[step.text for step in program.steps] for program in programs],
                "symbols": [program.sizes.names for program in programs],
                "unfused": [[str(refusal) for refusal in context.report.unfused] for context in contexts],
                "keys": [[region.key for region in context.report.regions] for context in contexts],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
