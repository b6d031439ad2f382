"""Where a codec profile comes from: given, shipped with the package, kept in the store, or calibrated now."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.codec.profile import Profile, shipped_profile
from cachegen_rag.errors import BitstreamError, CodecError, ConfigError, CorruptBitstreamError, ProfileError
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
    model: KVModel,
    store: Store,
    given: Profile | str | Path | None,
    salt: str,
    texts: Sequence[str],
    *,
    deadline: float | None = None,
) -> Profile | None:
    """The profile for ``model``: the given one, else the shipped one, else the store's, else one calibrated now.

    Without ``texts`` to calibrate from, None. ``deadline`` (a ``time.monotonic()`` value) bounds the reading of the
    store. The store's profile is replaced only if there is none or its bytes are of no use: a store that cannot be
    read may hold one that every stored document depends on.

    Raises ConfigError or ProfileError for a given profile that is unusable, StoreError for a store that cannot be read.
    """
    if isinstance(given, Profile):
        return given
    if given is not None:
        if not isinstance(given, (str, Path)):
            raise ConfigError(f"profile must be a Profile or the path of one, got {type(given).__name__}")
        return read_profile(Path(given))
    profile = shipped_profile(model.fingerprint)
    if profile is None:
        try:
            profile = load_profile(store, model.fingerprint, salt, deadline=deadline)
        except (BitstreamError, CodecError) as error:
            log.warning("the store's codec profile for this model cannot be used: %s", error)
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
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        raise ConfigError(f"cannot read the profile {str(path)!r:.200}: {error}") from error


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


def load_profile(
    store: Store, fingerprint: ModelFingerprint, salt: str, *, deadline: float | None = None
) -> Profile | None:
    """The profile that the store keeps for this model; None only if the store says that it has none.

    ``deadline`` is a ``time.monotonic()`` value. Raises StoreError if the store cannot be read, BitstreamError or
    ProfileError if what it holds is damaged or fits another model.
    """
    key = pointer_key(fingerprint, salt)
    pointer = store.get("ac", key, max_bytes=MAX_MANIFEST_BYTES, deadline=deadline)
    if pointer is None:
        return None
    segments = list(Manifest.from_bytes(pointer).expect(key=key, fingerprint=fingerprint.digest()).segments())
    if len(segments) != 1:
        raise CorruptBitstreamError(f"the profile's manifest names {len(segments)} objects instead of one")
    limit = min(segments[0].length, MAX_PROFILE_BYTES)
    data = store.get("cas", segments[0].sha256, max_bytes=limit, deadline=deadline)
    if data is None:
        raise CorruptBitstreamError("the profile's manifest is in the store, the profile itself is not")
    segments[0].verify(data)
    profile = Profile.from_bytes(data)
    if profile.shape != fingerprint.shape:
        raise ProfileError(f"the store's profile is for a KV of {profile.shape}, the model has {fingerprint.shape}")
    return profile
