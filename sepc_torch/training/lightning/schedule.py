"""Schedule of the callback: which steps refit the head and which validations are assessed, within a budget of time.

The last validation always refits and is assessed. The budget decides about the others: an assessment or a refit takes
place if the seconds spent so far, its own, and those of the last validation are at most ``max_cost`` times the training
so far. Seconds are those that the same work took before. The first validation does not wait for the budget where it may
be the only one that is assessed, because nobody knows beforehand which validation is the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sepc_torch.training.lightning.settings import say

# Seconds of a first refit with its assessment, before one is measured: 10 classes on one core take 0.2 to 0.4.
_FIRST_SECONDS = 0.3


class CostMeter:
    """Measures the time that a monitor takes, relative to the time of the training itself.

    Args:
        clock: Returns seconds.

    >>> seconds = iter([0.0, 10.0, 13.0, 20.0])  # training to 10, the monitor to 13, training to 20
    >>> meter = CostMeter(lambda: next(seconds))
    >>> meter.start()
    >>> with meter.paying():
    ...     pass
    >>> meter.stop()
    >>> meter.spent, round(meter.share(), 3)  # 3 of 17 seconds
    (3.0, 0.176)
    >>> meter.affords(0.5, 5.0), meter.affords(0.5, 6.0)
    (True, False)
    >>> meter
    CostMeter(3.0 s, 18% of the training's time)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._began, self._spent, self._depth, self._since = 0.0, 0.0, 0, 0.0
        self._ended: float | None = 0.0

    def __repr__(self) -> str:
        return f"CostMeter({self.spent:.1f} s, {self.share():.0%} of the training's time)"

    def start(self) -> None:
        """Begin a new training run."""
        self._began, self._spent, self._depth, self._ended = self.clock(), 0.0, 0, None

    def stop(self) -> None:
        """End the training run: the numbers stay as they are until the next one."""
        self._ended = self.clock()

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Count the time inside as the monitor's; nested uses count once."""
        self._depth += 1
        if self._depth == 1:
            self._since = self.clock()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._spent += self.clock() - self._since

    @property
    def spent(self) -> float:
        """Seconds of the monitor."""
        return self._seconds()[0]

    def share(self) -> float:
        """Time of the monitor divided by the time of the training without it; 0 before any training."""
        spent, training = self._seconds()
        return spent / training if training > 0.0 else 0.0

    def affords(self, limit: float | None, further: float = 0.0) -> bool:
        """Whether the cost so far and further seconds are at most a share of the training; None for no limit."""
        if limit is None:
            return True
        spent, training = self._seconds()
        return spent + further <= limit * training

    def _seconds(self) -> tuple[float, float]:
        """Seconds of the monitor and of the training so far."""
        now = self.clock() if self._ended is None else self._ended
        spent = self._spent + (now - self._since if self._depth else 0.0)
        return spent, now - self._began - spent


class Schedule:
    """Decides about refits and assessments, and says at the end of a run what they cost.

    Attributes:
        every: Refit after every n epochs; 0 for never.
        max_cost: The largest share of the training's time; None for no limit.
        cost: Time that the monitor takes.
        tried_step, skipped_step: Global steps of the last refit and of the last one that was not affordable.
        assessing: Whether the validation that runs is assessed.
        bounded: Whether the budget decides in this run.
        scores_pool: Whether every refit scores the pool.
        validations, assessed: Number of validations of this run and of those that were assessed.
    """

    def __init__(self, every: int, max_cost: float | None) -> None:
        self.every, self.max_cost = every, max_cost
        self.cost = CostMeter()
        self._refit_seconds, self._assess_seconds, self._mark = _FIRST_SECONDS, 0.0, 0.0
        self._fit_seconds, self._patient = 0.0, False
        self.tried_step, self.skipped_step = -1, -1
        self.assessing, self.bounded, self.scores_pool = True, max_cost is not None, False
        self.validations, self.assessed = 0, 0
        self._monitored: list[str] = []

    def start(self, trainer: Any, prefix: str) -> None:
        """Begin a training run.

        The budget does not skip assessments whose numbers another callback or a learning-rate schedule monitors, and
        if these are numbers of the pool, it skips no refits either.
        """
        self.tried_step, self.skipped_step = -1, -1  # the steps of an earlier run do not refer to these weights
        self.validations, self.assessed, self.assessing = 0, 0, True
        self._monitored = monitored_names(trainer, prefix)
        self.scores_pool = any(name.startswith((f"{prefix}/pool_", f"{prefix}/head_pool_")) for name in self._monitored)
        self.bounded = self.max_cost is not None and not self.scores_pool
        self._patient = self.bounded and not self._monitored and ends_with_validation(trainer)
        self.cost.start()

    def affords_refit(self, trainer: Any) -> bool:
        """Whether a refit now leaves enough for the last one; the main process decides, because clocks differ."""
        return self._affords(trainer, self._refit_seconds + self._assess_seconds)

    def waits(self, trainer: Any) -> bool:
        """Whether the validation that begins is not assessed, because the first assessment waits for the budget."""
        if not self._patient or self.assessed or is_last(trainer) or self.affords_refit(trainer):
            return False
        self.validations += 1
        self.assessing, self.skipped_step = False, int(trainer.global_step)
        return True

    def plan(self, trainer: Any, *, refitted: bool) -> bool:
        """Decide whether to assess the validation that begins; a refit before it has its numbers assessed."""
        self.validations += 1
        must = refitted or is_last(trainer) or bool(self._monitored) or (self.assessed == 0 and not self._patient)
        self.assessing = must or self._affords(trainer, self._assess_seconds)
        self.assessed += self.assessing
        self._mark = self.cost.spent
        return self.assessing

    def concluded(self) -> None:
        """Note the seconds of the assessment that ends."""
        if self.assessing:
            self._assess_seconds = self.cost.spent - self._mark

    @contextmanager
    def refitting(self, step: int, part: int = 1) -> Iterator[None]:
        """Note the step and the seconds of a refit, whose fit may use one sample in ``part``."""
        self.tried_step = step
        before = self.cost.spent
        with self.cost.paying():
            yield
            self._refit_seconds = self.cost.spent - before + (part - 1) * self._fit_seconds

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Note the seconds of the fit itself, which grow with its samples."""
        before = self.cost.spent
        yield
        self._fit_seconds = self.cost.spent - before

    def stop(self, trainer: Any, refits: int, pool: bool) -> None:
        """End a training run, and say in the log what the monitor cost."""
        self.cost.stop()
        limit = "no limit" if self.max_cost is None else f"limit {self.max_cost:.0%}"
        if self._monitored:
            limit += f"; {', '.join(self._monitored)} monitored, so every validation was assessed"
        elif self.max_cost is not None and self.cost.share() > self.max_cost:
            kept = "the last assessment and queries of the pool are" if pool else "the last assessment is"
            limit += f"; {kept} never skipped"
        say(
            trainer,
            f"took {self.cost.spent:.2f} s, {self.cost.share():.0%} of the training's time ({limit}). "
            f"Refits: {refits}. Assessed validations: {self.assessed} of {self.validations}.",
        )

    def _affords(self, trainer: Any, seconds: float) -> bool:
        if not self.bounded:
            return True
        last = self._refit_seconds + self._assess_seconds
        return bool(trainer.strategy.broadcast(self.cost.affords(self.max_cost, seconds + last)))


def is_last(trainer: Any) -> bool:
    """Whether the training ends after this step, as far as it is known now: an early stop is known too late.

    The main process decides, because a callback may ask only one process to stop.
    """
    ends = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    last_epoch = ends and int(trainer.current_epoch) + 1 == trainer.max_epochs
    found = last_epoch or trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
    return bool(trainer.strategy.broadcast(bool(found)))


def ends_with_validation(trainer: Any) -> bool:
    """Whether the run ends with a validation, known beforehand to be the last, and nothing keeps earlier weights.

    Callbacks that monitor a number stop the run early or keep the weights of an earlier epoch. Limits of steps or time
    end a run between validations.
    """
    epochs, every = trainer.max_epochs or 0, trainer.check_val_every_n_epoch
    if epochs <= 0 or not every or epochs % every or trainer.max_steps != -1 or trainer.val_check_interval != 1.0:
        return False
    return not any(
        getattr(callback, "monitor", None)
        or getattr(callback, "save_top_k", 1) not in (0, 1)
        or any(kind.__name__ == "Timer" for kind in type(callback).__mro__)  # Trainer(max_time=...) adds it
        for callback in trainer.callbacks
    )


def monitored_names(trainer: Any, prefix: str) -> list[str]:
    """Names with a prefix that other callbacks or learning-rate schedules monitor."""
    owners = [*trainer.callbacks, *trainer.lr_scheduler_configs]
    names = {getattr(owner, "monitor", None) for owner in owners}
    return sorted(name for name in names if isinstance(name, str) and name.startswith(f"{prefix}/"))
