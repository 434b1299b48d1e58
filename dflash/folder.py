"""The output folder of a run, before it begins: whatever stands there stays, or the run is refused. Loads no torch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from dflash import saved
from dflash.config import RunConfig
from kernelbake.errors import InputError

DRAFTER = "drafter"
EXPORTED = ("config.json", "model.safetensors")
"""The files of an exported drafter."""

_FILES = ("metrics.jsonl", ".metrics.jsonl.partial", "summary.json", ".summary.json.partial")
_FOLDERS = (DRAFTER, f"{saved.PREFIX}*")


def check(run: RunConfig) -> None:
    """Refuses an output folder in which the run would mix with another, remove what is not its own, or get stuck.

    Raises:
        InputError: something stands where the run will write; checkpoints that are not behind this run; or it cannot be
            written to, or read from later.
    """
    output = Path(run.output)
    _check_readable(output)
    _check_writable(output)
    _check_names(output)
    found = sorted((saved.final_name(path).name for path in saved.whole(output)), key=_step_of_name)
    resumed = saved.find(output, run.resume) if run.resume is not None else None
    if not found or run.resume == saved.LATEST:
        return
    if resumed is None:
        raise InputError(
            f"output: `{output}` holds the run that saved `{found[-1]}`; wanted a folder without checkpoints",
            hint="--resume latest goes on with that run; another --output, or removing the folder, begins a new one",
        )
    is_own = os.path.dirname(os.path.realpath(resumed)) == os.path.realpath(output)
    later = [name for name in found if not is_own or _step_of_name(name) > _step_of(resumed)]
    if later:
        raise InputError(
            f"output: `{output}` holds checkpoints that this run would not go on from, and `{saved.LATEST}` would mean "
            f"`{later[-1]}`; wanted none behind `{resumed}`",
            reasons=later,
            hint="another --output goes on from there and leaves them as they are; else move them away",
        )


def _check_readable(output: Path) -> None:
    """Refuses a name under which safetensors would find neither checkpoint nor drafter when all steps are made.

    Raises:
        InputError: it is not UTF-8.
    """
    try:
        str(output).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"output: `{output}` is no name in UTF-8; wanted one, as safetensors reads no files under others"
        ) from error


def _check_writable(output: Path) -> None:
    """Refuses what cannot be made or written to, without making it.

    Raises:
        InputError: with the reason.
    """
    try:
        there = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))
        there.stat()
        why = "" if there.is_dir() else os.strerror(errno.ENOTDIR)
    except OSError as error:
        why = error.strerror or str(error)
    if not why and not os.access(there, os.W_OK | os.X_OK):
        why = os.strerror(errno.EACCES)
    if why:
        raise InputError(f"output: `{output}` cannot be written to ({why}); wanted a folder for checkpoints and logs")


def _check_names(output: Path) -> None:
    """Refuses what the run could not write over, or would remove though it is not a run's.

    Raises:
        InputError: with all of it.
    """
    files = [output / name for name in _FILES if (output / name).exists() and not (output / name).is_file()]
    folders = [path for name in _FOLDERS for path in output.glob(name) if path.is_symlink() or not path.is_dir()]
    reasons = [f"`{path.name}` is no file" for path in files]
    reasons += [f"`{path.name}` is no folder" for path in sorted(folders)]
    if not reasons and (others := foreign(output / DRAFTER)):
        reasons = [f"`{DRAFTER}` holds `{'`, `'.join(others)}`, which is not of an exported drafter"]
    if reasons:
        raise InputError(
            f"output: `{output}` holds what is not a run's where the run will write; wanted nothing in the way",
            reasons=reasons,
            hint="move it away, or give another --output",
        )


def foreign(drafter: Path) -> list[str]:
    """What stands in the folder of the exported drafter beside its files: nobody may remove it."""
    return sorted(set(os.listdir(drafter)).difference(EXPORTED)) if drafter.is_dir() else []


def _step_of_name(name: str) -> int:
    digits = name.removeprefix(saved.PREFIX)
    return int(digits) if digits.isdecimal() else -1


def _step_of(folder: Path) -> int:
    """The step of a checkpoint, whatever its folder is called; one that cannot be read is refused when it is loaded."""
    try:
        return int(json.loads((folder / saved.STATE).read_bytes())["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return _step_of_name(folder.name)
