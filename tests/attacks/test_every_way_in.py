"""Whatever is asked of a bundle, a hostile file is refused for the same reasons: there is one reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import hostile
import pytest
import samples

from kernelbake import bundle, diff, freeze, inspect, levels, preflight, signing
from kernelbake.errors import BundleError, InputError, KernelbakeError, SignatureError

FILES = hostile.load()


def _verify(path: Path) -> None:
    [level] = levels.verify(path, levels.Request()).levels
    assert level.error is not None
    raise level.error


WAYS: dict[str, Callable[[Path], object]] = {
    "verify": _verify,
    "freeze": freeze.freeze,
    "preflight": preflight.workload_of,
    "show": inspect.show,
    "explain": lambda path: inspect.explain(path, "kernel"),
    "diff": lambda path: diff.diff(bundle.read(path), bundle.read(path)),
    "signature": lambda path: signing.check(path, []),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> Iterator[dict[str, tuple[Path, BundleError]]]:
    """Every hostile file with the refusal of the reader itself."""
    folder = tmp_path_factory.mktemp("hostile")
    found = {}
    for number, (name, file) in enumerate(FILES.items()):
        path = folder / f"{number}.tar"
        file.make(path)
        with pytest.raises(BundleError) as refusal:
            bundle.read(path)
        found[name] = path, refusal.value
    yield found
    for path, _ in found.values():
        if path.is_file() and not path.is_symlink():
            path.unlink()


@pytest.mark.parametrize("way", WAYS)
def test_the_same_refusal_for_the_same_reasons(way, refused):
    for name, (path, wanted) in refused.items():
        with pytest.raises(KernelbakeError) as refusal:
            WAYS[way](path)
        assert type(refusal.value) is type(wanted), name
        assert refusal.value.message == wanted.message, name
        assert refusal.value.reasons == wanted.reasons, name
        assert refusal.value.exit_code == wanted.exit_code == 3, name
    assert freeze.current() is None


def test_a_missing_signature_refuses_before_anything_is_loaded(tmp_path):
    path, key = tmp_path / "bundle.tar", tmp_path / "key.pub"
    bundle.write(path, samples.contents())
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA" + "A" * 42 + " nobody\n")
    for way in (freeze.freeze, preflight.workload_of):
        with pytest.raises(SignatureError, match="missing; wanted one by SHA256:"):
            way(path, trusted=[key])
        with pytest.raises(InputError, match="No such file"):
            way(path, trusted=[tmp_path / "none.pub"])
    assert freeze.current() is None
