"""Profiles: the same bytes always, and whatever is wrong with a file is a ProfileError before anything is allocated."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
import synthetic

from cachegen_rag.codec.profile import CLASSES, Profile, family, shipped_profile
from cachegen_rag.errors import ProfileError
from cachegen_rag.fingerprint import ModelFingerprint, content_hash
from cachegen_rag.kv import KVShape
from cachegen_rag.rope import RopeSpec

SHAPE = KVShape(3, 2, 8, 12)


def sealed(body: bytes) -> bytes:
    """``body`` with a checksum that holds: what a faulty or hostile writer would send."""
    return body + struct.pack("<I", google_crc32c.value(body))


def test_round_trip_and_hash() -> None:
    profile = synthetic.profile(SHAPE)
    data = profile.to_bytes()
    again = Profile.from_bytes(data)
    assert again.to_bytes() == data and again.hash == profile.hash == content_hash(data)
    fresh = replace(again, _bytes=None)
    assert fresh.to_bytes() == data
    assert fresh.levels == profile.levels and fresh.shape == SHAPE
    for a, b in zip(fresh.blocks, profile.blocks, strict=True):
        np.testing.assert_array_equal(a.scale, b.scale)
        np.testing.assert_array_equal(a.joint_matrix, b.joint_matrix)
        for c, d in zip(a.cells, b.cells, strict=True):
            np.testing.assert_array_equal(c.matrix, d.matrix)
            np.testing.assert_array_equal(c.mean, d.mean)
    assert replace(fresh, sinks=3, _bytes=None).hash != profile.hash


def test_every_cut_and_flip_is_refused() -> None:
    data = synthetic.profile(KVShape(1, 1, 2, 2)).to_bytes()
    for size in [*range(64), *range(64, len(data), 97), len(data) - 1]:
        with pytest.raises(ProfileError):
            Profile.from_bytes(data[:size])
    for at in range(0, len(data), 31):
        with pytest.raises(ProfileError):
            Profile.from_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    with pytest.raises(ProfileError):
        Profile.from_bytes(data + b"\0")


@pytest.mark.parametrize("seed", range(8))
def test_hostile_numbers_are_refused_without_allocating(seed: int) -> None:
    """Checksums hold, every field may be anything: an error or a profile, never a crash or gigabytes."""
    body = synthetic.profile(KVShape(2, 1, 4, 4)).to_bytes()[:-4]
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(150):
        damaged = bytearray(body)
        at = int(rng.integers(8, len(body)))
        damaged[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\x7f\xff\x7f", b"\0\0\xc0\x7f"])
        try:
            Profile.from_bytes(sealed(bytes(damaged[: len(body)])))
        except ProfileError:
            refused += 1
    assert refused > 20
    for size in (60, len(body) // 2, len(body) - 1):
        with pytest.raises(ProfileError):
            Profile.from_bytes(sealed(body[:size]))
    with pytest.raises(ProfileError, match="too many"):
        Profile.from_bytes(sealed(body + b"\0\0"))


def test_inconsistent_content_is_refused() -> None:
    profile = synthetic.profile(SHAPE)

    def refused(match: str, **changes: object) -> None:
        with pytest.raises(ProfileError, match=match):
            Profile.from_bytes(replace(profile, _bytes=None, **changes).to_bytes())  # type: ignore[arg-type]

    lacking = profile.frequency.copy()
    lacking[5, 0] -= 1
    refused("4096", frequency=lacking)
    no_escape = profile.frequency.copy()
    no_escape[5, 0] += no_escape[5, 128]
    no_escape[5, 128] = 0
    refused("escape", frequency=no_escape)
    shrink = profile.shrink.copy()
    shrink[CLASSES - 1, 1] = np.nan
    refused("finite", shrink=shrink)
    even = synthetic.profile(KVShape(4, 2, 8, 12))
    twice = replace(even, blocks=even.blocks[:1] * 2, _bytes=None)
    with pytest.raises(ProfileError, match="cover"):
        Profile.from_bytes(twice.to_bytes())
    refused("default level", default_level=9)
    mixed = replace(profile.blocks[0], scale=profile.blocks[0].scale[::-1].copy())
    refused("order", blocks=(mixed, *profile.blocks[1:]))
    data = profile.to_bytes()
    with pytest.raises(ProfileError, match="version 9"):
        Profile.from_bytes(data[:8] + b"\x09\0" + data[10:])


@pytest.mark.real
def test_the_shipped_profile_fits_every_quantization_of_its_model(small_model_fingerprint: ModelFingerprint) -> None:
    profile = shipped_profile(small_model_fingerprint)
    assert profile is not None and profile.fingerprint == family(small_model_fingerprint)
    assert len(profile.to_bytes()) < 6_000_000
    assert profile.shape == small_model_fingerprint.shape
    other = replace(small_model_fingerprint, weights="of another quantization", context="elsewhere")
    again = shipped_profile(other)
    assert again is not None and again.hash == profile.hash
    levels = profile.levels
    assert len(levels) >= 4 and levels[0].kl < 0.002
    assert all(a.kl < b.kl and a.bits > b.bits for a, b in pairwise(levels))
    assert 0.015 < levels[profile.default_level - 1].kl < 0.035


def test_no_profile_ships_for_an_unknown_model() -> None:
    unknown = ModelFingerprint("w", "t", SHAPE, RopeSpec.plain(8))
    assert shipped_profile(unknown) is None
