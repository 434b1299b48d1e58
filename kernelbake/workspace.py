"""The folder of a build beside its output, in which lies what it has found out so far."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernelbake import journal
from kernelbake.errors import InputError


@contextlib.contextmanager
def opened(output: Path, rank: int) -> Iterator[Path]:
    """The folder of a build, locked; it stays when the build fails and is removed when it succeeds.

    Args:
        output: the bundle to be.
        rank: of this builder among several at one bundle; each has a folder of its own.

    Raises:
        InputError: it cannot be made or used, or is not ours.
        LockedError: another build of this output runs.
    """
    folder = output.with_name(f"{output.name}.work" + (f".{rank}" if rank else ""))
    try:
        _make(folder)
        with journal.lock(folder / "lock", f"build {output}"):
            (folder / "code").mkdir(exist_ok=True)
            yield folder
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"build: `{error.filename or folder}` cannot be used ({reason}); wanted a folder for the journal",
            hint="an older bundle of that name is untouched; the build goes on from its journal, if that is there",
        ) from error


def _make(folder: Path) -> None:
    """Makes the folder, or sees that the one that is there is ours.

    What lies in it is believed and gets into the bundle; where others may write too, as in ``/tmp``, anybody can have
    put it there.

    Raises:
        InputError: it is a link, no folder, or somebody else's.
    """
    try:
        folder.mkdir(mode=0o700)
        return
    except FileExistsError:
        found = folder.lstat()
    with tempfile.TemporaryFile(dir=folder.parent) as mine:
        owner = os.fstat(mine.fileno()).st_uid  # who we are to this file system, which may be nobody
    what = None if stat.S_ISDIR(found.st_mode) else "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
    if what is None and found.st_uid != owner:
        what = f"made by user {found.st_uid}"
    if what is not None:
        raise InputError(
            f"build: `{folder}` is {what}; wanted the folder of an earlier build of user {owner}, or nothing",
            hint="remove it, or name an output in a folder of your own",
        )
