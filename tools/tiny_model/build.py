"""Rebuild the tiny model from seeds: ``python tools/tiny_model/build.py --output DIR --seed 0 [--resume] [--stop-after S]``.

Three stages, each kept in the output folder: the autoencoder (``vae``), examples as latents (``examples.safetensors``), and flow
matching (``checkpoint.safetensors``), whose result is the pipeline's folder ``model``. An interrupted run goes on with
``--resume`` exactly where its last checkpoint was; the autoencoder takes minutes and begins anew. Losses go to csv files:
with the same seed, libraries and machine they are the same to the last digit.
"""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial
from pathlib import Path

import torch
from components import Network, pipeline_of
from diffusers import AutoencoderKL
from evaluate import accuracy, draw
from files import save_folder
from flow_training import FlowTraining, Plan, Rhythm, encode_examples, train
from make_prompts import held_out_scenes
from progress import Deadline
from vae_training import DEFAULT_STEPS, train_autoencoder
from warm_start import autoencoder_of, start_from

from digenrl.models.loading import quiet_libraries

_THREADS = 2
"""Fixed, for sums depend on how they are split."""
_EVALUATED = 250
_MODEL_NAME = "digenrl-tiny-shapes"


def main() -> None:
    arguments = _parser().parse_args()
    quiet_libraries()
    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a fifth of the time, and nothing here reads such memory
    output: Path = arguments.output
    if output.exists() and any(output.iterdir()) and not arguments.resume:
        raise SystemExit(f"{output} is not empty: add --resume to go on with what is there, or name another --output.")
    output.mkdir(parents=True, exist_ok=True)
    done = build(output, arguments, Deadline(arguments.stop_after))
    print(f"Done: {output / 'model'}" if done else "Stopped. Go on with the same command and --resume.", flush=True)


def build(output: Path, arguments: argparse.Namespace, deadline: Deadline) -> bool:
    """All stages that are not done yet; False where the deadline passed before the last one was."""
    begin = arguments.start_from
    if begin is not None and not (output / "vae").exists():
        save_folder(output / "vae", autoencoder_of(begin).save_pretrained)
    if (output / "vae").exists():
        vae = AutoencoderKL.from_pretrained(output / "vae").eval().requires_grad_(False)
    else:
        trained = train_autoencoder(output, seed=arguments.seed, steps=arguments.vae_steps, deadline=deadline)
        if trained is None:
            return False
        vae = trained
    dataset = encode_examples(output, vae, seed=arguments.seed, count=arguments.examples)
    training = FlowTraining(dataset, seed=arguments.seed, prepare=None if begin is None else partial(start_from, begin))
    if (output / "checkpoint.safetensors").exists():
        training.load(output / "checkpoint.safetensors")

    def tell_accuracy(network: Network) -> str:
        scenes = held_out_scenes()[:_EVALUATED]
        return str(accuracy(draw(pipeline_of(network, vae), scenes), scenes))

    rhythm = Rhythm(save_every_s=120, evaluate_every_s=arguments.evaluate_every, evaluate=tell_accuracy)
    plan = Plan(images=arguments.images, decay_images=int(arguments.images * arguments.decay), peak=arguments.peak)
    done = train(training, output, plan=plan, rhythm=rhythm, deadline=deadline)
    save_folder(output / "model", lambda folder: save_model(folder, training.average, vae))
    print(f"The average after {training.images:,} images: {tell_accuracy(training.average)}", flush=True)
    return done


def save_model(folder: Path, network: Network, vae: AutoencoderKL) -> None:
    """Write the pipeline with weights in float16 that load as float32, so that it runs on a CPU as it is."""
    network, vae = copy.deepcopy(network).half(), copy.deepcopy(vae).half()
    pipeline_of(network, vae).save_pretrained(folder)
    for path in [*folder.glob("*/config.json"), folder / "model_index.json"]:
        config = json.loads(path.read_text(encoding="utf-8"))
        if "dtype" in config:
            config["dtype"] = "float32"
        if "_name_or_path" in config:
            config["_name_or_path"] = _MODEL_NAME
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the tiny shapes model from seeds.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with what the output folder holds")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="stop with a checkpoint (default: when done)")
    parser.add_argument("--images", type=int, default=600_000, help="to train on, repetitions counted")
    parser.add_argument("--decay", type=float, default=0.4, help="share of them over which the learning rate falls")
    parser.add_argument("--peak", type=float, default=1.0, help="factor for the learning rates at their highest")
    parser.add_argument("--start-from", type=Path, metavar="MODEL", help="begin with a finished model's weights")
    parser.add_argument("--examples", type=int, default=64_000, help="different pictures")
    parser.add_argument("--vae-steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--evaluate-every", type=float, default=600, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    main()
