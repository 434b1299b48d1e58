"""Checks of fake tensors and of refused launches, in a process of their own: what a fake device changes is not undone.

``python shadowchecks.py`` prints, as JSON, check → ``ok`` or what went wrong, and scenario → how it was refused.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from kernelbake import fakedevice, profiles
from kernelbake.errors import PlanError

PROFILE = profiles.load("rtx-pro-6000-blackwell")
fakedevice.install(PROFILE)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import shadowkernels  # noqa: E402
import shadowworkload  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch import nn  # noqa: E402

from kernelbake import faketensors, triton_api  # noqa: E402
from kernelbake.bounds import Limits  # noqa: E402
from kernelbake.faketensors import UnknownValueError, content, stand_in  # noqa: E402
from kernelbake.footprint import Ledger  # noqa: E402
from kernelbake.keys import Case  # noqa: E402
from kernelbake.recorder import Observer  # noqa: E402
from kernelbake.shadow import LaunchLog, explained, shadowed  # noqa: E402

CHECKS: dict[str, Callable[[], None]] = {}
CUDA = torch.device("cuda", 0)
LEDGER = Ledger("cuda")
REFUSED = (
    *("numpy_number", "torch_dtype", "descriptor", "local_kernel", "replaced_kernel", "compiled_by_torch"),
    *("reads_a_loss", "values", "assertions"),
)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@contextlib.contextmanager
def unknown() -> Any:
    try:
        yield
    except UnknownValueError:
        return
    raise AssertionError("the content is known")


# ---------------------------------------------------------------------------------------------- the device


@check
def the_device_answers_from_the_profile() -> None:
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.multi_processor_count) == (PROFILE.name, PROFILE.sm_count)
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == PROFILE.capability
    assert properties.total_memory == PROFILE.total_memory_bytes
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    driver = triton.runtime.driver.active
    assert driver.get_current_target().arch == PROFILE.arch
    assert driver.utils.get_device_properties(0)["max_shared_mem"] == PROFILE.shared_memory_bytes
    assert driver.utils.get_device_properties(0)["multiprocessor_count"] == PROFILE.sm_count


@check
def streams_and_events_do_nothing() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        start.record()
        torch.cuda.current_stream().wait_event(start)
        end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == 0.0


@check
def a_fake_device_times_nothing() -> None:
    with pytest.raises(RuntimeError, match="asked to time"):
        triton.runtime.driver.active.get_benchmarker()(lambda: None)


# ---------------------------------------------------------------------------------------------- devices of tensors


@check
def tensors_stay_where_they_are() -> None:
    x = torch.ones(4, 8, device="cuda")
    made = [
        *(x + 1, x.T, x[1:], x.to(torch.float16), x.float(), x.type_as(x.half()), x.clone(), x.contiguous()),
        *(torch.empty_like(x), torch.zeros_like(x), torch.rand_like(x), torch.full_like(x, 2)),
        *(x.new_empty(3), x.new_zeros(3), x.new_ones(3), x.new_full((3,), 1.0), x.new_tensor([1.0])),
        *(F.rms_norm(x.half(), (8,)), F.layer_norm(x, (8,)), torch.where(x > 0, x, 0.0), F.softmax(x, -1)),
        F.one_hot(torch.tensor([1, 2], device="cuda"), 4),
        F.scaled_dot_product_attention(*[x.view(1, 4, 2, 4).transpose(1, 2)] * 3),
    ]
    devices = [str(item.device) for item in made]
    assert devices == ["cuda:0"] * len(made), devices
    assert all(item.is_cuda and not item.is_cpu for item in made)


@check
def tensors_move() -> None:
    x = torch.ones(4, 8, device="cuda")
    assert x.to("cuda") is x.to(CUDA) is x.cuda() is x.to(x) is x
    assert x.to("cuda", copy=True) is not x
    assert x.to("cpu", torch.float16).dtype == torch.float16
    assert str(x.to("cpu").device) == str(x.cpu().device) == "cpu"
    assert str(x.cpu().to(x).device) == str(x.cpu().cuda().device) == "cuda:0"
    assert str(torch.from_numpy(np.arange(3)).to("cuda").device) == "cuda:0"


@check
def modules_move_in_place() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))
    module[1].weight = module[0].bias
    before = list(module.parameters())
    assert module.to("cuda") is module
    assert [str(one.device) for one in (*module.parameters(), *module.buffers())] == ["cuda:0"] * len(
        [*module.parameters(), *module.buffers()]
    )
    module.to(torch.bfloat16)
    assert all(
        one is other and one.dtype == torch.bfloat16 for one, other in zip(module.parameters(), before, strict=True)
    )
    assert module[1].weight is module[0].bias


@check
def modules_and_states_are_copied() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to("cuda")
    module[1].weight = module[0].bias
    copied = copy.deepcopy(module)
    assert copied[1].weight is copied[0].bias
    assert copied[0].bias is not module[0].bias
    assert all(isinstance(one, nn.Parameter) and one.requires_grad for one in copied.parameters())
    assert {str(one.device) for one in copied.parameters()} == {"cuda:0"}
    copied.load_state_dict(module.state_dict())
    empty = nn.Linear(8, 8, device="meta").to_empty(device="cuda")
    assert str(empty.weight.device) == "cuda:0"
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    assert str(torch.ones(3).pin_memory().to("cuda", non_blocking=True).device) == "cuda:0"


@check
def routing_of_experts_is_planned() -> None:
    """Counting, sorting and grouped products, as mixtures of experts make them."""
    experts = torch.randint(0, 8, (16, 2), device="cuda")
    assert torch.histc(experts.view(-1), bins=8, min=0, max=7).shape == (8,)
    order = torch.sort(experts.view(-1))[1]
    assert F.embedding(order, torch.randn(32, 64, device="cuda")).shape == (32, 64)
    rows = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(8, 64, 32, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(8, device="cuda", dtype=torch.int32)
    assert torch._grouped_mm(rows, weights, offs=ends).shape == (32, 32)


# ---------------------------------------------------------------------------------------------- backward, autocast


class Twice(torch.autograd.Function):
    """A function as kernel libraries write them."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight), x + 1

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Any, grad_plus: Any) -> Any:
        x, weight = ctx.saved_tensors
        return (grad @ weight.T).to(x.dtype) + grad_plus, x.T.to(grad.dtype) @ grad


def _engine_sees_the_cpu(result: torch.Tensor) -> None:
    """No node of the graph may name a device whose streams the engine would ask for."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            assert {str(item.device) for item in node._input_metadata} <= {"cpu"}, node
            waiting += [following for following, _ in node.next_functions]


@check
def a_training_step_runs_through() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to("cuda")
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    for optimizer in (
        torch.optim.AdamW(module.parameters()),
        torch.optim.AdamW(module.parameters(), fused=True),
        torch.optim.AdamW(module.parameters(), foreach=True),
        torch.optim.SGD(module.parameters(), 0.1, momentum=0.9),
    ):
        for _ in range(2):
            y, plus = Twice.apply(module(x), module[0].weight)
            labels = torch.zeros(4, dtype=torch.long, device="cuda")
            loss = F.cross_entropy(y, labels) + plus.mean()
            loss = loss + torch.utils.checkpoint.checkpoint(lambda t: (t * 2).sum(), y, use_reentrant=False)
            _engine_sees_the_cpu(loss)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            assert str(x.grad.device) == str(module[0].weight.grad.device) == "cuda:0"
            optimizer.zero_grad()


@check
def autocast_casts_as_on_a_gpu_forward_and_backward() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to("cuda")
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    half = torch.bfloat16
    for _ in range(2):
        with torch.autocast("cuda", dtype=half):
            y = module[0](x)
            normed = module[1](y)
            z = module[2](normed)
            product, plus = Twice.apply(z, weight)
            attended = F.scaled_dot_product_attention(*[z.view(1, 4, 2, 4).transpose(1, 2)] * 3)
            other = [torch.softmax(z, -1), z.exp(), torch.cat([z, x]), F.mse_loss(z, x), z * 2, z @ z.T]
        kinds = [item.dtype for item in (y, normed, z, product, plus, attended, *other)]
        assert kinds == [half, torch.float32, *[half] * 4, *[torch.float32] * 4, half, half], kinds
        loss = sum(item.float().sum() for item in (product, plus, attended, *other))
        _engine_sees_the_cpu(loss)
        loss.backward()
        assert x.grad.dtype == weight.grad.dtype == module[0].weight.grad.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        assert module[0](x).dtype == torch.float16
    assert module[0](x).dtype == torch.float32


# ---------------------------------------------------------------------------------------------- content


@check
def integers_are_followed() -> None:
    bounds = torch.tensor([0, 5, 9], device="cuda")
    lengths = bounds[1:] - bounds[:-1]
    assert lengths.tolist() == [5, 4]
    assert lengths.max().item() == 5
    assert torch.repeat_interleave(torch.arange(2, device="cuda"), lengths).tolist() == [0] * 5 + [1] * 4
    assert torch.nonzero(bounds > 4).tolist() == [[1], [2]]
    assert torch.unique(torch.tensor([3, 1, 3], device="cuda")).tolist() == [1, 3]
    assert bounds.cumsum(0).cpu().numpy().tolist() == [0, 5, 14]
    assert [int(item) for item in bounds] == [0, 5, 9]
    assert np.asarray(bounds.cpu()).sum() == 14
    assert torch.equal(bounds, bounds.clone())
    assert bool((bounds == 5).any())


@check
def content_lives_in_the_storage() -> None:
    x = torch.empty(2, 3, dtype=torch.int64, device="cuda")
    with unknown():
        x.tolist()
    x.zero_()
    x[1, 2] = 7
    x.T[0] += 1
    x.view(-1)[1:3].copy_(torch.tensor([4, 5], device="cuda"))
    assert x.tolist() == [[1, 4, 5], [1, 0, 7]]
    assert x.T.contiguous().tolist() == [[1, 1], [4, 0], [5, 7]]
    x[0, 0] = torch.empty((), dtype=torch.int64, device="cuda")
    with unknown():
        x.tolist()


@check
def an_unknown_value_is_asked_for_in_vain() -> None:
    x = torch.randn(16, device="cuda")
    for ask in (x.sum().item, x.tolist, x.cpu().numpy, lambda: bool(x[0] > 0), lambda: x[x > 0], x.nonzero):
        with unknown():
            ask()


@check
def draws_are_known_from_a_generator_on_the_host() -> None:
    real = torch.Generator().manual_seed(3)
    fake = torch.Generator().manual_seed(3)
    with torch.utils._python_dispatch._disable_current_modes():
        expected = torch.randperm(9, generator=real).tolist()
    assert torch.randperm(9, generator=fake).tolist() == expected
    with unknown():
        torch.randperm(9, generator=torch.Generator("cuda").manual_seed(3), device="cuda").tolist()
    with unknown():
        torch.randperm(9).tolist()


@check
def a_known_mask_selects_from_the_unknown() -> None:
    mask = torch.tensor([True, False, True], device="cuda")
    x = torch.randn(3, 5, device="cuda", requires_grad=True)
    assert x[mask].shape == (2, 5)
    assert x[:, None][mask].shape == (2, 1, 5)
    assert torch.masked_select(x, mask[:, None]).shape == (10,)
    x[mask].sum().backward()


@check
def large_tensors_cost_nothing() -> None:
    x = torch.ones(1 << 20, 1 << 20, device="cuda")
    assert content(x) is None
    assert content(torch.zeros(1 << 23, dtype=torch.int64, device="cuda")) is None
    assert (x @ x).shape == (1 << 20, 1 << 20)


@check
def stand_ins_have_the_tensors_alignment() -> None:
    x = torch.empty(64, dtype=torch.bfloat16, device="cuda")
    assert [stand_in(view).data_ptr() for view in (x, x[1:], x[8:], x.view(8, 8)[3, 2:])] == [0, 2, 16, 52]
    assert stand_in(x[8:]).ptr_range() == 128
    assert stand_in(x[1:].clone()).data_ptr() == 0
    assert stand_in(x[1:].to("cuda")).data_ptr() == 2


@check
def equal_layouts_are_remembered_and_right() -> None:
    def layouts() -> list[Any]:
        x = torch.randn(4, 6, 8, device="cuda", dtype=torch.bfloat16)
        parts = x.transpose(1, 2).split(2, dim=1)
        made = [x.permute(2, 0, 1), *parts, parts[1] * 2, x[:, ::2], x.mean(1), x @ x.mT, *torch.std_mean(x.float(), 0)]
        made += [torch.cat([x, x[:, :3]], 1), x.to(torch.float32, memory_format=torch.contiguous_format), x.unbind()[3]]
        return [(item.shape, item.stride(), item.storage_offset(), item.dtype, item.device) for item in made]

    with torch.utils._python_dispatch._disable_current_modes():
        real = torch.empty(4, 6, 8, dtype=torch.bfloat16)
        parts = real.transpose(1, 2).split(2, dim=1)
        expected = [real.permute(2, 0, 1), *parts, parts[1] * 2, real[:, ::2], real.mean(1), real @ real.mT]
        expected += [
            *torch.std_mean(real.float(), 0),
            torch.cat([real, real[:, :3]], 1),
            real.float(),
            real.unbind()[3],
        ]
    first, second = layouts(), layouts()
    assert first == second
    assert [row[:4] for row in second] == [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in expected]


# ---------------------------------------------------------------------------------------------- memory


def parts(step: Callable[[Callable[[str], None]], None]) -> list[tuple[str, int, int]]:
    """The footprint of a step, which is given a function to say what it is at work on."""
    here = ["first"]
    LEDGER.begin(lambda: here[0])
    step(lambda name: here.__setitem__(0, name))
    return [(part.name, part.begun_bytes, part.peak_bytes) for part in LEDGER.end(Case(())).parts]


@check
def storages_are_counted_while_they_live() -> None:
    before = torch.empty(1 << 20, device="cuda")

    def step(now: Callable[[str], None]) -> None:
        x = torch.empty(1000, device="cuda")  # 4,096 bytes with the allocator's rounding
        views = x[10:].view(-1), x[None], x.detach(), before[5:], before.view(2, -1)
        x += 1
        torch.add(x, x, out=x)
        del x
        now("second")
        y = torch.empty(1024, dtype=torch.bfloat16, device="cuda")
        del views
        now("third")
        torch.empty(1, device="cuda")
        del y

    for _ in range(2):
        assert parts(step) == [("first", 0, 4096), ("second", 4096, 6144), ("third", 2048, 2560)]


@check
def a_part_tells_what_it_allocates_and_frees_again() -> None:
    def step(now: Callable[[str], None]) -> None:
        x = torch.empty(1000, device="cuda")
        y, z = torch.empty(128, device="cuda"), torch.empty(0, device="cuda")
        del x, z
        w = torch.empty(300, device="cuda")
        now("second")
        v = w + 1
        del w, v, y

    LEDGER.begin(lambda: here[0])
    here = ["first"]
    step(lambda name: here.__setitem__(0, name))
    changes = {part.name: part.changes for part in LEDGER.end(Case(())).parts}
    assert changes == {"first": (4096, -1), "second": (1536, -1)}, changes


@check
def what_a_step_leaves_behind_is_not_its_own() -> None:
    kept = []

    def step(now: Callable[[str], None]) -> None:
        kept.append(torch.empty(1 << 20, device="cuda"))
        torch.empty(256, device="cuda")

    assert parts(step) == [("first", 0, 1024)]


@check
def a_graph_holds_what_a_backward_pass_needs() -> None:
    weight = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    size = weight.nbytes

    def step(now: Callable[[str], None]) -> None:
        x = torch.empty(1024, 1024, device="cuda")
        y = F.silu(x @ weight)  # keeps x, and what goes into silu
        del x
        now("backward")
        y.sum().backward()
        weight.grad = None

    found = parts(step)
    assert [name for name, *_ in found] == ["first", "backward"]
    assert found[0][1:] == (0, 3 * size)
    assert found[1][1] == 3 * size
    assert 4 * size <= found[1][2] <= 5 * size + 4096, found


@check
def a_norm_keeps_its_input_and_a_number_a_row() -> None:
    x = torch.zeros(4096, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.ones(1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step(now: Callable[[str], None]) -> None:
        y = F.rms_norm(x, (1024,), weight, 1e-6)
        assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
        y.sum().backward()
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
        x.grad = weight.grad = None

    ((_, _, peak),) = parts(step)
    assert x.nbytes + 4096 * 4 <= peak <= 2 * x.nbytes + 4096 * 4 + 8192, peak


@check
def what_an_operation_is_made_of_is_not_counted() -> None:
    x = torch.zeros(1024, 1024, device="cuda")

    def step(now: Callable[[str], None]) -> None:
        torch.ops.aten._fused_rms_norm_backward(x, x, [1024], torch.ones(1024, 1, device="cuda"), None, [True, False])
        torch.ops.aten.gelu_backward(x, x)

    for _ in range(2):
        ((_, _, peak),) = parts(step)
        assert x.nbytes <= peak <= x.nbytes + 8192, peak


def refused(name: str) -> str:
    log = LaunchLog(Observer(triton_api.gpu_target(120), stand_in, run_hooks=True), Limits())
    before = shadowkernels.plain
    try:
        with shadowed(log), explained(name):
            shadowworkload.SCENARIOS[name](shadowkernels, "cuda")
    except PlanError as error:
        return str(error)
    finally:
        shadowkernels.plain = before
    return "not refused"


def main() -> None:
    results: dict[str, str] = {}
    log = LaunchLog(Observer(triton_api.gpu_target(120), faketensors.stand_in, run_hooks=True), Limits())
    for name, function in CHECKS.items():
        try:
            with shadowed(log, LEDGER):
                function()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
    refusals = {name: refused(name) for name in REFUSED}
    json.dump({"checks": results, "refusals": refusals}, sys.stdout)


if __name__ == "__main__":
    main()
