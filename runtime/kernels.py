"""Generated kernels: made once for all equal regions, kept on disk, loaded as modules."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import sympy
import torch
from dsi.codegen.kernel import Kernel, digest_of
from dsi.ir.context import Context
from dsi.ir.errors import Refusal, Refused
from dsi.ir.region import Region
from dsi.ir.tile import KernelSpec
from torch.utils._sympy.functions import FloorDiv

from .cache import DiskCache
from .choices import untuned, winner
from .serialise import expression_from_json, expression_to_json, kernel_from_json, kernel_to_json
from .sizes import expression

# Where a symbol of a kernel is read from: ("size", input, dimension, factor), ("stride", input, dimension, factor) or ("value", input, 0,
# factor). What stands there is `factor` times the symbol.
Origin = tuple[str, int, int, int]


@dataclass(frozen=True)
class KernelSet:
    """The variants generated for one region and all equal ones, smallest row bucket first.

    `symbols` says where each size symbol that the launches use is read from, in terms of the region's inputs; `rows` is the number of rows
    that picks the variant. `few`: made for a program in which a launch counts for more than a microsecond of the device, by which
    `spared` launches are saved.
    """

    variants: tuple[Kernel, ...]
    rows: sympy.Expr
    symbols: dict[str, Origin]
    few: bool = False
    spared: int = 0


_sets: dict[tuple[str, str], KernelSet | Refusal] = {}
_outdated: set[tuple[str, str]] = set()  # what is stored of these was made with other choices
_modules: dict[str, ModuleType] = {}
_lock = threading.RLock()


def device_name(context: Context) -> str:
    """The device that kernels are generated for, as caches are keyed: name and capability."""
    if context.device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor}"
    return "none"


def kernels_for(region: Region, context: Context, few: bool = False) -> KernelSet | Refusal:
    """The kernels of `region`, from this process, from disk, or generated; a refusal where there can be none. Fills `region.kernels`.
    `few`: of one launch, where that is near the fastest (codegen/few_launches.py)."""
    device = device_name(context)
    memo = (device, _name(region, few))
    with _lock:
        if memo not in _sets:
            disk = DiskCache(device, context.options.cache and bool(region.key))
            won = _won(region, disk)
            stored = None if memo in _outdated else _read(disk, memo[1], few, won)
            _sets[memo] = stored if stored is not None else _generate(region, device, disk.enabled, few)
            _outdated.discard(memo)
            if stored is None:
                _write(disk, memo[1], _sets[memo], won)
        found = _sets[memo]
    if isinstance(found, KernelSet):
        region.kernels = list(found.variants)
        name = f"kernels/{region.key or region.name}{'.few' if found.spared else ''}"
        for kernel in found.variants:
            path = f"{name}.{kernel.schedule}{'' if kernel.max_rows is None else kernel.max_rows}.py"
            if path not in context.artifacts:
                context.emit(path, kernel.source)
        return found
    return dataclasses.replace(found, node=region.name)


def keep(region: Region, context: Context, found: KernelSet) -> None:
    """Has `found` be the kernels of `region` and of all equal ones from now on, on disk too."""
    device = device_name(context)
    name = _name(region, found.few)
    with _lock:
        _sets[device, name] = found
    region.kernels = list(found.variants)
    if region.key:
        disk = DiskCache(device, context.options.cache)
        _write(disk, name, found, _won(region, disk))


def renew(regions: Sequence[Region], device: str) -> None:
    """Has the kernels of some regions generated anew, because other choices are known to be better."""
    with _lock:
        for memo in ((device, _name(region, few)) for region in regions for few in (False, True)):
            _sets.pop(memo, None)
            _outdated.add(memo)


def _name(region: Region, few: bool) -> str:
    """What kernels are kept under."""
    return (region.key or f"{region.name} {id(region)}") + (" few" if few else "")


def print_kernels(context: Context) -> None:
    """Generates the kernels of every region of the report that has none yet, so that they can be shown where the CPU runs something
    else.
    """
    for region in context.report.regions:
        if not region.kernels:
            found = kernels_for(region, context)
            if isinstance(found, Refusal):
                context.report.unfused.append(found)


def _generate(region: Region, device: str, cache: bool, few: bool) -> KernelSet | Refusal:
    spec = region.spec
    if spec is None:
        return Refusal("it has no plan, so no kernel")
    try:
        variants, spared = _variants(spec, region.key, device, cache, few)
    except Refused as refused:
        return refused.refusal
    except NotImplementedError as error:  # an index expression that has no form in Triton
        return Refusal(str(error))
    ordered = tuple(sorted(variants, key=lambda kernel: (kernel.max_rows is None, kernel.max_rows or 0)))
    rows = spec.plan.queries if hasattr(spec.plan, "queries") else spec.plan.rows
    return KernelSet(ordered, expression(rows), _origins(region), few, spared)


def _variants(spec: KernelSpec, key: str, device: str, cache: bool, few: bool) -> tuple[Sequence[Kernel], int]:
    """The kernels of a specification, by the best choices that are known, and how many launches of any are saved with `few`."""
    from dsi.codegen import cost
    from dsi.codegen.devices import find_device
    from dsi.codegen.few_launches import in_one_launch

    from dsi import codegen

    figures = find_device(device)
    found: list[Kernel] = []
    spared = 0
    for bucket in cost.buckets(spec.plan):
        choice = (winner(device, cache, key, bucket) if key else None) or untuned(spec, bucket, device, figures)
        made = codegen.generate(spec, choice=choice, device=figures)
        if few and (launches := len(made[0].launches)) > 1 and (other := in_one_launch(spec, choice, figures)) is not None:
            made, spared = codegen.generate(spec, choice=other, device=figures), max(spared, launches - 1)
        found += made
    return found, spared


def _origins(region: Region) -> dict[str, Origin]:
    found: dict[str, Origin] = {}
    for part in ("value", "size", "stride"):
        for number, node in enumerate(region.inputs):
            for dim, value in enumerate(_numbers(node.meta["val"], part)):
                factor, symbol = expression(value).as_coeff_Mul()
                if symbol.is_Symbol and factor.is_Integer and factor > 0:
                    found.setdefault(symbol.name, (part, number, dim, int(factor)))
    return found


def _numbers(value: Any, part: str) -> Sequence[Any]:
    if not isinstance(value, torch.Tensor):
        return [value] if part == "value" else []
    return {"value": (), "size": value.shape, "stride": value.stride()}[part]


def _won(region: Region, disk: DiskCache) -> list[dict[str, Any] | None]:
    """The winners of trials that are known now, by buckets of rows. Kernels that are stored were made with those that were known then, by
    this process or another, which may have been ended between its trials and its kernels."""
    from dsi.codegen import cost

    if not disk.enabled or region.spec is None:
        return []
    found = [winner(disk.device, disk.enabled, region.key, bucket) for bucket in cost.buckets(region.spec.plan)]
    return [None if choice is None else dataclasses.asdict(choice) for choice in found]


def _read(disk: DiskCache, key: str, few: bool, won: Sequence[Any]) -> KernelSet | None:
    stored = disk.read("regions", key)
    if stored is None:
        return None
    try:
        if stored["won"] != won:
            return None
        variants = []
        for value in stored["variants"]:
            source = disk.read_source(value["digest"])
            if source is None:
                return None
            variants.append(kernel_from_json(value, source))
        symbols = {name: (str(part), int(number), int(dim), int(by)) for name, (part, number, dim, by) in stored["symbols"].items()}
        return KernelSet(tuple(variants), expression_from_json(stored["rows"]), symbols, few, int(stored["spared"]))
    except (KeyError, TypeError, ValueError):
        return None  # of another format; it is generated and written anew


def _write(disk: DiskCache, key: str, found: KernelSet | Refusal, won: Sequence[Any]) -> None:
    if not disk.enabled or isinstance(found, Refusal):
        return
    try:
        value = {
            "variants": [kernel_to_json(kernel) for kernel in found.variants],
            "rows": expression_to_json(found.rows),
            "symbols": {name: list(origin) for name, origin in found.symbols.items()},
            "spared": found.spared,
            "won": won,
        }
    except ValueError:
        return  # an expression that cannot be stored: generated in each process
    for kernel in found.variants:
        disk.write_source(kernel.source, kernel.digest)
    disk.write("regions", key, value)


def load(kernel: Kernel, disk: DiskCache) -> ModuleType:
    """The module of a kernel's source. Triton reads a kernel's text from its file, so the module is imported from one."""
    digest = digest_of(kernel.source)
    with _lock:
        if digest not in _modules:
            path = disk.write_source(kernel.source, digest)
            name = f"dsi_kernel_{digest}"
            found = importlib.util.spec_from_file_location(name, path)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[name] = module
            found.loader.exec_module(module)
            _modules[digest] = module
        return _modules[digest]


def symbol_values(found: KernelSet, values: Sequence[Any]) -> dict[str, sympy.Expr]:
    """Each symbol of the kernels as an expression of the outer graph, from the fakes and SymInts of the region's inputs."""
    result: dict[str, sympy.Expr] = {}
    for name, (part, number, dim, factor) in found.symbols.items():
        result[name] = FloorDiv(expression(_numbers(values[number], part)[dim]), factor)
    return result
