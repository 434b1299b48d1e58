"""Whether a bundle's code still does on this machine what it did when the bundle was built, found out in a child."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelbake import children, digest, outputs, packing
from kernelbake.errors import BuildError, BundleError
from kernelbake.manifest import Manifest
from kernelbake.outcome import Files
from kernelbake.outputs import Compared, Verdict, Wanted
from kernelbake.supervise import QUIET_LIMIT_S, refusal
from kernelbake.words import counted
from kernelbake.worker import Child, ChildDiedError

if TYPE_CHECKING:
    from kernelbake.bundle import Bundle

ENGINE = "kernelbake.replay:run"

OnProgress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What running a bundle's winners showed.

    Args:
        launches: every launch and variant of the plan.
        cases: how many cases' steps were run.
        loads: binaries loaded, each device counted.
        load_s: how long that took, verification included.
    """

    launches: tuple[Compared, ...]
    cases: int
    loads: int
    load_s: float

    def refuse(self, name: str) -> None:
        """Refuses a bundle whose launches write something else than was recorded.

        Raises:
            BundleError: naming each.
        """
        differing = [str(one) for one in self.launches if one.verdict is Verdict.DIFFERS]
        if differing:
            launches = f"{counted(len(differing), 'launch')} of {len(self.launches):,}"
            raise BundleError(
                f"bundle `{name}`: {launches} {'does' if len(differing) == 1 else 'do'} not write what was recorded; "
                f"wanted the same bits, or nearly the same values",
                reasons=differing,
                hint="a different driver or cuBLAS explains small differences; these are not small",
            )


def replay(path: Path, held: Bundle, devices: Sequence[int], on_progress: OnProgress | None = None) -> Replayed:
    """Loads a bundle in a child, runs the steps of the cases that are needed, and compares what its launches write.

    Args:
        path: the bundle's file.
        held: the same, read.
        devices: on which to load it; the steps run on the first. Empty under the interpreter.
        on_progress: called with cases done, cases in all, and the case.

    Raises:
        BundleError: the code does not load, or a launch ends the process; with its name.
        MisfitError: the bundle is not for this machine.
        CoverageError: a step launches what the bundle does not hold.
        BuildError: a step does not run.
        InputError: the file has changed, or the workload is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="kernelbake-") as folder:
        child = _Replay(path, held, devices, Path(folder), on_progress)
        found, facts = child.run()
    launches = tuple(
        outputs.compared(one, str(held.plan.launches[one.launch]), found.get((one.launch, one.variant)))
        for one in child.wanted
    )
    return Replayed(launches, len({one.case for one in child.wanted}), facts["loads"], facts["load_s"])


class _Replay:
    """The child and what is heard of it."""

    def __init__(
        self, path: Path, held: Bundle, devices: Sequence[int], folder: Path, on_progress: OnProgress | None
    ) -> None:
        self._path, self._held, self._folder, self._on_progress = path, held, folder, on_progress
        self._manifest = Manifest.from_resolved(held.manifest_resolved, held.manifest_text, str(path))
        self.wanted: list[Wanted] = outputs.wanted(held) if held.made != "compiled-only" else []
        self._devices = list(devices)
        self._current: int | None = None
        self._found: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._cases = 0

    def run(self) -> tuple[dict[tuple[int, int], Mapping[str, Any]], Mapping[str, Any]]:
        """What each launch and variant wrote, and the facts with which the child ended."""
        environment = children.worker_environment(self._manifest, self._folder)
        arguments = ["-P", "-m", "kernelbake.worker_main"]
        child = Child(arguments, environment=environment, log=self._folder / "worker.log")
        try:
            child.send(self._job())
            child.send({"open": True})
            while True:
                limit = QUIET_LIMIT_S if self._current is None else self._manifest.measure.time_limit_s
                message = child.receive(limit)
                if message is None:
                    raise self._fallen(f"it took longer than {limit:g} s", child)
                if message["event"] == "done":
                    return self._found, message["facts"]
                self._take(message, child)
        except ChildDiedError as death:
            raise self._fallen(f"its process ended with {death.how}", child) from death
        finally:
            child.close()

    def _job(self) -> dict[str, Any]:
        manifest, held, folder = self._manifest, self._held, self._folder
        (folder / "code").mkdir()
        codes: dict[str, dict[str, Any]] = {}
        for (kernel, specialization), data in packing.take_code(held, Files(folder / "code")).items():
            codes.setdefault(kernel, {})[specialization] = data
        (folder / "codes.json").write_bytes(digest.canonical_json(codes))
        (folder / "plan.json").write_bytes(digest.canonical_json(held.plan.to_json()))
        return {
            "engine": ENGINE,
            "open_now": True,
            "plan": str(folder / "plan.json"),
            "codes": str(folder / "codes.json"),
            "folder": str(folder / "code"),
            "plugin": manifest.plugin,
            "section": dict(manifest.section),
            "interpreted": manifest.interpreted,
            "policy": manifest.measure.to_json(),
            "bundle": str(self._path.absolute()),
            "digest": held.digest,
            "devices": self._devices,
            "wanted": [[one.launch, one.variant, one.case, _positions(one)] for one in self.wanted],
        }

    def _take(self, message: Mapping[str, Any], child: Child) -> None:
        event = message["event"]
        if event == "ready":
            decided = {one.launch: one.candidate for one in self.wanted}
            child.send({"decided": decided, "rejected": {}, "cases_done": [], "met": []})
        elif event == "start":
            self._current = message["launch"]
            child.send({"go": True})
        elif event == "outputs":
            self._current = None
            self._found[message["launch"], message["variant"]] = message["data"]
        elif event == "case":
            self._cases += 1
            if self._on_progress is not None:
                self._on_progress(self._cases, len({one.case for one in self.wanted}), message["case"])
        elif event == "interrupted":
            raise KeyboardInterrupt
        elif event == "refused" and self._current is None:
            raise refusal(message)
        elif event == "refused":
            raise self._fallen(message["message"], child)
        else:
            raise self._fallen(f"it failed with `{message['kind']}`: {message['message']:.300}", child)

    def _fallen(self, how: str, child: Child) -> BundleError | BuildError:
        """What a child's end means: a launch on trial is the bundle's, anything else the step's."""
        reasons = (how, *child.log_tail())
        if self._current is None:
            return BuildError("device: the workload's step does not run to its end; wanted it to", reasons=reasons)
        launch = self._held.plan.launches[self._current]
        return BundleError(
            f"bundle `{self._held.name}`: launch `{launch}` does not run to its end; wanted the recorded outputs",
            reasons=reasons,
        )


def _positions(one: Wanted) -> dict[int, str]:
    """Position and name of every tensor that is recorded."""
    return {int(tensor["at"]): str(tensor["argument"]) for tensor in one.recorded or ()}
