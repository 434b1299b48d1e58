"""The training step against its definition: what a block may see, how the loss is normalised, what an update does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace

import interpreted
import pytest
import stubpair
import torch
from stubpair import CPU, sample

from dflash import target
from dflash.anchors import IGNORED, Drafting
from dflash.attention.reference import reference_attention
from dflash.buckets import Batch, Sample, Shape, assemble
from dflash.config import OptimizerConfig
from dflash.optimizer import Optimizer
from dflash.pairs import Pair
from dflash.spec import Spec
from dflash.target import Target

DRAFTING = Drafting(4, 256)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted.last_configs():
        yield


@pytest.fixture(scope="module")
def tiny() -> Target:
    """A hybrid target of two layers with random weights."""
    wanted = stubpair.spec()
    return target.random_target(wanted.target, wanted.drafter.target_layer_ids, CPU, torch.float32, seed=0)


def batch(rows: list[list[Sample]], slots: int = 4, bucket: int = 32, layout: str = "padded") -> Batch:
    return assemble(rows, Shape(bucket, slots, len(rows), layout, "float32"), DRAFTING, 0)


def hidden(pair: Pair, given: Batch, features: torch.Tensor) -> torch.Tensor:
    """The drafter's output [N, K, E] for a batch of one row and features of one's own."""
    with torch.no_grad():
        out = pair.drafter(
            features,
            pair.target.embed(given.block_ids_BQ),
            given.positions_BS,
            given.block_positions_BQ,
            given.anchors_BN,
            given.num_valid_B,
            given.doc_ids_BS,
        )
    return out[0].unflatten(0, (given.shape.anchors, -1))


# ---------------------------------------------------------------------------------------------- what a block sees


def at(anchors: list[int], length: int = 16) -> Batch:
    """A row with exactly these anchors."""
    given = batch([[sample(length, 0)]], slots=len(anchors), bucket=length)
    positions = torch.tensor([[anchor + i for anchor in anchors for i in range(4)]])
    ids = given.block_ids_BQ.clone()
    ids[0, ::4] = given.input_ids_BS[0, anchors]
    return dataclasses.replace(
        given,
        anchors_BN=torch.tensor([anchors], dtype=torch.int32),
        num_valid_B=torch.tensor([len(anchors)], dtype=torch.int32),
        block_ids_BQ=ids,
        block_positions_BQ=positions,
    )


def test_a_block_sees_the_context_strictly_before_its_anchor_however_close_others_are() -> None:
    """Anchors at 10, 11 and 12 with blocks of 4: features at position 11 reach the block at 12 only."""
    pair, given = stubpair.pair(), at([10, 11, 12])
    features = pair.target.features(given)
    before = hidden(pair, given, features)
    changed = features.clone()
    changed[:, 11] += 1.0
    after = hidden(pair, given, changed)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[2], after[2])


def test_no_position_from_the_anchor_on_changes_its_block() -> None:
    pair, given = stubpair.pair(), at([3, 9])
    features = pair.target.features(given)
    before = hidden(pair, given, features)
    for position in range(16):
        changed = features.clone()
        changed[:, position] += 1.0
        after = hidden(pair, given, changed)
        for block, anchor in enumerate((3, 9)):
            assert torch.equal(before[block], after[block]) == (position >= anchor)


def test_no_token_behind_an_anchor_reaches_its_block_through_the_target(tiny: Target) -> None:
    """Gated DeltaNet, its convolution and attention included: what the target reads from the anchor on is not seen."""
    pair, given = stubpair.pair(), at([3, 9])
    before = hidden(pair, given, tiny.features(given))
    for position in (2, 3, 8, 9, 15):
        ids = given.input_ids_BS.clone()
        ids[0, position] = (ids[0, position] + 1) % 256
        after = hidden(pair, given, tiny.features(dataclasses.replace(given, input_ids_BS=ids)))
        for block, anchor in enumerate((3, 9)):
            distance = float((before[block] - after[block]).abs().max())
            assert distance < 1e-5 if position >= anchor else distance > 1e-4


def test_blocks_do_not_see_each_other() -> None:
    pair, given = stubpair.pair(), at([5, 6])
    features = pair.target.features(given)
    other = given.block_ids_BQ.clone()
    other[0, 0] = (other[0, 0] + 1) % 256
    before, after = (
        hidden(pair, given, features),
        hidden(pair, dataclasses.replace(given, block_ids_BQ=other), features),
    )
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


def test_the_drafter_is_what_its_formulas_say() -> None:
    """One layer, written out with dense attention: KV injection, norms per head, full rotary, SwiGLU."""
    pair, given = stubpair.pair(), at([3, 9])
    wanted = stubpair.spec()
    features = pair.target.features(given)
    weights = dict(pair.drafter.named_parameters())
    size, eps = wanted.drafter.head_dim, wanted.drafter.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ weights[f"layers.0.self_attn.{name}.weight"].T).unflatten(-1, (-1, size))

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = size // 2
        angle = positions[..., None, None] * wanted.drafter.rope_theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)

    context = norm(features @ weights["fc.weight"].T, "hidden_norm.weight")
    x = pair.target.embed(given.block_ids_BQ)
    y = norm(x, "layers.0.input_layernorm.weight")
    names = ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")
    out = reference_attention(
        turned(norm(heads(y, "q_proj"), names[0]), given.block_positions_BQ),
        torch.cat(
            (
                turned(norm(heads(context, "k_proj"), names[1]), given.positions_BS),
                turned(norm(heads(y, "k_proj"), names[1]), given.block_positions_BQ),
            ),
            1,
        ),
        torch.cat((heads(context, "v_proj"), heads(y, "v_proj")), 1),
        given.anchors_BN,
        block_size=4,
        context_length=16,
    )
    x = x + out.float().flatten(-2) @ weights["layers.0.self_attn.o_proj.weight"].T
    z = norm(x, "layers.0.post_attention_layernorm.weight")
    gate, up = (z @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (gate * gate.sigmoid() * up) @ weights["layers.0.mlp.down_proj.weight"].T
    found = hidden(pair, given, features).flatten(0, 1)
    assert torch.allclose(found, norm(x, "norm.weight")[0], atol=1e-5)


# ---------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_weighted_mean_of_cross_entropies() -> None:
    pair = stubpair.pair()
    given = batch([[sample(20, 1)], [sample(9, 2, supervised=4)]])
    loss, _ = stubpair.gradients(pair, [given])
    features = pair.target.features(given)
    total, weight = 0.0, 0.0
    for row in range(2):
        one = dataclasses.replace(
            given,
            **{
                name: getattr(given, name)[row : row + 1]
                for name in ("block_ids_BQ", "positions_BS", "block_positions_BQ", "anchors_BN", "num_valid_B")
            },
        )
        logits = hidden(pair, one, features[row : row + 1]) @ pair.target.head_VE.T
        for slot in range(4):
            for i in range(1, 4):
                label = int(given.labels_BNK[row, slot, i])
                if label != IGNORED:
                    decay = math.exp(-(i - 1) / (4 * 7 / 16))
                    total -= decay * float(logits[slot, i].log_softmax(-1)[label])
                    weight += decay
    assert loss == pytest.approx(total / weight, rel=1e-5)
    assert given.weight_sum == pytest.approx(weight, rel=1e-6)


def test_the_loss_is_the_same_for_every_split_and_any_padding() -> None:
    """Four samples of uneven length as 1 × 4, 2 × 2 and 4 × 1, and once more with 100 padding tokens."""
    samples = [sample(31, 1), sample(12, 2, supervised=3), sample(20, 3), sample(7, 4, supervised=2)]
    pair = stubpair.pair()
    loss, grads = stubpair.gradients(pair, [batch([[item] for item in samples])])
    splits = [
        [batch([[item] for item in samples[:2]]), batch([[item] for item in samples[2:]])],
        [batch([[item]]) for item in samples],
        [stubpair.widened(batch([[item] for item in samples]), 132)],
    ]
    for split in splits:
        other_loss, other_grads = stubpair.gradients(pair, split)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for grad, other in zip(grads, other_grads, strict=True):
            assert (grad - other).norm() <= 1e-6 * max(float(grad.norm()), 1e-3)


def test_a_packed_row_has_the_loss_of_its_documents() -> None:
    samples = [sample(9, 1), sample(4, 2), sample(7, 3)]
    pair = stubpair.pair()
    apart = [batch([[item]], slots=16) for item in samples]
    packed = batch([samples], slots=16, layout="packed")
    assert packed.weight_sum == pytest.approx(sum(item.weight_sum for item in apart), rel=1e-6)
    loss, grads = stubpair.gradients(pair, apart)
    other_loss, other_grads = stubpair.gradients(pair, [packed])
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for grad, other in zip(grads, other_grads, strict=True):
        assert (grad - other).norm() <= 2e-6 * max(float(grad.norm()), 1e-3)


def test_padding_blocks_are_as_if_they_were_not_there() -> None:
    """One row with 20 anchors and one with a single one: finite, and equal to running them alone."""
    samples = [sample(24, 1), sample(24, 2, supervised=1)]
    pair = stubpair.pair()
    loss, grads = stubpair.gradients(pair, [batch([[item] for item in samples], slots=20)])
    alone = [batch([[samples[0]]], slots=20), batch([[samples[1]]], slots=1)]
    assert [int(item.num_valid_B[0]) for item in alone] == [20, 1]
    other_loss, other_grads = stubpair.gradients(pair, alone)
    assert math.isfinite(loss)
    assert all(grad.isfinite().all() for grad in grads)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for grad, other in zip(grads, other_grads, strict=True):
        assert (grad - other).norm() <= 2e-6 * max(float(grad.norm()), 1e-3)


def test_a_step_without_any_anchor_has_no_loss_and_changes_nothing() -> None:
    pair = stubpair.pair()
    given = batch([[sample(8, 1, supervised=1)]])
    given = dataclasses.replace(
        given,
        num_valid_B=torch.zeros(1, dtype=torch.int32),
        labels_BNK=torch.full_like(given.labels_BNK, IGNORED),
        weights_BNK=torch.zeros_like(given.weights_BNK),
        weight_sum=0.0,
    )
    before = [weight.clone() for weight in pair.drafter.parameters()]
    result = pair.step([given], lr=1.0)
    assert float(result.loss) == 0.0
    assert float(result.norm) == 0.0
    assert all(torch.equal(old, new) for old, new in zip(before, pair.drafter.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------- the update


def test_gradients_are_clipped_and_applied_as_adamw_says() -> None:
    pair, given = stubpair.pair(clip=0.5), batch([[sample(20, 1)]])
    _, grads = stubpair.gradients(pair, [given])
    norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in grads))
    assert norm > 0.5
    weights = [torch.nn.Parameter(weight.detach().clone()) for weight in pair.drafter.parameters()]
    plain = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for master in pair.optimizer.grads:
        master.zero_()
    for _ in range(2):
        _, grads = stubpair.gradients(pair, [given])
        scale = 0.5 / max(0.5, math.sqrt(sum(float(grad.pow(2).sum()) for grad in grads)))
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad * scale
        plain.step()
        pair.optimizer.step(1e-3)
        for weight, found in zip(weights, pair.drafter.parameters(), strict=True):
            assert torch.allclose(weight, found, atol=1e-7)


def test_a_gradient_that_is_not_finite_changes_nothing_from_then_on() -> None:
    pair, given = stubpair.pair(), batch([[sample(20, 1)]])
    pair.step([given], 1e-3)
    before = {name: tensor.clone() for name, tensor in pair.optimizer.state().items()}
    broken = dataclasses.replace(given, weights_BNK=given.weights_BNK * math.inf)
    assert not math.isfinite(float(pair.step([broken], 1e-3).norm))
    pair.step([given], 1e-3)
    after = pair.optimizer.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_masters_keep_what_bfloat16_would_lose() -> None:
    """Steps of 1e-4 on weights near 1 are below bfloat16's resolution; the fp32 masters add them up."""
    network = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        network.weight.fill_(1.0)
    optimizer = Optimizer(network, OptimizerConfig())
    for _ in range(100):
        network(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1e-4)
    assert float(optimizer.masters[0].detach().mean()) == pytest.approx(0.99, abs=1e-4)
    assert float(network.weight.detach().float().mean()) == pytest.approx(0.99, abs=4e-3)


def test_one_block_is_learned_by_heart(tiny: Target) -> None:
    """The hybrid target's features, the labels and the update belong together: all seven labels are soon predicted."""
    pair = stubpair.pair(stubpair.spec(block_size=8))
    shape, drafting = Shape(16, 1, 1, "padded", "float32"), Drafting(8, 256)
    drawn = (assemble([[sample(16, number, supervised=7)]], shape, drafting, 0) for number in range(99))
    given = next(one for one in drawn if (one.labels_BNK[..., 1:] != IGNORED).all())
    features = tiny.features(given)
    pair.target = SimpleNamespace(device=CPU, features=lambda batch: features, embed=tiny.embed)  # type: ignore[assignment]
    pair._head_VE = tiny.head_VE
    accuracies = []
    while len(accuracies) < 80 and max(accuracies, default=0.0) < 1.0:
        counts = pair.step([given], 3e-3).counts
        accuracies.append(float(counts[:7].sum() / counts[7:14].sum()))
    assert accuracies[0] < 0.5
    assert accuracies[-1] > 0.95
    assert float(counts[-2] / counts[-1]) == 8


def test_the_same_step_gives_the_same_bits() -> None:
    given = batch([[sample(20, 1)], [sample(30, 2)]])
    one, other = stubpair.pair(), stubpair.pair()
    for _ in range(3):
        assert torch.equal(one.step([given], 1e-3).loss, other.step([given], 1e-3).loss)
    for name, tensor in one.optimizer.state().items():
        assert torch.equal(tensor, other.optimizer.state()[name])


def test_the_session_makes_the_launches_of_every_loss_that_its_section_names() -> None:
    import dflashspec

    from dflash.workload import WORKLOAD
    from kernelbake import recorder, triton_api

    def with_target(terms: list[str]) -> set[object]:
        spec = Spec.parse(dflashspec.changed("drafter.num_layers", 1) | {"loss": {"terms": terms}})
        session = WORKLOAD.open(spec, device="cpu", seed=0)
        made = recorder.Recording(triton_api.gpu_target(90))
        with made.recorded():
            session.step(WORKLOAD.cases(spec).planned[0])
        launches = [launch for launch in made.launches() if launch.kernel.qualname == "block_loss_kernel"]
        assert launches
        specializations = [
            item for launch in launches for variant in launch.variants for item in variant.specializations
        ]
        return {p.key for item in specializations for p in item.parameters if p.name == "TARGET"}

    assert with_target(["kl"]) == {True}
    assert with_target(["ce", "kl"]) == {False, True}


def test_the_session_of_the_plug_in_repeats_itself() -> None:
    """The same case again: the same inputs, and weights that the steps between have not changed."""
    import dflashspec

    from dflash.workload import WORKLOAD

    spec = Spec.parse(dflashspec.TINY)
    session = WORKLOAD.open(spec, device="cpu", seed=0)
    before = {name: tensor.clone() for name, tensor in session._pair.optimizer.state().items() if "master" in name}
    for case in WORKLOAD.cases(spec).planned[:2]:
        session.step(case)
    after = session._pair.optimizer.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert session._pair.device == CPU
