"""dflash's own errors; the base class, the exit codes and the wording are those of kernelbake.

Input, bundle, misfit, coverage and frozen-miss errors come from ``kernelbake.errors`` as they are.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import TypeVar

from kernelbake.errors import ExitCode, InputError, KernelbakeError, MisfitError

__all__ = [
    "AcceptanceError",
    "DataError",
    "ExitCode",
    "Faults",
    "ForeignPackageError",
    "HangError",
    "InterruptedRunError",
    "PairError",
    "RankLostError",
    "ResumeError",
    "TrainingStoppedError",
    "UnplannedError",
]

T = TypeVar("T")


class DataError(InputError):
    """The training data cannot be used: not there, broken, or nothing in it is supervised."""


class ResumeError(MisfitError):
    """A checkpoint is sound but belongs to another run or another bundle."""


class ForeignPackageError(InputError):
    """Another distribution owns the import name ``dflash`` in this environment."""


class TrainingStoppedError(KernelbakeError):
    """Training stopped by itself: a non-finite loss or gradient, a failed pair, or no memory left."""

    exit_code = ExitCode.STOPPED


class PairError(TrainingStoppedError):
    """A pair failed, and all others were stopped.

    Args:
        message, hint, reasons: as for every error.
        exit_code: of what the pair failed with, where that has one of its own.
    """

    def __init__(
        self, message: str, *, hint: str | None, reasons: Iterable[str], exit_code: ExitCode | None = None
    ) -> None:
        super().__init__(message, hint=hint, reasons=reasons)
        if exit_code is not None:
            self.exit_code = exit_code


class RankLostError(TrainingStoppedError):
    """Another rank failed, or no longer answers.

    Args:
        message, hint, reasons: as for every error.
        exit_code: of what it failed with, where that is known.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, reasons: Iterable[str] = (), exit_code: int | None = None
    ) -> None:
        super().__init__(message, hint=hint, reasons=reasons)
        if exit_code is not None:
            self.exit_code = ExitCode(exit_code)


class HangError(TrainingStoppedError):
    """Nothing moved for too long. Threads may hang still: the process has to be ended without waiting for them."""


class UnplannedError(KernelbakeError):
    """A run made launches that its plan does not have: the plan is wrong, and so is a bundle made from it."""


class AcceptanceError(KernelbakeError):
    """Acceptance on this card found something that is not as it should be."""


class InterruptedRunError(KernelbakeError):
    """A signal ended the run after the current step; the state was saved first.

    Args:
        number: the signal's number; it decides the exit code.
        saved: what was saved, for the message.
    """

    def __init__(self, number: int, saved: str) -> None:
        super().__init__(f"train: stopped by {signal.Signals(number).name}; {saved}")
        self.exit_code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED


class Faults:
    """Gathers what checks refuse, so that a person hears of every fault at once."""

    def __init__(self) -> None:
        self._found: list[InputError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Makes a check; what it gives, or None if it refuses."""
        try:
            return check()
        except InputError as error:
            self._found.append(error)
            return None

    def refuse(self) -> None:
        """Refuses what was found, if anything.

        Raises:
            InputError: the only one that was found, as it is; or one that holds all of them, with their hints.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            told = [str(error).splitlines() for error in self._found]
            reasons = [line for first, *others in told for line in (first, *(f"  {other}" for other in others))]
            raise InputError(f"input: {len(told)} faults; wanted none before anything is loaded", reasons=reasons)
