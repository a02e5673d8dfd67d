"""What rewards with a network share: where it runs, how its weights are read, and what is said when they are not there.

Invariant: no code is ever run that a file of weights brings along. Safetensors are preferred; of the .pt and .pth files that
some authors publish, torch reads tensors alone (``weights_only``) and refuses the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from digenrl.errors import ConfigError, DigenError


def device_of(setting: str) -> torch.device:
    """The device that a setting names; ``auto`` takes a GPU if there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if setting == "auto" else setting)


@contextmanager
def reading(what: str, *, needs: str, fix: str) -> Iterator[None]:
    """Whatever goes wrong while weights are read becomes a ConfigError that says what is needed and how to get it.

    A network that is made inside draws its first weights, which are replaced, without a trace in torch's random state.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except DigenError:
        raise
    except Exception as error:  # the hub's client, tokenizers, torch and safetensors each raise classes of their own
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}", why=needs, fix=fix) from error


def read_tensors(path: str, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a file, of the first of ``names`` that a folder has, or of the last of them from the hub.

    A ``state_dict`` inside the file is opened, and ``module.`` before every name, which data parallelism leaves, is taken off.
    """
    file = _file(path, names)
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        plain: object = load_file(file)
    else:
        plain = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(plain, Mapping) and isinstance(plain.get("state_dict"), Mapping):
        plain = plain["state_dict"]
    if not isinstance(plain, Mapping) or not plain or not all(isinstance(value, Tensor) for value in plain.values()):
        raise ValueError(f"{file} does not hold named tensors alone")
    prefix = "module." if all(name.startswith("module.") for name in plain) else ""
    return {name.removeprefix(prefix): value for name, value in plain.items()}


def load_exactly(module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put float32 copies of the tensors into a network. Raises ValueError that names what is missing or too much."""
    wanted = set(module.state_dict())
    missing, foreign = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
    if missing or foreign:
        raise ValueError(f"{len(missing)} tensors are missing {missing[:3]}, {len(foreign)} are not the network's {foreign[:3]}")
    module.load_state_dict({name: value.float() for name, value in tensors.items()})


def by_row(head: torch.nn.Module, rows: Tensor) -> Tensor:
    """A head's answers [B, *] to each of B rows alone: a product with few outputs depends, in its last bits, on a row's place."""
    return torch.stack([head(row) for row in rows])


def linear_head(width: int) -> torch.nn.Module:
    """The head of the LAION aesthetic predictor and of ImageReward: five linear layers and, at inference, nothing between them.

    [B, width] -> [B, 1]. Its tensors are named ``layers.N`` with the places 0, 2, 4, 6 and 7, as in the published files.
    """
    linear = torch.nn.Linear
    dropout = torch.nn.Identity
    layers = [linear(width, 1024), dropout(), linear(1024, 128), dropout(), linear(128, 64), dropout(), linear(64, 16)]
    return torch.nn.Sequential(OrderedDict(layers=torch.nn.Sequential(*layers, linear(16, 1))))


def _file(path: str, names: Sequence[str]) -> Path:
    local = Path(path).expanduser()
    if local.is_file():
        return local
    if local.is_dir():
        found = [local / name for name in names if (local / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{local} has none of {', '.join(names)}")
        return found[0]
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(path, names[-1]))
