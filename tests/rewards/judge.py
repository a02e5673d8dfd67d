"""A vision-language model's endpoint, as far as a judge needs it: it answers with the brightness of what it is shown."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from tests.rewards.services import Reply


class Judge:
    """Gives the mean of all pixels, 0 to 1; the first answers can be laid down, and ``always`` is sent instead of any."""

    def __init__(self, answers: Sequence[str] = ()) -> None:
        self._answers = list(answers)
        self._lock = threading.Lock()
        self.health = Reply(json.dumps({"object": "list", "data": [{"id": "tiny-vl"}]}).encode())
        self.always: Reply | None = None
        self.requests: list[dict[str, Any]] = []
        self.seen: list[list[Any]] = []
        self.path, self.headers = "", dict[str, str]()

    def answer(self, content: bytes) -> Reply:
        request = json.loads(content)
        parts = request["messages"][-1]["content"]
        shown = [_pixels(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        with self._lock:
            self.requests.append(request)
            self.seen.append(shown)
            text = self._answers.pop(0) if self._answers else json.dumps({"score": float(np.mean(shown)) / 255})
        if self.always is not None:
            return self.always
        message = {"role": "assistant", "content": text}
        return Reply(json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode())


def _pixels(url: str) -> Any:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
