"""Speculative decoding through FLA's kernels on a GPU: states roll back, responses are the target's own."""

from __future__ import annotations

import functools

import pytest
import tinytarget
import torch

from dflash import evaluate, target
from dflash.evaluate import Prompt, Settings
from dflash.rollback import TargetSequence
from dflash.spec import Spec
from dflash.target import Target

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-2}
"""‖difference of logits‖ / ‖logits‖: FLA multiplies fp32 in TF32."""

LARGER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def spec() -> Spec:
    section = tinytarget.spec().to_json()
    section["target"].update(LARGER)
    return Spec.parse(section)


@functools.cache
def model(dtype: torch.dtype) -> Target:
    made = spec()
    found = target.random_target(made.target, made.drafter.target_layer_ids, torch.device(DEVICE), dtype, seed=0)
    tinytarget.spread(found.model)
    return found


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bf16", "fp32"])
def test_a_sequence_says_what_one_pass_over_it_says(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    read = torch.randint(0, tinytarget.VOCAB, (70,), generator=random).tolist()
    sequence = TargetSequence(model(dtype))
    sequence.extend(read, num_logits=1)
    for number in range(20):
        size = 1 + number % 6
        block = torch.randint(0, tinytarget.VOCAB, (size,), generator=random).tolist()
        found = sequence.extend(block, num_logits=size, undo=True)
        whole = TargetSequence(model(dtype)).extend(read + block, num_logits=size)
        assert error(found.logits_TV, whole.logits_TV) < TOLERANCE[dtype]
        assert error(found.features_TF, whole.features_TF[len(read) :]) < TOLERANCE[dtype]
        kept = int(torch.randint(0, size + 1, (1,), generator=random))
        sequence.keep(kept)
        read += block[:kept]


def test_states_that_are_not_rolled_back_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetSequence, "_replay", lambda self, mixer, count: None)
    sequence = TargetSequence(model(torch.float32))
    sequence.extend([1, 2, 3], num_logits=1)
    sequence.extend([4, 5, 6, 7], num_logits=1, undo=True)
    sequence.keep(0)
    found = sequence.extend([8], num_logits=1)
    whole = TargetSequence(model(torch.float32)).extend([1, 2, 3, 8], num_logits=1)
    assert error(found.logits_TV, whole.logits_TV) > 5 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bf16", "fp32"])
def test_greedy_responses_are_the_target_s_own_where_its_choice_is_clear(dtype: torch.dtype) -> None:
    made, decides = spec(), model(dtype)
    torch.manual_seed(1)
    network = tinytarget.build_drafter(made, dtype=dtype).to(DEVICE)
    held_out = [Prompt(number, tuple(tokens)) for number, tokens in enumerate(tinytarget.prompts(12))]
    report = evaluate.evaluate(
        decides, evaluate.contenders(network, decides, seed=2), held_out, Settings(32, 5), source="prompts"
    )
    spread = float(TargetSequence(decides).extend(held_out[-1].tokens, num_logits=1).logits_TV.std())
    for item in report.measured:
        assert item.tokens == 12 * 31
        for difference in item.differences:
            assert difference.margin < 4 * TOLERANCE[dtype] * spread, item
