"""Built-in component names and where their classes live: strings only, so that reading a recipe imports no torch.

A name without a colon is looked up here; ``package.module:Class`` is a user's own component, imported as it stands.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from digenrl.errors import ConfigError

Medium = Literal["image", "video"]
"""What a model makes and a reward looks at."""
MEDIA: tuple[Medium, ...] = get_args(Medium)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """Import paths of one built-in component and of its torch-free settings class."""

    component: str
    settings: str
    summary: str
    media: tuple[Medium, ...] = ("image",)
    """As the class says it, which need not be imported for it."""


ALGORITHMS = {
    "flow_grpo": Registered(
        component="digenrl.algorithms.flow_grpo:FlowGRPO",
        settings="digenrl.config.settings.algorithms:FlowGRPOSettings",
        summary="clipped policy gradient on SDE steps of a flow model, group-relative advantages (arXiv 2505.05470)",
    ),
    "dance_grpo": Registered(
        component="digenrl.algorithms.dance_grpo:DanceGRPO",
        settings="digenrl.config.settings.algorithms:DanceGRPOSettings",
        summary="constant noise, a random share of the steps, best and worst of a group, rewards apart (arXiv 2505.07818)",
    ),
    "mix_grpo": Registered(
        component="digenrl.algorithms.mix_grpo:MixGRPO",
        settings="digenrl.config.settings.algorithms:MixGRPOSettings",
        summary="noise and training in a window that slides over the denoising steps, ODE outside (arXiv 2507.21802)",
    ),
}
MODELS = {
    "sd3": Registered(
        component="digenrl.models.sd3:SD3Adapter",
        settings="digenrl.config.settings.models:SD3Settings",
        summary="Stable Diffusion 3 and 3.5 (any StableDiffusion3Pipeline folder or hub id)",
    ),
    "flux": Registered(
        component="digenrl.models.flux:FluxAdapter",
        settings="digenrl.config.settings.models:FluxSettings",
        summary="FLUX.1-dev and FLUX.1-schnell (any FluxPipeline folder or hub id)",
    ),
    "qwen_image": Registered(
        component="digenrl.models.qwen_image:QwenImageAdapter",
        settings="digenrl.config.settings.models:QwenImageSettings",
        summary="Qwen-Image (any QwenImagePipeline folder or hub id)",
    ),
    "wan": Registered(
        component="digenrl.models.wan:WanAdapter",
        settings="digenrl.config.settings.models:WanSettings",
        summary="Wan2.1 text to video, 1.3B and 14B (any WanPipeline folder or hub id with one transformer)",
        media=("image", "video"),
    ),
    "hunyuan_video": Registered(
        component="digenrl.models.hunyuan_video:HunyuanVideoAdapter",
        settings="digenrl.config.settings.models:HunyuanVideoSettings",
        summary="HunyuanVideo text to video (any HunyuanVideoPipeline folder or hub id)",
        media=("image", "video"),
    ),
}
REWARDS = {
    "shapes": Registered(
        component="digenrl.rewards.shapes.reward:ShapesReward",
        settings="digenrl.config.settings.rewards:ShapesSettings",
        summary="exact verifier of drawn shapes: count, form, colour and position",
    ),
    "jpeg": Registered(
        component="digenrl.rewards.jpeg:JpegReward",
        settings="digenrl.config.settings.rewards:JpegSettings",
        summary="compressibility: minus the size of the image as a JPEG, in kilobytes",
    ),
    "brightness": Registered(
        component="digenrl.rewards.pixels:BrightnessReward",
        settings="digenrl.config.settings.rewards:BrightnessSettings",
        summary="mean of all pixel values, from 0 (black) to 1 (white); to try a set-up with",
    ),
    "sharpness": Registered(
        component="digenrl.rewards.pixels:SharpnessReward",
        settings="digenrl.config.settings.rewards:SharpnessSettings",
        summary="mean difference of neighbouring pixels' brightness, from 0 (flat) to 1; to try a set-up with",
    ),
    "clip_score": Registered(
        component="digenrl.rewards.clip:ClipScoreReward",
        settings="digenrl.config.settings.clip:ClipSettings",
        summary="100 times the cosine of image and prompt in the space of a CLIP model",
    ),
    "pickscore": Registered(
        component="digenrl.rewards.clip:PickScoreReward",
        settings="digenrl.config.settings.clip:PickScoreSettings",
        summary="what people would pick, as PickScore has learned it",
    ),
    "hpsv2": Registered(
        component="digenrl.rewards.hpsv2:HpsV2Reward",
        settings="digenrl.config.settings.hpsv2:HpsV2Settings",
        summary="what people would prefer, as Human Preference Score 2.1 has learned it",
    ),
    "hpsv3": Registered(
        component="digenrl.rewards.hpsv3:HpsV3Reward",
        settings="digenrl.config.settings.qwen_rewards:HpsV3Settings",
        summary="what people would prefer, as Human Preference Score 3 (a Qwen2-VL-7B) has learned it",
    ),
    "video_align": Registered(
        component="digenrl.rewards.video_align:VideoAlignReward",
        settings="digenrl.config.settings.qwen_rewards:VideoAlignSettings",
        summary="how good a video looks, moves and follows its prompt (VideoReward, a Qwen2-VL-2B)",
        media=("video",),
    ),
    "aesthetic": Registered(
        component="digenrl.rewards.aesthetic:AestheticReward",
        settings="digenrl.config.settings.aesthetic:AestheticSettings",
        summary="how beautiful people would find the image, from 1 to 10 (LAION aesthetic predictor, version 2)",
    ),
    "image_reward": Registered(
        component="digenrl.rewards.image_reward:ImageRewardReward",
        settings="digenrl.config.settings.image_reward:ImageRewardSettings",
        summary="how people would rank the image for its prompt, standardised (ImageReward 1.0)",
    ),
    "ocr": Registered(
        component="digenrl.rewards.ocr:OcrReward",
        settings="digenrl.config.settings.ocr:OcrSettings",
        summary="share of the text in the prompt's double quotes that can be read in the image",
    ),
    "geneval": Registered(
        component="digenrl.rewards.geneval.reward:GenEvalReward",
        settings="digenrl.config.settings.geneval:GenEvalSettings",
        summary="a detector checks the objects that a GenEval prompt asks for: number, colours, places",
    ),
    "vlm_judge": Registered(
        component="digenrl.rewards.vlm_judge:VlmJudgeReward",
        settings="digenrl.config.settings.vlm_judge:VlmJudgeSettings",
        summary="a vision-language model behind an OpenAI-compatible endpoint gives a number",
        media=("image", "video"),
    ),
    "vlm_judge_local": Registered(
        component="digenrl.rewards.vlm_judge_local:VlmJudgeLocalReward",
        settings="digenrl.config.settings.vlm_judge_local:VlmJudgeLocalSettings",
        summary="a vision-language model of the Qwen family, in the scorer's own process, gives a number",
        media=("image", "video"),
    ),
    "remote": Registered(
        component="digenrl.rewards.remote.client:RemoteReward",
        settings="digenrl.config.settings.remote_rewards:RemoteSettings",
        summary="another process or machine scores, over HTTP (`digenrl reward-serve`)",
        media=("image", "video"),
    ),
}
KINDS = {"algorithm": ALGORITHMS, "model": MODELS, "reward": REWARDS}


def settings_class(kind: str, name: str, *, where: str) -> type[BaseModel]:
    """The pydantic settings class of a component; ``where`` is the recipe key that named it, for the message."""
    registered = _registered(kind, name, where=where)
    if registered is not None:
        settings: type[BaseModel] = _import(registered.settings, where=where)
        return settings
    own = getattr(_import_own(name, where=where), "Settings", None)
    if not (isinstance(own, type) and issubclass(own, BaseModel)):
        raise ConfigError(
            f"{where}: {name} has no settings class.",
            why="The recipe's keys are validated against it before any worker starts.",
            fix="Give the class an inner `class Settings(pydantic.BaseModel)` with one documented field per key.",
        )
    return own


def media_of(kind: str, name: str, *, where: str) -> tuple[Medium, ...]:
    """What a model makes, or a reward looks at: the class's ``media``, and images where it says nothing."""
    registered = _registered(kind, name, where=where)
    if registered is not None:
        return registered.media
    own = _import_own(name, where=where)
    media: object = getattr(own, "media", ("image",))
    if not isinstance(media, tuple) or not media or not set(media) <= set(MEDIA):
        raise ConfigError(
            f"{where}: {name} has media = {media!r}.",
            why=f"It says what the {kind} can handle.",
            fix='Use media = ("image",), ("video",) or ("image", "video").',
        )
    return media


def compares_groups(name: str, *, where: str) -> bool:
    """Whether a reward is asked for all samples of a prompt at once: it has ``score_group``, which no built-in one has."""
    return _registered("reward", name, where=where) is None and hasattr(_import_own(name, where=where), "score_group")


def component_class(kind: str, name: str, *, where: str) -> Any:
    """The class that implements a component. Imports it, hence torch for most built-ins."""
    registered = _registered(kind, name, where=where)
    return _import_own(name, where=where) if registered is None else _import(registered.component, where=where)


def _registered(kind: str, name: str, *, where: str) -> Registered | None:
    if ":" in name:
        return None
    known = KINDS[kind]
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"{where}: there is no {kind} called {name!r}.",
        why=f"Built in are: {', '.join(sorted(known))}.",
        fix=f"{hint}A class of your own is named by its import path, package.module:Class.",
    )


def _import_own(path: str, *, where: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        # A user's reward file beside the recipe: the console script does not put the working directory on the path.
        # Last, so that no file there (a random.py, a wandb/ folder) can stand in for an installed package.
        sys.path.append(here)
    return _import(path, where=where)


def _import(path: str, *, where: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: cannot import {path!r}: {error}.",
            why="The component's module, or something that it imports, is missing.",
            fix=f"Run from the folder that holds {module_name.split('.')[0]!r}, or install the package (on a cluster, on every "
            "node).",
        ) from error
    except Exception as error:  # the module is the user's: whatever it raises is theirs to mend, in the line named here
        raise ConfigError(
            f"{where}: importing {path!r} fails: {type(error).__name__}: {error} ({_line_of(error)}).",
            why="The module of a component is imported before anything starts.",
            fix=f"Mend it until `python -c 'import {module_name}'` works.",
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{where}: module {module_name!r} has no {attribute!r}.",
            fix=f"Name one of its classes: {', '.join(n for n in vars(module) if n[0].isupper()) or 'it has none'}.",
        )
    return getattr(module, attribute)


def _line_of(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"
