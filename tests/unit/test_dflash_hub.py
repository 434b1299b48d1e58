"""What a target that is on the Hub says of itself, where the network is slow, gone or forbidden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from dflash import hub
from kernelbake.errors import InputError


@pytest.mark.parametrize(
    ("fault", "asked", "said"),
    [
        (httpx.ConnectError("Name or service not known"), 2, "cannot be reached (Name or service not known)"),
        (httpx.ConnectTimeout(""), 1, "cannot be reached (ConnectTimeout)"),
        (OfflineModeIsEnabled(""), 1, "HF_HUB_OFFLINE forbids to ask the Hub"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_told_of_once_and_soon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Exception, asked: int, said: str
) -> None:
    """The client of the Hub would ask for half a minute, and say so six times; the choices stand in our message."""
    tries: list[float] = []

    def ask(url: str, timeout: float) -> None:
        tries.append(timeout)
        raise fault

    _in_an_empty_cache(monkeypatch, tmp_path, ask)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", _only_cached)
    with pytest.raises(InputError) as caught:
        hub.config_of("someone/something")
    assert said in caught.value.message
    assert "wanted `random`, a folder with `config.json`" in caught.value.message
    assert tries == [huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT] * asked


@pytest.mark.parametrize("fault", [httpx.ReadTimeout(""), httpx.ConnectError("at first"), None])
def test_a_slow_network_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Exception | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    faults = [fault]

    def ask(url: str, timeout: float) -> None:
        if faults and (found := faults.pop()) is not None:
            raise found

    _in_an_empty_cache(monkeypatch, tmp_path, ask)
    found = str(tmp_path / "config.json")
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda model, name, local_files_only=False: _only_cached(model, name, local_files_only) or found,
    )
    assert hub.config_of("someone/something") == {"model_type": "x"}


def _in_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ask: Callable[[str, float], None]) -> None:
    monkeypatch.setattr("dflash.hub._AGAIN_S", 0.0)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.chdir(tmp_path)


def _only_cached(model: str, name: str, local_files_only: bool = False) -> None:
    if local_files_only:
        raise LocalEntryNotFoundError("it is not there")
