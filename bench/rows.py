"""The rows of `python -m bench all` in order of importance: a command each, and the seconds that it should take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import estimates, shapes
from bench.estimates import Size
from bench.sides import SIDES, Side

# Sides that take the place of the rows' own.
SETS = {
    "own": "",
    "ours": "dsi,dsi-reduce-overhead",
    "quick": "reduce-overhead,dsi,dsi-reduce-overhead",
    "tuned": "reduce-overhead,dsi,dsi-max-autotune",
    "slow": "max-autotune-no-cudagraphs,dsi",
}


@dataclass(frozen=True)
class Row:
    """One benchmark: the words of its command, the seconds that it takes besides running its `sides`, and how much these have to compile in
    each of its workloads (none: the command has ways of its own, and `seconds` is all)."""

    name: str
    words: tuple[str, ...]
    seconds: float
    sides: str = ""
    sizes: tuple[Size, ...] = ()

    def against(self, sides: str) -> str:
        """The sides that it is run with, where others than its own may be asked for."""
        return sides or self.sides if self.sizes else ""

    def expected(self, sides: str = "") -> float:
        """Seconds, with these sides instead of its own."""
        return self.seconds + compared(self.against(sides), self.sizes)


def compared(sides: str, sizes: Sequence[Size]) -> float:
    """Seconds of comparing sides in workloads of these sizes: references, compilations and timing."""
    sum_ = 0.0
    for size in sizes:
        before: list[Side] = []
        for name in sides.split(","):
            sum_ += SIDES[name].seconds(size, before)
            before.append(SIDES[name])
        sum_ += estimates.REFERENCE + estimates.timing(len(before))
    return sum_


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _starting(case: str, layers: int | None) -> float:
    """Seconds until a case's model is there."""
    return estimates.START + estimates.building(shapes.SHAPES[case].parameters(layers))


def _decode(
    name: str,
    case: str,
    sides: str,
    layers: int | None = None,
    batches: Sequence[int] = (1,),
    lives: Sequence[int] = (128,),
    cache: int = 512,
) -> Row:
    """Steps of a decoder. `lives`: tokens in the cache."""
    words = ["decode", "--cases", case, *(["--layers", str(layers)] if layers else [])]
    words += ["--batches", _listed(batches), "--cache", str(cache), "--live", _listed(lives)]
    count = layers or shapes.SHAPES[case].timed_layers
    return Row(name, tuple(words), _starting(case, layers), sides, tuple(Size(count, batch) for batch in batches for _ in lives))


def _encode(name: str, case: str, sides: str, length: int = 128) -> Row:
    """A pass of an encoder."""
    size = Size(shapes.SHAPES[case].timed_layers, length)
    return Row(name, ("decode", "--cases", case, "--length", str(length)), _starting(case, None), sides, (size,))


def _prefill(name: str, case: str, sides: str, layers: int, length: int) -> Row:
    """A prompt into an empty cache."""
    words = ("prefill", "--cases", case, "--layers", str(layers), "--lengths", str(length))
    return Row(name, words, _starting(case, layers), sides, (Size(layers, length),))


def _regions(name: str, widths: Sequence[int], sides: str) -> Row:
    """The four regions of a GPT layer, at each width."""
    return Row(name, ("regions", "--widths", _listed(widths)), estimates.START, sides, (estimates.REGION,) * 4 * len(widths))


def _deepspeed(width: int, layers: int, first: float = 0.0) -> Row:
    """DeepSpeed's layers with others. `first`: seconds more, for what is compiled once a machine."""
    parameters = 12 * layers * width**2
    sides = "eager,reduce-overhead,dsi,dsi-laid-out,deepspeed"
    seconds = estimates.START + estimates.building(parameters) + compared(sides, [Size(layers)])
    return Row(f"deepspeed-{width}", ("deepspeed", "--width", str(width), "--layers", str(layers)), seconds + first)


def _memory(name: str, case: str) -> Row:
    """The bytes of two engines, one after the other."""
    shape = shapes.SHAPES[case]
    return Row(name, ("memory", "--cases", case), estimates.START + 2 * estimates.engine(shape.parameters(shape.layers)))


MAX = "max-autotune-no-cudagraphs"
# Captured as comparators without graphs of their own are, and by graphs of our own, as users have them: one launch a step each.
OWN = "dsi,dsi-reduce-overhead"
OURS = f"{OWN},dsi-int8,dsi-int8-reduce-overhead"
LAID_OUT = "dsi-laid-out,dsi-laid-out-reduce-overhead"
REGION_SIDES = f"{OWN},eager,reduce-overhead"
ROWS = (
    _decode("gpt2", "gpt2", f"dsi,{LAID_OUT},reduce-overhead,{MAX}"),
    _decode("8b-16", "llama-3-8b", f"{OURS},{MAX}", 4, [16]),
    _decode("8b-1", "llama-3-8b", f"{OURS},int8-recipe,{MAX}", 4),
    Row("generate-gpt2", ("generate", "--cases", "gpt2"), 90),
    _decode("gpt2-xl", "gpt2-xl", f"dsi,{LAID_OUT},reduce-overhead"),
    _decode("1b", "llama-3.2-1b", f"{OWN},reduce-overhead,{MAX}"),
    _decode("8b-4-8", "llama-3-8b", f"{OURS},{MAX}", 4, [4, 8]),
    Row("generate-8b", ("generate", "--cases", "llama-3-8b", "--sides", "static,dsi"), 130),
    Row("generate-smollm2", ("generate", "--cases", "smollm2-135m", "--sides", "static,dsi"), 110),
    _encode("bert-large", "bert-large", f"{OWN},eager,reduce-overhead,{MAX}"),
    _prefill("prefill-512", "llama-3-8b", f"dsi,{MAX}", 4, 512),
    _prefill("prefill-2048", "llama-3-8b", f"dsi,{MAX}", 4, 2048),
    _decode("live", "llama-3-8b", "dsi", 4, [16], [512, 4080], 4096),
    _regions("regions-1600", [1600], REGION_SIDES),
    _regions("regions", [4256, 12288], REGION_SIDES),
    _memory("memory", "llama-3-8b"),
    _decode("int8-rows", "llama-3-8b", "dsi,dsi-int8", 4, [2, 32, 64, 128, 512], [32], 64),
    Row("compile", ("compile", "--sides", "dsi"), 75),
    _decode("7b", "llama-7b", f"{OWN},{MAX}", 4),
    _decode("gpt2-xl-12", "gpt2-xl", f"dsi,{LAID_OUT},reduce-overhead,{MAX}", 12),
    _decode("8b-full", "llama-3-8b", f"{OURS},reduce-overhead", 32),
    Row("repeat", ("repeat",), 100),
    Row("sanitize", ("sanitize",), 150),
    Row("attention", ("attention",), 60),
    _decode("int8-16", "llama-3-8b", "dsi,dsi-int8,int8-recipe", 4, [16]),
    _decode("torchao", "llama-3-8b", "dsi,dsi-int8,torchao", 4),
    _deepspeed(768, 12, first=120),
    _deepspeed(1600, 12),
    _deepspeed(4096, 8),
    Row("compile-compared", ("compile", "--sides", f"dsi,default,{MAX}", "--layers", "4"), 330),
)


def chosen(names: str) -> list[Row]:
    """The rows named, in the order in which they are named; all of them for "". Raises ValueError naming one that is unknown."""
    known = {row.name: row for row in ROWS}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"unknown row {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in asked] or list(ROWS)


def listing(sides: str, rows: Sequence[Row] = ROWS) -> None:
    """Print rows, the seconds that each is expected to take, and those up to its end."""
    named, sum_ = SETS.get(sides, sides), 0.0
    print(f"{'row':18}{'seconds':>8}{'so far':>8}  command")
    for row in rows:
        sum_ += row.expected(named)
        against = row.against(named)
        words = " ".join([*row.words, *(["--sides", against] if against else [])])
        print(f"{row.name:18}{row.expected(named):8.0f}{sum_:8.0f}  {words}")
