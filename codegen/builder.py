"""The text of a kernel while it is written: nested blocks, unique names, and the arguments that turn out to be needed."""

from __future__ import annotations

import keyword
import re

import sympy
import torch
from dsi.ir.errors import refuse
from dsi.ir.tile import KernelSpec, Tensor

from .kernel import Argument, Workspace
from .pointwise import HELPERS

TRITON_TYPES = {
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}


def triton_type(dtype: torch.dtype) -> str:
    """Triton's name of a dtype. Refuses those that kernels cannot keep exact (float64: arithmetic is fp32) or do not know."""
    if dtype not in TRITON_TYPES:
        raise refuse(f"no kernel is generated for {str(dtype).removeprefix('torch.')} values: arithmetic in kernels is fp32")
    return TRITON_TYPES[dtype]


def prefetch(address: str) -> str:
    """Source of a request that the lines of a block of addresses come to the L2 cache. Nothing is read, so it may precede the wait."""
    return (
        f'tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [{address}], dtype=tl.int32, is_pure=False, pack=1)'
    )


class Names:
    """Hands out Python identifiers, each once."""

    def __init__(self, taken: tuple[str, ...] = ()):
        self._taken = {*keyword.kwlist, "tl", "triton", "range", "float", "int", *taken}

    def new(self, hint: str) -> str:
        """`hint` made an identifier, with the first free number behind it if it is taken."""
        base = re.sub(r"\W", "_", hint).strip("_") or "v"
        if base[0].isdigit():
            base = "v" + base
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name


class Block:
    """Lines of one indentation level, and the statements that hold in it.

    A nested block is attached under its header when it is complete, so that what a loop body finds to be the same in every step can still
    be written before the loop.
    """

    def __init__(self, outer: Block | None = None):
        self.outer = outer
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def line(self, text: str) -> None:
        self.lines.append(text)

    def comment(self, text: str) -> None:
        self.lines.append(f"# {text}")

    def name_of(self, code: str) -> str | None:
        """The name that an expression was given here or in a surrounding block."""
        block: Block | None = self
        while block is not None:
            if code in block._names:
                return block._names[code]
            block = block.outer
        return None

    def assign(self, name: str, code: str) -> None:
        """Writes an assignment whose right-hand side never changes, so that it can be named again by `name_of`."""
        self.line(f"{name} = {code}")
        self._names[code] = name

    def rename(self, old: str, new: str) -> None:
        """Has what is called `old` called `new` from here on."""
        block: Block | None = self
        while block is not None:
            self._names.update({code: new for code, name in block._names.items() if name == old})
            block = block.outer

    def attach(self, header: str, body: Block) -> None:
        self.lines.append(header)
        self.lines.extend("    " + line for line in body.lines)


class Builder:
    """State shared by all printers of one kernel: names, and which tensors and sizes its signature must have."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.sizes: dict[sympy.Symbol, str] = {}
        self.inputs: dict[int, str] = {}
        self.outputs: dict[int, str] = {}
        self.body = Block()
        self.names = Names((*HELPERS, "PDL", "DP4A", "gdc_wait", "gdc_launch_dependents"))
        self.constants: dict[str, int | bool] = {}
        self.workspaces: list[Workspace] = []
        self._workspace_names: list[str] = []
        self._in_workspace: dict[int, str] = {}  # inputs that lie in scratch memory, or are read as another dtype: the pointers
        self.reinterpreted: set[int] = set()  # inputs that are read as another dtype
        self.helpers: dict[str, str] = {}
        self._behind_wait = False  # the next kernel may start behind the wait, not before
        symbols = {name for name, _ in spec.scalars}
        for tensor in (*spec.inputs, *spec.outputs):
            if tensor is not None:
                symbols.update(str(s) for e in (*tensor.sizes, *tensor.strides) for s in sympy.sympify(e).free_symbols)
        # Reserved first, so that size symbols keep the names they have in the graph.
        self._size_names = {symbol: self.names.new(symbol) for symbol in sorted(symbols)}
        self._input_names = [self._pointer(tensor, f"in{i}") for i, tensor in enumerate(spec.inputs)]
        self._output_names = [self._pointer(tensor, f"out{i}") for i, tensor in enumerate(spec.outputs)]

    def _pointer(self, tensor: Tensor | None, default: str) -> str:
        return self.names.new((tensor.name if tensor is not None and tensor.name else default) + "_ptr")

    def input(self, number: int) -> str:
        """The pointer of a region input, entered in the signature."""
        if number in self._in_workspace:
            return self._in_workspace[number]
        triton_type(self.spec.inputs[number].dtype)
        return self.inputs.setdefault(number, self._input_names[number])

    def output(self, number: int) -> str:
        """The pointer of a region output, entered in the signature."""
        triton_type(self.spec.outputs[number].dtype)
        return self.outputs.setdefault(number, self._output_names[number])

    def size(self, symbol: sympy.Symbol) -> str:
        """The argument that holds a size symbol, entered in the signature."""
        if str(symbol) not in self._size_names:
            raise refuse(f"the size {symbol} cannot be read off any input of {self.spec.name}")
        return self.sizes.setdefault(symbol, self._size_names[str(symbol)])

    def constant(self, name: str, value: int) -> str:
        """A block size, given at launch as a constexpr. Names are few and fixed: BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_S, SPLIT."""
        self.constants[name] = value
        return name

    def start(self, block: Block, behind_wait: bool = False) -> None:
        """Opens the kernel: the next one may take its place on the device from here on (or from the wait on), and wait there (see `wait`).

        Programmatic dependent launch: a kernel starts while the one before it still runs, reads what that one cannot have written (the
        constants of the specification), and waits for its end before it reads or stores anything else. PDL is a constexpr: off where the
        device or the interpreter has no such launch.
        """
        self.constants["PDL"] = True
        self._behind_wait = behind_wait
        if not behind_wait:
            block.line("if PDL:")
            block.line("    gdc_launch_dependents()")

    def wait(self, block: Block) -> None:
        """Waits for the kernels before this one. Everything after it may read what they wrote."""
        block.line("if PDL:")
        block.line("    gdc_wait()")
        if self._behind_wait:
            block.line("    gdc_launch_dependents()")

    def workspace(self, hint: str, size: sympy.Expr, dtype: str, zeroed: bool = False) -> str:
        """The pointer of scratch memory that the runtime owns, entered in the signature."""
        self.workspaces.append(Workspace(sympy.sympify(size), dtype, zeroed))
        self._workspace_names.append(self.names.new(f"{hint}_ptr"))
        return self._workspace_names[-1]

    def place(self, number: int, pointer: str) -> None:
        """States that an input lies in the scratch memory `pointer`."""
        self._in_workspace[number] = pointer

    def reinterpret(self, block: Block, number: int) -> None:
        """Has an input read as elements of its dtype in the specification, where the tensor in memory is of a narrower one."""
        pointer = self.input(number)
        name = self.names.new(f"{pointer.removesuffix('_ptr')}_words")
        block.line(f"{name} = {pointer}.to(tl.pointer_type({triton_type(self.spec.inputs[number].dtype)}))")
        self._in_workspace[number] = name
        self.reinterpreted.add(number)

    def use(self, helper: str) -> None:
        """Enters a helper function of `pointwise.HELPERS`, after those that it calls."""
        source, needs = HELPERS[helper]
        for other in needs:
            self.use(other)
        self.helpers.setdefault(helper, source)

    def arguments(self) -> tuple[tuple[Argument, ...], list[str]]:
        """The positional arguments and, beside them, their names in the signature."""
        inputs = sorted(self.inputs.items())
        outputs = sorted(self.outputs.items())
        sizes = sorted(self.sizes.items(), key=lambda item: item[1])
        arguments = (
            *(Argument("input", number) for number, _ in inputs),
            *(Argument("output", number) for number, _ in outputs),
            *(Argument("workspace", number) for number in range(len(self.workspaces))),
            *(Argument("size", expr=symbol) for symbol, _ in sizes),
        )
        names = [name for _, name in (*inputs, *outputs)] + self._workspace_names + [name for _, name in sizes]
        return arguments, names

    def function(self, name: str) -> str:
        """The finished kernel function."""
        _, parameters = self.arguments()
        parameters = parameters + [f"{constant}: tl.constexpr" for constant in sorted(self.constants)]
        head = f"def {name}({', '.join(parameters)}):"
        if len(head) > 120:
            head = f"def {name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + "):"
        return "@triton.jit\n" + head + "\n" + "\n".join("    " + line if line else "" for line in self.body.lines) + "\n"
