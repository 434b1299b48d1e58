"""Tuning in line: at a launch met while a step runs, every candidate is checked and timed there, and one is chosen.

This file knows neither torch nor Triton. How a candidate runs is a ``Site``'s business, and where its fate is written
down a ``Report``'s, so that scripted candidates take the very path that real ones take.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from kernelbake.choose import Agreement, Difference, InvalidTimeError, Policy, Race, Times, checked_samples
from kernelbake.errors import BuildError
from kernelbake.keys import Config
from kernelbake.outcome import OK, Reason, Rejected, one_line
from kernelbake.plan import Launch

T = TypeVar("T")


class Failed(Exception):
    """A candidate failed for a known reason."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(str(rejected))
        self.rejected = rejected


class DeviceLostError(Exception):
    """The device no longer answers in this process; another process has to go on."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """What the checking runs of a candidate showed.

    Args:
        output: what it left behind, for ``Site.difference``.
        repeated: how far the worst of its repeated runs is from the first; agrees if within tolerance.
        same_bits: whether all repeated runs gave the same bits.
        expected: how far it is from the oracle; None without one.
    """

    output: Any
    repeated: Difference
    same_bits: bool
    expected: Difference | None = None


class Site(Protocol):
    """One call of a kernel with its live arguments. Candidates are named by their place in the plan's launch."""

    def prepare(self, candidate: int) -> None:
        """Does what can be done for a candidate before it runs: its code is loaded.

        Raises:
            Failed: it cannot be loaded.
        """
        ...

    def identity(self, candidate: int) -> str:
        """Equal for two candidates that are the same to the device: same code, same grid.

        Raises:
            Failed: the candidate cannot even be loaded.
        """
        ...

    def check(self, candidate: int) -> Checked:
        """Runs it several times from the same inputs, once with poisoned outputs; the trainer's tensors stay untouched.

        Raises:
            Failed: for a known reason. Any other exception counts as a crash of the candidate.
        """
        ...

    def difference(self, one: Any, other: Any) -> Difference:
        """How far the output of one ``Checked`` is from that of another."""
        ...

    def warm(self, candidate: int) -> None:
        """Runs it until clocks and caches are as in the long run."""
        ...

    def sample(self, candidate: int, *, brief: bool) -> Any:
        """Times of single launches in ms: the kernel alone, caches cold, nothing else in the timed region.

        Args:
            candidate: which.
            brief: a few are enough.
        """
        ...

    def answers(self) -> bool:
        """Whether the device still works after an exception."""
        ...


class Report(Protocol):
    """Where the fate of candidates is written down. ``launch`` and ``candidate`` are places in the plan."""

    def rejected(self, launch: int) -> Mapping[int, Rejected]:
        """Candidates of which it is already known."""
        ...

    def start(self, launch: int, candidate: int, meanwhile: Callable[[], None]) -> None:
        """Returns when it is on disk that the candidate is about to run for the first time.

        Args:
            launch, candidate: which.
            meanwhile: done while the disk is at work; what it raises is raised.
        """
        ...

    def sampling(self, launch: int, candidate: int) -> None:
        """The candidate is about to be timed."""
        ...

    def outcome(self, launch: int, candidate: int, data: Mapping[str, Any]) -> None:
        """How the check of a candidate ended, or why it was rejected later."""
        ...

    def decided(self, launch: int, data: Mapping[str, Any]) -> None:
        """What was chosen, with the times of everyone."""
        ...

    def lost(self, message: str) -> None:
        """The device is lost to this process. May not return: what would run on the way out may fail or hang."""
        ...


class _Tuning:
    """The tuning of one launch."""

    def __init__(self, policy: Policy, report: Report, place: int, launch: Launch, site: Site) -> None:
        self._policy, self._report, self._place, self._launch, self._site = policy, report, place, launch, site
        places = sorted(range(len(launch.candidates)), key=lambda place: preference(launch.candidates[place]))
        self._tokens = {launch.candidates[place].token: place for place in places}
        self._order = {token: number for number, token in enumerate(self._tokens)}
        self._fates: dict[int, Rejected] = dict(report.rejected(place))
        self._same: dict[str, list[str]] = {}
        self._agreement: Agreement[Any] = Agreement(site.difference)

    def run(self) -> int:
        checked = self._check()
        accepted = self._judge(checked)
        while accepted:
            race = self._race(accepted)
            if race.times and self._confirm(race.verdict().winner, accepted, checked):
                return self._decide(race, accepted, checked)
            accepted = {token: found for token, found in accepted.items() if self._tokens[token] not in self._fates}
        raise self._nobody()

    def first_sound(self) -> int:
        """The first candidate, by preference, that loads, runs and repeats itself."""
        for token in self._tokens:
            if self._tokens[token] in self._fates:
                continue
            found = self._first_check(token)
            if found is not None and self._trusted(token, found):
                self._report.outcome(self._place, self._tokens[token], {"outcome": OK})
                return self._tokens[token]
        raise self._nobody()

    # ------------------------------------------------------------------------------------------ one candidate

    def _attempt(self, token: str, action: Callable[[int], T]) -> T | None:
        """What the action returns; None if the candidate failed at it, which is then written down."""
        candidate = self._tokens[token]
        try:
            return action(candidate)
        except KeyboardInterrupt:
            raise
        except Failed as failure:
            fate = failure.rejected
        except InvalidTimeError as error:
            fate = Rejected(Reason.WRONG, str(error))
        except BaseException as error:  # a candidate may fail in any way; none of them may end the build
            fate = classify(error)
        self._reject(token, fate)
        if not self._site.answers():
            self._report.lost(str(fate))
            raise DeviceLostError(str(fate))
        return None

    def _reject(self, token: str, fate: Rejected) -> None:
        for name in (token, *self._same.get(token, [])):
            self._fates[self._tokens[name]] = fate
            self._report.outcome(self._place, self._tokens[name], fate.to_json())

    # ------------------------------------------------------------------------------------------ the phases

    def _check(self) -> dict[str, Checked]:
        """Every distinct candidate, run and looked at, in the order of preference."""
        first: dict[str, str] = {}
        checked: dict[str, Checked] = {}
        for token in self._tokens:
            if self._tokens[token] in self._fates:
                continue
            identity = self._attempt(token, self._site.identity)
            if identity is None:
                continue
            if identity in first:
                self._follow(first[identity], token)
                continue
            first[identity] = token
            found = self._first_check(token)
            if found is not None and self._trusted(token, found):
                self._agreement.add(token, found.output)
                checked[token] = dataclasses.replace(found, output=None)
        return checked

    def _first_check(self, token: str) -> Checked | None:
        """Runs a candidate for the first time, announced; None if it failed."""

        def action(candidate: int) -> Checked:
            self._report.start(self._place, candidate, functools.partial(self._site.prepare, candidate))
            return self._site.check(candidate)

        return self._attempt(token, action)

    def _trusted(self, token: str, found: Checked) -> bool:
        """Whether a candidate repeats itself and agrees with the oracle; else it is rejected."""
        if not found.repeated.agrees:
            self._reject(token, _because(Reason.UNREPEATABLE, found.repeated))
        elif found.expected is not None and not found.expected.agrees:
            self._reject(token, _because(Reason.WRONG, found.expected))
        else:
            return True
        return False

    def _follow(self, leader: str, token: str) -> None:
        """A candidate with the code of another shares its fate and is not run."""
        self._same.setdefault(leader, []).append(token)
        fate = self._fates.get(self._tokens[leader])
        if fate is not None:
            self._fates[self._tokens[token]] = fate
            self._report.outcome(self._place, self._tokens[token], fate.to_json())

    def _judge(self, checked: dict[str, Checked]) -> dict[str, Difference]:
        """Those whose results can be believed, with their distance from the reference."""
        if not checked:
            return {}
        accepted = self._agreeing(checked)
        if any(checked[token].same_bits for token in accepted):
            for token in [token for token in accepted if not checked[token].same_bits]:
                error = checked[token].repeated.error
                detail = f"two runs on equal inputs differ by {error:.2e} of the norm, and other candidates repeat"
                self._reject(token, Rejected(Reason.UNREPEATABLE, detail, _finite(error)))
                del accepted[token]
        for token in accepted:
            for name in (token, *self._same.get(token, [])):
                self._report.outcome(self._place, self._tokens[name], {"outcome": OK})
        return accepted

    def _agreeing(self, checked: dict[str, Checked]) -> dict[str, Difference]:
        """Those that agree with the oracle, where there is one, or else with most of the others."""
        judged = {token: found.expected for token, found in checked.items() if found.expected is not None}
        if len(judged) == len(checked):
            return judged
        try:
            inside, outside = self._agreement.split()
        except BuildError as error:
            reasons = [f"{self._config(token)}: {text}" for token, text in self._agreement.against_first().items()]
            raise BuildError(
                f"{self._launch}: {error.message}; wanted an agreement",
                reasons=reasons,
                hint="name an oracle for this kernel in the workload, or raise `measure.tolerance` if you know why",
            ) from error
        for token, difference in outside.items():
            self._reject(token, _because(Reason.WRONG, difference))
        return inside

    def _warm(self, candidate: int) -> bool:
        self._site.warm(candidate)
        return True

    def _sample(self, candidate: int, *, brief: bool) -> list[float]:
        return checked_samples(self._site.sample(candidate, brief=brief))

    def _race(self, accepted: Mapping[str, Difference]) -> Race:
        race = Race(self._policy, list(accepted), self._order.__getitem__)
        warmed: set[str] = set()
        while names := race.next_round():
            for token in names:
                self._report.sampling(self._place, self._tokens[token])
                if token not in warmed:
                    warmed.add(token)
                    if self._attempt(token, self._warm) is None:
                        race.drop(token)
                        continue
                samples = self._attempt(token, functools.partial(self._sample, brief=race.brief))
                if samples is None:
                    race.drop(token)
                else:
                    race.add(token, samples)
        return race

    def _confirm(self, token: str, accepted: Mapping[str, Difference], checked: dict[str, Checked]) -> bool:
        """Runs the winner again after all the timing: it must still give what it gave at first.

        One that repeated itself at first and does not now is treated as ``_judge`` treats those that never did.
        """
        self._report.sampling(self._place, self._tokens[token])
        again = self._attempt(token, self._site.check)
        if again is None:
            return False
        difference = self._site.difference(again.output, self._agreement.first(token))
        others = [name for name in accepted if name != token and self._tokens[name] not in self._fates]
        wavers = checked[token].same_bits and not again.same_bits
        if difference.agrees and again.repeated.agrees:
            if not wavers:
                return True
            if not any(checked[name].same_bits for name in others):
                checked[token] = dataclasses.replace(checked[token], same_bits=False)
                return True
        worse = difference if not difference.agrees else again.repeated
        detail = worse.detail or f"runs on equal inputs differ by {again.repeated.error:.2e} of the norm"
        self._reject(token, Rejected(Reason.UNREPEATABLE, f"{detail}, after it was timed", _finite(worse.error)))
        return False

    # ------------------------------------------------------------------------------------------ the end

    def _decide(self, race: Race, accepted: Mapping[str, Difference], checked: Mapping[str, Checked]) -> int:
        verdict, ratios = race.verdict(), race.ratios()
        winner = self._tokens[verdict.winner]
        candidates = {}
        for token, times in race.times.items():
            facts = {**_facts(times), "error": accepted[token].error, "repeatable": checked[token].same_bits}
            facts |= {"ratio": round(ratios[token], 6), "doubt": round(race.doubt(token, ratios), 6)}
            candidates[str(self._tokens[token])] = facts
            for name in self._same.get(token, []):
                candidates[str(self._tokens[name])] = {**facts, "same_code_as": self._tokens[token]}
        runner_up = None if verdict.runner_up is None else self._tokens[verdict.runner_up]
        data = {
            "winner": winner,
            "runner_up": runner_up,
            "margin": verdict.margin,
            "told_apart": verdict.told_apart,
            "band": round(race.band(ratios), 6),
            "tied": [self._tokens[token] for token in verdict.tied],
            "candidates": candidates,
        }
        self._report.decided(self._place, data)
        return winner

    def _config(self, token: str) -> str:
        return str(self._launch.candidates[self._tokens[token]])

    def _nobody(self) -> BuildError:
        return nobody(self._launch, self._fates)


def preference(config: Config) -> tuple[int, int, str]:
    """Of two candidates that are as good as each other the one that takes less of the GPU: fewer warps, then fewer
    stages; then the one whose token is smaller. Nothing here depends on a measurement or on an order."""
    return config.num_warps or _NUM_WARPS, config.num_stages or _NUM_STAGES, config.token


_NUM_WARPS, _NUM_STAGES = 4, 3
"""Triton's defaults."""


def tune(policy: Policy, report: Report, place: int, launch: Launch, site: Site) -> int:
    """Chooses a candidate for a launch.

    Args:
        policy: how to measure.
        report: where every step is written down.
        place: of the launch in the plan.
        launch: the planned launch.
        site: the call that was met.

    Returns:
        The winner's place among the candidates.

    Raises:
        BuildError: no candidate can be used, or none can be trusted; with the reason of each.
        DeviceLostError: a candidate took the device with it; its fate is written down.
        KeyboardInterrupt: a person stops the build.
    """
    return _Tuning(policy, report, place, launch, site).run()


def stand_in(policy: Policy, report: Report, place: int, launch: Launch, site: Site) -> int:
    """Any candidate that works, for a launch that is decided elsewhere; arguments and errors as for ``tune``."""
    return _Tuning(policy, report, place, launch, site).first_sound()


def nobody(launch: Launch, fates: Mapping[int, Rejected]) -> BuildError:
    """The error for a launch without a usable candidate: every reason, and what is short where something is."""
    reasons = [f"{launch.candidates[candidate]}: {fate}" for candidate, fate in sorted(fates.items())]
    needs = [fate.need_bytes for fate in fates.values() if fate.need_bytes is not None]
    limits = [fate.limit_bytes for fate in fates.values() if fate.limit_bytes is not None]
    short = ""
    if len(needs) == len(fates) and needs:
        short = f" (the least of them needs {min(needs)} bytes of shared memory; the GPU has {limits[0]})"
    number = len(launch.candidates)
    count = "its candidate is" if number == 1 else f"all {number} candidates are"
    return BuildError(f"{launch}: {count} rejected{short}; wanted one that can be used", reasons=reasons)


def classify(error: BaseException) -> Rejected:
    """The reason behind an exception that a candidate raised."""
    kind = type(error).__name__
    if kind == "OutOfMemoryError":
        return Rejected(Reason.MEMORY, one_line(error))
    if kind == "OutOfResources":
        need, limit = getattr(error, "required", None), getattr(error, "limit", None)
        return Rejected(Reason.SHARED_MEMORY, one_line(error), need_bytes=need, limit_bytes=limit)
    return Rejected(Reason.CRASH, one_line(error))


def _because(reason: Reason, difference: Difference) -> Rejected:
    return Rejected(reason, difference.detail, _finite(difference.error))


def _finite(error: float) -> float | None:
    return error if error < float("inf") else None


def _facts(times: Times) -> dict[str, Any]:
    return {
        "samples_ms": [round(sample, 6) for sample in times.samples],
        "median_ms": round(times.median, 6),
        "spread_ms": round(times.spread, 6),
    }
