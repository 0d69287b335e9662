"""The roofline of a step: what each class of kernel must do at least, and how long it took, in JSON and for people."""

from __future__ import annotations

from pathlib import Path

from bench.engine.report import Report, write_json_alone


def roofline_classes(work: Report, micros: dict[str, float], ceilings: Report) -> Report:
    """By class, what a step must at least do, how long that takes at the ceilings, and how long it took.

    `work`: class -> bytes, flops, and fp8: those of the flops that are of FP8 numbers. `micros`: class -> us on the
    device. `ceilings`: copy, bytes/s; matmul, type -> FLOP/s (that of a type that is not there is bf16's).
    """
    plain = ceilings["matmul"]["bf16"]
    fast = ceilings["matmul"].get("fp8") or plain
    found: Report = {}
    for kind in dict.fromkeys((*work, *micros)):
        least = work.get(kind, {"bytes": 0, "flops": 0, "fp8": 0})
        copy = least["bytes"] / ceilings["copy"] * 1e6
        matmul = ((least["flops"] - least["fp8"]) / plain + least["fp8"] / fast) * 1e6
        took = micros.get(kind, 0.0)
        found[kind] = least | {
            "least_us": max(copy, matmul),
            "bound": "copy" if copy >= matmul else "matmul",
            "us": took,
            "of_ceiling": max(copy, matmul) / took if took else None,
        }
    return found


def roofline_page(report: Report) -> str:
    """The report of `--roofline` in Markdown."""
    ceilings, settings = report["ceilings"], report["settings"]
    rates = ", ".join(f"{kind} {rate / 1e12:.0f} TFLOP/s" for kind, rate in ceilings["matmul"].items() if rate)
    lines = ["# Roofline", "", f"`{report['command']}`", "", f"{report['model']}: {report['described']}", ""]
    lines += [
        f"Ceilings of the same run: copy {ceilings['copy'] / 1e12:.2f} TB/s, products {rates}. Of {settings['runs']} "
        f"profiled steps of each kind the one of median time counts, without graphs: sums of kernels' times, without "
        f"gaps between kernels. Bytes are those of weights, caches, and queries and results of attention; what passes "
        f"between other kernels is not counted. {report['date']}.",
        "",
        f"- {'; '.join(f'{key} {value}' for key, value in report['environment'].items())}.",
    ]
    for name, step in report["steps"].items():
        lines += ["", f"## {name}: {step['requests']} requests, {step['tokens']} tokens, {step['seen']} visible", ""]
        lines += ["| class | GB | GFLOP | bound by | minimum us | measured us | of the ceiling |"]
        lines.append("|---|---:|---:|---|---:|---:|---:|")
        classes = step["classes"]
        lines += [_roofline_row(kind, one) for kind, one in sorted(classes.items(), key=lambda item: -item[1]["us"])]
        whole = {key: sum(one[key] for one in classes.values()) for key in ("bytes", "flops", "least_us", "us")}
        part = whole["least_us"] / whole["us"] if whole["us"] else None
        lines.append(_roofline_row("all", whole | {"bound": "", "of_ceiling": part}))
    return "\n".join(lines) + "\n"


def _roofline_row(kind: str, one: Report) -> str:
    part = "–" if one["of_ceiling"] is None else f"{one['of_ceiling']:.0%}"
    done = f"{one['bytes'] / 1e9:.3f} | {one['flops'] / 1e9:.1f} | {one['bound']}"
    return f"| {kind} | {done} | {one['least_us']:.1f} | {one['us']:.1f} | {part} |"


def write_roofline(out: Path, report: Report) -> list[Path]:
    """Write `out`.json and `out`.md. Returns the paths."""
    paths = [write_json_alone(out, report), out.with_name(out.name + ".md")]
    paths[1].write_text(roofline_page(report))
    return paths
