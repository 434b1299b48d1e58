"""Every error of kernelbake, with its exit code and hint.

A message reads *where: what was found; what was wanted*; the hint is a line of its own. The library raises, the
command line prints and exits: nothing else in the package calls ``sys.exit``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """What the exit status of ``kernelbake`` and ``dflash`` means; both commands share the table."""

    DONE = 0
    FAULT = 1
    """A fault of ours: an exception that no one expected."""
    INPUT = 2
    """Options, manifest, run configuration, data, or weights that cannot be loaded."""
    BUNDLE = 3
    """The bundle is damaged, hostile, incomplete, of a later format, not signed as required, or its results differ."""
    MISFIT = 4
    """The bundle is sound but does not fit: another GPU, Triton, kernel source or environment."""
    MISS = 5
    """Something is missing: a coverage gap in ``verify`` or preflight, every choice of a bundle that was not measured
    yet, or a refused launch at run time."""
    BUILD = 6
    """A build failed: no viable candidate, GPU absent, wrong or busy, a launch outside the plan; a workload cannot be
    planned; or a build would choose otherwise than a bundle that is verified."""
    LOCKED = 7
    """Another process holds the lock."""
    STOPPED = 8
    """Training stopped: non-finite loss, a pair failed or hangs, out of memory."""
    INTERRUPTED = 130
    TERMINATED = 143


class KernelbakeError(Exception):
    """Base of every error a caller may expect.

    Args:
        message: one sentence without a period, ``where: what was found; what was wanted``.
        hint: what the person can do about it, or None.
        reasons: all the single findings behind the message, one line each. Never only the first.
    """

    exit_code: ExitCode = ExitCode.FAULT

    def __init__(self, message: str, *, hint: str | None = None, reasons: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reasons = tuple(reasons)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {reason}" for reason in self.reasons)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class InputError(KernelbakeError):
    """An option, a file or a value that a person gave cannot be used."""

    exit_code = ExitCode.INPUT


class ManifestError(InputError):
    """A manifest with faults; ``reasons`` holds all of them, each with its dotted path and line."""


class BundleError(KernelbakeError):
    """The bundle cannot be trusted: damaged, hostile, incomplete, or of a later format."""

    exit_code = ExitCode.BUNDLE


class SignatureError(BundleError):
    """A required signature is missing, foreign or broken."""


class MisfitError(KernelbakeError):
    """The bundle is sound but was made for something else; ``reasons`` lists every difference."""

    exit_code = ExitCode.MISFIT


class CoverageError(KernelbakeError):
    """The bundle lacks entries that a plan needs, ``reasons`` lists every one of them; or it was not measured yet."""

    exit_code = ExitCode.MISS


class FrozenMissError(KernelbakeError):
    """A frozen process asked for something that its bundle does not hold."""

    exit_code = ExitCode.MISS


class BuildError(KernelbakeError):
    """The build cannot deliver a bundle."""

    exit_code = ExitCode.BUILD


class PlanError(BuildError):
    """The workload cannot be planned: a shadow run failed, or its set of keys has no bound."""


class LockedError(KernelbakeError):
    """Another process holds the lock."""

    exit_code = ExitCode.LOCKED


class UnsupportedError(KernelbakeError):
    """This platform, interpreter or library version is not supported; the message names the range that is."""

    exit_code = ExitCode.MISFIT
