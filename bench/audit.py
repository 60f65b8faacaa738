"""`python -m bench audit`: the kernels that models get untuned, compiled and looked at: registers, spills, shared memory, loads, programs.

Needs no GPU: kernels are compiled for a device of codegen/devices.py, each in a process of its own, since a compiler may abort the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import path, ptx, shapes
from bench.comparators import DTYPES
from bench.generate import cache_argument, static_cache
from bench.report import Report, Settings

LAYERS = 2  # regions repeat from layer to layer
LONGEST = 240.0  # seconds for one kernel
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a processor
COLUMNS = ("region", "choice", "regs", "spill", "KB", "loads", "exch", "progs", "waves")


@dataclass
class Model:
    """A model and what is asked of it: a decode step of `batch` sequences, or a pass of `tokens` tokens (an encoder's, a prompt's)."""

    name: str
    batch: int = 1
    tokens: int = 1
    cache: int = 512
    int8: bool = False
    laid_out: bool = False

    def __str__(self) -> str:
        more = [f"{self.tokens} tokens"] * (self.tokens > 1) + ["int8"] * self.int8 + ["laid out"] * self.laid_out
        return ", ".join([self.name, f"b{self.batch}", *more])


@dataclass
class Found:
    """One launch of a region's kernel, as it was compiled. `loop` counts what the loop with the most loads has (bench/ptx.py)."""

    entry: str
    programs: int
    warps: int
    registers: int = 0
    spills: int = 0
    shared: int = 0
    loop: ptx.Loop = field(default_factory=ptx.Loop)
    problem: str = ""

    def resident(self, device: Any) -> int:
        """Programs that a processor holds at once."""
        per_warp = math.ceil(max(self.registers, 1) * 32 / 256) * 256
        by_registers = REGISTERS // (per_warp * self.warps)
        by_memory = device.shared // max(self.shared + 1024, 1)
        return max(min(by_registers, by_memory, THREADS // (32 * self.warps), BLOCKS), 1)

    def odd(self, device: Any, schedule: str) -> list[str]:
        """What a reader should look at."""
        found = [self.problem] if self.problem else []
        found += ["spills"] if self.spills else []
        found += ["shared memory"] if self.shared > device.shared else []
        if schedule == "row":
            return found  # a few microseconds at most, once a step
        found += ["few programs"] if self.programs < device.processors else []
        found += [f"loads of {self.loop.widest} bytes"] if self.loop.loads and self.loop.widest < 16 else []
        thin = schedule in ("skinny", "tiled") and self.loop.again and min(self.loop.loads, default=4) < 4
        found += [f"loads of {min(self.loop.loads)} bytes in the loop, which are no asynchronous copies"] if thin else []
        found += [f"{self.loop.exchanges} exchanges in the loop"] if schedule == "gemv" and self.loop.again and self.loop.exchanges else []
        return found


def regions_of(model: Model) -> list[tuple[Any, int]]:
    """The different regions of a model, each with how often it occurs. Nothing is computed: the model is on the meta device."""
    backend = path.backend()
    from dsi.compiler.observe import collecting
    from dsi.engine.layout import lay_out

    shape = shapes.SHAPES[model.name]
    torch._dynamo.reset()
    with torch.no_grad(), collecting() as contexts:
        made = shapes.build(shape, min(LAYERS, shape.layers), max(model.cache, model.tokens), DTYPES[shape.dtype], "meta", hot=False)
        if model.laid_out:
            lay_out(made)
        ids = torch.ones(model.batch, model.tokens, dtype=torch.int64, device="meta")
        given: dict[str, Any] = {"input_ids": ids}
        if shape.family == "bert":
            given["attention_mask"] = torch.ones_like(ids)
        else:
            given[cache_argument(made)] = static_cache(made, model.cache, model.batch)
        options = {"executor": "reference", **({"dtype": "int8"} if model.int8 else {})}
        with contextlib.suppress(RuntimeError):  # weights are packed in the first call, which looks at their values: the regions are there
            torch.compile(made, backend=backend, options=options, fullgraph=True, dynamic=False)(**given)
    if not contexts:
        raise ValueError(f"{model} was not compiled")
    regions = [region for context in contexts for region in context.report.regions]
    keys = [region.key or str(id(region)) for region in regions]
    return [(region, keys.count(key)) for number, (region, key) in enumerate(zip(regions, keys, strict=True)) if keys.index(key) == number]


def kernels_of(region: Any, device: Any) -> list[tuple[Any, Any]]:
    """(choice, kernel) of a region's variants as an untuned start on `device` has them."""
    from dsi.codegen import cost

    from dsi import codegen

    return [(choice, codegen.generate(region.spec, choice, device)[0]) for choice in cost.choices(region.spec, device)]


def compiled(spec: Any, kernel: Any, capability: int) -> Iterator[Found]:
    """Each launch of a kernel compiled for sm_`capability`, in this process. Library calls are left out."""
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        module = load(kernel.source, Path(folder))
        for launch in kernel.launches:
            if not hasattr(launch, "entry"):
                continue
            found = Found(launch.entry, math.prod(int(size) if size.is_number else 1 for size in launch.grid), launch.num_warps)
            source = triton.compiler.ASTSource(**signature(spec, kernel, launch, getattr(module, launch.entry)))
            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
            result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            usage = ptx.resources(result.asm["cubin"], launch.entry, Path(folder))
            found.registers, found.spills = usage["REG"], usage["STACK"] + usage["LOCAL"]
            found.shared, found.loop = result.metadata.shared, ptx.busiest(result.asm["ptx"])
            yield found


def load(source: str, folder: Path) -> Any:
    """The module of a kernel's text."""
    import importlib.util

    file = folder / "kernel.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("audited", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signature(spec: Any, kernel: Any, launch: Any, function: Any) -> dict[str, Any]:
    """What Triton is told of a launch: types, constants, and that addresses are multiples of 16."""
    from dsi.codegen.builder import triton_type

    types: dict[str, str] = {}
    aligned = {}
    names = [name for name in function.arg_names if name not in launch.constants]
    for position, (name, argument) in enumerate(zip(names, launch.arguments, strict=True)):
        if argument.kind == "size":
            types[name] = "i32"
            continue
        if argument.kind == "workspace":
            dtype = getattr(torch, kernel.workspaces[argument.number].dtype)
        else:
            dtype = (spec.inputs if argument.kind == "input" else spec.outputs)[argument.number].dtype
        types[name] = "*" + pointee(triton_type(dtype))
        aligned[(position,)] = [["tt.divisibility", 16]]
    types.update(dict.fromkeys(launch.constants, "constexpr"))
    return {"fn": function, "signature": types, "constexprs": dict(launch.constants), "attrs": aligned}


def pointee(name: str) -> str:
    """Triton's short name of an element type ("tl.float16" -> "fp16")."""
    short = name.removeprefix("tl.")
    return {"int1": "i1", "uint8": "u8", "bfloat16": "bf16"}.get(short) or short.replace("float", "fp").replace("int", "i")


def looked_at(spec: Any, kernel: Any, capability: int) -> list[Found]:
    """`compiled` in a process of its own: one that aborts, or takes too long, is a finding, too."""
    context = multiprocessing.get_context("fork")  # there is no CUDA context that a fork could not use
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        faulthandler.disable()  # what ends this process is told by the other one
        try:
            there.send(list(compiled(spec, kernel, capability)))
        except Exception as error:
            there.send([Found(kernel.name, 0, 1, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")])
        there.close()
        os._exit(0)

    process = context.Process(target=work)
    process.start()
    there.close()
    try:
        if not here.poll(LONGEST):
            return [Found(kernel.name, 0, 1, problem=f"not compiled within {LONGEST:.0f} s")]
        found: list[Found] = here.recv()
        return found
    except EOFError:
        process.join()
        return [Found(kernel.name, 0, 1, problem=f"the compiler ended its process (exit code {process.exitcode})")]
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def run(settings: Settings, models: Sequence[Model], device_name: str) -> Report:
    """Look at every kernel of every model. Equal kernels are compiled once."""
    import triton

    path.backend()
    from dsi.codegen.devices import find_device

    device = find_device(device_name)
    report = Report("audit", settings)
    report.head["triton"], report.head["for"] = triton.__version__, device.name
    seen: dict[str, list[Found]] = {}
    for model in models:
        lines = []
        for region, count in regions_of(model):
            if region.spec is None:
                continue
            for choice, kernel in kernels_of(region, device):
                if kernel.digest not in seen:
                    seen[kernel.digest] = looked_at(region.spec, kernel, device.capability)
                for found in seen[kernel.digest] or [Found("library", 0, 1)]:
                    row = _row(model, region, count, choice, kernel, found, device)
                    report.add(row)
                    lines.append(_line(row))
        report.table(str(model), COLUMNS, lines)
        for row in report.rows:
            if row["model"] == str(model) and row["odd"]:
                report.say(f"look at {row['region']}, {row['entry']}: {'; '.join(row['odd'])}")
    odd = [row for row in report.rows if row["odd"]]
    report.say(f"{len(seen)} kernels; {len(odd)} rows to look at")
    return report


def good(report: Report) -> bool:
    """Whether every kernel was compiled, and has the memory that it needs on the device."""
    return bool(report.rows) and not any(row["broken"] for row in report.rows)


def _row(model: Model, region: Any, count: int, choice: Any, kernel: Any, found: Found, device: Any) -> dict[str, Any]:
    resident = found.resident(device)
    return {
        "model": str(model),
        "region": region.label or region.kind,
        "count": count,
        "choice": {name: value for name, value in dataclasses.asdict(choice).items() if value is not None},
        "schedule": choice.schedule,
        "digest": kernel.digest,
        "entry": found.entry,
        "programs": found.programs,
        "waves": found.programs / (device.processors * resident),
        "resident": resident,
        "registers": found.registers,
        "spills": found.spills,
        "shared": found.shared,
        "loop": dataclasses.asdict(found.loop),
        "widest": found.loop.widest,
        "broken": bool(found.problem) or found.shared > device.shared,
        "odd": found.odd(device, choice.schedule) if kernel.schedule != "library" else [],
    }


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    c = row["choice"]
    sizes = "x".join(str(c[name]) for name in ("block_m", "block_n", "block_k"))
    more = [f"/{c['split']}"] * (c["split"] > 1) + ["apart"] * bool(c["apart"]) + [f"d{c['digits']}"] * bool(c["digits"])
    more += [f"peeled {c['peel']}"] * bool(c["peel"])
    loads = " ".join(f"{count}x{width}" for width, count in sorted(row["loop"]["loads"].items(), reverse=True))
    return (
        f"{row['count']}x {row['region']}"[:44],
        " ".join([f"{row['schedule']} {sizes} w{c['num_warps']} s{c['num_stages']}", *more]),
        str(row["registers"]),
        str(row["spills"]),
        f"{row['shared'] / 1024:.0f}",
        loads or "-",
        str(row["loop"]["exchanges"]),
        str(row["programs"]),
        f"{row['waves']:.2f}",
    )
