"""Makes the pairs of a run, one after the other, in one thread, before any other begins. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dflash import checkpoint, data, devices, drafter, graphs, memory, ranks, sources, target
from dflash.exchange import scratch_bytes
from dflash.job import Job, Trainer
from dflash.objective import Objective
from dflash.optimizer import Optimizer
from dflash.pairs import Pair
from kernelbake.errors import InputError


def torch_device(number: int, *, interpreted: bool) -> torch.device:
    """The device of that number: a GPU, or the CPU under the interpreter."""
    return torch.device("cpu") if interpreted else torch.device("cuda", number)


def build(job: Job) -> Trainer:
    """Loads the targets, makes or restores drafters and optimizers, opens the data; all in this thread.

    Raises:
        InputError: the target cannot be loaded or does not fit, the data or the checkpoint cannot be used.
        ResumeError: the checkpoint belongs to another run.
        MisfitError: the ranks would not train the same.
        TrainingStoppedError: the target's forward pass cannot be captured.
    """
    run, spec = job.run, job.spec
    source, held_out = sources.open_source(spec), None
    if spec.data.held_out:
        source, held_out = data.hold_out(source, spec.data.held_out)
    resumed = checkpoint.load(checkpoint.find(job.output, run.resume)) if run.resume else None
    if resumed is not None:
        now = (spec, run.seed, job.bundle, job.step_batches, source.digest)
        checkpoint.check_same_run(resumed[0], *now, other_bundle=run.other_bundle)
        if resumed[0].step > run.steps:
            raise InputError(
                f"steps: found `{run.steps}`; wanted at least `{resumed[0].step}`, where the checkpoint is"
            )
    _check_same(job, source, resumed[0].step if resumed is not None else 0)
    interpreted = job.interpreted
    places = [tuple(torch_device(gpu, interpreted=interpreted) for gpu in (at.target, at.drafter)) for at in run.pairs]
    needs = _needs(job, places)
    memory.check(needs)
    pairs = [_pair(job, number, there, here) for number, (there, here) in enumerate(places)]
    place = resumed[0].loader if resumed is not None else None
    loader = data.Loader(source, job.shapes, job.drafting, run.seed, place, step_batches=job.step_batches)
    trainer = Trainer(job, pairs, loader, held_out, loader.state(), meter=memory.Meter(needs))
    if job.ranks.world > 1:
        trainer.group = ranks.gradient_group(cuda=pairs[0].device.type == "cuda")
    if resumed is not None:
        trainer.done = resumed[0].step
    _share_weights(trainer, resumed[1] if resumed is not None else None)
    changed = _changed(resumed[0].run, run.to_json()) if resumed is not None else ()
    trainer.notes = (*changed, *graphs.install(pairs, spec, wanted=run.graphs, interpreted=job.interpreted))
    return trainer


_CHANGE_NUMBERS = ("steps", "gamma", "batch", "optimizer", "loss")
"""Parts of a run's configuration that a checkpoint may go on with other values of, to other numbers."""


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """What a resumed run does otherwise than before, in one line, if anything."""
    then, here = (_flat(_numbers(run), "") for run in (before, now))
    found = [f"{name} `{then[name]}`, now `{here[name]}`" for name in here if name in then and then[name] != here[name]]
    return (f"resume: not the run that it was: {'; '.join(found)}",) if found else ()


def _numbers(run: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run's configuration what changes numbers and no checkpoint refuses; other data, it does."""
    data = run.get("data")
    shuffled = data.get("shuffle_labels") if isinstance(data, Mapping) else None
    return {**{name: run.get(name) for name in _CHANGE_NUMBERS}, "data": {"shuffle_labels": shuffled}}


def _needs(job: Job, places: Sequence[tuple[torch.device, ...]]) -> list[memory.Need]:
    """What all pairs of this process need on their devices."""
    found: list[memory.Need] = []
    for there, here in places:
        found += memory.of_run(
            job.footprints, job.spec, there, here, graphs_wanted=job.run.graphs, interpreted=job.interpreted
        )
        if job.num_pairs > 1:
            state = next(need.num_bytes for need in found if need.what == memory.OPTIMIZER)
            length = state // memory.MASTER_BYTES
            scratch = scratch_bytes(length, job.num_pairs)
            found.append(memory.Need(here, "gradients of other pairs", scratch, True))
    return found


def _pair(job: Job, number: int, there: torch.device, here: torch.device) -> Pair:
    run, spec, dtype = job.run, job.spec, devices.DTYPES[job.spec.axes.dtype]
    if here.type == "cuda":
        torch.cuda.set_device(here)
    objective = Objective.of(run.loss)
    layer_ids, whole = spec.drafter.target_layer_ids, objective.reads_target
    model = target.load_target(spec.target, layer_ids, there, dtype, seed=run.seed, whole=whole)
    torch.manual_seed(run.seed)
    network = drafter.build(spec.drafter, spec.target.hidden_size, here, dtype)
    optimizer = Optimizer(network, run.optimizer, job.num_pairs)
    return Pair(job.ranks.rank * len(run.pairs) + number, model, network, optimizer, objective)


def _check_same(job: Job, source: data.Source, step: int) -> None:
    """Refuses ranks that would not train the same, before anything large is loaded.

    Raises:
        MisfitError: with every difference, and the rank.
    """
    if job.ranks.world == 1:
        return
    import triton

    own = ("devices", "dp_pairs", "output", "bundle", "resume")  # of a host
    facts = {"bundle": job.bundle, "torch": torch.__version__, "triton": triton.__version__}
    facts |= {"pairs": len(job.run.pairs), "samples": len(source), "contents": source.digest, "step": step}
    facts |= _flat({name: value for name, value in job.run.to_json().items() if name not in own}, "")
    job.ranks.check_same(facts | _flat(job.spec.to_json(), ""))


def _flat(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}{name}.")
        else:  # a checkpoint's JSON has lists where a run has tuples
            found[f"{path}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def _share_weights(trainer: Trainer, resumed: Mapping[str, torch.Tensor] | None) -> None:
    """Gives all pairs the same weights, to the bit: those of a checkpoint, or of rank 0's first pair.

    Raises:
        MisfitError: ranks have read other checkpoints.
    """
    first, world = trainer.pair.optimizer, trainer.job.ranks
    for pair in trainer.pairs if resumed is not None else ():
        pair.optimizer.restore(resumed or {})
    if resumed is None and world.world > 1:
        import torch.distributed as dist

        for master in first.masters:
            dist.broadcast(master.detach(), 0, group=trainer.group)
        first.take_weights(first.masters)
    if resumed is None:
        for pair in trainer.pairs[1:]:
            pair.optimizer.take_weights(first.masters)
    if world.world > 1:
        read = first.state() if resumed is not None else {}  # beside weights: the moments, which are nothing at first
        held = {**{f"weights {place}": master for place, master in enumerate(first.masters)}, **read}
        world.check_same({name: float(tensor.detach().sum(dtype=torch.float64)) for name, tensor in held.items()})
