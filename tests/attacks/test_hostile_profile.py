"""Profiles come from stores too: a damaged or hostile one is a ProfileError or a working profile, never a crash."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import google_crc32c
import pytest
import synthetic

from cachegen_rag.bitstream import Bitstream
from cachegen_rag.codec import Codec, Profile
from cachegen_rag.errors import BitstreamError, CodecError, ProfileError
from cachegen_rag.kv import KVShape


@pytest.fixture(scope="module")
def profile() -> Profile:
    return synthetic.profile(KVShape(3, 2, 16, 24))


def sealed(data: bytes | bytearray) -> bytes:
    """With the last four bytes replaced by the right checksum."""
    return bytes(data[:-4]) + struct.pack("<I", google_crc32c.value(bytes(data[:-4])))


def test_every_flipped_bit_of_the_beginning_and_many_others_are_found(profile: Profile) -> None:
    data, rng = profile.to_bytes(), random.Random(0)
    for bit in [*range(8 * 200), *(rng.randrange(8 * len(data)) for _ in range(400))]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ProfileError):
            Profile.from_bytes(bytes(damaged))


def test_every_cut_is_found(profile: Profile) -> None:
    data, rng = profile.to_bytes(), random.Random(0)
    for size in [*range(200), *(rng.randrange(len(data)) for _ in range(100)), len(data) - 1]:
        for cut in (data[:size], sealed(data[:size])):
            with pytest.raises(ProfileError):
                Profile.from_bytes(cut)


def test_hostile_profiles(profile: Profile) -> None:
    """Checksums are right; everything else may be wrong. What still parses must encode and decode, or say why not."""
    data, rng, sound = profile.to_bytes(), random.Random(5), 0
    kv = synthetic.kv(profile, 5)
    streams = [Bitstream.from_bytes(Codec(profile, bytes(32)).encode(kv, level)) for level in (0, 1, 2)]
    numbers = [0.0, -1.0, 1e38, -1e38, 1e-40, float("nan"), float("inf")]
    for _ in range(250):
        mutant = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at, kind = rng.randrange(8, rng.choice([60, 200, 1200, len(data) - 4])), rng.randrange(6)
            if kind == 0:
                mutant[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                mutant[at] = rng.choice([0, 1, 127, 128, 255])
            elif kind == 2:
                mutant[at : at + 4] = struct.pack("<f", rng.choice(numbers))
            elif kind == 3:
                mutant[at : at + 2] = b"\xff\xff"
            elif kind == 4:
                mutant[at : at + 300] = bytes(len(mutant[at : at + 300]))
            else:
                del mutant[at : at + rng.choice([1, 2, 4])]
        try:
            parsed = Profile.from_bytes(sealed(mutant))
        except ProfileError:
            continue
        for stream in streams:
            named = replace(stream, profile=parsed.hash, level=min(stream.level, len(parsed.levels)))
            try:
                Codec(parsed, bytes(32)).decode(named.to_bytes())
                sound += 1
            except (BitstreamError, CodecError):
                pass
        try:
            Codec(parsed, bytes(32)).encode(kv, 1)
        except CodecError:
            pass
    assert sound > 50
