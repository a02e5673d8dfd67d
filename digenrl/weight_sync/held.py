"""The receiving side: a generator's weights, and which version of the trainer's they are.

Invariants: a version is claimed only while the policy's own bytes are those of that publication; nothing is touched before
all that arrived is verified; the version never goes back; parameters keep their memory, so results keep their bits, and whole
ones are stored in the dtypes that they travel in; ranks that hold a network together load each by itself. Such a rank verifies
every tensor whole before it writes its share of it, and then that it holds the bytes of this share.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from digenrl.errors import ProtocolError, WorkerError
from digenrl.training.group import is_spread, own_share, spread_like
from digenrl.training.policy import Policy
from digenrl.weight_sync.publication import Publication, check_arrived, check_tensors, read_tensor
from digenrl.weight_sync.wire import Bucket, byte_digest, check_binding, form, forms, to_bytes, wire_dtypes

UNKNOWN = -1
"""The version of weights that no trainer published: before the first load, and after one that broke off."""

_LOCK_TIMEOUT_S = 600.0


class HeldWeights:
    """Weights that follow a trainer's.

    From the moment this is made the policy is at version -1, so that nothing is generated before the first load. Loading
    changes weights under whoever runs the network: the owner loads between trajectories. Deliveries may race each other.
    """

    def __init__(self, policy: Policy, compute_dtype: torch.dtype) -> None:
        self._policy = policy
        self._dtypes = wire_dtypes(policy, compute_dtype)
        self._forms = forms(policy.parameters, self._dtypes)
        self._lock = threading.Lock()
        self._newest = UNKNOWN
        self._digest = ""
        self._shares: dict[str, str] = {}
        """Digests of what is held here of each tensor of the newest version."""
        policy.version = UNKNOWN
        for name, parameter in policy.parameters.items():
            # Nothing is trained here, and the forward pass rounds them so anyway: half the memory in bfloat16. FSDP keeps hold of
            # the shards that it made.
            if not is_spread(parameter):
                parameter.data = parameter.data.to(self._dtypes[name])

    @property
    def version(self) -> int:
        """The version held, or -1."""
        return self._policy.version

    @property
    def digest(self) -> str:
        """``Publication.digest`` of the version held; empty at version -1."""
        return self._digest if self.version != UNKNOWN else ""

    def load(self, manifest: Publication, buckets: Sequence[Bucket]) -> None:
        """Become the published version. The same version again is verified, and changes nothing.

        Raises, with nothing changed: ProtocolError for an older version, or for other weights under the number that is held;
        DamagedWeights when the bytes are not those published (send again); RunFailed, with the names, when trained tensors
        are missing, foreign, or of another shape or dtype. Raises WorkerError, and is then at version -1, when the copy
        breaks off or the policy does not have the published bytes afterwards.
        """
        with self._alone(manifest):
            self._refuse_number(manifest)
            if manifest.version == self.version:
                self._verify_again(manifest)
                return
            check_arrived(manifest, buckets)
            if any(map(is_spread, self._policy.parameters.values())):
                check_tensors(manifest, buckets)
            sent = {spec.name: form(spec.dtype, spec.shape) for spec in manifest.tensors}
            check_binding(sent, self._forms, sender="the publication", receiver="this worker")
            self._policy.version = UNKNOWN
            shares = self._copy(manifest, buckets)
            self._verify(manifest, shares)
            self._newest, self._digest, self._shares = manifest.version, manifest.digest, shares
            self._policy.version = manifest.version

    @contextmanager
    def _alone(self, manifest: Publication) -> Iterator[None]:
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise WorkerError(
                f"Version {manifest.version} waited {_LOCK_TIMEOUT_S:.0f} s for another version to be loaded on this worker.",
                why="Loading takes seconds; the device may hang.",
                fix="Restart the worker.",
            )
        try:
            yield
        finally:
            self._lock.release()

    def _refuse_number(self, manifest: Publication) -> None:
        """Older than, or as old as and other than, the newest version that was ever held here."""
        if manifest.version < max(self._newest, 0):
            raise ProtocolError(
                f"Version {manifest.version} of the weights came to a worker that has been at version {self._newest}.",
                why="A version never goes back: samples of the newer one would be followed by samples of the older.",
                fix="Deliver publications in order, or drop late ones.",
            )

        if manifest.version == self._newest and manifest.digest != self._digest:
            raise ProtocolError(
                f"Two different weights were published as version {manifest.version}.",
                why=f"The digest is {manifest.digest}, and {self._digest} was loaded.",
                fix="Publish each version once, after its optimizer step and before the next.",
            )

    def _verify_again(self, manifest: Publication) -> None:
        if self._held_shares() != self._shares:
            self._policy.version = UNKNOWN
            raise self._broken(manifest, "its weights changed after they were loaded")

    def _copy(self, manifest: Publication, buckets: Sequence[Bucket]) -> dict[str, str]:
        """Write what is to be held here of each tensor. Returns the digests that it must have then."""
        shares = {}
        try:
            with torch.no_grad():
                for spec in manifest.tensors:
                    parameter = self._policy.parameters[spec.name]
                    values = spread_like(parameter, read_tensor(spec, buckets))
                    parameter.copy_(values)
                    shares[spec.name] = self._share_digest(spec.name, values) if is_spread(values) else spec.digest
        except RuntimeError as error:  # torch's, a CUDA error and running out of memory among them
            raise self._broken(manifest, f"the copy broke off: {error}") from error
        self._policy.weights_changed()
        return shares

    def _held_shares(self) -> dict[str, str]:
        return {name: self._share_digest(name, tensor) for name, tensor in self._policy.parameters.items()}

    def _share_digest(self, name: str, tensor: Tensor) -> str:
        return byte_digest(to_bytes(own_share(tensor.detach()), self._dtypes[name]))

    def _verify(self, manifest: Publication, shares: Mapping[str, str]) -> None:
        found = self._held_shares()
        odd = [name for name, digest in shares.items() if found[name] != digest]
        if odd:
            raise self._broken(manifest, f"{len(odd)} of {len(found)} tensors differ afterwards, for example {odd[0]}")

    @staticmethod
    def _broken(manifest: Publication, detail: str) -> WorkerError:
        return WorkerError(
            f"This worker does not hold version {manifest.version} of the weights, nor any other: {detail}.",
            why="It refuses to generate, for its samples would belong to no version.",
            fix="Send the version again, or restart the worker.",
        )
