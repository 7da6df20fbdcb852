"""Progress of a training run: a bar in a terminal, a line every so often in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LOG_EVERY_S = 15.0


class Progress:
    """Context manager. `update` after every step with the loss and the last validation loss (nats per token)."""

    def __init__(self, steps: int, done: int, tokens_per_step: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._steps, self._done, self._tokens = steps, done, tokens_per_step
        self._began = self._logged = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
        self._bar = Bar(*columns, console=self._console) if self._console.is_terminal else None
        self._task = self._bar.add_task("", total=steps, completed=done, facts="") if self._bar else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, loss: float, validation_loss: float | None) -> None:
        now = time.monotonic()
        speed = (step - self._done) * self._tokens / max(now - self._began, 1e-9)
        held_out = "" if validation_loss is None else f", held out {validation_loss:.3f}"
        facts = f"loss {loss:.3f}{held_out}, {speed:.0f} tokens/s"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif now - self._logged >= LOG_EVERY_S or step == self._steps:
            self._logged = now
            left = (self._steps - step) * self._tokens / max(speed, 1e-9)
            self._console.print(
                f"step {step}/{self._steps}, {facts}, {left:.0f} s left", highlight=False, soft_wrap=True
            )
