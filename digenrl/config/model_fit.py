"""Whether the components of a model folder are of one model, told from their configs: what one makes, another must take.

A size that a config leaves out is not checked here; loading will find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from digenrl.config.families import Family
from digenrl.errors import ConfigError

Config = Mapping[str, Any]


def check_fit(transformer: Config, vae: Config, text_encoder: Callable[[str], Config | None], family: Family) -> None:
    """Raise ConfigError for latents or text of a width that the transformer does not take.

    text_encoder: config of the text encoder of that name, or None where the folder leaves it out.
    """
    taken, made = transformer.get("in_channels"), vae.get("latent_channels", vae.get("z_dim"))
    if isinstance(taken, int) and isinstance(made, int) and taken != made * family.packing**2:
        packed = f", packed {family.packing} x {family.packing} into {made * family.packing**2}" if family.packing > 1 else ""
        raise ConfigError(
            f"model.path: the transformer takes {taken} channels, and the VAE makes {made}{packed}.",
            why="The two are of different models.",
            fix="Download the model again, or put the transformer/ and the vae/ of one model there.",
        )
    for key, sources in family.text_widths.items():
        configs = [text_encoder(name) for name, _ in sources]
        widths = [_width(config, size) for config, (_, size) in zip(configs, sources, strict=True)]
        wanted = transformer.get(key)
        if isinstance(wanted, int) and all(isinstance(width, int) for width in widths) and sum(widths) != wanted:
            names = " and ".join(f"{name}/" for name, _ in sources)
            raise ConfigError(
                f"model.path: the transformer takes text of width {wanted} ({key}), and {names} makes {sum(widths)}.",
                why="They are of different models.",
                fix=f"Download the model again, or put the {names} of the transformer's model there.",
            )


def _width(config: Config | None, key: str) -> Any:
    """The size under this key, or that of the text half of a model of text and pictures; None where it is not said."""
    if config is None:
        return None
    text = config.get("text_config")
    return config.get(key, text.get(key) if isinstance(text, Mapping) else None)
