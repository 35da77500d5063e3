"""Writes the generated parts of the documents: measured figures from `results/`.

What was not measured yet is left out. Run: python benchmarks/table.py; their pictures are made by python benchmarks/pictures.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_tables
import scale_model

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
INK, OURS_COLOR, OTHERS_COLOR = "#333333", "#D55E00", "#5B6770"
Found = list[tuple[str, ...]]
REDUCERS = ("Mean", "Max", "Norm", "Moments", "Summary", "Quantile")


def headline() -> str:
    """The figures that matter, for the README."""
    found: Found = []
    step = {
        row["execution"]: f"{row['x bare']:.2f}x {row['execution']}"
        for row in _result("compiled").get("rows", [])
        if (row["network"], row["what"], row["mode"]) == ("transformer", "training step", "Summary of outputs")
    }
    if step:
        label = "training step of a transformer with nine statistics of every output of its leaf modules, of the bare step"
        found.append((label, ", ".join(step.values())))
    devices = _result("gpu").get("devices", {})
    on, big = next(((on, rows["rows"]) for on, one in devices.items() if (rows := one["sections"].get("training-big"))), ("", []))
    steps = {row["who"]: f"{row['x bare']['mean']:.2f}x" for row in big if row["execution"] == "eager"}
    if steps:
        label = f"the same on a GPU ({on}), a transformer of {big[0]['network']} parameters, eager"
        both = steps.get("Summary of outputs and gradients")
        found.append((label, f"{steps['Summary of outputs']}{f'; {both} with all gradients' if both else ''}"))
    floor = {row["reducer"]: row["x floor"] for row in _result("floor").get("rows", []) if row["layout"] == "per tensor"}
    plain = "plain PyTorch, eight statistics"
    if floor.keys() >= {"Summary", plain}:
        figure = f"{_multiple(floor['Summary'])}; {_multiple(floor[plain])} for eight by plain PyTorch calls"
        found.append(("nine statistics of a 25 MB activation, of `x.sum()`", figure))
    calls = {row["what"]: row["x the bare call"] for row in _result("hooks").get("rows", [])}
    if "Summary" in calls:
        found.append(("nine statistics of an 8x64 output, of the call of its linear layer", f"{calls['Summary']:.1f}x"))
    peaks: dict[str, float] = {}
    for row in _result("memory_peak").get("rows", []):
        if row["activation MB"] == 400:
            peaks[row["reducer"]] = max(row["peak MB"], peaks.get(row["reducer"], 0.0))
    if peaks.keys() >= {"Summary", plain}:
        figure = f"{peaks['Summary']:.0f} MB; {peaks[plain]:.0f} MB for eight by plain PyTorch calls"
        found.append(("nine statistics of a 400 MB activation, memory at the peak", figure))
    if soak := _result("soak"):
        label = f"{soak['steps']:,} training steps with every kind of monitor, growth of resident memory"
        found.append((label, f"{soak['growth MB']:.1f} MB"))
    return "\n".join([*_table(("what", "figure"), [*found, *_found()]), "", _machine()])


def _found() -> Found:
    """How often findings are right, in the programs by which nothing was chosen."""
    alone, against = (_result(name).get("scores", {}).get("held out") for name in ("diagnosis", "diagnosis_good_runs"))
    if not alone or not against:
        return []
    told = []
    for one in (alone, against["the rules and one good run"]):
        shares = "/".join(f"{one['all'][key]:.2f}" for key in ("found", "located", "right cause"))
        told.append(f"{shares}, false alarms in {one['false alarms']} of {one['healthy']}")
    where = f"{alone['all']['trainings']} faults in {alone['programs']} trainings that no rule was chosen by"
    label = f"{where}: share found / in the right place / with the right cause"
    return [(label, f"{told[0]}; with a good run at hand {told[1]}")]


def figures() -> str:
    """Everything that was measured of speed and memory, for the page about speed."""
    makers = (_floor, _hooks, _cliffs, _compiled, _parameters, _memory, _growth, _storage, _masks, _load, _sync, _importing)
    lines = _table(("what", "figure"), [row for make in makers for row in make()])
    lines += ["", f"{_machine()} Multiples are of `x.sum()` of the same tensor in the same run."]
    if _result("peers"):
        lines += ["", "![Cost of one update beside other libraries](images/costs.png)", "", *_peers()]
    return "\n".join(lines)


def _machine(*names: str) -> str:
    machine = next(result for name in (*names, "floor", "hooks", "peers") if (result := _result(name)))["machine"]
    return f"{machine['cores']} cores of {machine['processor']}, torch {machine['torch']}."


def _floor() -> Found:
    rows = _result("floor").get("rows", [])
    names = {
        **{name: f"`{name}`, one update on a 25 MB activation" for name in REDUCERS},
        "plain PyTorch, eight statistics": "eight statistics by plain PyTorch calls, for comparison",
        "plain torch.histogram": "`torch.histogram`, for comparison",
    }
    return [(label, layouts) for name, label in names.items() if (layouts := _layouts(rows, name))]


def _hooks() -> Found:
    hooks = _result("hooks")
    labels = {
        "monitor not due (every=1000000)": "monitor that is not due",
        "Mean": "`ForwardMonitor(Mean())` on an 8x64 output",
        "Summary": "`ForwardMonitor(Summary())` on an 8x64 output",
        "BackwardMonitor(Summary)": "`BackwardMonitor(Summary())` on an 8x64 output",
    }
    measured = {row["what"]: row for row in hooks.get("rows", [])}
    found = [
        (
            f"{label}, beyond an empty hook",
            f"{row['us beyond an empty hook']:.1f} us, {row['x the bare call']:.2f} x the call of the layer",
        )
        for what, label in labels.items()
        if (row := measured.get(what))
    ]
    if hooks:
        found.append(("10,000 monitors attached", f"{hooks['attach_10000_s']:.2f} s"))
    for row in _result("attach").get("rows", []):
        label = f"an optimizer step in which nothing is due, with {row['what']} attached"
        found.append((label, f"{row['added us']:.1f} us more than {row['bare us']:.0f} us"))
    return found


def _cliffs() -> Found:
    """What makes recording several times as dear, beside the same without it."""
    return [
        (
            f"{row['what']}, recorded, of the same without",
            f"{row['x']:.1f}x ({row['python calls without']} to {row['python calls with']} functions of the library)",
        )
        for row in _result("cliffs").get("rows", [])
    ]


def _compiled() -> Found:
    """By network, by what is timed and by mode: eager and compiled, as multiples of the bare network in the same way."""
    by: dict[tuple[str, ...], dict[str, str]] = {}
    for row in _result("compiled").get("rows", []):
        if row["mode"] != "bare":
            graphs = (
                f" ({row['graphs']} graph, {row['graph breaks']} breaks, {row['recompiles']} recompiles)" if "graphs" in row else ""
            )
            label = f"`{row['mode']}` of all {row['leaf modules']} leaf modules of a {row['network']}, {row['what']}"
            by.setdefault((label,), {})[row["execution"]] = f"{row['x bare']:.2f}x {row['execution']}{graphs}"
    return [(f"{label}, of the bare one", ", ".join(parts.values())) for (label,), parts in by.items()]


def _parameters() -> Found:
    found: Found = []
    rows = _result("parameters").get("rows", [])
    for work in ("norms of all gradients", "Summary of all gradients", "norms of all updates, with their snapshot"):
        each = [f"{row['x clip']:.1f}x for {row['parameters']}" for row in rows if row["what"] == work]
        if each:
            found.append((f"{work}, a step, of `clip_grad_norm_`", ", ".join(each)))
    return found


def _memory() -> Found:
    found: Found = []
    peaks: dict[str, dict[int, float]] = {}
    for row in _result("memory_peak").get("rows", []):
        sizes = peaks.setdefault(row["reducer"], {})
        sizes[row["activation MB"]] = max(row["peak MB"], sizes.get(row["activation MB"], 0.0))
    for reducer in ("Summary", "Quantile", "plain PyTorch, eight statistics"):
        if reducer in peaks:
            each = "; ".join(f"{peak:.0f} MB" for peak in peaks[reducer].values())
            name = f"`{reducer}`" if " " not in reducer else reducer
            found.append((f"{name}, peak memory of one update of {', '.join(map(str, peaks[reducer]))} MB", each))
    for name, label in (("soak", "{steps:,} training steps with everything recorded"), ("memory_updates", "{updates:,} updates")):
        if result := _result(name):
            found.append((f"{label.format(**result)}, growth of resident memory", f"{result['growth MB']:.1f} MB"))
    return found


def _growth() -> Found:
    found, growth = [], _result("growth")
    series = (
        ("layers", "`Summary` on {} small layers, beyond the bare network", "layers", "us a layer beyond bare", "us a layer"),
        ("statistics", "{} statistics of an 8x64 observation", "statistics", "x one", "x one statistic"),
    )
    for key, label, count, figure, unit in series:
        rows = [row for row in growth.get(key, []) if row.get("observation", "8x64") == "8x64"]
        if rows:
            counts, each = ("; ".join(form(row) for row in rows) for form in (_shown(count, ",d"), _shown(figure, ".1f")))
            found.append((label.format(counts), f"{each} {unit}"))
    return found


def _storage() -> Found:
    seconds = {row["what"]: row["s"]["median"] for row in _result("storage").get("rows", [])}
    if not seconds:
        return []
    return [
        (
            f"10,000 subrecorders{what} saved and flushed to disk; loaded",
            f"{seconds[f'{row}save']:.2g} s; {seconds[f'{row}load']:.2g} s",
        )
        for what, row in (
            (", `Summary` of 64 channels,", ""),
            (", `Summary` of 64 channels, in one file,", "packed: "),
            (", one mean each, in one file,", "packed one mean each: "),
        )
    ]


def _masks() -> Found:
    found = []
    for pattern in ("... ->", "b c -> c"):
        medians = {row["what"]: row["median"] for row in _result("masks").get("rows", []) if row["pattern"] == pattern}
        if medians:
            plain, weighted = (
                medians["Summary, elements masked"] / medians["Summary"],
                medians["WeightedMoments"] / medians["Moments"],
            )
            what = f"element by element, 25 MB, `{pattern}`: masked `Summary` of plain; `WeightedMoments` of `Moments`"
            found.append((what, f"{plain:.1f}x; {weighted:.1f}x"))
    return found


def _load() -> Found:
    """Each update beside busy processes, with as many threads as there are cores."""
    rows = _result("load").get("rows", [])
    most = max((row["threads"] for row in rows), default=0)
    return [
        (
            f"`{row['what']}`, 25 MB, {most} threads: quiet; beside one busy process a core",
            f"{row['quiet']['median']:.1f} ms; {row['busy']['median']:.1f} ms (mean {row['busy']['mean']:.1f} ms)",
        )
        for row in rows
        if row["threads"] == most
    ]


def _sync() -> Found:
    rows = _result("sync").get("rows", [])
    return [(f"{row['subrecorders']:,} subrecorders synchronised, 2 processes", f"{row['sync_ms']:.0f} ms") for row in rows[-1:]]


def _importing() -> Found:
    """In processor time, beyond `import torch`; without byte code of this project, too."""
    rows = _result("import").get("rows", [])
    if not rows:
        return []
    bare, warm, first = (row["s"]["median"] for row in rows)
    label = f"`import recorders` beyond `import torch`, which takes {bare:.1f} s; without byte code"
    return [(label, f"{warm - bare:.2f} s; {first - bare:.2f} s")]


def sync_costs() -> str:
    """Bytes that a rank receives in a sync, and its processor time to merge, gathered and reduced, for the page about ranks."""
    result = _result("sync_bytes")
    times = {(row["what"], row["ranks"]): row for row in result.get("times", [])}
    rows: Found = []
    for row in result.get("rows", []):
        took = times.get((row["what"], row["ranks"]))
        merging = f"{took['gathered ms']:,.0f} ms; {took['reduced ms']:,.0f} ms" if took else ""
        label = f"{row['what']}, {row['state bytes'] / 1e6:,.1f} MB"
        rows.append((label, f"{row['ranks']:,}", f"{row['gathered'] / 1e6:,.1f} MB", f"{row['reduced'] / 1e6:,.1f} MB", merging))
    head = (
        "what a rank recorded",
        "ranks",
        "received, all gathered",
        "received, reduced",
        "processor time to merge: gathered; reduced",
    )
    return "\n".join(_table(head, rows))


def paper() -> str:
    """A few of the works of `_peers`, among them where another library is faster, and `wandb.watch` beside a recorder."""
    works = {("25 MB activation", "mean"), ("25 MB activation", "several statistics"), ("8x64 output", "mean")}
    times = {what: time["median"] for what, time in _result("wandb_watch")["times"].items()}
    watch, ours = (times[what] / times["bare"] for what in ('wandb.watch(log="all")', "recorder, the same"))
    told = (
        f"A training step of nine linear layers takes {watch:.1f} times as long with `wandb.watch`, which logs histograms of each "
        f"parameter and gradient in each step, and {ours:.1f} times with a recorder that keeps their distributions over all steps."
    )
    return "\n".join([*_peers({*works, ("all gradients", "norms")}), "", told])


def _peers(works: set[tuple[str, str]] | None = None) -> list[str]:
    """One row a piece of work, one column a library; the best of several ways of one."""
    result = _result("peers")
    names = list(dict.fromkeys(row["who"].split(",")[0] for row in result["rows"]))
    if works:
        chosen = [row for row in result["rows"] if (row["where"], row["work"]) in works]
        names = [name for name in names if any(row["who"].split(",")[0] == name for row in chosen)]
    rows = []
    for where, work, floor in dict.fromkeys((row["where"], row["work"], row["floor"]) for row in result["rows"]):
        if works and (where, work) not in works:
            continue
        cells = []
        for name in names:
            own = [
                row["x floor"]
                for row in result["rows"]
                if (row["where"], row["work"], row["who"].split(",")[0]) == (where, work, name)
            ]
            cells.append(_multiple(min(own)) if own else "")
        rows.append((f"{where}, {work}", f"`{floor}`" if "(" in floor or "_" in floor else floor, *cells))
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    return [
        *_table(("work", "in units of", *names), rows),
        "",
        f"In one process, with {packages}. {result['note']}",
    ]


def parts() -> str:
    """Where the time of an update goes that is not the read of the tensor."""
    rows = [(row["what"], f"{row['us']:.1f} us", f"{row['us beyond the row before']:.1f} us") for row in _result("hooks")["parts"]]
    return "\n".join(_table(("up to and with", "in all", "more than the row before"), rows))


def states() -> str:
    """How the cost of an update grows with what the state holds."""
    result = _result("growth_states")["rows"]
    rows = [(row["size"], f"`{row['reducer']}`", *(f"{us:,.0f} us" for us in row["us"].values())) for row in result]
    return "\n".join(_table(("number of", "one update of", *(f"{int(size):,}" for size in result[0]["us"])), rows))


def overheads() -> str:
    """What recording truly takes of a step, and what `overhead()` says of it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in _result("overhead").get("rows", []):
        cadence = "" if row["budget"] is None else f", one step in {row['every_step']}"
        found.setdefault((row["step"], row["monitors"]), []).append(f"{row['true']:.1%}; {row['told']:.1%}{cadence}")
    rows = [(*place, *cells) for place, cells in found.items()]
    return "\n".join(_table(("a bare step takes about", "recorded", "truth; told", "truth; told, with a budget of 3 %"), rows))


def health() -> str:
    """What `presets.health()` costs a training."""
    rows = [
        (
            f"{row['net']}, {row['execution']}",
            f"{row['ms']['bare']['median']:.1f} ms",
            f"{row['recorded / bare']:.2f}x",
            f"{row['idle / bare']:.2f}x",
            f"{row['training, computed']:+.1%}",
            str(row["graph breaks"]),
        )
        for row in _result("health").get("rows", [])
    ]
    head = ("net", "a bare step", "a step that records", "a step between", "a training of 1,000 steps", "graph breaks")
    note = f"By one thread, in time of the processor, on {_machine('health')}" if rows else "Not measured yet."
    return "\n".join([*_table(head, rows), "", note])


def versions() -> str:
    """Which tests pass on which versions of torch."""
    result, counts = _result("torch_versions"), ("passed", "failed", "skipped")
    rows = [(row["torch"], row["suite"], *(str(row[count]) for count in counts)) for row in result.get("rows", [])]
    note = f"Python {result['python']}, on a CPU." if rows else "Not measured yet."
    return "\n".join([*_table(("torch", "suite", *counts), rows), "", note])


def wheel() -> str:
    """What works where the wheel was installed: a row for each torch, a column for each Python."""
    result = _result("versions")
    rows = result.get("rows", [])
    if not rows:
        return "Not measured yet."
    torches, pythons = (list(dict.fromkeys(row[name] for row in rows)) for name in ("torch", "python"))
    pythons.sort(key=lambda version: [int(part) for part in version.split(".")])
    cells = {(row["torch"], row["python"]): _worked(row) for row in rows}
    table = _table(
        ("torch", *(f"Python {python}" for python in pythons)),
        [(torch, *(cells.get((torch, python), "not tried") for python in pythons)) for torch in torches],
    )
    return "\n".join([*table, "", f"`{result['wheel']}`, on a CPU."])


def architectures() -> str:
    """Which models of transformers are recorded as they should be, and what is wrong with others."""
    result = _result("architectures")
    rows = result.get("rows", [])
    if not rows:
        return "Not measured yet."
    wrong = [
        (f"`{row['architecture']}`", "; ".join(line.partition("; operands")[0] for line in row["wrong"]))
        for row in rows
        if row["wrong"]
    ]
    note = (
        f"{len(rows) - len(wrong)} of {len(rows)} architectures of transformers {result['transformers']} are as they should be. "
        f"{len(result['left_out'])} more could not be made small, or take other inputs than text, pictures or sound."
    )
    return "\n".join([note, *(["", *_table(("model", "what is not"), wrong)] if wrong else [])])


def libraries() -> str:
    """Which libraries were tried with a recorder, and what is wrong with which net or training."""
    rows = _result("libraries").get("rows", [])
    if not rows:
        return "Not measured yet."
    wrong = [(row["name"], "; ".join(line.partition("; operands")[0] for line in row["wrong"])) for row in rows if row["wrong"]]
    versions: dict[str, str] = {}
    for row in rows:
        versions[row["name"].partition(" ")[0].rstrip(",")] = row["version"]
    each = ", ".join(f"{name} {version}" for name, version in versions.items())
    note = f"{len(rows) - len(wrong)} of {len(rows)} nets and trainings of {len(versions)} libraries are as they should be: {each}."
    return "\n".join([note, *(["", *_table(("net or training", "what is not"), wrong)] if wrong else [])])


def _worked(row: dict[str, Any]) -> str:
    checks = row.get("checks", {})
    if failed := [name for name, outcome in checks.items() if outcome not in ("passed", "not supported")]:
        return f"failed: {', '.join(failed)}"
    if row["outcome"] == "passed":
        return "all" if "not supported" not in checks.values() else "all, eager"
    return str(row["outcome"])


def generating() -> str:
    """What recording costs `generate` of transformers."""
    found = _result("generate")
    ratios = {(row["execution"], row["what"]): f"{row['x bare']:.2f}x" for row in found["rows"]}
    whats = list(dict.fromkeys(row["what"] for row in found["rows"]))
    monitors = {row["what"]: str(row["monitors"]) for row in found["rows"]}
    rows = [
        (what, monitors[what], *(ratios.get((execution, what), "not measured") for execution in ("eager", "compiled")))
        for what in whats
        if what != "bare"
    ]
    bare = min(row["ms a token"]["median"] for row in found["rows"] if row["what"] == "bare")
    note = (
        f"Time of the processor, of bare `generate` in the same turns, which takes {bare:.0f} ms a new token: {found['what']}. "
        f"Compiled: a static cache, whose prefill is not compiled. {_machine('generate')}"
    )
    return "\n".join([*_table(("what is recorded of outputs", "monitors", "eager", "compiled"), rows), "", note])


def generating_limit() -> str:
    """What keeps the limit, and what does not, eager and compiled."""
    limit, costs = 1.05, dict[str, list[float]]()
    for row in _result("generate")["rows"]:
        if row["what"] != "bare":
            costs.setdefault(row["what"], []).append(round(row["x bare"], 2))
    kept = [ratio for ratios in costs.values() for ratio in ratios if max(ratios) <= limit]
    within = "; ".join(what for what, ratios in costs.items() if max(ratios) <= limit)
    beyond = [f"- {what}: {_range(ratios)}" for what, ratios in costs.items() if max(ratios) > limit]
    told = f"Recording is to take at most {limit:.2f}x. These keep to it, with {_range(kept)}: {within}. These take more:"
    return "\n".join([told, "", *beyond])


def _range(ratios: list[float]) -> str:
    ends = dict.fromkeys(f"{ratio:.2f}x" for ratio in (min(ratios), max(ratios)))
    return " to ".join(ends)


def in_vllm() -> str:
    """What recording costs an engine of vLLM."""
    found = _result("vllm_engine")
    rows = [(row["what"], f"{row['x bare']:.2f}x") for row in found["rows"] if row["what"] != "bare"]
    bare = next(row["ms a token"]["median"] for row in found["rows"] if row["what"] == "bare")
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    note = (
        f"Time of a batch of requests, of what the same engine takes without a recorder in turns, {bare:.0f} ms a new token: "
        f"{found['what']}. {packages}, `enforce_eager=True`. {_machine('vllm_engine')}"
    )
    return "\n".join([*_table(("what is recorded of outputs", "cost"), rows), "", note])


def streams() -> str:
    """Raw capture beside plain files, for the page about streams."""
    labels = {
        "write": "written",
        "read in order, first": "read in order, the first time, with checksums",
        "read in order, again": "read in order, later",
        "read shuffled, first": "read shuffled, the first time, with checksums",
        "read shuffled, again": "read shuffled, later",
    }
    lines: list[str] = []
    for row in _result("stream").get("rows", []):
        found: Found = []
        for what, label in labels.items():
            part = row[f"{what}: of plain"]
            found.append(
                (
                    label,
                    f"{row[f'{what}: plain GB/s']:.2f} GB/s",
                    f"{row[f'{what}: stream GB/s']:.2f} GB/s",
                    f"{part['median']:.0%} ({part['p10']:.0%} to {part['p90']:.0%})",
                )
            )
        head = (f"{row['gb']:.0f} GB", "plain files", "the stream", "bandwidth of the stream, as percent of that of plain files")
        queue = f"{row['added memory MB']:.0f} MB at the peak, with a queue of {row['queue MB']:.0f} MB"
        lines += [*_table(head, found), "", f"Memory added by the writer: {queue}."]
    return "\n".join([*lines, "", _machine("stream")])


def figure() -> Any:
    """The cost of one update of a 25 MB activation, ours and the others', as dots on a logarithmic scale."""
    from matplotlib.figure import Figure

    rows = [row for row in _result("peers")["rows"] if row["where"] == "25 MB activation"]
    works = list(dict.fromkeys(row["work"] for row in rows))
    drawn = Figure(figsize=(8.6, 0.21 * len(rows) + 0.34 * len(works) + 0.9), dpi=160, layout="constrained")
    axes = drawn.subplots()
    left = 0.8 * min(row["x floor"] for row in rows)
    height, ticks, labels = 0.0, [], []
    for work in works:
        own = sorted((row for row in rows if row["work"] == work), key=lambda row: row["x floor"])
        axes.text(0.0, height - 0.05, work, transform=axes.get_yaxis_transform(), fontsize=10, fontweight="bold", color=INK)
        for row in own:
            height += 1.0
            mine = row["who"] == "torch-recorders"
            color = OURS_COLOR if mine else OTHERS_COLOR
            axes.hlines(height, left, row["x floor"], color=color, linewidth=5 if mine else 3, alpha=0.9 if mine else 0.45)
            axes.plot(row["x floor"], height, "o", color=color, markersize=7 if mine else 6)
            shown = f"{_multiple(row['x floor'])}"
            weight = "bold" if mine else "normal"
            axes.annotate(
                shown, (row["x floor"], height), (7, 0), textcoords="offset points", va="center", fontsize=9, weight=weight
            )
            ticks.append(height)
            labels.append(row["who"])
        height += 1.6
    axes.set_yticks(ticks, labels, fontsize=9, color=INK)
    for label in axes.get_yticklabels():
        if label.get_text() == "torch-recorders":
            label.set_color(OURS_COLOR)
            label.set_fontweight("bold")
    axes.set_xscale("log")
    axes.set_xlim(left, 2.2 * max(row["x floor"] for row in rows))
    axes.set_ylim(height - 0.6, -0.7)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}x")
    axes.grid(axis="x", color="#E3E6E8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=9)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set_title("One update on a 25 MB activation, as a multiple of x.sum()", loc="left", fontsize=12, color=INK, pad=10)
    return drawn


def accuracy() -> str:
    """How exact the reducers are: every row that the scripts `accuracy_*.py` measured."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("accuracy_*.json")):
        result = json.loads(path.read_text())
        rows = [(row["what"], row["data"], f"{row['error']:.2e}", f"{row['bound']:.2e}") for row in result["rows"]]
        lines += [f"`benchmarks/{path.stem}.py`: {result['what']}.", "", *_table(("what", "data", "error", "bound"), rows), ""]
    return "\n".join(lines).rstrip()


def attacks() -> str:
    """What `reliability.py` tried, and what broke."""
    found = _result("reliability")
    rows = []
    for row in found.get("rows", []):
        outcomes = ", ".join(f"{name}: {count:,}" for name, count in sorted(row["outcomes"].items(), key=lambda item: -item[1]))
        rows.append((row["attack"], f"{row['tries']:,}", f"{row['broke']:,}", outcomes))
    how = f"By `python benchmarks/reliability.py {found['mode']}`".replace(" full`", "`") if found else ""
    return "\n".join([*_table(("attack", "times", "broke", "what was found"), rows), "", f"{how}. {_machine('reliability')}"])


def scale_measured() -> str:
    """What a sync cost in processes that fit here."""
    rows = [
        (
            f"{row['ranks']:,}",
            str(row["to"]),
            f"{row['monitors']:,}",
            f"{row['bytes']:,}",
            f"{row['modelled_bytes']:,}",
            f"{row['messages']:,}",
            str(row["collectives"]),
            f"{row['peak_bytes'] / 1e6:.1f} MB",
            f"{row['peak_bytes_of_others'] / 1e6:.1f} MB",
            f"{row['processor_s'] * 1e3:.0f} ms",
        )
        for row in _result("scale").get("rows", [])
    ]
    head = ("ranks", "to", "monitors", "bytes sent", "of the model", "messages", "collectives", "memory", "of the others", "time")
    return "\n".join([*_table(head, rows), "", _machine("scale")])


def scale_modelled() -> str:
    """What a sync would cost beyond."""
    found, rows = _result("scale"), []
    for ranks in (8, 64, 512, 4096, 10_000):
        for monitors, size in found["sizes"].items():
            seconds = scale_model.seconds(ranks, size, int(monitors), found["merge_s"])
            memory = _bytes(scale_model.memory(ranks, size))
            rows.append((f"{ranks:,}", f"{int(monitors):,}", memory, _bytes(2 * size), _seconds(seconds)))
    head = ("ranks", "monitors", "memory of who gets it", "of the others, with `to=rank`", "time")
    return "\n".join(_table(head, rows))


def scale_offline() -> str:
    """What files cost in place of a sync."""
    row = _result("scale")["offline"]
    each = row["processor_s"] / row["paths"] / row["monitors"]
    disk = _bytes(row["bytes"] / row["paths"] * 10_000)
    return "\n".join(
        [
            f"Measured: {row['paths']} paths with {row['monitors']:,} monitors each, {_bytes(row['bytes'])}, merged in "
            f"{_seconds(row['processor_s'])} of processor time,",
            f"{each * 1e6:.0f} us for one monitor of one path. So 1,000 monitors of 10,000 ranks take {each * 1e7 / 3600:.1f} "
            f"hours in one process, and {disk} of disk.",
        ]
    )


def _bytes(number: float) -> str:
    power = min(int(math.log10(number)) // 3, 4)
    return f"{number / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 300 else f"{seconds / 60:.3g} min"


def kernels() -> str:
    """Registers and spilled bytes of the GPU kernels, by reducer and architecture: the most of all layouts and dtypes compiled."""
    rows = _result("kernels").get("rows", [])
    targets = list(dict.fromkeys(row["target"] for row in rows))
    found: Found = []
    for reducer, kernel in dict.fromkeys((row["reducer"], row["kernel"]) for row in rows):
        cells = []
        for target in targets:
            same = [row for row in rows if (row["reducer"], row["kernel"], row["target"]) == (reducer, kernel, target)]
            registers, spilled = (max((row[name] for row in same), default=0) for name in ("registers", "spilled"))
            cells.append(f"{registers} registers, {spilled} bytes spilled")
        found.append((f"`{reducer}`", kernel, *cells))
    versions = ", ".join(" ".join(pair) for pair in _result("kernels").get("versions", {}).items())
    return "\n".join(
        [
            *_table(("reducer", "kernel", *targets), found),
            "",
            f"{sum(row['compiled'] for row in rows)} kernels, compiled by {versions}.",
        ]
    )


def gpu() -> str:
    """What was measured on a GPU."""
    return gpu_tables.tables(_result("gpu"))


def divergence_costs() -> str:
    """What it costs to record a training so that it can be compared with another."""
    rows = _result("divergence_costs").get("rows", [])
    columns = list(dict.fromkeys(f"{row['network']}, {row['execution']}" for row in rows))
    ratios = {(row["recorded"], f"{row['network']}, {row['execution']}"): row["x bare"] for row in rows}
    recorded = [name for name in dict.fromkeys(row["recorded"] for row in rows) if name != "bare"]
    shown = {key: f"{ratio:.2f}" for key, ratio in ratios.items()}
    found = [(name, *(shown.get((name, column), "-") for column in columns)) for name in recorded]
    return "\n".join([*_table(("recorded", *columns), found), "", _machine("divergence_costs")])


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"figures": headline},
    ROOT / "docs" / "accuracy.md": {"accuracy": accuracy},
    ROOT / "docs" / "sync.md": {"sync": sync_costs},
    ROOT / "docs" / "divergence-scores.md": {"costs": divergence_costs},
    ROOT / "docs" / "paper.md": {"figures": headline, "beside": paper},
    ROOT / "docs" / "generating.md": {"limit": generating_limit, "costs": generating, "vllm": in_vllm},
    ROOT / "docs" / "reliability.md": {"attacks": attacks},
    ROOT / "docs" / "scale.md": {"measured": scale_measured, "modelled": scale_modelled, "offline": scale_offline},
    ROOT / "docs" / "speed.md": {
        "figures": figures,
        "states": states,
        "health": health,
        "overheads": overheads,
        "parts": parts,
        "kernels": kernels,
        "gpu": gpu,
    },
    ROOT / "docs" / "stream-format.md": {"streams": streams},
    ROOT / "docs" / "trainers.md": {"libraries": libraries},
    ROOT / "docs" / "torch.md": {"versions": versions, "wheel": wheel, "architectures": architectures},
}


def written() -> Iterator[tuple[Path, str]]:
    """Every page with its generated parts as they are now."""
    for page, parts in PAGES.items():
        text = page.read_text()
        for name, make in parts.items():
            start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            before, opened, rest = text.partition(start)
            _, closed, after = rest.partition(end)
            if not (opened and closed):
                raise ValueError(f"{page} has no place for {name}")
            text = f"{before}{start}{make()}\n{end}{after}"
        yield page, text


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, ("---",) * len(head), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _result(name: str) -> dict[str, Any]:
    """What a script wrote; empty where it was not run yet."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _shown(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: format(row[key], form)


def _multiple(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def _layouts(measured: list[dict[str, Any]], reducer: str) -> str:
    ratios = {row["layout"]: row["x floor"] for row in measured if row["reducer"] == reducer}
    return ", ".join(f"{ratio:.0f}x {layout}" for layout, ratio in ratios.items())


if __name__ == "__main__":
    for page, text in written():
        page.write_text(text)
