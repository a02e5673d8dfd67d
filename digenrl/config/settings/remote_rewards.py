"""Settings of the rewards that ask a service over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _service_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the address of a service: http://HOST:PORT or https://HOST, with a path if need be")
    if parts.username or parts.password:
        raise ValueError("an address with a password in it would stand in every log; put the token into an environment variable")
    return url.rstrip("/")


ServiceUrl = Annotated[str, AfterValidator(_service_url)]


class ServiceSettings(BaseModel):
    """How long to wait for a service, and how hard to press it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    timeout_s: float = Field(
        default=120.0, gt=0, description="Longest wait for one answer, in seconds, before it is asked again."
    )
    deadline_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest time of one request with all its attempts, in seconds; then the run stops with exit code 4.",
    )
    start_timeout_s: float = Field(
        default=30.0, gt=0, description="How long a service may take to be there at the start, before the run is refused."
    )
    max_inflight: int = Field(
        default=4, ge=1, le=1024, description="Requests at once, of each process that scores (each generator, usually)."
    )


class RemoteSettings(ServiceSettings):
    """Where a service of `digenrl reward-serve` (or another that speaks its protocol) is, and how it is asked."""

    url: ServiceUrl = Field(description="Address of the service: http://HOST:PORT.")
    samples_per_request: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="Images or videos in one request; whole groups, and at least one, where the service compares the samples of "
        "a prompt.",
    )
    video: Literal["npy", "mp4"] = Field(
        default="npy",
        description="What videos are sent as, both without loss: plain pixels, or H.264 of RGB, which is smaller and takes time.",
    )
    token_env: str = Field(
        default="DIGENRL_REWARD_TOKEN",
        min_length=1,
        description="Environment variable that holds the service's bearer token; none is sent where it is not set.",
    )
