"""How well a drafter does: real speculative decoding of held-out prompts, beside what needs no training. Loads torch.

Every contender answers every prompt, one after the other for each prompt, so that whatever slows the machine slows all.
The acceptance length is the mean over responses of each response's mean over its blocks, bonus token included.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dflash import data, drafter
from dflash.decode import Response, Sampling, generate
from dflash.drafter import Drafter
from dflash.errors import DataError
from dflash.proposers import CopyProposer, DrafterProposer, Proposer
from dflash.target import Target

ALONE = "target alone"
TRAINED, UNTRAINED, COPY = "drafter", "untrained drafter", "copied n-grams"
_TEXT_PROMPT = 64
"""Tokens taken as the prompt where a sample has none: all of it is text."""

OnProgress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How responses are generated.

    Args:
        max_new_tokens: of a response.
        block_size: positions verified at once, the anchor included.
        stop_ids: tokens that end a response.
        temperature: 0 is greedy.
        seed: of draws; every prompt has its own.
    """

    max_new_tokens: int
    block_size: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0

    def sampling(self, number: int) -> Sampling:
        """For the prompt of that number, whatever came before it."""
        return Sampling(self.temperature, self.seed * 1_000_003 + number)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A greedy response that is not the target's own.

    Args:
        prompt: its number.
        place: of the first token that differs, counted from 0.
        margin: by how much the logit of the target's own token was above the next best, when it decoded alone.
    """

    prompt: int
    place: int
    margin: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one contender came to.

    Args:
        name: who it is.
        acceptance_length: mean over responses of their means; None if no response had a block.
        accepted_by_position: for each proposed position, the share of the blocks that proposed a token there in which
            it was accepted.
        responses, blocks, tokens: counts; the first token of a response comes from its prompt's pass.
        without_blocks: responses that ended with their first token, which count for nothing else.
        tokens_per_s: tokens of all blocks over the seconds that they took.
        speedup: tokens per second over those of the target alone.
        differences: greedy responses other than the target's own: equal logits up to rounding, or a fault.
    """

    name: str
    acceptance_length: float | None
    accepted_by_position: tuple[float, ...]
    responses: int
    blocks: int
    tokens: int
    without_blocks: int
    tokens_per_s: float | None
    speedup: float | None
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """All contenders on the same prompts."""

    settings: Settings
    prompts: int
    source: str
    device: str
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = dataclasses.asdict(self)
        found["settings"]["stop_ids"] = sorted(self.settings.stop_ids)
        return found

    def lines(self) -> list[str]:
        """A table for people."""
        head = ("", "acceptance length", "tokens/s", "speedup", "accepted at 1, 2, … after the anchor")
        rows = [head, *(_row(item) for item in self.measured)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  ".join((row[0].ljust(widths[0]), *_right(row, widths), row[4])).rstrip() for row in rows]
        return [*table, *(line for item in self.measured for line in _differences(item))]


def _right(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[column].rjust(widths[column]) for column in (1, 2, 3)]


def _row(item: Measured) -> tuple[str, ...]:
    def shown(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    shares = " ".join(f"{share:.2f}" for share in item.accepted_by_position[:8])
    more = " …" if len(item.accepted_by_position) > 8 else ""
    return (
        item.name,
        shown(item.acceptance_length, 2),
        shown(item.tokens_per_s, 1),
        shown(item.speedup, 2),
        shares + more,
    )


def _differences(item: Measured) -> list[str]:
    if not item.differences:
        return []
    widest = max(item.differences, key=lambda difference: difference.margin)
    found = f"{len(item.differences)} of {item.responses} greedy responses differ from the target's own"
    clear = f"its choice was clear by at most {widest.margin:.3g} (prompt {widest.prompt})"
    return [f"{item.name}: {found}; where they first do, {clear}"]


# ---------------------------------------------------------------------------------------------- prompts


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt of a held-out sample.

    Args:
        number: of the sample in its source.
        tokens: token ids.
    """

    number: int
    tokens: tuple[int, ...]


def prompts(source: data.Source, count: int, *, longest: int) -> list[Prompt]:
    """Prompts of ``count`` samples at even distances: what stands before the first supervised token.

    A sample that is text from its beginning gives its first tokens, at most half of it.

    Args:
        source: held-out samples.
        count: how many at most.
        longest: longer prompts are passed over, in tokens.

    Raises:
        DataError: no sample has a prompt that short.
    """
    total = len(source)
    found: list[Prompt] = []
    for place in range(min(count, total)):
        number = (2 * place + 1) * total // (2 * min(count, total))
        ids, supervised = source.read(number)
        end = int(supervised.argmax())
        if end <= 1:
            end = min(_TEXT_PROMPT, max(len(ids) // 2, 1))
        if end <= longest:
            found.append(Prompt(number, tuple(ids[:end].tolist())))
    if not found:
        raise DataError(f"data: `{source.name}` has no prompt of at most `{longest}` tokens; wanted held-out prompts")
    return found


def stop_ids(target: Target) -> frozenset[int]:
    """The tokens that end a response, as the target's generation configuration says."""
    found = getattr(getattr(target.model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


# ---------------------------------------------------------------------------------------------- measuring


def contenders(network: Drafter, target: Target, *, seed: int) -> dict[str, Proposer]:
    """The drafter, one of the same shape with random weights, and copying."""
    weight = network.fc.weight
    torch.manual_seed(seed)
    fresh = drafter.build(network.spec, target.head_VE.shape[1], weight.device, weight.dtype)
    return {
        TRAINED: DrafterProposer(network, target),
        UNTRAINED: DrafterProposer(fresh, target),
        COPY: CopyProposer(network.spec.block_size - 1),
    }


def evaluate(
    target: Target,
    proposers: Mapping[str, Proposer],
    held_out: Sequence[Prompt],
    settings: Settings,
    *,
    source: str,
    on_progress: OnProgress = lambda done, total: None,
) -> Report:
    """Lets the target alone and each proposer with it answer all prompts.

    Args:
        target: decides.
        proposers: name → proposer.
        held_out: at least one prompt.
        settings: how.
        source: of the prompts, for people.
        on_progress: called with the prompts answered and their number.
    """
    everyone: dict[str, Proposer | None] = {ALONE: None, **proposers}
    counts = {name: _Counts(name) for name in everyone}
    first = dataclasses.replace(settings, max_new_tokens=min(settings.max_new_tokens, 2 * settings.block_size))
    for proposer in everyone.values():  # compiles and allocates what the measured responses need
        _answer(target, proposer, held_out[0], first)
    for done, prompt in enumerate(held_out):
        on_progress(done, len(held_out))
        alone: Response | None = None
        for name, proposer in everyone.items():
            found = _answer(target, proposer, prompt, settings)
            alone = found if alone is None else alone
            counts[name].add(found)
            if settings.temperature == 0 and found.tokens != alone.tokens:
                counts[name].differences.append(_difference(target, prompt, settings, found, alone))
    on_progress(len(held_out), len(held_out))
    base = counts[ALONE].tokens_per_s
    measured = tuple(found.measured(base) for found in counts.values())
    return Report(settings, len(held_out), source, _device_name(target.device), measured)


def _answer(
    target: Target, proposer: Proposer | None, prompt: Prompt, settings: Settings, *, margins: bool = False
) -> Response:
    return generate(
        target,
        proposer,
        prompt.tokens,
        max_new_tokens=settings.max_new_tokens,
        block_size=settings.block_size,
        stop_ids=settings.stop_ids,
        sampling=settings.sampling(prompt.number),
        margins=margins,
    )


def _difference(target: Target, prompt: Prompt, settings: Settings, found: Response, alone: Response) -> Difference:
    pairs = zip(found.tokens, alone.tokens, strict=False)
    shorter = min(len(found.tokens), len(alone.tokens))
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
    again = _answer(target, None, prompt, settings, margins=True)
    return Difference(prompt.number, place, again.margins[min(place, len(again.margins) - 1)])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


class _Counts:
    """Sums of one contender."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._means: list[float] = []
        self._proposed: collections.Counter[int] = collections.Counter()
        self._accepted: collections.Counter[int] = collections.Counter()
        self._responses = self._blocks = self._tokens = self._without = 0
        self._seconds = 0.0
        self.differences: list[Difference] = []

    def add(self, response: Response) -> None:
        self._responses += 1
        mean = response.acceptance_length
        if mean is None:
            self._without += 1
            return
        self._means.append(mean)
        self._blocks += len(response.rounds)
        self._tokens += sum(found.committed for found in response.rounds)
        self._seconds += response.seconds
        for found in response.rounds:
            self._proposed.update(range(found.drafted))
            self._accepted.update(range(found.accepted))

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    def measured(self, base: float | None) -> Measured:
        speed = self.tokens_per_s
        return Measured(
            name=self._name,
            acceptance_length=statistics.fmean(self._means) if self._means else None,
            accepted_by_position=tuple(
                self._accepted[place] / self._proposed[place] for place in sorted(self._proposed)
            ),
            responses=self._responses,
            blocks=self._blocks,
            tokens=self._tokens,
            without_blocks=self._without,
            tokens_per_s=speed,
            speedup=speed / base if speed is not None and base is not None else None,
            differences=tuple(self.differences),
        )
