"""How much of a step is the network, and how much is everything else: one RL step against plain torch.

The step: 6 prompts x 8 samples, 10 denoising steps of which 9 are trained, LoRA of rank 16, float32, JPEG reward, no CFG,
on the shipped tiny model. The floor: on the same network and threads, only the forward passes that sampling needs, the
text encoding and decoding, and one forward and backward pass per trained pair, each at its best batch size. Step and floor
alternate, so that a drift of the machine's speed hits both; the ratio is taken pair by pair.

    python benchmarks/overhead.py [--threads 1] [--repeats 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

PROMPTS, SAMPLES, STEPS, TRAINED = 6, 8, 10, 9
BATCH_SIZES = (24, 48, 72, 144)


def recipe_of(threads: int, repeats: int, output_dir: str) -> dict[str, Any]:
    return {
        "run": {"name": "overhead", "output_dir": output_dir, "device": "cpu", "threads_per_worker": threads},
        "model": {"type": "sd3", "path": "builtin:shapes", "max_sequence_length": 0, "lora": {"rank": 16, "alpha": 32}},
        "data": {"prompts": "builtin:shapes/train.jsonl", "stratify_by": "category"},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "num_generations": SAMPLES,
            "num_inference_steps": STEPS,
            "height": 32,
            "width": 32,
            "forward_batch_size": PROMPTS * SAMPLES,
        },
        "algorithm": {"type": "flow_grpo"},
        "rewards": [{"type": "jpeg"}],
        "train": {"steps": repeats + 2, "timestep_batch_size": "all"},
        "schedule": {"groups_per_micro_batch": PROMPTS},
        "log": {"sample_freq": 0},
    }


def measure(threads: int, repeats: int) -> dict[str, Any]:
    import torch

    from digenrl.config.loader import recipe_from_plain
    from digenrl.metrics.console import RunConsole
    from digenrl.metrics.log import MetricsLog
    from digenrl.runtime.build import build_workers, wire_inline_run
    from digenrl.runtime.run_folder import RunFolder
    from digenrl.trace.record import TraceWriter

    with tempfile.TemporaryDirectory() as parent:
        recipe = recipe_from_plain(recipe_of(threads, repeats, f"{parent}/run"))
        workers, ledger = build_workers(recipe)
        folder = RunFolder.create(RunFolder.choose_path(recipe), recipe)
        console = RunConsole(0, _silent_console())
        run = wire_inline_run(recipe, workers, ledger, folder, MetricsLog(folder.metrics), console)
        floor = Floor(run.trainer.policy.adapter)
        with TraceWriter(folder.trace, run.scheduler.settings) as trace:
            steps = _steps(run, trace)
            next(steps)  # warms caches up, on both sides
            sizes = floor.choose_batch_sizes()
            product, plain, network = [], [], []
            for _ in range(repeats):
                product.append(next(steps))
                parts = floor.run(*sizes)
                plain.append(sum(parts.values()))
                network.append(parts["sampling"] + parts["training"])
        assert torch.get_num_threads() == threads
    return {
        "step_s": _spread(product),
        "floor_s": _spread(plain),
        "share_of_floor": _spread([f / p for f, p in zip(plain, product, strict=True)]),
        "share_of_floor_without_text_and_vae": _spread([n / p for n, p in zip(network, product, strict=True)]),
        "best_batch_sizes": {"sampling": sizes[0], "training": sizes[1]},
        "threads": threads,
        "repeats": repeats,
    }


def _steps(run: Any, trace: Any) -> Iterator[float]:
    """Wall seconds of one RL step after the other, scheduler, trace and logging included."""
    from digenrl.scheduling.commands import OptimizerStep
    from digenrl.scheduling.events import RunStarted

    events: Any = (RunStarted(at_us=run.executor.now_us()),)
    began = time.perf_counter()
    while events:
        commands = run.scheduler.handle(*events)
        trace.record(events, commands)
        for command in commands:
            run.executor.submit(command)
        if isinstance(getattr(events[0], "command", None), OptimizerStep):
            yield time.perf_counter() - began
            began = time.perf_counter()
        events = run.executor.next_events(60.0)


class Floor:
    """Plain torch: the passes that the step cannot do without."""

    def __init__(self, adapter: Any) -> None:
        import torch

        self._torch = torch
        self._adapter = adapter
        self._text = adapter.encode_prompts(["a red circle"] * PROMPTS, [""] * PROMPTS)

    def choose_batch_sizes(self) -> tuple[int, int]:
        return (
            min(BATCH_SIZES, key=lambda size: min(_time(lambda: self._sample(size)) for _ in range(2))),
            min(BATCH_SIZES, key=lambda size: min(_time(lambda: self._train(size)) for _ in range(2))),
        )

    def run(self, sampling: int, training: int) -> dict[str, float]:
        return {
            "text": _time(lambda: self._adapter.encode_prompts(["a red circle"] * PROMPTS, [""] * PROMPTS)),
            "sampling": _time(lambda: self._sample(sampling)),
            "decoding": _time(self._decode),
            "training": _time(lambda: self._train(training)),
        }

    def _sample(self, size: int) -> None:
        with self._torch.no_grad():
            for count in _chunks(PROMPTS * SAMPLES, size) * STEPS:
                self._forward(count)

    def _train(self, size: int) -> None:
        torch = self._torch
        for count in _chunks(PROMPTS * SAMPLES * TRAINED, size):
            velocity = self._forward(count)
            velocity.backward(torch.ones_like(velocity))
        self._adapter.transformer.zero_grad(set_to_none=True)

    def _decode(self) -> None:
        self._adapter.decode(self._torch.zeros(PROMPTS * SAMPLES, *self._adapter.latent_shape(32, 32)))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result = measure(arguments.threads, arguments.repeats)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    share, step, floor = result["share_of_floor"], result["step_s"], result["floor_s"]
    print(f"a step takes {step['median']:.3f} s, plain torch {floor['median']:.3f} s (medians of {arguments.repeats})")
    print(f"the step runs at {share['median']:.1%} of the floor ({share['min']:.1%} to {share['max']:.1%})")


if __name__ == "__main__":
    main()
