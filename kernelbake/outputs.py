"""Recorded outputs: what a winner's launches wrote when the bundle was built, and whether they still write it.

A winner's line of the record holds, for each of its specializations that a step launched, the case and a description of
every tensor that the first launch in that case wrote (``summaries`` makes them). Pure values; nothing runs here.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.bundle import Bundle


class Verdict(enum.StrEnum):
    """How a launch's outputs compare with the recorded ones."""

    SAME = "same bits"
    CLOSE = "within tolerance"
    DIFFERS = "differs"
    UNMET = "not met"
    UNRECORDED = "not recorded"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One launch to look at.

    Args:
        launch, variant: places in the plan.
        candidate: the winner's place among the launch's candidates.
        case: id of the case in whose step it is met.
        entry: digest of its code; None under the interpreter.
        recorded: descriptions of the tensors that it wrote; None where the bundle does not say.
        inputs: digest of what it read; None where the bundle does not say.
    """

    launch: int
    variant: int
    candidate: int
    case: str
    entry: str | None
    recorded: Sequence[Mapping[str, Any]] | None
    inputs: str | None = None


@dataclasses.dataclass(frozen=True)
class Compared:
    """What became of one launch.

    Args:
        name: kernel and key, for people.
        entry: digest of its code; None under the interpreter.
        case: id of the case.
        verdict: how it compares.
        error: estimate of ‖now − then‖ / ‖then‖ over the worst tensor; 0 for the same bits, None where nothing was
            compared or there is no number for it.
        detail: what differs, in words.
        same_inputs: whether it read the recorded bits; None where that is not known.
    """

    name: str
    entry: str | None
    case: str
    verdict: Verdict
    error: float | None = None
    detail: str = ""
    same_inputs: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}

    def __str__(self) -> str:
        code = f", entry `{self.entry:.19}`" if self.entry is not None else ""
        return f"{self.name}{code}, in {self.case}: {self.detail or self.verdict.value}"


def wanted(held: Bundle) -> list[Wanted]:
    """Every launch and variant of a bundle's plan, with the case in which its outputs were recorded.

    Where nothing was recorded, the case is the last that makes the launch, in which a build meets it first.
    """
    lines = {
        (line["kernel"], _text(line["key"]), _text(line["config"])): line.get("outputs", {}) for line in held.record
    }
    choices = {choice.id: choice for choice in held.choices}
    order = {case.id: place for place, case in enumerate(held.plan.cases)}
    found = []
    for place, launch in enumerate(held.plan.launches):
        choice = choices[launch.id]
        candidate = launch.candidates.index(choice.winner)
        key = launch.key.to_json() if launch.key else None
        recorded = lines.get((launch.kernel.to_json(), _text(key), _text(choice.winner.to_json())), {})
        for number, variant in enumerate(launch.variants):
            specialization = variant.specializations[candidate]
            known = recorded.get(specialization.digest)
            case = known["case"] if known is not None else max(variant.cases, key=lambda one: order.get(one, -1))
            entry, tensors = choice.entries[specialization.token], known["tensors"] if known is not None else None
            inputs = known.get("inputs") if known is not None else None
            found.append(Wanted(place, number, candidate, case, entry, tensors, inputs))
    return found


def _text(value: Any) -> str:
    from kernelbake import digest

    return digest.canonical_json(value).decode()


def compared(one: Wanted, name: str, found: Mapping[str, Any] | None) -> Compared:
    """Compares what a launch wrote with what is recorded.

    Args:
        one: the launch.
        name: kernel and key.
        found: ``tensors``, ``tolerance`` and ``inputs`` of this run; None if no step made the launch.
    """
    verdict, error, detail, same = Verdict.UNMET, None, "", None
    if found is not None and one.inputs is not None and found.get("inputs") is not None:
        same = one.inputs == found["inputs"]
    if found is not None and one.recorded is None:
        verdict = Verdict.UNRECORDED
    elif found is not None and one.recorded is not None:
        verdict, error, detail = judge(one.recorded, found["tensors"], found["tolerance"], same_inputs=same)
    return Compared(name, one.entry, one.case, verdict, error, detail, same)


FLIPPED = 1e-3
"""Share of integers and truth values that may differ on other inputs: a choice among nearly equal numbers falls
otherwise where these change in their last bits."""


def judge(
    recorded: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    tolerance: float,
    *,
    same_inputs: bool | None = None,
) -> tuple[Verdict, float | None, str]:
    """Compares descriptions of tensors.

    Args:
        recorded, found: descriptions.
        tolerance: of floating tensors.
        same_inputs: whether the launch read the same bits both times; if it did, or that is not known, integers and
            truth values have to be the same.

    Returns:
        The verdict; the largest error, None where there is no number for it; and what differs, in words.
    """
    now = {tensor["at"]: tensor for tensor in found}
    errors, details = [0.0], []
    for then in recorded:
        error, detail = _difference(then, now.get(then["at"]), tolerance, same_inputs)
        errors.append(error)
        details += [detail] if detail else []
    worst = max(errors)
    number = worst if math.isfinite(worst) else None
    if details:
        read = {None: "", True: ", on the recorded inputs", False: ", on other inputs than recorded"}[same_inputs]
        return Verdict.DIFFERS, number, "; ".join(details) + read
    same = all(then["digest"] == now[then["at"]]["digest"] for then in recorded)
    return (Verdict.SAME if same else Verdict.CLOSE), number, ""


_NUMBERS = {"norm", "not_finite", "sketch"}


def _difference(
    then: Mapping[str, Any], now: Mapping[str, Any] | None, tolerance: float, same_inputs: bool | None
) -> tuple[float, str]:
    """An estimate of ‖now − then‖ / ‖then‖, and in words what is beyond the tolerance."""
    name = f"`{then['argument']:.60}`"
    if now is None:
        return math.inf, f"{name} is not written"
    for field in ("argument", "dtype", "shape"):
        if then[field] != now[field]:
            return math.inf, f"{field} of {name} is `{now[field]}`; recorded `{then[field]}`"
    if then["digest"] == now["digest"]:
        return 0.0, ""
    if "sketch" in then and "norm" not in then and len(now.get("sketch", ())) == len(then["sketch"]):
        return _flipped(then, now, same_inputs)
    if not all(tensor.keys() >= _NUMBERS for tensor in (then, now)) or len(then["sketch"]) != len(now["sketch"]):
        return math.inf, f"{name} has other bits than recorded, and no tolerance applies to it"
    if then["not_finite"] != now["not_finite"]:
        return math.inf, f"{now['not_finite']} elements of {name} are not finite; recorded {then['not_finite']}"
    error = _distance(then["sketch"], now["sketch"], then["norm"])
    if error > tolerance:
        return error, f"{name} is off by about {error:.2e} of its norm; allowed {tolerance:.0e}"
    return error, ""


def _flipped(then: Mapping[str, Any], now: Mapping[str, Any], same_inputs: bool | None) -> tuple[float, str]:
    """The share of integers or truth values that differ, and in words whether they are too many."""
    total = math.prod(then["shape"])
    length = _distance(then["sketch"], now["sketch"], 1.0)
    number = max(length * length / 2, 1.0)
    share = number / max(total, 1)
    if same_inputs is False and share <= FLIPPED:
        return share, ""
    allowed = f"; allowed {FLIPPED:.1%}" if same_inputs is False else ""
    return share, f"about {number:.0f} of {total} elements of `{then['argument']:.60}` differ{allowed}"


def _distance(one: Sequence[float], other: Sequence[float], norm: float) -> float:
    """The length of a difference, from two sketches, relative to a norm."""
    try:
        length = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / max(len(one), 1))
        return length / norm if norm else (0.0 if length == 0.0 else math.inf)
    except OverflowError:
        return math.inf


def summed(found: Sequence[Compared]) -> str:
    """How many launches had which verdict, in words, with the largest error within tolerance."""
    parts = []
    for verdict in Verdict:
        of_kind = [one for one in found if one.verdict is verdict]
        if of_kind:
            parts.append(f"{counted(len(of_kind), *_WORDS[verdict])}{_largest(of_kind)}")
    return ", ".join(parts)


_WORDS = {
    Verdict.SAME: ("gave the recorded bits", "gave the recorded bits"),
    Verdict.CLOSE: ("stayed within tolerance", "stayed within tolerance"),
    Verdict.DIFFERS: ("differs", "differ"),
    Verdict.UNMET: ("was not met", "were not met"),
    Verdict.UNRECORDED: (
        "ran and has nothing recorded to compare with",
        "ran and have nothing recorded to compare with",
    ),
}
"""Of one launch, and of several."""


def _largest(found: Sequence[Compared]) -> str:
    errors: Iterator[float] = (one.error for one in found if one.verdict is Verdict.CLOSE and one.error is not None)
    largest = max(errors, default=None)
    return f" (largest error {largest:.1e})" if largest is not None else ""
