"""Every hostile file is refused, by the number of the MUST that it breaks and naming the place."""

from __future__ import annotations

import hostile
import pytest

from kernelbake import bundle
from kernelbake.rules import Rule, ViolationsError

FILES = hostile.load()


def test_the_sample_is_sound(tmp_path):
    for made in ("measured", "compiled-only", "interpreted"):
        path = tmp_path / f"{made}.tar"
        path.write_bytes(hostile.sound_bytes(made))
        assert bundle.read(path).made == made


def test_every_must_has_a_hostile_file():
    assert {rule for file in FILES.values() for rule in file.rules} == set(Rule)


@pytest.mark.parametrize("name", FILES)
def test_refused_by_number_and_place(name, tmp_path):
    file = FILES[name]
    path = tmp_path / "bundle.tar"
    file.make(path)
    with pytest.raises(ViolationsError) as refusal:
        bundle.read(path)
    violations = refusal.value.violations
    assert set(file.rules) <= {violation.rule for violation in violations}, refusal.value
    assert any(file.place in str(violation) for violation in violations), refusal.value
    assert all(violation.place and ";" in violation.message for violation in violations), refusal.value
