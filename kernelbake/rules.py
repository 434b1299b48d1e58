"""The numbered MUSTs of ``docs/bundle-format.md``, and what a violation of one is."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path

from kernelbake.errors import BundleError

FORMAT = 1
"""The format that this code writes, and the only one that it reads."""

MAX_VIOLATIONS = 100
"""A file of a million wrong members is described by its first hundred."""


class Rule(enum.IntEnum):
    """The number of a MUST; the same order as in the document and in the code that checks it."""

    REGULAR_FILE = 1
    LENGTH = 2
    BOUNDS = 3
    MEMBER_TYPE = 4
    MEMBER_NAME = 5
    UNIQUE = 6
    ORDER = 7
    HEADER_BYTES = 8
    PADDING = 9
    TRAILER = 10
    STRICT_JSON = 11
    FORMAT = 12
    HEADER_FIELDS = 13
    HEADER_DIGEST = 14
    BUNDLE_DIGEST = 15
    INDEX_FIELDS = 16
    ABOUT_DIGEST = 17
    LISTED = 18
    SIZE = 19
    DIGEST = 20
    MANIFEST = 21
    FINGERPRINT = 22
    TABLE = 23
    PLAN = 24
    CHOICES = 25
    RECORD = 26
    ENTRY_HALVES = 27
    ENTRY_DIGEST = 28
    ENTRY_FIELDS = 29
    ENTRY_UNIQUE = 30
    CUBIN_ARCH = 31
    METADATA_TARGET = 32
    SHARED_MEMORY = 33
    NO_PATHS = 34
    LIBRARIES = 35
    CHOICE_ENTRIES = 36
    ENTRY_CHOICES = 37
    WINNER_OPTIONS = 38
    PLANNED_CHOSEN = 39
    WINNER_CANDIDATE = 40
    WINNER_RECORDED = 41
    SPECIALIZATIONS = 42
    MADE = 43
    PROFILE = 44
    SOURCES = 45
    COUNTS = 46


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """One thing in which a file breaks the format.

    Args:
        rule: the MUST.
        place: the member, the field or the byte of the file.
        message: what was found; what was wanted.
    """

    rule: Rule
    place: str
    message: str

    def to_json(self) -> dict[str, object]:
        return {"must": int(self.rule), "rule": self.rule.name, "place": self.place, "message": self.message}

    def __str__(self) -> str:
        return f"{self.place}: {self.message} (MUST {int(self.rule)})"


class ViolationsError(BundleError):
    """A bundle that breaks its format; ``violations`` are the findings behind ``reasons``."""

    def __init__(self, where: Path | str, violations: tuple[Violation, ...], *, hint: str | None = None) -> None:
        number = "one violation" if len(violations) == 1 else f"{len(violations)} violations"
        super().__init__(
            f"bundle `{where}`: {number} of bundle format {FORMAT}; wanted none",
            reasons=[str(violation) for violation in violations],
            hint=hint,
        )
        self.violations = violations


class Findings:
    """Collects violations; the same finding once, and a bounded number of them."""

    def __init__(self) -> None:
        self._found: dict[Violation, None] = {}

    def add(self, rule: Rule, place: str, message: str) -> None:
        """Adds a finding, unless there are too many already."""
        if not self.full:
            self._found[Violation(rule, place, message)] = None

    @property
    def full(self) -> bool:
        """Whether nothing more is taken."""
        return len(self._found) >= MAX_VIOLATIONS

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self, where: Path | str) -> None:
        """Raises what was found, in the order of the rules.

        Raises:
            ViolationsError: something was found.
        """
        if self._found:
            violations = sorted(self._found, key=lambda violation: violation.rule)
            later = any(violation.rule is Rule.FORMAT for violation in violations)
            hint = "install the kernelbake that made it, or a later one" if later else None
            raise ViolationsError(where, tuple(violations), hint=hint)
