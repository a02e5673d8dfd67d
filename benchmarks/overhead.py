"""How much of a step is the network, and how much is everything else: one RL step against plain torch.

The step: 6 prompts x 8 samples, 10 denoising steps of which 9 are trained, LoRA of rank 16, float32, JPEG reward, no CFG,
on the shipped tiny model, as `digenrl train` runs it in one process. The floor: on the same network and threads, only the
forward passes that sampling needs, the text encoding and decoding, and one forward and backward pass per trained pair, each at
its best batch size. Step and floor alternate, so that a drift of the machine's speed hits both; the ratio is taken pair by pair.

    python benchmarks/overhead.py [--threads 1] [--repeats 7] [--json] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

BATCH_SIZES = (24, 48, 72, 144)


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


def recipe_of(size: Size, threads: int, repeats: int, output_dir: str) -> dict[str, Any]:
    return {
        "run": {"name": "overhead", "output_dir": output_dir, "device": "cpu", "threads_per_worker": threads},
        "model": {"type": "sd3", "path": "builtin:shapes", "max_sequence_length": 0, "lora": {"rank": 16, "alpha": 32}},
        "data": {"prompts": "builtin:shapes/train.jsonl", "stratify_by": "category"},
        "rollout": {
            "prompts_per_step": size.prompts,
            "num_generations": size.generations,
            "num_inference_steps": size.denoising_steps,
            "height": 32,
            "width": 32,
            "forward_batch_size": size.samples,
        },
        "algorithm": {"type": "flow_grpo"},
        "rewards": [{"type": "jpeg"}],
        "train": {"steps": repeats + 1, "timestep_batch_size": "all", "save_freq": 0},
        "schedule": {"groups_per_micro_batch": size.prompts},
        "log": {"sample_freq": 0, "tensorboard": False},
    }


@dataclass(slots=True)
class Measured:
    """A recorder that times each RL step and, before the next one begins, the floor."""

    inner: Any
    floor: Floor
    batch_sizes: Sequence[int]
    best: tuple[int, int] | None = None
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
            self.floor_s.append(self.floor.run(*self.best))
        self.began = time.perf_counter()


def measure(threads: int, repeats: int, *, size: Size | None = None, batch_sizes: Sequence[int] = BATCH_SIZES) -> dict[str, Any]:
    """Medians and ranges of ``repeats`` steps, each beside a floor. batch_sizes: of which the floor takes the best."""
    import torch

    from digenrl.config.loader import recipe_from_plain
    from digenrl.driver import drive
    from digenrl.metrics.console import RunConsole
    from digenrl.metrics.log import MetricsLog
    from digenrl.runtime.build import Start
    from digenrl.runtime.inline import InlineSystem
    from digenrl.runtime.interrupt import Interrupt
    from digenrl.runtime.journal import Journal
    from digenrl.runtime.run_folder import RunFolder
    from digenrl.runtime.watch import Watch
    from digenrl.trace.record import TraceWriter

    size = size or Size()
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        recipe = recipe_from_plain(recipe_of(size, threads, repeats, f"{parent}/run"))
        system, start = InlineSystem(recipe), Start()
        folder = RunFolder.create(RunFolder.choose_path(recipe), recipe, stack)
        log = MetricsLog(folder.metrics)
        stack.callback(log.close)
        journal = Journal(recipe, folder, log, RunConsole(0, _silent_console()))
        interrupt = stack.enter_context(Interrupt())
        run = system.begin(system.settings(start), start, journal, interrupt, folder.checkpoints)
        trace = stack.enter_context(TraceWriter(folder.trace, run.scheduler.settings))
        measured = Measured(Watch(run.scheduler, [trace]), Floor(system.policy.adapter, size), batch_sizes)
        drive(run.scheduler, run.executor, measured, command_timeout_s=60.0)
        assert torch.get_num_threads() == threads
    assert measured.best is not None and len(measured.step_s) == repeats, "the run went to its end"
    floors = [(sum(parts.values()), parts["sampling"] + parts["training"]) for parts in measured.floor_s]
    pairs = list(zip(measured.step_s, floors, strict=True))
    return {
        "step_s": _spread(measured.step_s),
        "floor_s": _spread([plain for plain, _ in floors]),
        "share_of_floor": _spread([plain / step for step, (plain, _) in pairs]),
        "share_of_floor_without_text_and_vae": _spread([network / step for step, (_, network) in pairs]),
        "best_batch_sizes": {"sampling": measured.best[0], "training": measured.best[1]},
        "threads": threads,
        "repeats": repeats,
    }


class Floor:
    """Plain torch: the passes that the step cannot do without."""

    def __init__(self, adapter: Any, size: Size) -> None:
        import torch

        self._torch = torch
        self._adapter = adapter
        self._size = size
        self._text = self._encode()

    def choose_batch_sizes(self, candidates: Sequence[int]) -> tuple[int, int]:
        """The fastest ones for sampling and for training."""
        return (
            min(candidates, key=lambda size: min(_time(lambda: self._sample(size)) for _ in range(2))),
            min(candidates, key=lambda size: min(_time(lambda: self._train(size)) for _ in range(2))),
        )

    def run(self, sampling: int, training: int) -> dict[str, float]:
        return {
            "text": _time(self._encode),
            "sampling": _time(lambda: self._sample(sampling)),
            "decoding": _time(self._decode),
            "training": _time(lambda: self._train(training)),
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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a step of a few samples: shows that it runs, and no more")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tiny: dict[str, Any] = {"size": Size(prompts=2, generations=2, denoising_steps=3), "batch_sizes": (4, 8)}
    result = measure(arguments.threads, arguments.repeats, **(tiny if arguments.tiny else {}))
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    share, step, floor = result["share_of_floor"], result["step_s"], result["floor_s"]
    print(f"a step takes {step['median']:.3f} s, plain torch {floor['median']:.3f} s (medians of {arguments.repeats})")
    print(f"the step runs at {share['median']:.1%} of the floor ({share['min']:.1%} to {share['max']:.1%})")


if __name__ == "__main__":
    main()
