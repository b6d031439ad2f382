"""Where a codec profile comes from: given, shipped with the package, kept in the store, or calibrated now."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.codec.profile import Profile, shipped_profile
from cachegen_rag.errors import BitstreamError, CodecError, ConfigError, StoreError
from cachegen_rag.fingerprint import ModelFingerprint, document_key
from cachegen_rag.manifest import MAX_MANIFEST_BYTES, Chunk, Level, Manifest, Segment
from cachegen_rag.models.base import KVModel
from cachegen_rag.stores.base import Store
from cachegen_rag.warm import passages

log = logging.getLogger(__name__)

MAX_PROFILE_BYTES = 64 << 20
ENOUGH_TEXT = 60_000
"""Characters; with less, calibration reads the passages shipped with the package too."""


def find_profile(
    model: KVModel, store: Store, given: Profile | str | Path | None, salt: str, texts: Sequence[str]
) -> Profile | None:
    """The profile for ``model``: the given one, else the shipped one, else the store's, else one calibrated now.

    Without ``texts`` to calibrate from, None. Raises ConfigError or ProfileError for a given profile that is unusable.
    """
    if isinstance(given, Profile):
        return given
    if given is not None:
        return read_profile(Path(given))
    profile = shipped_profile(model.fingerprint) or load_profile(store, model.fingerprint, salt)
    if profile is None and texts:
        log.warning("no codec profile for %s yet: calibrating on the documents given, once", model.name)
        if sum(map(len, texts)) < ENOUGH_TEXT:
            texts = [*texts, *passages()]  # a few short documents say too little about a model
        profile = calibrate(model, texts)
        save_profile(store, model.fingerprint, salt, profile)
    return profile


def read_profile(path: Path) -> Profile:
    """Read a profile from a file. Raises ConfigError if it cannot be read, ProfileError if it is not one."""
    try:
        return Profile.from_bytes(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error


def pointer_key(fingerprint: ModelFingerprint, salt: str) -> str:
    """Where a store keeps the name of a model's profile: a manifest of one object."""
    return document_key(fingerprint.digest(), [], profile="profile", salt=salt)


def save_profile(store: Store, fingerprint: ModelFingerprint, salt: str, profile: Profile) -> None:
    """Keep a profile in the store, under the hash that bitstreams name, for every reader of that store."""
    data = profile.to_bytes()
    segment = Segment.of(data)
    key = pointer_key(fingerprint, salt)
    chunk = Chunk(0, 1, (Level(0, None, (segment,)),))
    store.put("cas", segment.sha256, data)
    store.put("ac", key, Manifest(key, fingerprint.digest(), profile.hash, 1, (chunk,)).to_bytes())


def load_profile(store: Store, fingerprint: ModelFingerprint, salt: str) -> Profile | None:
    """The profile that the store keeps for this model; None if there is none or it cannot be trusted."""
    key = pointer_key(fingerprint, salt)
    try:
        pointer = store.get("ac", key, max_bytes=MAX_MANIFEST_BYTES)
        if pointer is None:
            return None
        (segment,) = Manifest.from_bytes(pointer).expect(key=key, fingerprint=fingerprint.digest()).segments()
        data = store.get("cas", segment.sha256, max_bytes=min(segment.length, MAX_PROFILE_BYTES))
        if data is None:
            return None
        segment.verify(data)
        return Profile.from_bytes(data)
    except (BitstreamError, CodecError, StoreError, ValueError) as error:
        log.warning("the store's codec profile for this model cannot be used: %s", error)
        return None
