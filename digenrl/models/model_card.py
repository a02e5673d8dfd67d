"""The README.md of an export: what it is, what it was trained with, whether it helped, and how to load it.

Invariants: the YAML header is what the hub asks for; the licence is the base model's own or "other", never made up; no
absolute path of this machine is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from digenrl.config.builtin import PREFIX, resolve
from digenrl.config.checks import looks_like_hub_id
from digenrl.config.families import FAMILIES, Family
from digenrl.config.registry import media_of
from digenrl.config.schema import EvalSection, Recipe
from digenrl.models.export import LORA_FILE, flow_shift

_CARDS = ("README.md", "MODEL_CARD.md")
_UNKNOWN = Family(pipeline="", required=(), cfg_argument="guidance_scale")
"""Of an adapter of the user's own: as most pipelines have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card tells."""

    title: str
    recipe: Recipe
    section: EvalSection
    """How the run evaluates."""
    pipeline: str
    """diffusers' class of the pipeline."""
    absent: tuple[str, ...]
    """Components that the base leaves out."""
    weights: str
    """``ema`` or ``raw``."""
    policy_version: int
    evaluations: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl of kind ``eval``, by rising step."""
    has_plot: bool
    """Whether reward.png lies beside the card."""
    prompt: str
    """For the example."""


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with a YAML header."""
    lora = facts.recipe.model.lora
    what = "All weights of the transformer" if lora is None else f"LoRA adapters (rank {lora.rank}, alpha {lora.alpha:g})"
    kind = "averaged (EMA)" if facts.weights == "ema" else "raw"
    plain = _without_folders(facts.recipe.to_plain())
    parts = [
        f"---\n{yaml.safe_dump(_header(facts), sort_keys=False)}---",
        f"# {facts.title}",
        f"{what} of `{base_name(facts.recipe.model.path)}`, trained with reinforcement learning "
        f"({facts.recipe.algorithm.type}) by DigenRL for {facts.policy_version} steps on the "
        f"rewards {', '.join(f'`{reward.name}`' for reward in facts.recipe.rewards)}. These are the {kind} weights.",
        f"## Load\n\n```python\n{loading_code(facts)}```",
        _results(facts),
        f"## Recipe\n\n```yaml\n{yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def loading_code(facts: CardFacts) -> str:
    """Python that draws one picture or video, when it runs in the exported folder."""
    recipe = facts.recipe
    on_euler = FAMILIES.get(recipe.model.type, _UNKNOWN).samples_on_euler
    call = _call(recipe, facts.section)
    # A place for a text encoder that is empty has to be named, or diffusers asks for its folder.
    empty = [name for name in facts.absent if name.startswith(("text_encoder", "tokenizer"))]
    options = ", dtype=torch.float32" + "".join(f", {name}=None" for name in empty)
    shift = flow_shift(recipe)
    lines = ["import torch", f"from diffusers import {'FlowMatchEulerDiscreteScheduler, ' if on_euler else ''}{facts.pipeline}"]
    if recipe.model.lora is None:
        lines += ["", 'folder = "."  # this folder, or its id on the hub']
        lines += [f"pipeline = {facts.pipeline}.from_pretrained(folder{options})"]
    else:
        lines += [*_base_lines(recipe.model.path), 'folder = "."  # this folder, or its id on the hub']
        lines += [
            f"pipeline = {facts.pipeline}.from_pretrained(base{options})",
            f"pipeline.load_lora_weights(folder, weight_name={LORA_FILE!r})",
        ]
        if shift is not None and not on_euler:
            changes = f"shift={shift}, use_dynamic_shifting=False"
            lines += [f"pipeline.scheduler = pipeline.scheduler.from_config(pipeline.scheduler.config, {changes})"]
    if on_euler:
        own = 'pipeline.scheduler.config.get("flow_shift", 1.0)' if shift is None else repr(shift)
        lines += [f"pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift={own})  # the grid that it was trained on"]
    arguments = "".join(f"    {name}={value!r},\n" for name, value in call.items())
    found, output = ("video", "frames") if _makes_videos(recipe) else ("image", "images")
    lines += [f"{found} = pipeline(\n    {facts.prompt!r},\n{arguments}).{output}[0]"]
    return "\n".join(lines) + "\n"


def _makes_videos(recipe: Recipe) -> bool:
    """Whether the pipeline is one of videos, of which an image is one frame."""
    return "video" in media_of("model", recipe.model.type, where="model.type")


def _call(recipe: Recipe, section: EvalSection) -> dict[str, Any]:
    """Arguments of the pipeline that draw as the run evaluates, by the names that diffusers has for them in this family."""
    rollout, family = recipe.rollout, FAMILIES.get(recipe.model.type, _UNKNOWN)
    call: dict[str, Any] = {"height": rollout.height, "width": rollout.width}
    if _makes_videos(recipe):
        call["num_frames"] = rollout.num_frames
    call["num_inference_steps"] = section.num_inference_steps
    if family.cfg_argument == "guidance_scale":
        call["guidance_scale"] = section.true_cfg_scale
    else:
        if section.guidance_scale is not None:
            call["guidance_scale"] = section.guidance_scale
        if section.true_cfg_scale > 1:
            call |= {"true_cfg_scale": section.true_cfg_scale, "negative_prompt": ""}
    text_tokens = recipe.model.settings.model_dump().get("max_sequence_length")
    if text_tokens is not None:
        call["max_sequence_length"] = text_tokens
    return call


def base_name(path: str) -> str:
    """A name for the base model that tells nothing about this machine: its id on the hub, or the folder's last part."""
    if path.startswith(PREFIX):
        return f"digenrl-tiny-{path.removeprefix(PREFIX)}"
    is_hub_id = looks_like_hub_id(path) and not os.path.exists(path)
    return path if is_hub_id else Path(os.path.abspath(path)).name


def _base_lines(path: str) -> list[str]:
    if path.startswith(PREFIX):
        where = f'resolve({path!r}, where="base")'
        return ["from digenrl.config.builtin import resolve", "", f"base = str({where})  # ships with DigenRL"]
    name = base_name(path)
    note = "" if name == path else "  # the folder of the base model"
    return ["", f"base = {name!r}{note}"]


def _header(facts: CardFacts) -> dict[str, Any]:
    lora = facts.recipe.model.lora is not None
    task = "text-to-video" if facts.recipe.rollout.num_frames > 1 else "text-to-image"
    return {
        "base_model": base_name(facts.recipe.model.path),
        "base_model_relation": "adapter" if lora else "finetune",
        "library_name": "diffusers",
        "pipeline_tag": task,
        "tags": [*(["lora"] if lora else []), task, "digenrl", "reinforcement-learning"],
        **base_license(facts.recipe.model.path),
    }


def base_license(path: str) -> dict[str, str]:
    """The keys of the base's card that begin with ``license``; ``other`` where there is no card, or none in it."""
    found = next((header for text in _card_texts(path) if (header := _yaml_header(text)).get("license")), {})
    keys = {key: str(found[key]) for key in ("license", "license_name", "license_link") if found.get(key)}
    link = keys.get("license_link", "")
    if link and "://" not in link:
        # A file beside the base's card: it is not copied, so the link has to say where it lies.
        name = base_name(path)
        keys["license_link"] = f"https://huggingface.co/{name}/blob/main/{link}"
        if name != path:
            del keys["license_link"]
    return keys or {"license": "other"}


def _card_texts(path: str) -> list[str]:
    folder = resolve(path, where="model.path")
    if folder.exists():
        files = [folder / name for name in _CARDS if (folder / name).is_file()]
        return [file.read_text(encoding="utf-8", errors="replace") for file in files]
    from huggingface_hub import hf_hub_download

    try:
        return [Path(hf_hub_download(path, "README.md")).read_text(encoding="utf-8", errors="replace")]
    except Exception:  # offline and not in the cache, no card, no access: the licence is then not known
        return []


def _yaml_header(text: str) -> dict[str, Any]:
    _, fence, rest = text.partition("---\n")
    head, closing, _ = rest.partition("\n---")
    if not (fence and closing and text.startswith("---\n")):
        return {}
    try:
        header = yaml.safe_load(head)
    except yaml.YAMLError:
        return {}
    return header if isinstance(header, dict) else {}


def _results(facts: CardFacts) -> str:
    """Held-out rewards of the first evaluation and of the last one that is no newer than these weights."""
    rows = [row for row in facts.evaluations if row["step"] <= facts.policy_version]
    lines = []
    if rows:
        before, after = rows[0], rows[-1]
        names = [name for name in after if name == "reward" or name.startswith("reward/")]
        lines += [f"| held out | version {before['step']} | version {after['step']} |", "|---|---|---|"]
        lines += [f"| {name} | {_number(before.get(name))} | {_number(after.get(name))} |" for name in names]
        guidance = facts.section.true_cfg_scale
        lines += [
            "",
            f"{int(after.get('num_images') or 0)} prompts, one picture each, {facts.section.num_inference_steps} ODE steps, "
            f"guidance {guidance:g}, the same noise each time.",
        ]
    if facts.has_plot:
        lines += ["", "![Reward of each step](reward.png)"]
    return "\n".join(["## Results", "", *lines]) if lines else ""


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def _without_folders(value: Any) -> Any:
    """The same with every absolute path cut to its last part: where things lie here concerns nobody there."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    is_path = isinstance(value, str) and (os.path.isabs(value) or value.startswith("~"))
    return Path(value).name if is_path else value
