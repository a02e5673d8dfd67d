"""How much of a step is the network, and how much is everything else: one RL step against plain torch.

The step: 6 prompts x 8 samples, 10 denoising steps of which 9 are trained, LoRA of rank 16, float32, JPEG reward, no CFG,
on the shipped tiny model, as `digenrl train` runs it in one process. The floor: on the same network and threads, only the
forward passes that sampling needs, the text encoding and decoding, and one forward and backward pass per trained pair, each at
its best batch size. Step and floor alternate, so that a drift of the machine's speed hits both; the ratio is taken pair by pair.

With --processes 2 the step is that of two colocated trainer ranks, Ray workers beside the driver. The floor is then two processes
that do half of the passes each at the same time, without a word to each other, and it lasts as long as the slower one.

    python benchmarks/overhead.py [--processes 1] [--threads 1] [--repeats 7] [--json] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

BATCH_SIZES = (24, 36, 48, 72, 144)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one RL step consists of."""

    prompts: int = 6
    generations: int = 8
    denoising_steps: int = 10
    """All but the last are trained."""

    @property
    def samples(self) -> int:
        """Of one step."""
        return self.prompts * self.generations

    @property
    def pairs(self) -> int:
        """(sample, denoising step) pairs that are trained."""
        return self.samples * (self.denoising_steps - 1)

    def part(self, of: int) -> Size:
        """What one of several processes does of it."""
        return replace(self, prompts=self.prompts // of)


def recipe_of(size: Size, threads: int, repeats: int, output_dir: str, processes: int = 1) -> dict[str, Any]:
    cluster = (
        {"placement": "colocated", "trainer": {"ranks": processes, "shard": 1}} if processes > 1 else {"placement": "inline"}
    )
    return {
        "run": {"name": "overhead", "output_dir": output_dir, "device": "cpu", "threads_per_worker": threads},
        "model": {"type": "sd3", "path": "builtin:shapes", "max_sequence_length": 10, "lora": {"rank": 16, "alpha": 32}},
        "data": {"prompts": "builtin:shapes/train.jsonl", "stratify_by": "category"},
        "rollout": {
            "prompts_per_step": size.prompts,
            "num_generations": size.generations,
            "num_inference_steps": size.denoising_steps,
            "height": 32,
            "width": 32,
            "forward_batch_size": size.samples // processes,
        },
        "algorithm": {"type": "flow_grpo"},
        "rewards": [{"type": "jpeg"}],
        # A whole group, also where ranks would else have a share of it each: the floor, too, takes its best batch size.
        "train": {"steps": repeats + 1, "timestep_batch_size": size.pairs // size.prompts, "save_freq": 0},
        "schedule": {"groups_per_micro_batch": size.prompts},
        "cluster": cluster,
        "log": {"sample_freq": 0, "tensorboard": False},
    }


@dataclass(slots=True)
class Measured:
    """A recorder that times each RL step and, before the next one begins, the floor."""

    inner: Any
    floor: Floor | Floors
    batch_sizes: Sequence[int]
    best: dict[str, int] | None = None
    """Batch sizes of sampling and training, chosen after the first step, which warms caches up."""
    step_s: list[float] = field(default_factory=list)
    """Wall seconds of each step but the first; scheduler, trace and metrics included."""
    floor_s: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each part of the floor, one by one beside the steps."""
    began: float = field(default_factory=time.perf_counter)

    def record(self, events: Sequence[Any], commands: Sequence[Any]) -> None:
        """See digenrl.driver.Recorder."""
        from digenrl.scheduling.commands import OptimizerStep

        self.inner.record(events, commands)
        if not any(isinstance(getattr(event, "command", None), OptimizerStep) for event in events):
            return
        seconds = time.perf_counter() - self.began
        if self.best is None:
            self.best = self.floor.choose_batch_sizes(self.batch_sizes)
        else:
            self.step_s.append(seconds)
            self.floor_s.append(self.floor.run())
        self.began = time.perf_counter()


def measure(
    threads: int, repeats: int, *, processes: int = 1, size: Size | None = None, batch_sizes: Sequence[int] = BATCH_SIZES
) -> dict[str, Any]:
    """Medians and ranges of ``repeats`` steps, each beside a floor. batch_sizes: of which the floor takes the best."""
    import torch

    from digenrl.config.loader import recipe_from_plain
    from digenrl.driver import drive
    from digenrl.metrics.console import RunConsole
    from digenrl.metrics.log import MetricsLog
    from digenrl.runtime.build import Start
    from digenrl.runtime.interrupt import Interrupt
    from digenrl.runtime.journal import Journal
    from digenrl.runtime.run_folder import RunFolder
    from digenrl.runtime.watch import Watch
    from digenrl.trace.record import TraceWriter

    size = size or Size()
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        recipe = recipe_from_plain(recipe_of(size, threads, repeats, f"{parent}/run", processes))
        system, floor = _system_and_floor(recipe, size, threads, processes, stack)
        folder = RunFolder.create(RunFolder.choose_path(recipe), recipe, stack)
        log = MetricsLog(folder.metrics)
        stack.callback(log.close)
        start, journal = Start(), Journal(recipe, folder, log, RunConsole(0, _silent_console()))
        interrupt = stack.enter_context(Interrupt())
        run = system.begin(system.settings(start), start, journal, interrupt, folder.checkpoints)
        trace = stack.enter_context(TraceWriter(folder.trace, run.scheduler.settings))
        measured = Measured(Watch(run.scheduler, [trace]), floor, batch_sizes)
        drive(run.scheduler, run.executor, measured, command_timeout_s=60.0)
        assert processes > 1 or torch.get_num_threads() == threads
    assert measured.best is not None and len(measured.step_s) == repeats, "the run went to its end"
    floors = [(sum(parts.values()), parts["sampling"] + parts["training"]) for parts in measured.floor_s]
    pairs = list(zip(measured.step_s, floors, strict=True))
    return {
        "step_s": _spread(measured.step_s),
        "floor_s": _spread([plain for plain, _ in floors]),
        "floor_parts_s": {name: statistics.median(parts[name] for parts in measured.floor_s) for name in measured.floor_s[0]},
        "share_of_floor": _spread([plain / step for step, (plain, _) in pairs]),
        "share_of_floor_without_text_and_vae": _spread([network / step for step, (_, network) in pairs]),
        "best_batch_sizes": measured.best,
        "processes": processes,
        "threads": threads,
        "repeats": repeats,
    }


def _system_and_floor(recipe: Any, size: Size, threads: int, processes: int, stack: ExitStack) -> tuple[Any, Floor | Floors]:
    if processes == 1:
        from digenrl.runtime.inline import InlineSystem

        inline = InlineSystem(recipe)
        return inline, Floor(inline.policy.adapter, size)
    from digenrl.runtime.ray.environment import prepare

    prepare(private=True)
    from digenrl.runtime.ray.system import RaySystem

    floors = Floors(recipe_of(size, threads, 1, "unused"), size.part(processes), processes)
    stack.callback(floors.close)
    return RaySystem(recipe, None, stack), floors


class Floors:
    """Several processes that do their parts of the floor at the same time."""

    def __init__(self, recipe: dict[str, Any], size: Size, processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ends: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(processes):
            here, there = spawn.Pipe()
            self._ends.append(here)
            self._processes.append(spawn.Process(target=_serve_floor, args=(there, recipe, size), daemon=True))
            self._processes[-1].start()
            there.close()  # so that the end of the process is the end of the pipe

    def choose_batch_sizes(self, candidates: Sequence[int]) -> dict[str, int]:
        """As Floor has it; what the first process found."""
        return dict(self._ask("choose_batch_sizes", tuple(candidates))[0])

    def run(self) -> dict[str, float]:
        """Seconds of each part, in the process that took longest."""
        return max(self._ask("run"), key=lambda parts: sum(parts.values()))

    def close(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join(10)

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        for end in self._ends:
            end.send((method, arguments))
        return [end.recv() for end in self._ends]


def _serve_floor(pipe: Any, recipe: dict[str, Any], size: Size) -> None:
    import torch

    from digenrl.config.loader import recipe_from_plain
    from digenrl.runtime.build import ALL_ROLES, build_components
    from digenrl.runtime.ray.environment import NICENESS

    # What else the machine does is to hold the floor up as much as it does the workers.
    os.nice(int(os.environ[NICENESS]))
    built = build_components(recipe_from_plain(recipe), ALL_ROLES, torch.device("cpu"))
    floor = Floor(built.adapter, size)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(floor, method)(*arguments))


class Floor:
    """Plain torch: the passes that the step cannot do without."""

    def __init__(self, adapter: Any, size: Size) -> None:
        import torch

        self._torch = torch
        self._adapter = adapter
        self._size = size
        self._text = self._encode()
        self._best = {"sampling": size.samples, "training": size.pairs}

    def choose_batch_sizes(self, candidates: Sequence[int]) -> dict[str, int]:
        """The fastest ones for sampling and for training."""
        self._best = {
            "sampling": min(candidates, key=lambda size: min(_time(lambda: self._sample(size)) for _ in range(2))),
            "training": min(candidates, key=lambda size: min(_time(lambda: self._train(size)) for _ in range(2))),
        }
        return self._best

    def run(self) -> dict[str, float]:
        """Seconds of each part."""
        return {
            "text": _time(self._encode),
            "sampling": _time(lambda: self._sample(self._best["sampling"])),
            "decoding": _time(self._decode),
            "training": _time(lambda: self._train(self._best["training"])),
        }

    def _encode(self) -> Any:
        return self._adapter.encode_prompts(["a red circle"] * self._size.prompts, [""] * self._size.prompts)

    def _sample(self, size: int) -> None:
        with self._torch.no_grad():
            for count in _chunks(self._size.samples, size) * self._size.denoising_steps:
                self._forward(count)

    def _train(self, size: int) -> None:
        torch = self._torch
        for count in _chunks(self._size.pairs, size):
            velocity = self._forward(count)
            velocity.backward(torch.ones_like(velocity))
        self._adapter.transformer.zero_grad(set_to_none=True)

    def _decode(self) -> None:
        self._adapter.decode(self._torch.zeros(self._size.samples, *self._adapter.latent_shape(32, 32)))

    def _forward(self, count: int) -> Any:
        torch = self._torch
        text = {name: tensor[:1].expand(count, *tensor.shape[1:]) for name, tensor in self._text.tensors.items()}
        return self._adapter.transformer(
            hidden_states=torch.zeros(count, *self._adapter.latent_shape(32, 32)),
            timestep=torch.full((count,), 500.0),
            encoder_hidden_states=text["prompt_embeds"],
            pooled_projections=text["pooled_prompt_embeds"],
            return_dict=False,
        )[0]


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def _time(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _silent_console() -> Any:
    from rich.console import Console

    return Console(quiet=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=(1, 2, 3, 6), default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a step of a few samples: shows that it runs, and no more")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tiny: dict[str, Any] = {"size": Size(generations=2, denoising_steps=3), "batch_sizes": (4, 8)}
    result = measure(arguments.threads, arguments.repeats, processes=arguments.processes, **(tiny if arguments.tiny else {}))
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    share, step, floor = result["share_of_floor"], result["step_s"], result["floor_s"]
    print(f"{arguments.processes} process(es) of {arguments.threads} thread(s)")
    print(f"a step takes {step['median']:.3f} s, plain torch {floor['median']:.3f} s (medians of {arguments.repeats})")
    print(f"the step runs at {share['median']:.1%} of the floor ({share['min']:.1%} to {share['max']:.1%})")


if __name__ == "__main__":
    main()
