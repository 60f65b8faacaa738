"""Runs generated kernels under Triton's interpreter, in a process of its own (the interpreter is chosen when triton is first imported).

`Interpreter().run(...)` is what tests call. Run as a script, this file is the worker: pickled requests on stdin, pickled answers on stdout.

The interpreter holds bf16 as uint16 and computes with the bits as if they were integers; `mend_interpreter` gives it conversions and
products. Other bf16 arithmetic stays wrong on purpose: generated kernels must not need it.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path


class Interpreter:
    """A worker process. Close it when done, or use it as a context manager."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def run(self, source: str, entry: str, grid: tuple[int, ...], arguments: list, constants: dict) -> list:
        """Runs `entry` of a module's source over the grid; tensors among the arguments come back as the kernel leaves them."""
        _send(self._process.stdin, (source, entry, grid, arguments, constants))
        failed, result = _receive(self._process.stdout)
        if failed:
            raise RuntimeError(f"{source}\nunder the interpreter: {result}")
        return result

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(stream, value: object) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream):
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the interpreter process ended")
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


# ------------------------------------------------------------------------------------------------------------------- the worker


def mend_interpreter() -> None:
    """Makes conversions from and to bf16, products of bf16 blocks, and scalar masks right in the interpreter."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original_cast, original_dot, original_fp_to_fp = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    original_splat = builder.create_splat

    def widen(data):
        return (data.astype(np.uint32) << 16).view(np.float32)

    def round_to_bfloat16(values):
        values = np.ascontiguousarray(values, dtype=np.float32)
        bits = values.view(np.uint32)
        # To nearest, ties to even: add just under half of the last place that stays, one more if that place is odd.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)

    def cast(self, source, target):
        before, after = source.dtype.scalar, target.scalar
        if tl.bfloat16 not in (before, after) or before == after:
            return original_cast(self, source, target)
        values = widen(source.data) if before == tl.bfloat16 else source.data
        if after == tl.bfloat16:
            return handle(round_to_bfloat16(values), after)
        return handle(values.astype(interpreter._get_np_dtype(after)), after)

    def fp_to_fp(self, source, target, rounding):
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return original_fp_to_fp(self, source, target, rounding)

    def dot(self, a, b, *rest):
        a, b = (handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return original_dot(self, a, b, *rest)

    builder.cast_impl, builder.create_dot, builder.create_fp_to_fp = cast, dot, fp_to_fp
    for name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui", "create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, cast)

    def splat(self, shape_type, value):
        # A comparison's result carries the type of its operands; made a block by that type, it is no mask any more.
        if value.data.dtype == np.bool_:
            return handle(np.full(shape_type.shape, value.data.reshape(-1)[0]), tl.int1)
        return original_splat(self, shape_type, value)

    builder.create_splat = splat
    builder.create_int_cast = lambda self, source, target, signed: cast(self, source, target)


def load_module(source: str, folder: str):
    """Imports a source text as a module; triton reads a kernel's text from its file."""
    path = Path(folder) / f"kernel_{len(os.listdir(folder))}.py"
    path.write_text(source)
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _work() -> None:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    np.seterr(all="ignore")
    # What kernels print must not end up among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    mend_interpreter()
    modules: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                source, entry, grid, arguments, constants = _receive(sys.stdin.buffer)
            except EOFError:
                return
            try:
                if source not in modules:
                    modules[source] = load_module(source, folder)
                getattr(modules[source], entry)[grid](*arguments, **constants)
                _send(answers, (False, [a for a in arguments if isinstance(a, torch.Tensor)]))
            except BaseException:
                _send(answers, (True, traceback.format_exc(limit=-6)))


if __name__ == "__main__":
    _work()
