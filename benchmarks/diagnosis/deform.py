"""DEFault++ and our diagnosis on tiny transformers into which the operators of DEForm plant faults.

DEFault++ (https://github.com/SigmaJahan/DEFaultplusplus-Transformer-Debugging, package `defaultplusplus`) brings both the operators
and a pretrained predictor. A tiny DistilBERT learns which topic is in the first half of a text, a tiny GPT-Neo learns a language
in which the first token says which of two tables gives the next one. Each operator trains with its fault from the first step on.
Its outcome is compared with that of the same training without the fault, same seed: an operator whose fault changes no outcome is
no fault to find, and is left out of the figures.

DEFault++ is read in three ways, because its predictor was trained on fine-tunings of big models, on features of names that its
extractor of version 0.4.1 does not all produce:

- published: `FeatureExtractor`, `RuntimeNormalizer`, `Predictor`, as its documentation says. It fills features that did not come
  with the medians of its own healthy runs.
- named: the same figures of each step, made into the features that the predictor was trained on by the package's own
  `build_feature_vector` under the names it was trained with. Ours, in favour of DEFault++.
- centred: named, and each feature moved and scaled by what the other healthy runs of this benchmark have, to what the healthy runs
  of DEFault++ have. This tells it what is healthy here.

Ours is asked twice: by its rules alone, and with one healthy training of another seed at hand (`findings(..., against=)`).

Run: pip install --no-deps defaultplusplus && pip install transformers scikit-learn pandas
     python -m benchmarks.diagnosis.deform [--arch encoder|decoder] [--operators QZQ,FCA] [--seeds 2] [--all] [--without-ours]
     python -m benchmarks.diagnosis.deform --only-ours, which takes what DEFault++ said from the results, and asks ours anew
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import recorders
from benchmarks.measure import RESULTS, versions, write

EPOCHS, STEPS, BATCH, LENGTH = 6, 10, 16, 24
LAYERS = 4
CHANGED = 0.1  # of what is learned, in each seed: less is no fault to find
READINGS = ("published", "named", "centred")
Batch = dict[str, Tensor]


class MissingPeerError(ImportError):
    """DEFault++ is not installed."""

    def __init__(self, missing: object) -> None:
        super().__init__(
            f"{missing}. This benchmark needs DEFault++: pip install defaultplusplus (or with --no-deps, and transformers, "
            "scikit-learn, pandas and scipy beside it)"
        )


@dataclass(frozen=True)
class Variant:
    """What differs between healthy trainings: `rate` is a factor of the learning rate."""

    seed: int
    rate: float = 1.0
    width: int = 64


VARIANTS = (
    Variant(0),
    Variant(1),
    Variant(2, rate=0.7),
    Variant(3, rate=1.5),
    Variant(4, width=48),
    Variant(5, width=96),
    Variant(6, rate=0.8, width=96),
    Variant(7, rate=1.25, width=48),
)


@dataclass(frozen=True)
class Task:
    """A kind of transformer and what it learns.

    Attributes:
        net: of a width.
        batch: of a number of sequences and a seed.
        score: of a net in evaluation mode and a batch; higher is better.
        chance: the score of a net that learned nothing.
        rate: the learning rate.
    """

    arch: str
    net: Callable[[int], nn.Module]
    batch: Callable[[int, int], Batch]
    score: Callable[[nn.Module, Batch], float]
    chance: float
    rate: float


def _padded(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    kept = torch.arange(tokens.shape[1]) < tokens.shape[1] - torch.randint(0, 6, (len(tokens), 1), generator=generator)
    return tokens.where(kept, torch.zeros_like(tokens)), kept.long()


def topics(texts: int, seed: int) -> Batch:
    """Texts of which the first half has words of one topic of four, the second half of another; which is first is asked for."""
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randint(4, (texts, 2), generator=generator)
    words = 10 + 8 * halves.repeat_interleave(LENGTH // 2 - 1, 1) + torch.randint(8, (texts, LENGTH - 2), generator=generator)
    fillers = torch.randint(42, 100, words.shape, generator=generator)
    words = words.where(torch.rand(words.shape, generator=generator) < 0.5, fillers)
    tokens, kept = _padded(torch.cat([torch.full((texts, 1), 2), words], 1), generator)
    return {"input_ids": tokens, "attention_mask": kept, "labels": (halves[:, 0] >= 2).long()}


def language(texts: int, seed: int) -> Batch:
    """Texts whose first token says which of two tables gives the next token of the last; 15 % of the tokens are noise."""
    generator, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(123)
    tables = torch.stack([torch.randperm(8, generator=fixed) for _ in range(2)])
    which = torch.randint(2, (texts,), generator=generator)
    tokens = [which + 2, 4 + torch.randint(8, (texts,), generator=generator)]
    for _ in range(LENGTH - 2):
        noise = 4 + torch.randint(8, (texts,), generator=generator)
        tokens.append((4 + tables[which, tokens[-1] - 4]).where(torch.rand(texts, generator=generator) < 0.85, noise))
    padded, kept = _padded(torch.stack(tokens, 1), generator)
    return {"input_ids": padded, "attention_mask": kept, "labels": padded.where(kept.bool(), torch.full_like(padded, -100))}


def _encoder(width: int) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    # BERT itself is not to be had: the extractor of 0.4.1 subtracts the input of `intermediate` from its wider output, and raises
    config = DistilBertConfig(
        vocab_size=100, dim=width, n_layers=LAYERS, n_heads=4, hidden_dim=2 * width, max_position_embeddings=64
    )
    config.num_labels = 2
    config._attn_implementation = "eager"
    return DistilBertForSequenceClassification(config)


def _decoder(width: int) -> nn.Module:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    # GPT-2 has one layer for query, key and value, which the operators of these do not find
    config = GPTNeoConfig(
        vocab_size=12,
        hidden_size=width,
        num_layers=LAYERS,
        num_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=64,
        attention_types=[[["global", "local"], LAYERS // 2]],
        resid_dropout=0.1,
        embed_dropout=0.1,
        bos_token_id=1,
        eos_token_id=1,
    )
    config._attn_implementation = "eager"
    return GPTNeoForCausalLM(config)


def _accuracy(net: nn.Module, batch: Batch) -> float:
    return float((net(**batch).logits.argmax(-1) == batch["labels"]).float().mean())


def _minus_loss(net: nn.Module, batch: Batch) -> float:
    return -float(net(**batch).loss)


TASKS = {
    "encoder": Task("encoder", _encoder, topics, _accuracy, chance=0.5, rate=1e-3),
    "decoder": Task("decoder", _decoder, language, _minus_loss, chance=-float(np.log(8)), rate=3e-3),
}


@dataclass(frozen=True)
class Step:
    """A training step that was taken; `validation` is called only by those who look at validation scores."""

    loss: Tensor
    outputs: Any
    batch: Batch
    optimizer: torch.optim.Optimizer
    ends_epoch: bool
    validation: Callable[[], dict[str, float]]


class Run:
    """One training, with or without a fault.

    Attributes:
        net: the network.
        score: at the end, in evaluation mode, with the fault still there; of which `outcome` is finite or minus infinity.
    """

    def __init__(self, task: Task, variant: Variant, *, attentions: bool = False) -> None:
        torch.manual_seed(variant.seed)
        self.task, self.variant, self.attentions = task, variant, attentions
        self.net = task.net(variant.width)
        self.held_out = task.batch(256, 10_001)
        self.outcome = float("nan")

    def steps(self) -> Iterator[Step]:
        """Trains, and yields each step."""
        data = self.task.batch(BATCH * STEPS * EPOCHS // 2, 10_000)
        generator = torch.Generator().manual_seed(self.variant.seed)
        order = torch.cat([torch.randperm(len(data["labels"]), generator=generator) for _ in range(2)]).reshape(-1, BATCH)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.task.rate * self.variant.rate)
        extra = {"output_attentions": True, "output_hidden_states": True} if self.attentions else {}
        torch.manual_seed(self.variant.seed + 1)
        for number in range(EPOCHS * STEPS):
            self.net.train()
            batch = {name: values[order[number]] for name, values in data.items()}
            outputs = self.net(**batch, **extra)
            optimizer.zero_grad()
            if outputs.loss.requires_grad:
                outputs.loss.backward()
            optimizer.step()
            ends = (number + 1) % STEPS == 0
            yield Step(outputs.loss.detach(), outputs, batch, optimizer, ends, self._validation)
        score = self._validation()["score"]
        self.outcome = score if np.isfinite(score) else float("-inf")

    def _validation(self) -> dict[str, float]:
        self.net.eval()
        with torch.random.fork_rng(), torch.no_grad():
            score = self.task.score(self.net, self.held_out)
            loss = float(self.net(**self.held_out).loss)
        return {"score": score, "loss": loss, **({"accuracy": score} if self.task.arch == "encoder" else {})}


def recorded(net: nn.Module, steps: Iterable[Step]) -> tuple[recorders.Recorder, Batch]:
    """What our diagnosis looks at, and the last batch. `steps` trains."""
    recorder = recorders.presets.health().modules(net)
    batch: Batch = {}
    with recorder:
        for step in steps:
            batch = step.batch
            recorder.push("loss", step.loss)
            recorder.push("target", batch["labels"])
    return recorder, batch


@cache
def good_run(arch: str, variant: Variant) -> recorders.Learned:
    """What a healthy training of another seed was like."""
    training = Run(TASKS[arch], replace(variant, seed=variant.seed + 100))
    return recorders.learn(recorded(training.net, training.steps())[0])


def ours(net: nn.Module, steps: Iterable[Step], good: recorders.Learned) -> dict[str, list[str]]:
    """What our diagnosis says of a training, by its rules alone and with a good run at hand: the faults found, worst first."""
    recorder, batch = recorded(net, steps)
    found = {
        "rules": recorders.findings(recorder, example=batch, target=batch["labels"]),
        "good run": recorders.findings(recorder, against=good, example=batch, target=batch["labels"]),
    }
    return {how: [f"{finding.layer}: {finding.what}" for finding in several] for how, several in found.items()}


@dataclass(frozen=True)
class Verdict:
    """What DEFault++ says; `margin` is the logit of faulty less that of healthy, which tells more than a probability of 1.0."""

    faulty: bool
    probability: float
    margin: float
    category: str | None
    root_cause: str | None


class Peer:
    """The predictor of DEFault++ for one architecture."""

    def __init__(self, arch: str) -> None:
        try:
            from defaultplusplus.diagnosis import load_pretrained
            from defaultplusplus.processing import RuntimeNormalizer
        except ImportError as missing:
            raise MissingPeerError(missing) from missing
        self.arch = arch
        self.predictor = load_pretrained(arch)
        self.normalizer = RuntimeNormalizer.load(arch)

    def features(self, net: nn.Module, steps: Iterable[Step]) -> dict[str, dict[str, float]]:
        """Of a training, its features by reading. `steps` trains."""
        from defaultplusplus import FeatureExtractor

        history: list[dict[str, float]] = []
        validations: dict[str, list[float]] = defaultdict(list)
        with FeatureExtractor(net, arch=self.arch) as extractor:
            for step in steps:
                history.append(
                    extractor.step(
                        loss=step.loss,
                        outputs=step.outputs,
                        input_ids=step.batch["input_ids"],
                        attention_mask=step.batch["attention_mask"],
                        labels=step.batch["labels"],
                        optimizer=step.optimizer,
                    )
                )
                _keep_parameters(extractor)
                if step.ends_epoch:
                    extractor.epoch_end()
                    scores = {name: value for name, value in step.validation().items() if name != "score" and np.isfinite(value)}
                    extractor.record_validation(len(history) // STEPS - 1, scores)
                    for name, value in scores.items():
                        validations[name].append(value)
            published = extractor.finalize()
        return {"published": published, "named": _named(history, validations)}

    def covered(self, features: Mapping[str, float]) -> tuple[int, int]:
        """How many of the features that the predictor expects came, and how many it expects."""
        present, expected = self.normalizer.coverage(features)
        return int(present), int(expected)

    def predict(self, features: Mapping[str, float], healthy: Sequence[Mapping[str, float]] = ()) -> Verdict:
        """What it says of features; if there are `healthy` runs, of features that these are the centre and the scale of."""
        encoded = self.normalizer.encode(features)
        if healthy:
            encoded = self._centred(encoded, [self.normalizer.encode(each) for each in healthy])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas, of a fragmented frame
            said = self.predictor.predict(encoded)
            with torch.no_grad():
                encoding, _ = self.predictor.model.encode(torch.from_numpy(self.predictor._vectorize(encoded))[None])
                healthy_logit, faulty_logit = self.predictor.model.detect(encoding)[0].tolist()
        margin = faulty_logit - healthy_logit
        return Verdict(bool(said.is_faulty), float(said.detection_prob), margin, said.category, said.root_cause)

    def _centred(self, encoded: Mapping[str, float], healthy: Sequence[Mapping[str, float]]) -> dict[str, float]:
        reference = self.normalizer.reference
        centred = {}
        for name, middle, scale in zip(reference.schema, reference.median, reference.mad, strict=True):
            here = np.array([each[name] for each in healthy])
            spread = 1.4826 * np.median(np.abs(here - np.median(here))) or here.std()
            # a feature that is the same in all healthy runs has no scale of its own; that of DEFault++ must do
            centred[name] = float(middle + (encoded[name] - np.median(here)) / (spread or scale) * scale)
        return centred


def _keep_parameters(extractor: Any) -> None:
    """Copies the parameters that the update ratios are differences to: on a CPU, 0.4.1 keeps the parameters themselves."""
    for module in extractor.collector._modules:
        kept = getattr(module, "_previous_params", None)
        if kept:
            module._previous_params = {name: value.clone() for name, value in kept.items()}


def _named(history: Sequence[Mapping[str, float]], validations: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The features under the names of the predictor: of the figures of each step, and of layers by thirds of the depth."""
    from defaultplusplus.extraction.feature_construction import (
        EpochTrace,
        LayerInternalTrace,
        StepTrace,
        TrainingTrace,
        build_feature_vector,
    )

    figures = sorted(set().union(*history))
    values = {name: np.array([step.get(name, np.nan) for step in history], dtype=float) for name in figures}
    layers: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name in figures:
        if of_layer := re.match(r"L(\d+)_(.*)", name):
            layers[of_layer[2]][int(of_layer[1])] = values[name]
    by_depth = {}
    for name, found in layers.items():
        depth = np.full((len(history), LAYERS), np.nan)
        for layer, series in found.items():
            depth[:, layer] = series
        by_depth[name] = LayerInternalTrace(depth)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy, of means of nothing
        built = build_feature_vector(
            TrainingTrace(
                layer_internal=by_depth,
                step_level={name: StepTrace(series) for name, series in values.items()},
                epoch_level={f"val_val_{name}": EpochTrace(np.array(series)) for name, series in validations.items()},
                epoch_boundaries=[STEPS * (epoch + 1) for epoch in range(EPOCHS)],
            )
        )
    return {re.sub("__(early|mid)_(mean|std)__", r"__layer_\1_\2__", name): value for name, value in built.items()}


@dataclass
class Row:
    """A training, and what was said of it.

    Attributes:
        name: the operator and its parameter, or the healthy variant.
        component: what the operator changes; None if healthy.
        change: what it changed of the outcome, as a share of what is learned: -1 is all of it.
        problem: why there is nothing else.
    """

    name: str
    arch: str
    seed: int
    component: str | None = None
    outcome: float = float("nan")
    change: float = 0.0
    problem: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peer: dict[str, Verdict] = field(default_factory=dict)
    ours: dict[str, list[str]] | None = None


def operators(arch: str, chosen: Sequence[str], every_value: bool) -> Iterator[tuple[str, str, Any]]:
    """Of the operators that DEForm has for an architecture, name, component and value of the parameter; the middle one or all."""
    try:
        from defaultplusplus.deform.operators import list_operators
    except ImportError as missing:
        raise MissingPeerError(missing) from missing
    for operator in list_operators(arch):
        grid = operator.param_grid
        if not chosen or operator.op_id in chosen:
            for value in grid if every_value and grid else (grid[len(grid) // 2] if grid else None,):
                yield operator.op_id, operator.component.value, value


def _fault(net: nn.Module, operator: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    from defaultplusplus.deform import get_injector

    made: contextlib.AbstractContextManager[Any] = get_injector(operator, param_value=value)(net)
    return made


def observe(
    peer: Peer, row: Row, task: Task, variant: Variant, fault: tuple[str, Any] | None, with_ours: bool
) -> dict[str, dict[str, float]]:
    """Trains twice, once watched by each, fills in the row, and returns the features of DEFault++; none if that raised."""

    def watched(watch: Callable[[nn.Module, Iterable[Step]], Any], who: str, **how: bool) -> tuple[Any, float]:
        started = time.perf_counter()
        training = Run(task, variant, **how)
        with _fault(training.net, *fault) if fault else contextlib.nullcontext():
            said = watch(training.net, training.steps())
        row.seconds[who] = round(time.perf_counter() - started, 2)
        return said, training.outcome

    try:
        features, row.outcome = watched(peer.features, "peer", attentions=True)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as raised:
        row.problem = f"{type(raised).__name__}: {raised}".splitlines()[0]
        return {}
    if with_ours:
        row.ours, _ = watched(partial(ours, good=good_run(task.arch, variant)), "ours")
    return {reading: dict(values) for reading, values in features.items()}


def judge(peer: Peer, row: Row, features: Mapping[str, Mapping[str, float]], healthy: Sequence[Mapping[str, float]]) -> None:
    """Fills in what DEFault++ says; `healthy` are the named features of the healthy runs, without the one of this seed."""
    for reading, values in features.items():
        row.peer[reading] = peer.predict(values)
    row.peer["centred"] = peer.predict(features["named"], healthy)


def benchmark(arch: str, chosen: Sequence[str], seeds: int, every_value: bool, with_ours: bool) -> dict[str, Any]:
    """Trains all of an architecture; the rows, and the share of features that came."""
    task, peer = TASKS[arch], Peer(arch)
    healthy: list[Row] = []
    features = []
    for variant in VARIANTS:
        row = Row(f"healthy {variant.seed}", arch, variant.seed)
        found = observe(peer, row, task, variant, None, with_ours)
        if not found:
            raise RuntimeError(f"a healthy training of DEFault++ failed: {row.problem}")
        healthy.append(row)
        features.append(found)
    for number, row in enumerate(healthy):
        judge(peer, row, features[number], [each["named"] for at, each in enumerate(features) if at != number])
        show(row)
    faulty = []
    for operator, component, value in operators(arch, chosen, every_value):
        for variant in VARIANTS[:seeds]:
            row = Row(operator if value is None else f"{operator} {value}", arch, variant.seed, component)
            if found := observe(peer, row, task, variant, (operator, value), with_ours):
                clean = healthy[variant.seed].outcome
                row.change = max((row.outcome - clean) / (clean - task.chance), -99.0)
                judge(peer, row, found, [each["named"] for at, each in enumerate(features) if at != variant.seed])
            show(row)
            faulty.append(row)
            if row.problem:
                break
    coverage = {reading: peer.covered(features[0][reading]) for reading in ("published", "named")}
    return {"rows": healthy + faulty, "coverage": coverage}


def ask_ours(arch: str, row: Row) -> None:
    """Trains once more what a row is about, watched by ours."""
    operator, _, shown = row.name.partition(" ")
    fault = None
    if row.component is not None:
        values = [value for _, _, value in operators(arch, [operator], True)]
        fault = (operator, next((value for value in values if str(value) == shown), None))
    good = good_run(arch, VARIANTS[row.seed])
    training = Run(TASKS[arch], VARIANTS[row.seed])
    with _fault(training.net, *fault) if fault else contextlib.nullcontext():
        row.ours = ours(training.net, training.steps(), good)


def show(row: Row) -> None:
    """Prints a row."""
    if row.problem:
        print(f"{row.arch} {row.name:18} seed {row.seed}  no training: {row.problem[:80]}", flush=True)
        return
    said = "  ".join(f"{reading} {verdict.category or '-':11}" for reading, verdict in row.peer.items())
    mine = "".join(f"  {how} {len(found)}: {found[0][:50] if found else '-'}" for how, found in (row.ours or {}).items())
    print(f"{row.arch} {row.name:18} seed {row.seed} {row.outcome:6.3f} change {row.change:+.2f}  {said}{mine}", flush=True)


def changed(rows: Sequence[Row]) -> set[str]:
    """The names of those whose fault changes the outcome in all seeds, in one direction."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.component and not row.problem:
            by_name[row.name].append(row.change)
    return {name for name, found in by_name.items() if min(found) > CHANGED or max(found) < -CHANGED}


def scores(rows: Sequence[Row], says: Callable[[Row], bool]) -> dict[str, float]:
    """How well faulty runs that have a changed outcome are told from healthy ones."""
    faults = changed(rows)
    counts = Counter((row.name in faults, says(row)) for row in rows if not row.component or row.name in faults)
    hits, missed, false, right = (counts[key] for key in ((True, True), (True, False), (False, True), (False, False)))
    recall, alarms = hits / max(hits + missed, 1), false / max(false + right, 1)
    return {
        "f1": 2 * hits / max(2 * hits + missed + false, 1),
        "recall": recall,
        "false_alarms": alarms,
        "balanced_accuracy": (recall + 1 - alarms) / 2,
        "faulty": hits + missed,
        "healthy": false + right,
    }


def _order(rows: Sequence[Row], reading: str) -> float:
    """How often a faulty run has the greater margin than a healthy one: 0.5 by chance, whatever the threshold is."""
    faults = changed(rows)
    faulty = np.array([row.peer[reading].margin for row in rows if row.name in faults])
    healthy = np.array([row.peer[reading].margin for row in rows if not row.component])
    return float(((faulty[:, None] > healthy) + 0.5 * (faulty[:, None] == healthy)).mean()) if len(faulty) else float("nan")


def _right_category(row: Row, reading: str) -> bool:
    return row.component is not None and (row.peer[reading].category or "").endswith(row.component)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The scores by who says it; "always" is who says of all runs that they are faulty."""
    faults = [row for row in rows if row.name in changed(rows)]
    found: dict[str, dict[str, float]] = {"always": scores(rows, lambda row: True)}
    for reading in READINGS:
        found[reading] = scores(rows, lambda row, reading=reading: row.peer[reading].faulty)  # type: ignore[misc]
        found[reading]["order"] = _order(rows, reading)
        found[reading]["right_category"] = sum(_right_category(row, reading) for row in faults) / max(len(faults), 1)
    if all(row.ours is not None for row in rows if not row.problem):
        for how, who in (("rules", "ours"), ("good run", "ours, told a good run")):
            found[who] = scores(rows, lambda row, how=how: bool(row.ours and row.ours[how]))  # type: ignore[misc]
    return found


def _read(stored: dict[str, Any]) -> Row:
    """A row as the results hold it."""
    return Row(**{**stored, "peer": {reading: Verdict(**said) for reading, said in stored["peer"].items()}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=tuple(TASKS), action="append")
    parser.add_argument("--operators", default="", help="names with commas; all if empty")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="all values of the parameters rather than the middle ones")
    parser.add_argument("--without-ours", action="store_true")
    parser.add_argument("--only-ours", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    names = [name for name in chosen.operators.split(",") if name]
    path = RESULTS / "diagnosis_deform.json"
    kept = json.loads(path.read_text()) if (chosen.arch or chosen.only_ours) and path.exists() else {}
    results: dict[str, Any] = {arch: kept[arch] for arch in TASKS if arch in kept}
    for arch in chosen.arch or TASKS:
        if chosen.only_ours:
            found = {"rows": [_read(row) for row in kept[arch]["rows"]], "coverage": kept[arch]["coverage"]}
            for row in found["rows"]:
                if row.problem is None:
                    ask_ours(arch, row)
                show(row)
        else:
            found = benchmark(arch, names, chosen.seeds, chosen.all, not chosen.without_ours)
        rows = found["rows"]
        print(f"\n{arch}: features that came {found['coverage']}; {len(changed(rows))} operators change the outcome")
        print(f"{'who':22} {'F1':>5} {'recall':>7} {'false alarms':>13} {'balanced':>9} {'order':>6} {'category':>9}")
        table = summary(rows)
        for who, figures in table.items():
            print(
                f"{who:22} {figures['f1']:5.2f} {figures['recall']:7.2f} {figures['false_alarms']:13.2f} "
                f"{figures['balanced_accuracy']:9.2f} {figures.get('order', float('nan')):6.2f} "
                f"{figures.get('right_category', float('nan')):9.2f}"
            )
        print(f"of {table['always']['faulty']:.0f} faulty and {table['always']['healthy']:.0f} healthy runs\n")
        results[arch] = {
            "scores": table,
            "coverage": found["coverage"],
            "changed": sorted(changed(rows)),
            "rows": [asdict(row) for row in rows],
        }
    write("diagnosis_deform", packages=versions("defaultplusplus", "transformers"), threshold=CHANGED, **results)


if __name__ == "__main__":
    main()
