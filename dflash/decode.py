"""Speculative decoding: a proposer drafts, the target verifies a whole block at once, rejected tokens leave no trace.

At temperature 0 the result is the target's own greedy decoding; above 0 it is distributed as the target's own samples.
Both hold for exact arithmetic: a pass over a block adds up in another order than passes over single tokens, so where
two tokens are equal up to rounding, another one of them may win.

Legend of shape suffixes: T tokens of a pass, P proposed tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence

import torch

from dflash import devices
from dflash.proposers import Proposal, Proposer, pick, probabilities, uniforms
from dflash.rollback import TargetSequence
from dflash.target import Target
from kernelbake.errors import InputError

STOP, LENGTH = "stop", "length"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: 0 takes the likeliest token.
        seed: of all draws of one response.
    """

    temperature: float = 0.0
    seed: int = 0


GREEDY = Sampling()


@dataclasses.dataclass(frozen=True)
class Round:
    """One block.

    Args:
        drafted: proposed tokens that the target verified.
        accepted: those that it agreed with, up to the first that it did not.
        committed: tokens that the response grew by: accepted ones and the bonus token, up to a stop token.
    """

    drafted: int
    accepted: int
    committed: int


@dataclasses.dataclass(frozen=True)
class Response:
    """What was generated.

    Args:
        tokens: new tokens; a stop token is the last one.
        rounds: all blocks. The first token comes from the prompt's pass and belongs to none.
        finished: ``stop`` or ``length``.
        seconds: of all rounds, without the prompt's pass.
        margins: for each token, by how much its logit was above the next best; empty unless asked for.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    finished: str
    seconds: float
    margins: tuple[float, ...] = ()

    @property
    def acceptance_length(self) -> float | None:
        """Mean over the rounds of the tokens committed, bonus token included; None without a round."""
        if not self.rounds:
            return None
        return sum(found.committed for found in self.rounds) / len(self.rounds)


def generate(
    target: Target,
    proposer: Proposer | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    block_size: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling = GREEDY,
    margins: bool = False,
) -> Response:
    """Continues a prompt.

    Args:
        target: decides.
        proposer: drafts; None decodes token by token.
        prompt: token ids, at least one.
        max_new_tokens: at least 1; never exceeded.
        block_size: positions that the target verifies at once, the anchor included.
        stop_ids: tokens that end a response.
        sampling: greedy, or at a temperature.
        margins: whether to measure how clear each choice was.

    Raises:
        InputError: no prompt, no room, or a temperature below 0.
    """
    _check(prompt, max_new_tokens, sampling)
    judge = _Judge(sampling, margins)
    sequence = TargetSequence(target)
    found = sequence.extend(prompt, num_logits=1)
    tokens = judge.verify(found.logits_TV, Proposal([]))
    if proposer is not None:
        proposer.start(len(prompt) + max_new_tokens + block_size)
        proposer.keep(prompt, found.features_TF)
    rounds: list[Round] = []
    start = _now(target.device)
    while tokens[-1] not in stop_ids and len(tokens) < max_new_tokens:
        room = min(block_size, max_new_tokens - len(tokens))
        chosen, drafted = _verified(sequence, proposer, judge, tokens[-1], room)
        accepted = len(chosen) - 1
        chosen = _up_to_stop(chosen, stop_ids)
        tokens += chosen
        rounds.append(Round(drafted, accepted, len(chosen)))
    finished = STOP if tokens[-1] in stop_ids else LENGTH
    clear = tuple(judge.margins[: len(tokens)])
    return Response(tuple(tokens), tuple(rounds), finished, _now(target.device) - start, clear)


def _verified(
    sequence: TargetSequence, proposer: Proposer | None, judge: _Judge, anchor: int, room: int
) -> tuple[list[int], int]:
    """One block: accepted tokens with the bonus token, and how many were drafted; what was rejected is forgotten."""
    proposal = Proposal([])
    if proposer is not None and room > 1:
        proposal = proposer.propose(anchor, room - 1, judge.temperature, judge.generator)
    block = [anchor, *proposal.tokens]
    found = sequence.extend(block, num_logits=len(block), undo=len(block) > 1)
    chosen = judge.verify(found.logits_TV, proposal)
    if len(block) > 1:
        sequence.keep(len(chosen))
    if proposer is not None:
        proposer.keep(block[: len(chosen)], found.features_TF[: len(chosen)])
    return chosen, len(proposal.tokens)


def _check(prompt: Sequence[int], max_new_tokens: int, sampling: Sampling) -> None:
    reasons = []
    if not prompt:
        reasons.append("an empty prompt; wanted at least one token")
    if max_new_tokens < 1:
        reasons.append(f"`{max_new_tokens}` new tokens; wanted at least 1")
    if sampling.temperature < 0:
        reasons.append(f"temperature `{sampling.temperature}`; wanted at least 0")
    if reasons:
        raise InputError(f"decode: {len(reasons)} faults", reasons=reasons)


def _up_to_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to the first stop token, which stays."""
    end = next((place for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: end + 1]


def _now(device: torch.device) -> float:
    devices.synchronize(device)
    return time.perf_counter()


class _Judge:
    """Decides which proposed tokens stay, and adds one."""

    def __init__(self, sampling: Sampling, measure: bool) -> None:
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.margins: list[float] = []
        self.temperature = sampling.temperature
        self._measure = measure

    def verify(self, logits_TV: torch.Tensor, proposal: Proposal) -> list[int]:
        """The accepted tokens and the bonus token.

        Args:
            logits_TV: of the anchor and the proposed tokens: row i judges proposed token i, the last row only adds.
            proposal: T − 1 tokens.
        """
        if self.temperature == 0:
            choices = logits_TV.argmax(dim=-1).tolist()
            accepted = _agreeing(proposal.tokens, choices)
            chosen: list[int] = [*proposal.tokens[:accepted], choices[accepted]]
        else:
            chosen = sample(probabilities(logits_TV, self.temperature), proposal, self.generator)
        if self._measure:
            best_T2 = logits_TV[: len(chosen)].topk(2, dim=-1).values
            self.margins += (best_T2[:, 0] - best_T2[:, 1]).tolist()
        return chosen


def _agreeing(tokens: Sequence[int], choices: Sequence[int]) -> int:
    """Length of the leading run in which both are the same."""
    pairs = zip(tokens, choices, strict=False)
    return next((place for place, (token, choice) in enumerate(pairs) if token != choice), len(tokens))


def sample(probs_TV: torch.Tensor, proposal: Proposal, generator: torch.Generator) -> list[int]:
    """Rejection sampling: tokens distributed as the target's own samples, whatever was proposed.

    Proposed token d is accepted with probability min(1, p(d) / q(d)); the first that is not is replaced by a draw from
    the positive part of p − q (Leviathan et al., 2023, theorem 1). If all are accepted, one more is drawn from p.

    Args:
        probs_TV: the target's distributions p after the anchor and after each proposed token.
        proposal: T − 1 tokens, and the distributions q from which they were drawn.
        generator: on the CPU; T numbers are drawn, whatever happens.
    """
    count = len(proposal.tokens)
    draws_T = uniforms(count + 1, generator, probs_TV.device)
    tokens_P = torch.tensor(proposal.tokens, device=probs_TV.device, dtype=torch.int64)
    probs_PV = None if proposal.probs_PV is None else proposal.probs_PV.to(probs_TV.device)
    p_P = probs_TV[:count].gather(1, tokens_P[:, None])[:, 0].double()
    q_P = torch.ones_like(p_P) if probs_PV is None else probs_PV.gather(1, tokens_P[:, None])[:, 0].double()
    accepted = int((draws_T[:count] * q_P < p_P).int().cumprod(dim=0).sum())
    rest_V = probs_TV[accepted].double()
    if accepted < count:
        rest_V = _residual(rest_V, proposal.tokens[accepted], None if probs_PV is None else probs_PV[accepted])
    bonus = int(pick(rest_V[None], draws_T[count:])[0])
    return [*proposal.tokens[:accepted], bonus]


def _residual(probs_V: torch.Tensor, rejected: int, proposed_V: torch.Tensor | None) -> torch.Tensor:
    """The positive part of p − q; q is certain of the rejected token where it is None."""
    if proposed_V is None:
        rest_V = probs_V.clone()
        rest_V[rejected] = 0
    else:
        rest_V = (probs_V - proposed_V.double()).clamp(min=0)
    return rest_V if rest_V.sum() > 0 else probs_V  # p = q up to rounding: nothing is left to correct
