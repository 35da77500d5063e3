"""findings(): what is likely wrong with a training, of a recorder, a recording or a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recorders.errors import in_a_line
from recorders.recorder.recorder import Recorder
from recorders.recorder.report import unexpected
from recorders.recordings.display import shown_name
from recorders.recordings.recording import Recording, Subrecording, check_recorded
from recorders.watch.diagnosis import batch_rules, layer_rules, loss_rules, net_rules, optimizer_rules, rank_rules, weight_rules
from recorders.watch.diagnosis.asked import has_unit_length, is_adversarial, only
from recorders.watch.diagnosis.coverage import coverage
from recorders.watch.diagnosis.evidence import Evidence, evidence
from recorders.watch.diagnosis.explaining import explained
from recorders.watch.diagnosis.finding import Finding, Findings, fault
from recorders.watch.diagnosis.learned import Against, learned_at
from recorders.watch.diagnosis.left_ranges import left_ranges
from recorders.watch.diagnosis.limits import WEIGHTED
from recorders.watch.diagnosis.over_time import findings_over_time
from recorders.watch.diagnosis.probe.probing import Probed, probed
from recorders.watch.timeline import Timeline


def findings(
    recorded: Recorder | Recording | Timeline,
    *,
    against: Against = None,
    example: Any = None,
    target: Any = None,
) -> Findings:
    """The likely faults of a training, worst first; empty if none was found.

    Examines what `presets.health()` records, or as much of it as was recorded. Of layers: NaN and infinity, layers that never ran,
    dead, saturated or equal units, outlier features, gradients that vanish, explode or never come, and weights that change too
    much, too little or not at all. Of the training: the loss, the steps of the optimizer, inputs and target. What was not recorded
    is not examined; `findings(...).examined` says what was, and in how many layers, `unexamined` what was not, and what to record
    for it. An empty list that prints "nothing was examined" says nothing of the net. Thresholds, and their sources, are in
    `recorders.watch.diagnosis.limits`; how often findings are right is in docs/findings-scores.md.
    A timeline also tells since when: see `findings_over_time`.

    What healthy trainings may have too, such as dead units of which a layer has no more than `limits.UNIT_SHARE`, is no fault; it
    is in `findings(...).notices`, and in what is printed.

    Weights with `requires_grad=False` are frozen on purpose, which is no fault. A recording does not tell that, so weights that
    never changed are a fault there only if gradients of them came; else `unexamined` names them.

    Args:
        recorded: a recorder, a recording, or a timeline that an `Inspector` wrote. Only a recorder knows why something was not
            recorded.
        against: what good runs of the same training were like, see `learn`: its file, or the recording of one good run. Then
            findings of the kind "left-range" name what is not like that. Not of a timeline.

        example: what the net is called with: a tensor, a tuple of positional arguments or a dict of keyword arguments, as for
            `Recorder.plan`; one that does not fit the parameters of `forward` is its only argument. Then a copy of the net runs
            10 to 80 times, twice on the whole example and else on at most 4 samples, see `probed`: whether samples mix, inputs
            have no effect, the future is seen, a dropout acts in evaluation, a state is carried over, attention reads one key
            alone, gradients are cut, or what the net returns last does not fit the target. Only of a recorder.
        target: the target of `example`, which tells whether the net predicts what comes next, and which cross entropy the loss is.

    Raises:
        TypeError: `example` was given with what is no recorder, `against` with a timeline, or `recorded` is something else.
        StorageError: what is at the path `against` cannot be read.

    >>> import torch
    >>> from recorders import ForwardMonitor
    >>> from reducers import Activity
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> _ = torch.nn.init.constant_(net[0].bias, -100.0)
    >>> with Recorder(ForwardMonitor(Activity())).modules(net, types=torch.nn.ReLU) as recorder:
    ...     _ = net(torch.ones(8, 2))
    >>> [(finding.layer, finding.what) for finding in findings(recorder)]
    [('1', '3 of 3 units are dead: they were never active')]
    """
    if example is not None and not isinstance(recorded, Recorder):
        raise TypeError("example= needs a recorder: nothing else holds the net, of which a copy is run")
    if isinstance(recorded, Timeline):
        if against is not None:
            raise TypeError("against= needs a recorder or a recording: a timeline does not hold what good runs are compared by")
        return findings_over_time(recorded)
    check_recorded(recorded, "findings")
    known, parts = evidence(recorded), recorded.snapshot()
    found, failed = _judged(known)
    left, compared = ([], 0) if against is None else left_ranges(known, learned_at(against))
    found += left
    runs = _runs(recorded, example, target, known)
    meant = {"bottleneck"} if is_adversarial(known) else set()  # what a generator gives its critic is no code of it
    meant |= {"dropout-on-outputs"} if any(one.kind == "evaluation-mode" for one in found) else set()  # then it does nothing
    found += [one for one in runs.found if one.kind not in meant]
    if not known.target and target is None:
        found = [replace(one, severity="notice") if _is_projection(known, one) else one for one in found]
    if not any(finding.kind == "nonfinite" for finding in found):
        found = [*_left_out(parts), *found]
    faults, notices = explained(found, known)
    unexamined, examined = coverage(known, parts)
    unexamined += [*failed, *runs.unexamined]
    examined += runs.examined
    if against is not None and compared:
        examined.append(f"ranges of good runs: {compared} statistics")
    elif against is not None:
        unexamined.append("ranges of good runs: record both with presets.health(), of one net, and at least a few steps")
    return Findings(faults, unexamined, examined, notices)


RULES = (
    *layer_rules.RULES,
    *weight_rules.RULES,
    *net_rules.RULES,
    *optimizer_rules.RULES,
    *batch_rules.RULES,
    *loss_rules.RULES,
    *rank_rules.RULES,
)
"""Each looks at what is known of a training, and yields what it finds."""


def _is_projection(known: Evidence, one: Finding) -> bool:
    """Whether it is told of a projector of a contrastive training that it reads what a linear layer gives.

    People read what the encoder gives, and throw away the projector after it: the first layer of a part of the net, or the last
    layer, if what it gives has a length of 1.
    """
    layers = [layer.name for layer in known.layers if layer.kind in WEIGHTED and not layer.whole]
    part, inner, _ = one.layer.partition(".")
    first = next((name for name in layers if inner and name.partition(".")[0] == part), None)
    output = only(known.outputs)
    last = layers[-1:] if output is not None and has_unit_length(output) else []
    return one.kind == "linear-net" and one.layer in (first, *last)


def _judged(known: Evidence) -> tuple[list[Finding], list[str]]:
    """What the rules find, and those that failed: a module of the user may raise anything when it is looked at."""
    found: list[Finding] = []
    failed: list[str] = []
    for rule in RULES:
        try:
            found += rule(known)
        except Exception as error:
            name = rule.__name__.strip("_").replace("_", " ")
            failed.append(f"what the rule {name!r} looks at: it failed with {type(error).__name__}: {in_a_line(error)}")
    return found, failed


def _runs(recorded: Recorder | Recording, example: Any, target: Any, known: Evidence) -> Probed:
    """What runs of a copy of the first net on an example tell."""
    if example is None or not isinstance(recorded, Recorder):
        return Probed([], [], [])
    net = next(iter(recorded._live_nets()), None)
    if net is None:
        return Probed([], ["relations of the net: the recorder has no net, or it no longer exists"], [])
    return probed(net, example, target, None if known.loss is None else known.loss.end())


def _left_out(parts: Mapping[str, Subrecording]) -> list[Finding]:
    """One finding, of the first subrecorder of which elements were left out; none if there is none."""
    hit = unexpected(parts)
    for name, holes in hit.items():
        leaf, share = next(iter(holes.items()))
        also = f", and in {len(hit) - 1} more subrecorders" if len(hit) > 1 else ""
        what = f"{share}{f' in {leaf}' * bool(leaf)}: they are NaN or infinite, and results leave them out{also}"
        return [fault("nonfinite", shown_name(name), what)]
    return []
