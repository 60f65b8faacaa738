"""Tables of workloads: one each, and a summary of all."""

from __future__ import annotations

from typing import Any

from bench.report import Report, figure

MOST_NAMED = 8
COLUMNS = ("side", "device", "by", "wall", "host", "roof", "x dev", "x wall", "error", "kern", "graph", "mem", "comp")


def print_row(row: dict[str, Any], report: Report) -> None:
    """The table of one workload: milliseconds a call; "roof": share of the roofline; "x": a side's time over dsi's (the faster of dsi's
    sides); kernels and CUDA graphs launched in a call; peak memory over what is needed (weights, caches, eager's activations); seconds of
    compilation."""
    sides = row["sides"]
    best = {what: best_of(row, what, ours=True)[1] for what in ("device", "wall")}
    lines = []
    for name, found in sides.items():
        times = [found.get(what) for what in ("device", "wall", "host")]
        ratios = [found[what] / best[what] if found.get(what) and best[what] else None for what in ("device", "wall")]
        kernels = str(sum(kernel["count"] for kernel in found["kernels"].values())) if found["kernels"] else "-"
        lines.append(
            (
                name,
                figure(times[0], ".4f"),
                found["method"] or "-",
                figure(times[1], ".4f"),
                figure(times[2], ".4f"),
                figure(found["roofline share"], ".2f"),
                *(figure(ratio, ".2f") for ratio in ratios),
                figure(found["error"], ".0e"),
                kernels,
                str(found["graph launches"]) if found["kernels"] else "-",
                figure(found.get("peak share"), ".2f"),
                figure(found["compile seconds"], ".0f"),
            )
        )
    floor = "" if row["roofline ms"] is None else f" (roofline {row['roofline ms']:.4f})"
    report.table(f"{row['title']}, ms{floor}", COLUMNS, lines)
    for name, found in sides.items():
        if found["problem"]:
            report.say(f"{name}: {found['problem']}")
    ours = next((found["kernels"] for name, found in sides.items() if name.startswith("dsi") and found["kernels"]), {})
    if ours:
        longest = sorted(ours.items(), key=lambda item: -item[1]["us"])[:MOST_NAMED]
        shown = [(name.removeprefix("void ").split("<")[0], one["count"], one["us"] / one["count"]) for name, one in longest]
        named = ", ".join(f"{name} {count} x {each:.2f}" for name, count, each in shown)
        report.say(f"dsi's kernels that take longest, count x us: {named}")


def best_of(row: dict[str, Any], what: str, ours: bool) -> tuple[str, float | None]:
    """The fastest of dsi's sides, or of the others, by "device" or "wall", and its milliseconds; those that read int8 weights apart."""
    return _best({name: found for name, found in row["sides"].items() if not found.get("int8")}, what, ours)


def best_int8(row: dict[str, Any], what: str, ours: bool) -> tuple[str, float | None]:
    """`best_of` among those that read int8 weights."""
    return _best({name: found for name, found in row["sides"].items() if found.get("int8")}, what, ours)


def _best(sides: dict[str, Any], what: str, ours: bool) -> tuple[str, float | None]:
    times = {name: found[what] for name, found in sides.items() if name.startswith("dsi") == ours and found.get(what)}
    return min(times.items(), key=lambda item: item[1]) if times else ("-", None)


def summary(report: Report) -> None:
    """One line a workload: dsi beside the best comparator on the device, and beside eager on the wall."""
    lines = []
    for row in report.rows:
        _, ours = best_of(row, "device", ours=True)
        name, theirs = best_of(row, "device", ours=False)
        _, our_wall = best_of(row, "wall", ours=True)
        eager = row["sides"].get("eager", {}).get("wall")
        floor = row["roofline ms"]
        lines.append(
            (
                row["title"],
                figure(ours, ".4f"),
                figure(floor / ours if floor and ours else None, ".2f"),
                name,
                figure(theirs / ours if ours and theirs else None, ".2f"),
                figure(eager / our_wall if eager and our_wall else None, ".2f"),
            )
        )
    report.table("Summary", ("case", "dsi ms", "roof", "best other", "its x", "eager x wall"), lines)
    _int8_summary(report)


def _int8_summary(report: Report) -> None:
    """One line a workload with int8 sides: dsi's, and over it dsi without int8, the best other without, and the others with."""
    lines = []
    for row in report.rows:
        name, ours = best_int8(row, "device", ours=True)
        if ours is None:
            continue
        found = row["sides"][name]
        others = [best_of(row, "device", ours=True)[1], best_of(row, "device", ours=False)[1]]
        others += [row["sides"].get(side, {}).get("device") for side in ("int8-recipe", "torchao")]
        ratios = [figure(other / ours if other else None, ".2f") for other in others]
        lines.append((row["title"], figure(ours, ".4f"), figure(found.get("roofline share"), ".2f"), *ratios))
    if lines:
        report.table("int8 weights", ("case", "dsi ms", "roof", "x dsi", "x best other", "x recipe", "x torchao"), lines)
