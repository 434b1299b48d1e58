"""Speculative decoding equals the target's own decoding, whatever is proposed; states go back to what was accepted."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tinytarget
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash import decode, proposers, rollback
from dflash.decode import GREEDY, Response, Sampling, generate
from dflash.proposers import CopyProposer, DrafterProposer, Proposal, Proposer
from dflash.rollback import TargetSequence
from dflash.target import Target
from kernelbake.errors import InputError

BLOCK = 5
NEW = 16
CLEAR = 1e-7
"""Choices of the tiny targets are clearer than this, and their arithmetic is exact to a millionth of it."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def tiny(architecture: str = "qwen3_5") -> Target:
    return tinytarget.build(tinytarget.spec(architecture))


@functools.cache
def plain(prompt: tuple[int, ...], architecture: str = "qwen3_5", new: int = NEW) -> Response:
    """Decoded token by token; the test's own check that every choice is clear."""
    found = generate(tiny(architecture), None, prompt, max_new_tokens=new, block_size=1, margins=True)
    assert len(found.margins) == new
    assert min(found.margins) > CLEAR
    return found


class Foreseer:
    """Proposes what will come, wrong at a place that goes round the block."""

    def __init__(self, future: Sequence[int], block: int = BLOCK) -> None:
        self._future = list(future)
        self._block = block
        self._kept = -1
        self._rounds = 0
        self.proposed: list[int] = []

    def start(self, capacity: int) -> None:
        self._kept = 0

    def keep(self, tokens: Sequence[int], features_TF: torch.Tensor) -> None:
        assert len(tokens) == len(features_TF)
        self._kept += 0 if self._rounds == 0 else len(tokens)

    def propose(self, anchor: int, limit: int, temperature: float, generator: torch.Generator) -> Proposal:
        assert anchor == self._future[self._kept]
        tokens = self._future[self._kept + 1 : self._kept + self._block][:limit]
        wrong = self._rounds % self._block
        self._rounds += 1
        if wrong < len(tokens):
            tokens[wrong] = (tokens[wrong] + 1) % tinytarget.VOCAB
        self.proposed.append(len(tokens))
        return Proposal(tokens)


# ---------------------------------------------------------------------------------------------- the target's states


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_sequence_says_what_one_pass_over_it_says(architecture: str) -> None:
    random = torch.Generator().manual_seed(3)
    target, read = tiny(architecture), [1, 2, 3]
    sequence = TargetSequence(target)
    sequence.extend(read, num_logits=1)
    for number in range(15):
        size = 1 + number % 6
        block = torch.randint(0, tinytarget.VOCAB, (size,), generator=random).tolist()
        found = sequence.extend(block, num_logits=size, undo=True)
        logits, features = _whole(target, read + block)
        torch.testing.assert_close(found.logits_TV, logits[len(read) :], rtol=0, atol=1e-11)
        torch.testing.assert_close(found.features_TF, features[len(read) :], rtol=0, atol=1e-11)
        kept = int(torch.randint(0, size + 1, (1,), generator=random))
        sequence.keep(kept)
        read += block[:kept]
        assert sequence.length == len(read)


def _whole(target: Target, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), target.capturing() as captured:
        logits = target.model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits, captured()[0]


def test_features_are_the_outputs_of_the_chosen_layers() -> None:
    found = TargetSequence(tiny()).extend([1, 2, 3], num_logits=1)
    with torch.no_grad():
        told = tiny().model(torch.tensor([[1, 2, 3]]), output_hidden_states=True, use_cache=False).hidden_states
    wanted = torch.cat([told[layer + 1][0] for layer in (0, 1)], dim=-1)  # of the last layer it tells the normed output
    torch.testing.assert_close(found.features_TF[:, : wanted.shape[-1]], wanted, rtol=0, atol=1e-12)
    assert found.features_TF.shape == (3, 96)


@pytest.mark.parametrize("part", ["recurrent_states", "conv_states", "attention"])
def test_no_part_of_the_roll_back_is_idle(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = TargetSequence(tiny())
    sequence.extend([1, 2, 3], num_logits=1)
    polluted = sequence.extend([4, 5, 6], num_logits=1, undo=True)
    assert polluted.logits_TV.shape == (1, tinytarget.VOCAB)
    if part == "attention":
        for cache in sequence._attention:
            monkeypatch.setattr(cache, "crop", lambda surplus: None)
    else:
        left = {
            id(mixer): [state.clone() for state in getattr(mixer.cache, part).values()] for mixer in sequence._mixers
        }
    sequence.keep(1)
    if part == "attention":
        with pytest.raises(RuntimeError):
            sequence.extend([7, 8], num_logits=1)  # the mask no longer fits the keys
        return
    for mixer in sequence._mixers:
        for state, old in zip(getattr(mixer.cache, part).values(), left[id(mixer)], strict=True):
            state.copy_(old)
    logits, _ = _whole(tiny(), [1, 2, 3, 4, 7])
    found = sequence.extend([7], num_logits=1)
    assert (found.logits_TV[0] - logits[-1]).abs().max() > 1e-3


def test_only_tokens_of_a_pass_to_be_undone_can_be_taken_back() -> None:
    sequence = TargetSequence(tiny())
    sequence.extend([1, 2, 3], num_logits=1)
    with pytest.raises(ValueError, match="keep 1 of the last 0 tokens"):
        sequence.keep(1)
    sequence.extend([4, 5], num_logits=1, undo=True)
    with pytest.raises(ValueError, match="keep 3 of the last 2 tokens"):
        sequence.keep(3)
    sequence.keep(2)
    sequence.keep(0)
    assert sequence.length == 5


def test_calls_with_a_state_are_served_by_torch_on_the_cpu() -> None:
    def reference(query: torch.Tensor, **options: Any) -> str:
        return "torch"

    @functools.wraps(reference)
    def package(query: torch.Tensor, **options: Any) -> str:
        return "package"

    module = types.SimpleNamespace(torch_chunk_gated_delta_rule=package, causal_conv1d_update=reference)
    rollback._step_in_torch_on_cpu(module)
    rollback._step_in_torch_on_cpu(module)
    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    call = module.torch_chunk_gated_delta_rule
    assert call.original is package
    assert call(here, output_final_state=True) == "torch"
    assert call(here, output_final_state=False) == "package"
    assert call(elsewhere, output_final_state=True) == "package"
    assert module.causal_conv1d_update is reference


# ---------------------------------------------------------------------------------------------- greedy


def test_plain_decoding_is_that_of_transformers() -> None:
    for prompt in tinytarget.prompts(6):
        ids = torch.tensor([prompt])
        whole = tiny().model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert plain(tuple(prompt)).tokens == tuple(whole[0, len(prompt) :].tolist())


def _proposer(kind: str, future: Sequence[int], block: int) -> Proposer:
    if kind == "foreseer":
        return Foreseer(future, block)
    if kind == "copy":
        return CopyProposer(block - 1)
    return DrafterProposer(tinytarget.build_drafter(tinytarget.spec()), tiny())


@pytest.mark.parametrize(
    ("kind", "block", "new"),
    [
        ("foreseer", 4, 11),
        ("copy", 4, 11),
        ("drafter", 5, 5),  # random weights agree by chance alone: nearly a pass for each token
    ],
)
def test_fifty_prompts_give_the_tokens_of_plain_decoding(kind: str, block: int, new: int) -> None:
    accepted: collections.Counter[int] = collections.Counter()
    for prompt in tinytarget.prompts(50):
        wanted = plain(tuple(prompt), new=11)
        proposer = _proposer(kind, wanted.tokens, block)
        found = generate(tiny(), proposer, prompt, max_new_tokens=new, block_size=block, margins=True)
        assert found.tokens == wanted.tokens[:new]
        assert found.margins == pytest.approx(wanted.margins[:new], abs=CLEAR / 2)
        assert 1 + sum(part.committed for part in found.rounds) == new
        assert all(part.committed == part.accepted + 1 for part in found.rounds)
        accepted.update(part.accepted for part in found.rounds)
    if kind == "foreseer":
        assert set(accepted) == set(range(block))
    assert accepted[0] > 0


@pytest.mark.parametrize("architecture", ["qwen3_5_moe", "qwen3_next"])
def test_other_targets_too(architecture: str) -> None:
    for prompt in tinytarget.prompts(4, seed=1):
        wanted = plain(tuple(prompt), architecture)
        proposer = Foreseer(wanted.tokens)
        found = generate(tiny(architecture), proposer, prompt, max_new_tokens=NEW, block_size=BLOCK)
        assert found.tokens == wanted.tokens


def test_a_perfect_proposer_needs_the_fewest_passes() -> None:
    prompt = tinytarget.prompts(5)[3]
    wanted = plain(tuple(prompt)).tokens

    class Perfect(Foreseer):
        def propose(self, *args: Any) -> Proposal:
            self._rounds = BLOCK - 1  # the place that is wrong lies behind the block
            return super().propose(*args)

    found = generate(tiny(), Perfect(wanted), prompt, max_new_tokens=11, block_size=BLOCK)
    assert [part.committed for part in found.rounds] == [5, 5]
    assert found.acceptance_length == 5.0
    assert found.tokens == wanted[:11]


def test_a_proposer_is_told_the_features_of_what_is_kept() -> None:
    prompt = tinytarget.prompts(5)[2]
    wanted = plain(tuple(prompt)).tokens
    kept: list[int] = []
    features: list[torch.Tensor] = []

    class Listener(Foreseer):
        def keep(self, tokens: Sequence[int], features_TF: torch.Tensor) -> None:
            super().keep(tokens, features_TF)
            kept.extend(tokens)
            features.append(features_TF)

    found = generate(tiny(), Listener(wanted), prompt, max_new_tokens=NEW, block_size=BLOCK)
    assert len({part.accepted for part in found.rounds}) > 2
    assert kept == [*prompt, *wanted[:-1]]  # the last token is the next anchor
    _, whole = _whole(tiny(), kept)
    torch.testing.assert_close(torch.cat(features), whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("new", [1, 2, 3, 6, 7])
def test_the_room_is_never_exceeded(new: int) -> None:
    prompt = tinytarget.prompts(5)[2]
    wanted = plain(tuple(prompt)).tokens
    proposer = Foreseer(wanted)
    found = generate(tiny(), proposer, prompt, max_new_tokens=new, block_size=BLOCK)
    assert found.tokens == wanted[:new]
    assert found.finished == decode.LENGTH
    left = new - 1
    for part in found.rounds:
        assert part.drafted <= min(BLOCK, left) - 1
        left -= part.committed
    assert left == 0
    assert (found.acceptance_length is None) is (new == 1)


def test_a_stop_token_ends_a_response_wherever_it_stands() -> None:
    prompt = tinytarget.prompts(5)[4]
    wanted = plain(tuple(prompt)).tokens
    for stop in sorted(set(wanted))[:5]:
        end = wanted.index(stop) + 1
        for proposer in (None, Foreseer(wanted)):
            found = generate(tiny(), proposer, prompt, max_new_tokens=NEW, block_size=BLOCK, stop_ids={stop})
            assert found.tokens == wanted[:end]
            assert found.finished == decode.STOP
            assert 1 + sum(part.committed for part in found.rounds) == end


@pytest.mark.parametrize(
    ("prompt", "new", "temperature", "why"),
    [
        ([], 4, 0.0, "an empty prompt"),
        ([1], 0, 0.0, "`0` new tokens"),
        ([1], 4, -1.0, "temperature `-1.0`"),
    ],
)
def test_what_cannot_be_decoded(prompt: list[int], new: int, temperature: float, why: str) -> None:
    with pytest.raises(InputError) as caught:
        generate(tiny(), None, prompt, max_new_tokens=new, block_size=BLOCK, sampling=Sampling(temperature=temperature))
    assert caught.value.reasons[0].startswith(why)


# ---------------------------------------------------------------------------------------------- the drafter's context


@pytest.mark.parametrize(
    "fields", [{}, {"is_causal": True}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}]
)
def test_a_context_kept_in_pieces_is_that_kept_at_once(fields: dict[str, Any]) -> None:
    network = tinytarget.build_drafter(tinytarget.spec(**fields))
    features = torch.randn(11, 96, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    once, pieces = (DrafterProposer(network, tiny()) for _ in range(2))
    once.start(20)
    once.keep([0] * 11, features)
    pieces.start(20)
    for start, end in ((0, 4), (4, 5), (5, 11)):
        pieces.keep([0] * (end - start), features[start:end])
    torch.testing.assert_close(once.logits(7), pieces.logits(7), rtol=0, atol=1e-12)
    assert once.logits(7).shape == (BLOCK - 1, tinytarget.VOCAB)
    again = once.logits(7)
    once.start(20)
    once.keep([0] * 11, features)
    assert torch.equal(once.logits(7), again)
    assert not torch.allclose(once.logits(8), again)


# ---------------------------------------------------------------------------------------------- copying


def _copied(known: list[int], anchor: int, count: int, longest: int) -> list[int]:
    """The same by trying every place."""
    tokens = [*known, anchor]
    for size in range(min(longest, len(tokens)), 0, -1):
        tail = tokens[-size:]
        places = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tail]
        if places:
            for _ in range(count):
                tokens.append(tokens[places[-1] + len(tokens) - len(known) - 1])
            return tokens[len(known) + 1 :]
    return []


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 6))
def test_copies_what_followed_the_longest_last_occurrence(pieces: list[list[int]], limit: int) -> None:
    proposer, known = CopyProposer(4), list[int]()
    proposer.start(100)
    for piece in pieces:
        proposer.keep(piece, torch.empty(len(piece), 0))
        known += piece
        for anchor in range(4):
            found = proposer.propose(anchor, limit, 0.0, torch.Generator())
            assert found.tokens == _copied(known, anchor, min(limit, 4), 3)
    proposer.start(100)
    assert proposer.propose(0, limit, 0.0, torch.Generator()).tokens == []


# ---------------------------------------------------------------------------------------------- chance

_P = torch.tensor([[0.5, 0.3, 0.0, 0.2], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
_Q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])


@pytest.mark.parametrize("certain", [False, True])
def test_samples_are_distributed_as_the_target_s(certain: bool) -> None:
    random, count = torch.Generator().manual_seed(5), 8000
    firsts = torch.zeros(4)
    seconds = torch.zeros(4)
    for _ in range(count):
        drawn = [1, 3] if certain else proposers.pick(_Q, proposers.uniforms(2, random, _Q.device)).tolist()
        chosen = decode.sample(_P, Proposal(drawn, None if certain else _Q), random)
        assert chosen[:-1] == drawn[: len(chosen) - 1]
        firsts[chosen[0]] += 1
        if len(chosen) > 1:
            seconds[chosen[1]] += 1
    deviation = 5 * (0.25 / count) ** 0.5
    torch.testing.assert_close(firsts / count, _P[0], rtol=0, atol=deviation)
    reached = seconds.sum()
    torch.testing.assert_close(seconds / reached, _P[1], rtol=0, atol=float(5 * (0.25 / reached) ** 0.5))
    assert firsts[2] == 0


def test_the_same_distributions_accept_everything() -> None:
    random = torch.Generator().manual_seed(6)
    for _ in range(200):
        drawn = proposers.pick(_P[:2], proposers.uniforms(2, random, _P.device)).tolist()
        assert decode.sample(_P, Proposal(drawn, _P[:2]), random)[:2] == drawn


def test_a_residual_lost_to_rounding_falls_back_to_the_target_s_own() -> None:
    same = torch.tensor([0.5, 0.5])
    assert torch.equal(decode._residual(same.double(), 0, same), same.double())
    assert decode._residual(same.double(), 0, None).tolist() == [0.0, 0.5]


@given(st.lists(st.floats(0, 1e3, width=32), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_never_picks_what_has_no_weight(weights: list[float], uniform: float) -> None:
    row = torch.tensor([weights], dtype=torch.float64)
    if float(row.sum()) > 0:
        place = int(proposers.pick(row, torch.tensor([uniform], dtype=torch.float64))[0])
        assert weights[place] > 0
        before, upto = sum(weights[:place]), sum(weights[: place + 1])
        assert before <= uniform * sum(weights) * (1 + 1e-9) + 1e-300
        assert uniform * sum(weights) * (1 - 1e-9) <= upto


def test_a_response_is_decided_by_its_seed() -> None:
    prompt = tinytarget.prompts(5)[3]
    network = tinytarget.build_drafter(tinytarget.spec())

    def tokens(seed: int, temperature: float = 1.0) -> tuple[int, ...]:
        proposer, sampling = DrafterProposer(network, tiny()), Sampling(temperature, seed)
        found = generate(tiny(), proposer, prompt, max_new_tokens=12, block_size=BLOCK, sampling=sampling)
        assert all(0 <= part.accepted <= part.drafted for part in found.rounds)
        return found.tokens

    assert tokens(1) == tokens(1)
    assert len({tokens(seed) for seed in range(4)}) == 4
    assert tokens(1, temperature=1e-4) == plain(tuple(prompt)).tokens[:12]
    assert dataclasses.replace(GREEDY, seed=3).temperature == 0
