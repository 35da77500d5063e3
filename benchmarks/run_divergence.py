"""What `divergence` names of pairs of recorded runs: planted faults, faults of DEForm, and healthy runs.

Three tables. The first two count how often the phase and the layer are named right; the third says how far healthy runs are apart
that differ by rounding or data. `--page` writes them into docs/divergence-scores.md.

Run: pip install --no-deps defaultplusplus && pip install transformers
     python benchmarks/run_divergence.py [--only planted|deform|healthy], about ten minutes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch._inductor.config  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from planted_divergences import PLANTED  # noqa: E402
from planted_runs import PLANTED_RUNS, PlantedRun, twin_run  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.optim import SGD, Adam, Optimizer  # noqa: E402

from benchmarks.diagnosis import deform  # noqa: E402
from benchmarks.measure import RESULTS, versions, write  # noqa: E402
from recorders import Recording, RunDivergence, divergence, load  # noqa: E402
from recorders.watch.presets import fingerprints  # noqa: E402

PAGE = ROOT / "docs" / "divergence-scores.md"

# Planted faults


def planted() -> list[dict[str, Any]]:
    """A row for each fault of the tests, and for each twin with other names."""
    kinds: list[tuple[str, bool, Sequence[PlantedRun]]] = [
        ("twins", False, [twin_run(one) for one in PLANTED]),
        ("twins, other names", True, [twin_run(one, True) for one in PLANTED]),
        ("trainings", False, PLANTED_RUNS),
    ]
    rows = []
    for kind, rewritten, faults in kinds:
        for fault in faults:
            healthy, faulty = fault.healthy.recorded(), fault.faulty.recorded()
            again = fault.healthy.recorded()
            for with_repeat in (False, True):
                begin = time.perf_counter()
                found = divergence(healthy, faulty, repeat=again if with_repeat else None)
                seconds = time.perf_counter() - begin
                row = {"kind": kind, "fault": fault.name, "repeat": with_repeat, "right": fault.is_right(found, rewritten)}
                rows.append({**row, **_said(found), "expected": list(fault.places), "seconds": seconds})
                _print(rows[-1])
    return rows


# DEForm

_NOTHING = ""
_LAYER = "distilbert.transformer.layer.0"
_EMBEDDED = "distilbert.embeddings"
_Q, _K, _V = (f"{_LAYER}.attention.{name}_lin" for name in "qkv")

EXPECTED: dict[str, tuple[str, tuple[str, ...], str]] = {
    # phase, names, why; from the injectors of DEForm 0.4.1. They change all layers, of which the first is meant.
    "MZM": ("forward", (f"{_LAYER}.attention",), "the mask is changed within the attention"),
    "MIM": ("forward", (f"{_LAYER}.attention",), "the mask is changed within the attention"),
    "MRM": ("forward", (f"{_LAYER}.attention",), "the mask is changed within the attention"),
    "QZQ": ("parameters", (f"{_Q}.*",), "weights of queries are 0"),
    "QZK": ("parameters", (f"{_K}.*",), "weights of keys are 0"),
    "QZV": ("parameters", (f"{_V}.*",), "weights of values are 0"),
    "QSW": ("parameters", (f"{_Q}.*", f"{_K}.*"), "weights of queries and keys are exchanged"),
    "QTH": ("parameters", (f"{_Q}.*", f"{_K}.*", f"{_V}.*"), "all rows are the first one"),
    "QFG": (
        "backward",
        tuple(f"distilbert.transformer.layer.3.attention.{name}_lin" for name in "qkv"),
        "frozen; last layer is first",
    ),
    "SDS": (_NOTHING, (), "it changes nothing: only outputs are mapped, and this has no mapping"),
    "SPD": ("forward", (_Q,), "dropout on outputs of all modules in attentions, of which this is called first"),
    "SUC": ("forward", (_Q,), "outputs of all modules in attentions rounded to float16"),
    "POE": ("forward", (f"{_EMBEDDED}.position_embeddings",), "its output is 0"),
    "PSI": (_NOTHING, (), "only a keyword is shifted, and the net gives none"),
    "PTL": (_NOTHING, (), "only a keyword is cut, and the net gives none"),
    "KSB": (_NOTHING, (), "it changes nothing"),
    "KMD": (_NOTHING, (), "only a keyword is changed, and the net gives none"),
    "KFT": (_NOTHING, (), "it changes nothing"),
    "VSH": ("forward", (_Q,), "outputs of all modules in attentions are 0"),
    "VEC": (_NOTHING, (), "the first two tokens are seen, which they are anyhow"),
    "ETZ": ("parameters", (f"{_EMBEDDED}.word_embeddings.*",), "rows are 0"),
    "ESW": ("parameters", (f"{_EMBEDDED}.word_embeddings.*",), "rows are exchanged"),
    "ESS": ("parameters", (f"{_EMBEDDED}.*",), "no segments: all parameters of embeddings are scaled"),
    "FSW": ("parameters", (f"{_LAYER}.ffn.*",), "weights are scaled"),
    "FDN": ("parameters", (f"{_LAYER}.ffn.*",), "rows are 0"),
    "FCA": ("forward", (f"{_LAYER}.ffn.activation", f"{_LAYER}.ffn"), "another activation"),
    "FRG": (_NOTHING, (), "it sets an attribute that nothing reads"),
    "FWI": ("parameters", (f"{_LAYER}.ffn.*",), "weights begin otherwise"),
    "NSG": ("parameters", (f"{_EMBEDDED}.LayerNorm.weight",), "the first layer norm"),
    "NZG": ("parameters", (f"{_EMBEDDED}.LayerNorm.weight",), "the first layer norm"),
    "NSB": ("parameters", (f"{_EMBEDDED}.LayerNorm.bias",), "the first layer norm"),
    "NCE": ("forward", (f"{_EMBEDDED}.LayerNorm",), "eps of the first layer norm"),
    "RRS": ("forward", (f"{_EMBEDDED}.LayerNorm",), "all with 'layer' in their name: the output of this is 0 first"),
    "RSR": ("forward", (f"{_EMBEDDED}.LayerNorm",), "all with 'layer' in their name: the output of this is scaled first"),
    "RIN": ("forward", (f"{_EMBEDDED}.LayerNorm",), "all with 'layer' in their name: the output of this gets noise first"),
    "RGC": (_NOTHING, (), "it sets an attribute that nothing reads"),
    "OSL": ("forward", ("pre_classifier",), "all with 'classifier' in their name: the output of this is scaled first"),
    "OZR": ("parameters", ("pre_classifier.*",), "rows are 0"),
    "ORI": ("parameters", ("pre_classifier.*",), "weights begin otherwise"),
    "OOD": ("forward", ("pre_classifier",), "its output is turned by one class"),
}
SAME = {("FCA", "GELU"): "the activation is GELU already"}


def _encoder(fault: tuple[str, Any] | None, steps: int = 5, change: Change | None = None) -> Recording:
    training = deform.Run(deform.TASKS["encoder"], deform.VARIANTS[0])
    if change is not None:
        torch.set_num_threads(change.threads)
        training.variant = deform.VARIANTS[change.order]
        training.net.to(change.dtype)
        forward = training.net.forward

        def around(**given: Any) -> Any:
            with change.around():
                return forward(**given)

        training.net.forward = around  # type: ignore[method-assign]
        if change.compiled:
            training.net.compile()  # type: ignore[no-untyped-call]
    with deform._fault(training.net, *fault) if fault else contextlib.nullcontext():
        with fingerprints().modules(training.net) as recorder:
            for number, _ in enumerate(training.steps(), 1):
                if number == steps:
                    break
        torch.set_num_threads(1)
        return recorder.snapshot()


def operators() -> list[dict[str, Any]]:
    """A row for each operator of DEForm, and each value of its parameter."""
    healthy, again = _encoder(None), _encoder(None)
    rows = []
    for operator, _, value in deform.operators("encoder", [], True):
        faulty = _encoder((operator, value))
        for with_repeat in (False, True):
            found = divergence(healthy, faulty, repeat=again if with_repeat else None)
            phase, names, why = EXPECTED[operator]
            if (operator, value) in SAME:
                phase, names, why = _NOTHING, (), SAME[operator, value]
            right = found.phase == phase and (not phase or any(fnmatchcase(found.name, name) for name in names)) and found.step <= 0
            row = {"operator": operator, "value": value, "repeat": with_repeat, "right": right, "changes nothing": _is_equal(found)}
            rows.append({**row, **_said(found), "expected": [phase, *names], "why": why})
            _print(rows[-1])
    return rows


def _is_equal(found: RunDivergence) -> bool:
    return "all that both recorded is equal, bit for bit" in found.notes


# Healthy runs


@dataclass(frozen=True)
class Healthy:
    """A small training that nothing is wrong with.

    Attributes:
        net: what is trained.
        batch: of a number of samples and a generator: what the net gets, and what it should return.
        attends: whether it calls scaled_dot_product_attention.
        half: whether PyTorch computes it in float16 on a CPU.
    """

    net: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    attends: bool = False
    half: bool = True


class Attends(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Characters, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(20, 24), nn.LSTM(24, 32, 2, batch_first=True), nn.Linear(32, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])  # type: ignore[no-any-return]


class Patches(nn.Module):
    """A picture in patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        self.blocks = nn.Sequential(*(Attends(32, False) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def _language() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 32), *(Attends(32, True) for _ in range(3)), nn.LayerNorm(32), nn.Linear(32, 20))


def _vectors(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(number, 20, generator=generator)
    return x, x[:, :10].argmax(1)


def _pictures(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.randint(10, (number,), generator=generator)
    x = torch.randn(number, 3, 16, 16, generator=generator)
    return x + 0.5 * torch.sin(torch.arange(16.0) * (1 + y[:, None]) / 4)[:, None, None, :], y


def _words(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(20, (number, 12), generator=generator)
    return x, (x + x.roll(1, 1)) % 20


NETS = {
    "MLP": Healthy(_mlp, _vectors),
    "CNN, batch norm": Healthy(_cnn, _pictures),
    "LSTM": Healthy(Recurrent, _words, half=False),
    "decoder": Healthy(_language, _words, attends=True),
    "ViT": Healthy(Patches, _pictures, attends=True),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, 0.05, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, 2e-3),
}


@dataclass(frozen=True)
class Change:
    """What differs between two healthy runs.

    Attributes:
        words: for the table.
        around: each forward.
        dtype: of the whole net.
        compiled: whether the net is.
        order: seed of the order of the batches.
        parts: batches that one is split into.
        threads: of PyTorch.
        ranks: processes that get a part of each batch, and average gradients.
        scaled: whether the loss is, as for float16.
        attention: only for nets that have one.
        phases: that may be named.
    """

    words: str
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    order: int = 0
    parts: int = 1
    threads: int = 1
    ranks: int = 1
    scaled: bool = False
    attention: bool = False
    phases: tuple[str, ...] = ("",)


BASE = Change("nothing")
MATH = Change("attention", lambda: sdpa_kernel(SDPBackend.MATH), attention=True)
CHANGES = (
    (BASE, BASE),
    (BASE, Change("the order of the batches", order=1, phases=("input",))),
    (BASE, Change("a batch of 16 in two of 8", parts=2, phases=("", "input"))),
    (BASE, Change("1 process, 2 ranks", ranks=2, phases=("input",))),
    (BASE, Change("1 thread, 2 threads", threads=2)),
    (BASE, Change("eager, compiled", compiled=True)),
    (BASE, Change("float32, autocast to bfloat16", lambda: torch.autocast("cpu", torch.bfloat16))),
    (BASE, Change("float32, autocast to float16", lambda: torch.autocast("cpu", torch.float16), scaled=True)),
    (BASE, Change("float32, bfloat16", dtype=torch.bfloat16)),
    (MATH, Change("attention: math, flash", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), attention=True)),
)
STEPS, SHOWN = 31, (0, 10, 30)


def healthy_run(net: str, optimizer: str, change: Change) -> Recording:
    """Trains so many steps, and returns the recording; of several ranks that of the first."""
    if change.ranks == 1:
        return _train(net, optimizer, change)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (net, optimizer, change, folder), change.ranks)  # type: ignore[attr-defined, no-untyped-call]
        return load(Path(folder) / "0")


def _rank(rank: int, net: str, optimizer: str, change: Change, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=change.ranks)
    try:
        _train(net, optimizer, change, rank).save(Path(folder) / str(rank))
    finally:
        dist.destroy_process_group()


def _train(net: str, optimizer: str, change: Change, rank: int = 0) -> Recording:
    torch.set_num_threads(change.threads)
    torch.manual_seed(0)
    model = NETS[net].net().to(change.dtype)
    generator = torch.Generator().manual_seed(1)
    batches = [NETS[net].batch(16, generator) for _ in range(STEPS)]
    if change.order:
        order = torch.randperm(STEPS, generator=torch.Generator().manual_seed(change.order)).tolist()
        batches = [batches[index] for index in order]
    steps = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.GradScaler("cpu", enabled=change.scaled)
    called: Callable[..., Any] = torch.compile(model) if change.compiled else model
    if change.ranks > 1:
        called = nn.parallel.DistributedDataParallel(model)
    with fingerprints().modules(model) as recorder:
        for x, y in batches:
            x, y = x.chunk(change.ranks)[rank], y.chunk(change.ranks)[rank]
            for part, target in zip(x.chunk(change.parts), y.chunk(change.parts), strict=True):
                with change.around():  # around one forward: autocast keeps rounded weights as long as it is on
                    output = called(part.to(change.dtype) if part.is_floating_point() else part).float()
                scaler.scale(F.cross_entropy(output.flatten(0, -2), target.flatten()) / change.parts).backward()
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
    torch.set_num_threads(1)
    return recorder.snapshot()


def healthy() -> Iterator[dict[str, Any]]:
    """A row for each pair of healthy runs."""
    for net_name, net in NETS.items():
        for optimizer_name in OPTIMIZERS:
            made: dict[Change, Recording] = {}
            for first, second in CHANGES:
                if (second.attention and not net.attends) or (second.scaled and not net.half):
                    continue
                if first not in made:
                    made[first] = healthy_run(net_name, optimizer_name, first)
                yield _pair(net_name, optimizer_name, second, made[first], healthy_run(net_name, optimizer_name, second))
    first_run = _encoder(None, STEPS)
    for _, change in CHANGES:
        if change.ranks == change.parts == 1 and not change.attention and not change.scaled:
            yield _pair("DistilBERT", "AdamW", change, first_run, _encoder(None, STEPS, change))


def _pair(net: str, optimizer: str, change: Change, first: Recording, second: Recording) -> dict[str, Any]:
    found = divergence(first, second)
    apart = {str(at.step): _numbers((at.output, at.gradient, at.weight)) for at in found.growth if at.step in SHOWN}
    right = _is_equal(found) if change is BASE else found.phase in change.phases
    row = {"net": net, "optimizer": optimizer, "change": change.words, "right": right, **_said(found)}
    _print(row)
    return {**row, "apart": apart}


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


# Tables


def _said(found: RunDivergence) -> dict[str, Any]:
    return {
        "phase": found.phase,
        "step": found.step,
        "name": found.name,
        "differs": found.differs,
        "distance": _numbers([found.distance])[0],
        "allowed": _numbers([found.allowed])[0],
    }


def _print(row: dict[str, Any]) -> None:
    what = "  ".join(str(row[key]) for key in ("kind", "fault", "operator", "value", "net", "optimizer", "change") if key in row)
    repeat = ", repeat" if row.get("repeat") else ""
    said = f"{row['phase'] or 'nothing'} {row['name']} at {row['step']} ({row['differs']}; {row['distance']}, {row['allowed']})"
    print(f"{'right' if row['right'] else 'WRONG'}  {what}{repeat}: {said}", flush=True)


def page(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The tables of docs/divergence-scores.md."""
    lines = ["| planted | faults | named right | with `repeat` |", "|---|---|---|---|"]
    rows = results["planted"]
    for kind, words in (
        ("twins", "in a net, same names"),
        ("twins, other names", "in a net, other names in the second"),
        ("trainings", "in a training"),
    ):
        lines.append(_counted(words, [row for row in rows if row["kind"] == kind]))
    changing = [row for row in results["deform"] if not row["changes nothing"]]
    names = {row["operator"] for row in changing}
    lines.append(_counted(f"by {len(names)} operators of DEForm, all their values", changing))
    nothing = [row for row in results["deform"] if row["changes nothing"]]
    still = sorted({str(row["operator"]) for row in nothing} - names)
    expected = all(row["right"] for row in nothing)
    lines += [
        "",
        f"These operators of DEForm change nothing in this encoder: {', '.join(still)}. The runs are equal, bit for bit; ",
    ]
    lines[-1] += "nothing is named." if expected else "yet something is named."
    wrong = sorted({_fault_of(row) for row in [*rows, *changing] if not row["right"] and not row["repeat"]})
    lines += ["", f"Not named right without `repeat`: {', '.join(wrong) or 'none'}."]
    healthy = results["healthy"]
    lines += ["", "## Expected distances", ""]
    lines += [f"Of {len(healthy)} pairs of healthy runs, {sum(row['right'] for row in healthy)} are told right.", ""]
    lines += ["| what differs | named | outputs at step 0, 10, 30 | gradients | parameters |", "|---|---|---|---|---|"]
    for change in dict.fromkeys(row["change"] for row in healthy):
        own = [row for row in healthy if row["change"] == change]
        counts = Counter(row["phase"] or "nothing" for row in own)
        named = ", ".join(f"{what} {count}" for what, count in counts.most_common())
        cells = [", ".join(_range([row["apart"][str(step)][which] for row in own]) for step in SHOWN) for which in range(3)]
        lines.append(f"| {change} | {named} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _counted(words: str, rows: Sequence[Mapping[str, Any]]) -> str:
    counts = [[row["right"] for row in rows if row["repeat"] is repeat] for repeat in (False, True)]
    return f"| {words} | {len(counts[0])} | {sum(counts[0])} | {sum(counts[1])} |"


def _fault_of(row: Mapping[str, Any]) -> str:
    return str(row["fault"] if "fault" in row else f"{row['operator']} {row['value']}")


def _range(values: Sequence[float | None]) -> str:
    """The smallest and the largest."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    least, most = (
        f"{value:.0e}".replace("e-0", "e-") if value < 0.01 and value else f"{value:.2g}" for value in (min(known), max(known))
    )
    return least if least == most else f"{least} to {most}"


def _write_page(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    begin, end = "<!-- runs -->", "<!-- /runs -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{page(results)}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("planted", "deform", "healthy"))
    parser.add_argument("--page", action="store_true", help="only write the tables of the results into docs/divergence-scores.md")
    only, tables = vars(parser.parse_args()).values()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    path = RESULTS / "run_divergence.json"
    kept = json.loads(path.read_text()) if (only or tables) and path.exists() else {}
    torch._inductor.config.fallback_random = True  # otherwise a compiled dropout draws other numbers, and is named rightly
    if tables:
        _write_page(kept)
        return
    results = {name: kept.get(name, []) for name in ("planted", "deform", "healthy")}
    for name, rows in (("planted", planted), ("deform", operators), ("healthy", lambda: list(healthy()))):
        if only in (None, name):
            results[name] = rows()
            print(f"{name}: {sum(row['right'] for row in results[name])} of {len(results[name])} right")
    write("run_divergence", packages=versions("defaultplusplus", "transformers"), **results)


if __name__ == "__main__":
    main()
