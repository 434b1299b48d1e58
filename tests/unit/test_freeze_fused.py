"""The written launch function by itself: objects of Python stand for tensors, a list for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kernelbake import fused
from kernelbake.fused import UNSET, Argument, Constant, Nothing, Number, Pointer, Row, Shape, UnsupportedShapeError

HALF, FULL = object(), object()
GENERAL = "general path"


class Tensor:
    def __init__(self, address: int, dtype: Any = FULL, device: int = 0) -> None:
        self.dtype = dtype
        self._address, self._device = address, device

    def data_ptr(self) -> int:
        return self._address

    def get_device(self) -> int:
        return self._device


def specialize(backend: Any, value: Any, const: bool, specialize: bool, align: bool) -> tuple[Any, Any]:
    """As Triton's function does for numbers."""
    if value is None:
        return ("constexpr", None)
    if type(value) is int:
        return ("constexpr", 1) if value == 1 else ("i32", "D" if value % 16 == 0 else "")
    raise TypeError("failed to specialize")


class Bench:
    """A written function with everything that it calls."""

    def __init__(
        self, arguments: Sequence[Argument], rows: Sequence[Row], *, supplied: Sequence[str] = (), order: Any = None
    ) -> None:
        self.launched: list[Any] = []
        self.left: list[Any] = []
        self.current = 0
        self.hits = 0
        self.watched = False
        names = [argument.name for argument in arguments]
        shape = Shape(
            name="kernel", arguments=arguments, supplied=supplied, order=order or [*names, *supplied],
            call=lambda passed: f"kb_launch(kb_x, kb_y, kb_z, kb_stream, kb_function, {', '.join(passed)})",
            payload=("kb_kernel", "kb_function", "kb_meta", "kb_launch"), check_device=True,
        )  # fmt: skip
        runtime = {
            "kb_general": self._general, "kb_quiet": "not kb_bench.watched", "kb_bench": self,
            "kb_current": lambda: self.current, "kb_switch": self._switch, "kb_stream_of": lambda device: 70 + device,
            "kb_hit": self._hit, "kb_spec": specialize, "kb_backend": None,
        }  # fmt: skip
        payload = [
            Row(row.cells, row.options, row.target,
                {device: (row.target, f"{row.target}@{device}", dict.fromkeys(supplied, 64),
                          lambda *args: self.launched.append(args)) for device in (0, 1)})
            for row in rows
        ]  # fmt: skip
        self.function, self.namespace = fused.write(shape, payload, runtime)

    def _general(self, grid: Any, given: dict[str, Any], more: dict[str, Any]) -> str:
        self.left.append((grid, {name: value for name, value in given.items() if value is not UNSET}, more))
        return GENERAL

    def _switch(self, device: int) -> Any:
        import contextlib

        @contextlib.contextmanager
        def switched() -> Any:
            before, self.current = self.current, device
            yield
            self.current = before

        return switched()

    def _hit(self) -> None:
        self.hits += 1


X = Argument("x", constexpr=False)
N = Argument("n", constexpr=False)
BLOCK = Argument("BLOCK", constexpr=True)


def row(target: str, options: dict[str, Any] | None = None, **cells: Any) -> Row:
    return Row(cells, options or {}, target, {})


def plain() -> Bench:
    cells = {"x": Pointer(FULL, True), "n": Number(int, ("i32", "D")), "BLOCK": Constant(64)}
    return Bench([X, N, BLOCK], [row("one", **cells)])


def test_a_planned_call_is_launched_with_addresses_and_counted() -> None:
    bench = plain()
    assert bench.function((3, 4), Tensor(1600), 32, BLOCK=64) == "one"
    assert bench.launched == [(3, 4, 1, 70, "one@0", 1600, 32)]
    assert bench.hits == 1
    assert bench.left == []


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((Tensor(1601), 32, 64), {}),
        ((Tensor(1600, HALF), 32, 64), {}),
        ((Tensor(1600), 33, 64), {}),
        ((Tensor(1600), True, 64), {}),
        ((Tensor(1600), 32.0, 64), {}),
        ((Tensor(1600), None, 64), {}),
        ((None, 32, 64), {}),
        ((7, 32, 64), {}),
        ((Tensor(1600), 32, 64.0), {}),
        ((Tensor(1600), 32, 128), {}),
        ((Tensor(1600), 32, [64]), {}),
        ((Tensor(1600), 32), {}),
        ((Tensor(1600), 32, 64), {"num_warps": 4}),
        ((Tensor(1600, device=-1), 32, 64), {}),
        ((Tensor(1600, device=2), 32, 64), {}),
    ],
)
def test_every_other_call_is_left_to_the_general_path(args: Any, kwargs: Any) -> None:
    bench = plain()
    assert bench.function((3,), *args, **kwargs) == GENERAL
    [(grid, given, more)] = bench.left
    assert grid == (3,)
    assert [given[name] for name in ("x", "n", "BLOCK")[: len(args)]] == list(args)
    assert more == kwargs
    assert bench.launched == []
    assert bench.hits == 0


def test_a_call_that_someone_watches_is_left_to_the_general_path() -> None:
    bench = plain()
    bench.watched = True
    assert bench.function((3,), Tensor(1600), 32, 64) == GENERAL


def test_another_device_is_made_the_current_one_for_the_launch() -> None:
    bench = plain()
    seen: list[int] = []
    bench.namespace["kb_stream_of"] = lambda device: seen.append(bench.current) or device
    assert bench.function((1,), Tensor(1600, device=1), 32, 64) == "one"
    assert (seen, bench.current) == ([1], 0)
    assert bench.launched[0][4] == "one@1"
    assert bench.hits == 1


def test_tensors_on_two_devices_are_left_to_the_general_path() -> None:
    pointers = {"x": Pointer(FULL, True), "y": Pointer(FULL, True)}
    bench = Bench([X, Argument("y", constexpr=False)], [row("one", **pointers)])
    assert bench.function((1,), Tensor(16), Tensor(32)) == "one"
    assert bench.function((1,), Tensor(16), Tensor(32, device=1)) == GENERAL


def test_what_differs_between_rows_is_looked_up() -> None:
    pointers = [Nothing(), Pointer(FULL, True), Pointer(HALF, True), Pointer(FULL, False)]
    numbers = [Number(int, ("i32", "D")), Number(int, ("constexpr", 1))]
    rows = [row(f"{i}{j}{k}", x=p, n=n, BLOCK=Constant(c)) for i, p in enumerate(pointers)
            for j, n in enumerate(numbers) for k, c in enumerate((1, True, 1.0, "1", None))]  # fmt: skip
    bench = Bench([X, N, BLOCK], rows)
    tensors = [None, Tensor(16), Tensor(16, HALF), Tensor(8)]
    for i, tensor in enumerate(tensors):
        for j, number in enumerate((32, 1)):
            for k, constant in enumerate((1, True, 1.0, "1", None)):
                assert bench.function((1,), tensor, number, constant) == f"{i}{j}{k}"
    assert bench.function((1,), Tensor(8, HALF), 32, 1) == GENERAL
    assert bench.function((1,), None, 3, 1) == GENERAL


def test_a_number_of_the_autotune_key_counts_by_value() -> None:
    spec = ("i32", "D")
    bench = Bench([N], [row("small", n=Number(int, spec, 32)), row("large", n=Number(int, spec, 64))])
    assert [bench.function((1,), n) for n in (32, 64, 96)] == ["small", "large", GENERAL]


def test_a_float_or_nothing() -> None:
    bench = Bench([N], [row("some", n=Number(float, ("fp32", None))), row("none", n=Nothing())])
    assert [bench.function((1,), n) for n in (0.5, -0.0, None, 1)] == ["some", "some", "none", GENERAL]


def test_a_default_that_is_not_passed() -> None:
    value = Argument("value", constexpr=False, default=2.0)
    other = Argument("other", constexpr=False, default=None)
    rows = [row("one", value=Number(float, ("fp32", None)), other=Nothing())]
    bench = Bench([value, other], rows)
    assert bench.function((1,)) == bench.function((1,), 3.0, None) == "one"
    assert [launch[5:] for launch in bench.launched] == [(2.0, None), (3.0, None)]
    assert bench.function((1,), other=Tensor(16)) == GENERAL
    assert bench.left[0][1]["other"].data_ptr() == 16
    assert "value" not in bench.left[0][1]


def test_a_default_on_which_a_key_depends_has_to_be_passed() -> None:
    value = Argument("value", constexpr=False, default=2.0, optional=False)
    bench = Bench([value], [row("one", value=Number(float, ("fp32", None)))])
    assert bench.function((1,), 2.0) == "one"
    assert bench.function((1,)) == GENERAL


def test_options_are_looked_up_like_constexprs() -> None:
    rows = [row("four", {"num_warps": 4}, x=Pointer(FULL, None)), row("default", x=Pointer(FULL, None))]
    bench = Bench([X], rows)
    assert bench.function((1,), Tensor(1), num_warps=4) == "four"
    assert bench.function((1,), Tensor(1)) == "default"
    assert bench.function((1,), Tensor(1), num_warps=8) == GENERAL


def test_supplied_parameters_hold_their_places() -> None:
    bench = Bench([X, N], [row("one", x=Pointer(FULL, True), n=Number(int, ("i32", "D")))],
                  supplied=["BLOCK", "LAST"], order=["x", "BLOCK", "n", "LAST"])  # fmt: skip
    assert bench.function(lambda meta: (meta["BLOCK"], meta["n"], meta["LAST"]), Tensor(16), n=32) == "one"
    assert bench.launched == [(64, 32, 64, 70, "one@0", 16, 32)]
    assert bench.function((1,), Tensor(16), 32) == GENERAL
    assert bench.left[0][1] == {"x": bench.left[0][1]["x"], "BLOCK": 32}
    assert bench.function((1,), Tensor(16), n=32, LAST=3) == GENERAL


@pytest.mark.parametrize(
    "rows",
    [
        [row("a", x=Pointer(FULL, True)), row("b", x=Number(int, ("i32", "")))],
        [row("a", x=Pointer(FULL, True)), row("b", x=Pointer(HALF, None))],
        [row("a", x=Pointer(FULL, True)), row("b", x=Pointer(FULL, True))],
        [row("a", x=Number(float, ("fp32", None), 0.0))],
        [row("a", {"x": 1}, x=Nothing())],
    ],
    ids=["pointer or number", "alignment counts or not", "two for one pattern", "signed zero", "option and parameter"],
)
def test_what_cannot_be_told_apart_is_not_written(rows: list[Row]) -> None:
    with pytest.raises(UnsupportedShapeError):
        Bench([X], rows)


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan")])
def test_a_float_constexpr_without_a_plain_identity_is_not_written(value: float) -> None:
    with pytest.raises(UnsupportedShapeError, match="zero with a sign"):
        Bench([BLOCK], [row("a", BLOCK=Constant(value))])


@pytest.mark.parametrize("name", ["kb_grid", "class", "kb_x"])
def test_a_parameter_that_would_be_taken_for_the_codes_own_is_not_written(name: str) -> None:
    with pytest.raises(UnsupportedShapeError, match="name"):
        Bench([Argument(name, constexpr=True)], [row("a", **{name: Constant(1)})])


def test_the_same_row_twice_is_one() -> None:
    bench = Bench([X], [row("a", x=Pointer(FULL, True)), row("a", x=Pointer(FULL, True))])
    assert bench.function((1,), Tensor(16)) == "a"


def test_an_error_of_the_grid_is_the_callers() -> None:
    bench = plain()
    with pytest.raises(ZeroDivisionError):
        bench.function(lambda meta: (1 // 0,), Tensor(1600), 32, 64)
    with pytest.raises(TypeError):
        bench.function(3, Tensor(1600), 32, 64)
    assert bench.hits == 0
