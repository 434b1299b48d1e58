"""What an evaluation says: how figures are made, and that a drafter that has learned really is accepted."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinytarget
import torch
import torch.nn.functional as F

from dflash import drafter as drafters
from dflash import evaluate, evaluation
from dflash.anchors import Drafting
from dflash.attention.reference import reference_attention
from dflash.buckets import Sample, Shape, assemble
from dflash.decode import LENGTH, Response, Round, generate
from dflash.drafter import Drafter
from dflash.errors import DataError
from dflash.evaluate import ALONE, COPY, TRAINED, UNTRAINED, Prompt, Settings
from dflash.placement import Devices
from dflash.proposers import CopyProposer, DrafterProposer
from dflash.target import Target
from kernelbake.errors import InputError


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def tiny(dtype: torch.dtype = torch.float64) -> Target:
    return tinytarget.build(tinytarget.spec(), dtype=dtype)


class Samples:
    """Samples of (length, place of the first supervised token)."""

    name = "samples"
    share = 0.5
    digest = ""

    def __init__(self, *samples: tuple[int, int]) -> None:
        self._samples = samples
        self.dropped: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, number: int) -> Any:
        length, first = self._samples[number]
        return np.arange(length, dtype=np.int64) + 100 * number, np.arange(length) >= first


def test_prompts_end_before_the_first_supervised_token() -> None:
    found = evaluate.prompts(Samples((10, 4), (10, 7), (300, 1), (6, 1)), 9, longest=64)
    assert [(prompt.number, len(prompt.tokens)) for prompt in found] == [(0, 4), (1, 7), (2, 64), (3, 3)]
    assert found[1].tokens == tuple(range(100, 107))


def test_prompts_stand_at_even_distances() -> None:
    found = evaluate.prompts(Samples(*[(10, 4)] * 100), 4, longest=64)
    assert [prompt.number for prompt in found] == [12, 37, 62, 87]


def test_long_prompts_are_passed_over() -> None:
    assert [prompt.number for prompt in evaluate.prompts(Samples((10, 4), (10, 7)), 2, longest=5)] == [0]
    with pytest.raises(DataError, match="no prompt of at most `3` tokens"):
        evaluate.prompts(Samples((10, 4), (10, 7)), 2, longest=3)


@pytest.mark.parametrize(("found", "wanted"), [(None, set()), (7, {7}), ([7, 8], {7, 8})])
def test_stop_tokens_are_the_target_s(found: Any, wanted: set[int]) -> None:
    target = tiny()
    before = target.model.generation_config.eos_token_id
    target.model.generation_config.eos_token_id = found
    try:
        assert evaluate.stop_ids(target) == wanted
    finally:
        target.model.generation_config.eos_token_id = before


def response(tokens: list[int], *rounds: tuple[int, int], seconds: float = 1.0, margins: Any = ()) -> Response:
    made = tuple(Round(drafted, accepted, accepted + 1) for drafted, accepted in rounds)
    return Response(tuple(tokens), made, LENGTH, seconds, tuple(margins))


def test_figures_are_means_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [response([1] * 11, *[(0, 0)] * 10, seconds=2.0), response([1] * 11, *[(0, 0)] * 10, seconds=2.0)]
    drafted = [
        response([1] * 11, (4, 4), (4, 4), seconds=0.5),
        response([1, 1, 2, *[1] * 8], *[(4, 0)] * 8, (4, 1), seconds=1.5),
    ]
    margins = response([1] * 11, margins=[9.0, 9.0, 0.25, 9.0, 9.0])
    answers = iter([alone[0], drafted[0], alone[0], drafted[0], alone[1], drafted[1], margins])
    monkeypatch.setattr(evaluate, "generate", lambda *args, **options: next(answers))
    prompts = [Prompt(3, (1,)), Prompt(8, (2,))]
    seen: list[tuple[int, int]] = []
    report = evaluate.evaluate(
        tiny(),
        {TRAINED: CopyProposer(4)},
        prompts,
        Settings(11, 5),
        source="samples",
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]
    base, found = report.measured
    assert (base.name, base.acceptance_length, base.speedup, base.tokens_per_s) == (ALONE, 1.0, 1.0, 5.0)
    assert found.acceptance_length == (5.0 + 10 / 9) / 2
    assert (found.tokens, found.blocks, found.tokens_per_s, found.speedup) == (20, 11, 10.0, 2.0)
    assert found.accepted_by_position == (3 / 11, 2 / 11, 2 / 11, 2 / 11)
    [difference] = found.differences
    assert (difference.prompt, difference.place, difference.margin) == (8, 2, 0.25)
    lines = report.lines()
    assert lines[2].split()[:4] == ["drafter", "3.06", "10.0", "2.00"]
    assert lines[-1].startswith("drafter: 1 of 2 greedy responses differ from the target's own")
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["measured"][1]["speedup"] == 2.0


def test_a_response_of_one_token_counts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([response([1])] * 2)
    monkeypatch.setattr(evaluate, "generate", lambda *args, **options: next(answers))
    report = evaluate.evaluate(tiny(), {}, [Prompt(0, (1,))], Settings(1, 5), source="samples")
    [found] = report.measured
    assert (found.acceptance_length, found.tokens_per_s, found.without_blocks) == (None, None, 1)
    assert report.lines()[1].split() == ["target", "alone", "–", "–", "–"]


def test_draws_of_a_prompt_do_not_depend_on_the_others() -> None:
    network = tinytarget.build_drafter(tinytarget.spec())
    proposers = {TRAINED: DrafterProposer(network, tiny())}
    held_out = [Prompt(number, tuple(tokens)) for number, tokens in enumerate(tinytarget.prompts(3))]
    settings = Settings(8, 5, temperature=1.0, seed=4)
    both = evaluate.evaluate(tiny(), proposers, held_out, settings, source="x").measured[1]
    last = evaluate.evaluate(tiny(), proposers, held_out[2:], settings, source="x").measured[1]
    rest = evaluate.evaluate(tiny(), proposers, held_out[:2], settings, source="x").measured[1]
    assert both.blocks == last.blocks + rest.blocks
    assert settings.sampling(1) != settings.sampling(2)


# ---------------------------------------------------------------------------------------------- a drafter that learned

BLOCK = 5
LENGTH_TOKENS = 60


def _learn(target: Target, texts: list[list[int]], steps: int) -> Drafter:
    """Trains as the trainer does, with the dense reference in place of the kernels."""
    made = tinytarget.spec()
    network = drafters.build(made.drafter, made.target.hidden_size, torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    drafting, shape = Drafting(BLOCK, made.drafter.mask_token_id), Shape(64, 16, len(texts), "padded", "float32")
    samples = [(np.array(text, np.int64), np.arange(len(text)) > 0) for text in texts]
    features_BSF = None
    for step in range(steps):
        rows = [[Sample(step, number, *sample)] for number, sample in enumerate(samples)]
        batch = assemble(rows, shape, drafting, seed=0)
        features_BSF = target.features(batch) if features_BSF is None else features_BSF  # only anchors change
        hidden_BQE = network(
            features_BSF,
            target.embed(batch.block_ids_BQ),
            batch.positions_BS,
            batch.block_positions_BQ,
            batch.anchors_BN,
            batch.num_valid_B,
        )
        hidden_BNPE = hidden_BQE.unflatten(1, batch.labels_BNK.shape[1:])[:, :, 1:]
        logits_RV = F.linear(hidden_BNPE.flatten(0, 2), target.head_VE)
        loss = F.cross_entropy(logits_RV, batch.labels_BNK[..., 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.5
    return network


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, anchors: torch.Tensor, **options: Any) -> torch.Tensor:
    layout = options.pop("layout")
    return reference_attention(q, k, v, anchors, num_valid=layout, **options).to(q.dtype)


def test_what_was_learned_in_training_is_accepted_in_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "anchor_attention", _dense)
    monkeypatch.setattr(drafters, "anchor_layout", lambda anchors, *, num_valid, **options: num_valid)
    target = tiny(torch.float32)
    held_out = [Prompt(number, tuple(tokens)) for number, tokens in enumerate(tinytarget.prompts(6, seed=2)[2:])]
    texts = []
    for prompt in held_out:
        told = generate(
            target, None, prompt.tokens, max_new_tokens=LENGTH_TOKENS - len(prompt.tokens), block_size=1
        ).tokens
        texts.append([*prompt.tokens, *told])
    torch.manual_seed(7)
    network = _learn(target, texts, steps=200)
    settings = Settings(LENGTH_TOKENS - max(len(prompt.tokens) for prompt in held_out), BLOCK)
    report = evaluate.evaluate(
        target, evaluate.contenders(network, target, seed=1), held_out, settings, source="samples"
    )
    found = {item.name: item for item in report.measured}
    assert set(found) == {ALONE, TRAINED, UNTRAINED, COPY}
    lengths = {name: item.acceptance_length or 0.0 for name, item in found.items()}
    assert lengths[ALONE] == 1.0
    assert lengths[TRAINED] > 4.0
    assert lengths[UNTRAINED] < 1.5
    assert all(not item.differences for item in report.measured)


def test_gpus_that_are_not_there_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="eval: GPU `0`; wanted a CUDA GPU"):
        evaluation._devices(Devices(0, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="eval: GPUs `1` and `2`; wanted the numbers of 2 CUDA GPUs here"):
        evaluation._devices(Devices(1, 2))
