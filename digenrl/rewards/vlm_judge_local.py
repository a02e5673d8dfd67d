"""The reward ``vlm_judge_local``: a vision-language model in the scorer's own process looks at each picture and gives a number.

It is asked and read as ``vlm_judge`` is (see answers): what it writes is read strictly, and an answer without a score makes its
sample invalid, counted in the part ``unreadable``. It always takes the likeliest token, so its answers can be repeated. With
``read: yes`` nothing is written: the score is P(yes) / (P(yes) + P(no)) of the first token of its answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from digenrl.config.settings.vlm_judge import PLACEHOLDER
from digenrl.config.settings.vlm_judge_local import VlmJudgeLocalSettings
from digenrl.ids import SampleId
from digenrl.rewards.answers import read_score, spread
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.neural import device_of
from digenrl.rewards.qwen_vl import IMAGE_MARK, Pass, QwenVlInputs, dtype_of, load_qwen_vl, plain_text, reading_qwen_vl
from digenrl.rewards.self_test import GoodAndBad, circle_and_noise


class VlmJudgeLocalReward:
    """Asks a model of the Qwen-VL family that it holds itself."""

    Settings = VlmJudgeLocalSettings
    media = ("image", "video")

    def __init__(self, settings: VlmJudgeLocalSettings) -> None:
        """Raises ConfigError where the weights are not there, or its words for yes and no are not single tokens."""
        device = device_of(settings.device)
        self._settings = settings
        with reading_qwen_vl(f"The judge {settings.path!r}", settings.path):
            self._inputs = QwenVlInputs(settings.path, max_pixels=settings.max_pixels)
            self._model: Any = load_qwen_vl(settings.path, dtype=dtype_of(settings.dtype, device))
            tokenizer = self._inputs.tokenizer
            self._words = [_tokens_of(tokenizer, word) for word in ("yes", "no")] if settings.read == "yes" else []
        self.to(device)

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """The judge's number for each sample."""
        settings = self._settings
        questions = [
            self._inputs.question(
                spread(sample.frames, settings.num_frames),
                settings.template.replace(PLACEHOLDER, plain_text(sample.prompt)),
                system=settings.system,
            )
            for sample in samples
        ]
        scores: dict[SampleId, Score] = {}
        for batch in self._inputs.passes(questions, settings.forward_batch_size):
            arguments = self._arguments(batch)
            values = self._chances(arguments) if settings.read == "yes" else self._answers(arguments)
            for place, value in zip(batch.places, values, strict=False):  # a padded pass has more rows than places
                scores[samples[place].id] = Score(value=value, parts={"unreadable": float(math.isnan(value))})
        return {sample.id: scores[sample.id] for sample in samples}

    def self_test(self) -> GoodAndBad | None:
        """A drawn circle must beat noise."""
        return circle_and_noise() if self._settings.self_test else None

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._device = torch.device(device)
        self._model.to(self._device)

    def _arguments(self, batch: Pass) -> dict[str, Tensor]:
        batch = batch.to(self._device)
        return {
            "input_ids": batch.ids,
            "attention_mask": batch.attended,
            "mm_token_type_ids": (batch.ids == self._inputs.tokenizer.convert_tokens_to_ids(IMAGE_MARK)).int(),
            "pixel_values": batch.pixels,
            "image_grid_thw": batch.grids,
        }

    @torch.no_grad()
    def _answers(self, arguments: Mapping[str, Tensor]) -> list[float]:
        tokenizer = self._inputs.tokenizer
        written = self._model.generate(
            **arguments,
            do_sample=False,
            # The model's own generation_config may sample, and says so in settings that mean nothing here.
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=self._settings.max_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(written[:, arguments["input_ids"].shape[1] :], skip_special_tokens=True)
        return [read_score(text, self._settings) for text in texts]

    @torch.no_grad()
    def _chances(self, arguments: Mapping[str, Tensor]) -> list[float]:
        logits = self._model(**arguments, logits_to_keep=1).logits[:, -1].double()
        yes, no = (logits[:, tokens].logsumexp(-1) for tokens in self._words)
        return torch.sigmoid(yes - no).tolist()


def _tokens_of(tokenizer: Any, word: str) -> list[int]:
    """Ids of the spellings of a word (Yes, yes) that are one token each. Raises ValueError where none is."""
    found = [tokenizer(spelling, add_special_tokens=False)["input_ids"] for spelling in (word.capitalize(), word)]
    single = [ids[0] for ids in found if len(ids) == 1]
    if not single:
        raise ValueError(f"its tokenizer has no token for {word!r}, which read: yes needs")
    return single
