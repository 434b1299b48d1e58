"""Where the figures of a run go beside ``metrics.jsonl``: TensorBoard and Weights & Biases. Loads neither at import.

Both are optional, opened before a weight is loaded and before work at run time is counted: Weights & Biases starts a
process of its own when a run begins, and none later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash.errors import TrainingStoppedError
from dflash.schema import Reader
from kernelbake.errors import InputError

if TYPE_CHECKING:
    from dflash.config import RunConfig

_RUN_ID = ".wandb-id"
"""File of the output folder with the id of its Weights & Biases run, so that a resumed run goes on with it."""


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Who is told beside the log.

    Args:
        tensorboard: whether event files are written to ``tensorboard/`` in the output folder.
        wandb: a project of Weights & Biases; None sends nothing. Its own settings hold: ``WANDB_MODE=offline`` keeps
            everything on this machine.
        wandb_name: the run's name there; None lets it choose.
    """

    tensorboard: bool = False
    wandb: str | None = None
    wandb_name: str | None = None

    @classmethod
    def read(cls, reader: Reader) -> TrackingConfig:
        config = cls(
            tensorboard=reader.flag("tensorboard", False),
            wandb=reader.text("wandb", None),
            wandb_name=reader.text("wandb_name", None),
        )
        if config.wandb_name is not None and config.wandb is None and reader.good("wandb"):
            reader.fault("wandb_name", "given without `wandb`; wanted it with a project")
        reader.done()
        return config


class Sink(Protocol):
    """Takes the lines of the log."""

    def write(self, line: Mapping[str, Any]) -> None: ...


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line of the log, under names that group them: ``train/loss``, ``validation/accuracy`` …"""
    if "validation" in line:
        found = line["validation"]
        return {"validation/loss": found["loss"], **_scores("validation", found["scores"])}
    figures = {f"train/{name}": line[name] for name in ("loss", "norm", "lr", "epoch", "seconds")}
    figures |= _scores("train", line["scores"])
    figures["train/tokens_per_s"] = line["num_tokens"] / max(line["seconds"], 1e-9)
    return figures | {f"train/peak_gib/{device}": size / 2**30 for device, size in line["peak_bytes_by_device"].items()}


def _scores(group: str, scores: Mapping[str, Any]) -> dict[str, float]:
    figures = {f"{group}/{name}": scores[name] for name in ("accuracy", "acceptance_length")}
    places = enumerate(scores["accuracy_by_position"], 1)
    return figures | {f"{group}/accuracy_at/{place:02d}": value for place, value in places}


class TensorBoard:
    """Writes event files.

    Args:
        module: ``torch.utils.tensorboard``.
        folder: of the event files.
    """

    def __init__(self, module: Any, folder: Path) -> None:
        self._module = module
        self._folder = folder
        self._writer: Any = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line's figures; a resumed run replaces what stood at its steps.

        Raises:
            TrainingStoppedError: the files cannot be written.
        """
        try:
            if self._writer is None:
                self._writer = self._module.SummaryWriter(str(self._folder), purge_step=line["step"])
            for name, value in scalars(line).items():
                self._writer.add_scalar(name, value, line["step"])
        except OSError as error:
            raise TrainingStoppedError(f"tensorboard: `{self._folder}` cannot be written ({error})") from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One run there.

    Args:
        run: what ``wandb.init`` gave.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line's figures."""
        self._run.log({"step": line["step"], **scalars(line)})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def check(config: TrackingConfig) -> None:
    """Refuses what is asked for and not installed.

    Raises:
        InputError: naming every missing package with its extra.
    """
    missing = []
    for wanted, package, names in (
        (config.tensorboard, "tensorboard", ("tensorboard",)),
        (config.wandb is not None, "wandb", ("wandb",)),
    ):
        if wanted and not all(_imports(name) for name in names):
            missing.append(package)
    if missing:
        named = " and ".join(f"`{package}`" for package in missing)
        raise InputError(
            f"tracking: {named} cannot be imported; wanted what the run's configuration asks for",
            hint=f"pip install 'kernelbake[{','.join(missing)}]', or leave it out: metrics.jsonl is always written",
        )


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def opened(run: RunConfig) -> Iterator[tuple[Sink, ...]]:
    """Everyone who is to be told, until the block ends.

    Raises:
        InputError: something is not installed, or a run cannot be begun.
    """
    config, output = run.tracking, Path(run.output)
    check(config)
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if config.tensorboard:
            board = TensorBoard(importlib.import_module("torch.utils.tensorboard"), output / "tensorboard")
            stack.callback(board.close)
            sinks.append(board)
        if config.wandb is not None:
            sinks.append(stack.enter_context(_wandb(run, config, output)))
        yield tuple(sinks)


@contextlib.contextmanager
def _wandb(run: RunConfig, config: TrackingConfig, output: Path) -> Iterator[WeightsAndBiases]:
    try:
        made = importlib.import_module("wandb").init(
            project=config.wandb,
            name=config.wandb_name,
            dir=str(output),
            id=_run_id(output, resumed=run.resume is not None),
            resume="allow",
            config=run.to_json(),
        )
    except Exception as error:  # of any kind: no account, no network, a file that cannot be written
        raise InputError(
            f"tracking: Weights & Biases cannot begin a run ({error}); wanted one in project `{config.wandb}`",
            hint="WANDB_MODE=offline keeps it on this machine; without --wandb, metrics.jsonl is written as always",
        ) from error
    made.define_metric("*", step_metric="step")
    sink = WeightsAndBiases(made)
    try:
        yield sink
    except BaseException:
        sink.close(failed=True)
        raise
    sink.close(failed=False)


def _run_id(output: Path, *, resumed: bool) -> str:
    """The id of the output folder's run: that of before if it is resumed."""
    path = output / _RUN_ID
    if resumed and path.is_file():
        return path.read_text().strip()
    output.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(4)
    path.write_text(made + "\n")
    return made
