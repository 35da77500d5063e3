"""Checkup: asks while a training goes on what is wrong with it, and says so, or stops it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from recorders.errors import RecordingWarning, TrainingFaultError
from recorders.recorder.recorder import Recorder
from recorders.watch.diagnosis.finding import Finding
from recorders.watch.diagnosis.findings import findings
from recorders.watch.diagnosis.learned import Against, first_steps, learned_at
from recorders.watch.visualizers.visualizer import Pace
from reducers.errors import warn_user

OnFinding: TypeAlias = Literal["warn", "stop", "raise"]
"""What to do about a finding."""

EARLY = (10, 20, 50)
"""The numbers of steps after which it looks in any case: most faults show early, when a training that is ill has cost little."""

SHARE = 0.05
"""The most that later looks may take of the time of the training."""


class Checkup:
    """Looks for faults after 10, 20 and 50 steps, and then every so many steps; tells each new one once.

    A fault is new if none of its kind and place was told before. `findings` reads all that was recorded, and waits for the device.
    So after the first 50 steps it looks so seldom that this takes at most 5 % of the time. If it fails, that is one warning, and
    the training goes on.

    Args:
        recorder: what is examined. `presets.health()` records what `findings` examines.
        on_finding: "warn" gives one `RecordingWarning` for each new fault. "stop" also sets `stop` if its severity is "error", for
            the loop to end. "raise" raises these instead. What has the severity "warning" is warned of in any case.
        every: after the beginning it looks each time that so many steps have ended, or later, for the sake of time.
        example: what the net is called with, and `target` that of it: then a copy of the net is run at each look, see `findings`.
        against: what good runs were like, see `learn`: its file, or the recording of one good run. A training that goes on is
            compared with their first 10 steps; for the rest, call `findings(recorder, against=...)` at its end.

    Attributes:
        found: all that was told.
        stop: whether the training should end, if `on_finding` is "stop". Of several ranks each looks at what it recorded: let all
            agree before one stops.

    Raises:
        TypeError: `recorder` is not a recorder.
        ValueError: `on_finding` is none of these, or `every` is no positive whole number.
        StorageError: what is at the path `against` cannot be read.

    >>> import torch
    >>> from recorders import presets
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    >>> with presets.health().modules(net) as recorder:
    ...     checkup = Checkup(recorder, on_finding="raise")
    ...     for step in range(100):
    ...         optimizer.zero_grad()
    ...         net(torch.randn(8, 2)).square().mean().backward()
    ...         optimizer.step()
    ...         try:
    ...             checkup.step()
    ...         except TrainingFaultError as error:
    ...             print(error)
    ...             break
    after 10 steps: optimizer: the learning rate is 0 in all 10 steps recorded. Nothing is learned at a learning rate of 0. ...
    """

    def __init__(
        self,
        recorder: Recorder,
        on_finding: OnFinding = "warn",
        every: int = 50,
        example: Any = None,
        target: Any = None,
        against: Against = None,
    ) -> None:
        if not isinstance(recorder, Recorder):
            raise TypeError(f"Checkup takes a Recorder, such as presets.health().modules(net); got {type(recorder).__name__}")
        if on_finding not in ("warn", "stop", "raise"):
            raise ValueError(f"Checkup(on_finding={on_finding!r}): choose 'warn', 'stop' or 'raise'")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Checkup(every={every!r}): give a whole number of steps, at least 1")
        self.recorder, self.on_finding, self.every = recorder, on_finding, every
        self.example, self.target = example, target
        self.against = None if against is None else first_steps(learned_at(against))
        self.found: list[Finding] = []
        self.stop = False
        self._calls = 0
        self._looks = self._due()  # a training that goes on from a checkpoint is not looked at before its first step
        self._failed = False
        self._pace = Pace(0.0, SHARE)

    def step(self) -> None:
        """Looks for faults if it is time. Call it at the end of each step; the recorder's clock says which step it is, if it moves.

        Raises:
            TrainingFaultError: there is a new fault of severity "error", and `on_finding` is "raise".
        """
        self._calls += 1
        due = self._due()
        if due > self._looks:
            if self._position() > EARLY[-1] and not self._pace.due:
                return  # it looks at a later step
            with self._pace.measured():
                new = self._new()
            self._looks = due
            self._tell(new)
        self._looks = due  # if the clock went back, it looks again at the same steps

    def _position(self) -> int:
        clock = self.recorder.clock
        return clock.step if clock.attached or clock.step else self._calls

    def _due(self) -> int:
        """How many looks are due by now."""
        position = self._position()
        return position // self.every + sum(early <= position for early in EARLY if early < self.every)

    def _new(self) -> list[Finding]:
        """The faults that were not told."""
        told = {(one.kind, one.layer) for one in self.found}
        try:
            found = findings(self.recorder, against=self.against, example=self.example, target=self.target)
            return [one for one in found if (one.kind, one.layer) not in told]
        except Exception as error:  # of a rule, or of a reducer of the user's
            if not self._failed:
                what = f"`findings` of what was recorded failed, and the training goes on: {type(error).__name__}: {error}"
                warn_user(f"{what}. Please report it, with what findings(recorder) raises", RecordingWarning)
            self._failed = True
            return []

    def _tell(self, new: list[Finding]) -> None:
        self.found += new
        errors = [one for one in new if one.severity == "error"]
        self.stop = self.stop or (bool(errors) and self.on_finding == "stop")
        raised = errors if self.on_finding == "raise" else []
        when = f"after {self._position():,} steps"
        for one in new:
            if one not in raised:
                warn_user(f"{when}: {one}", RecordingWarning)
        if raised:
            raise TrainingFaultError(f"{when}: {'; '.join(map(str, raised))}")
