"""What a checkpoint says beside its tensors, read strictly, and which checkpoints there are. Loads no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash import __version__
from kernelbake.errors import InputError

FORMAT = 1
PREFIX = "step-"
LATEST = "latest"
STATE = "state.json"

BEGUN = "begun"
"""Key of a loader's state: the batches of a step that are still to come. States of the older order lack it."""


@dataclasses.dataclass(frozen=True)
class State:
    """What a checkpoint says beside its tensors.

    Args:
        step: optimizer steps done.
        seed: of the run; order and anchors follow from it.
        loader: position in the data, as ``data.Loader.state`` gives it.
        spec: the workload's section as it ran.
        run: the run's configuration.
        bundle: digest of the bundle; None of a stock run.
        step_batches: batches of one step, over all pairs and ranks; None in older checkpoints, of one pair.
        samples: digest of the data; None in older checkpoints.
        digests: of the tensors, by name, and of all else in ``state.json`` under that name, as ``save`` adds them; None
            in older checkpoints, which lack the latter first.
    """

    step: int
    seed: int
    loader: Mapping[str, Any]
    spec: Mapping[str, Any]
    run: Mapping[str, Any]
    bundle: str | None
    step_batches: int | None = None
    samples: str | None = None
    digests: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "dflash": __version__, **dataclasses.asdict(self)}


def folder(output: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return output / name_of(step)


def name_of(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def find(output: Path, resume: str) -> Path:
    """The checkpoint's folder that ``--resume`` means.

    Args:
        output: the run's output folder.
        resume: a folder, or ``latest``.

    Raises:
        InputError: there is none.
    """
    if resume != LATEST:
        folder = Path(resume)
        try:
            is_one = (folder / STATE).is_file()
        except OSError:  # no name that a path can have
            is_one = False
        if not is_one:
            raise InputError(f"resume: `{folder}` is no checkpoint; wanted a folder with `{STATE}`, or `{LATEST}`")
        return folder
    found = whole(output)
    if not found:
        raise InputError(
            f"resume: `{output}` holds no checkpoint; wanted one to go on from",
            hint="without --resume a new run begins there; --output names another folder",
        )
    return found[-1]


def newest_state(output: Path) -> State | None:
    """What the newest checkpoint of an output folder says beside its tensors; None without a checkpoint.

    Raises:
        InputError: it is broken or of a later format.
    """
    found = whole(output)
    try:
        return read(found[-1]) if found else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"run: `{found[-1]}` is broken ({error}); wanted a complete checkpoint") from error


def read(folder: Path) -> State:
    """What a checkpoint says.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: it is broken.
        InputError: it is of a later format.
    """
    data = json.loads((folder / STATE).read_text())
    if not isinstance(data, dict):
        raise ValueError(f"`{STATE}` is no object")
    if data["format"] != FORMAT:
        raise InputError(f"resume: `{folder}` has another format; wanted `{FORMAT}`")
    if isinstance(data.get("digests"), dict) and data["digests"].get(STATE, own := digest_of(data)) != own:
        raise ValueError(f"`{STATE}` is not what was saved")
    data.pop("format")
    data.pop("dflash")
    state = State(**data)
    _check_kinds(state)
    return state


def _check_kinds(state: State) -> None:
    """What a damaged file may have changed without losing a name.

    Raises:
        ValueError: a part is of another kind than ``save`` wrote.
    """
    loader = state.loader
    good = {
        "step": _is_count(state.step),
        "seed": _is_count(state.seed),
        "spec": isinstance(state.spec, dict) and all(isinstance(part, dict) for part in state.spec.values()),
        "run": isinstance(state.run, dict),
        "bundle": state.bundle is None or isinstance(state.bundle, str),
        "step_batches": state.step_batches is None or (_is_count(state.step_batches) and state.step_batches > 0),
        "samples": state.samples is None or isinstance(state.samples, str),
        "digests": state.digests is None or isinstance(state.digests, dict),
        "loader": isinstance(loader, dict)
        and loader.keys() - {BEGUN} == {"epoch", "next", "waiting"}
        and _is_count(loader["epoch"])
        and _is_count(loader["next"])
        and isinstance(loader["waiting"], dict)
        and all(bucket.isdecimal() and _are_visits(visits) for bucket, visits in loader["waiting"].items())
        and _are_batches(loader.get(BEGUN, [])),
    }
    if wrong := [name for name, is_good in good.items() if not is_good]:
        raise ValueError(f"`{STATE}`: `{'`, `'.join(wrong)}` of another kind than was written")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_visits(visits: Any) -> bool:
    """Whether these are (epoch, number) pairs."""
    return isinstance(visits, list) and all(
        isinstance(visit, list) and len(visit) == 2 and all(map(_is_count, visit)) for visit in visits
    )


def _are_batches(batches: Any) -> bool:
    """Whether these are buckets, each with the samples of a batch."""
    return isinstance(batches, list) and all(
        isinstance(batch, list) and len(batch) == 2 and _is_count(batch[0]) and _are_visits(batch[1])
        for batch in batches
    )


def whole(output: Path) -> list[Path]:
    """The checkpoints by step; one that was being replaced when its run was killed still counts."""
    found = [*output.glob(f"{PREFIX}*"), *displaced(output)]
    return sorted((path for path in found if (path / STATE).is_file()), key=lambda path: path.name.strip("."))


def displaced(output: Path) -> list[Path]:
    """Folders that a run was replacing when it was killed between two renames."""
    return [old for old in output.glob(".*.old") if not final_name(old).exists()]


def final_name(old: Path) -> Path:
    """What such a folder was called before."""
    return old.with_name(old.name.removeprefix(".").removesuffix(".old"))


def digest_of(told: Mapping[str, Any]) -> str:
    """Of a state as JSON, however that is laid out; its own place in it is left out."""
    digests = {name: digest for name, digest in told["digests"].items() if name != STATE}
    return hashlib.sha256(json.dumps({**told, "digests": digests}, sort_keys=True).encode()).hexdigest()[:16]
