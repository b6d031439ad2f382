"""Bitstreams that were written once and must decode for ever, by every path. Made by ``make()``, never by the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic

from cachegen_rag.bitstream import Bitstream
from cachegen_rag.codec import Codec, Profile
from cachegen_rag.kernels import native
from cachegen_rag.kv import KVShape

FOLDER = Path(__file__).parent.parent / "golden" / "codec"


def make() -> None:
    """Write the files. A change of these bytes is a new format version: old ones stay, and are still read."""
    profile = synthetic.profile(KVShape(2, 2, 8, 12), levels=3)
    kv = synthetic.kv(profile, 37, outliers=2)
    codec = Codec(profile, bytes(range(32)), sinks=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "profile.cgp").write_bytes(profile.to_bytes())
    for level in range(4):
        data = codec.encode(kv, level)
        back = codec.decode(data, np.float32)
        (FOLDER / f"level{level}.cgb").write_bytes(data)
        stream = Bitstream.from_bytes(data)
        arrays = {"keys": back.keys, "values": back.values, "ids": back.token_ids, "positions": back.positions}
        if level:
            arrays |= {f"symbols{i}": codec._symbols(stream, i, c) for i, c in enumerate(codec.coders(level))}
            arrays["escapes"], arrays["gains"] = codec.escapes(stream), codec.gains(stream)
        np.savez_compressed(FOLDER / f"level{level}.npz", **arrays)


@pytest.mark.parametrize("path", ["reference", "numba", "portable", "avx2", "avx512"])
@pytest.mark.parametrize("level", range(4))
def test_golden_bitstreams_decode(path: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEGEN_RAG_KERNELS", "" if path == "reference" else path)
    native.library.cache_clear()
    try:
        profile = Profile.from_bytes((FOLDER / "profile.cgp").read_bytes())
        codec = Codec(profile, bytes(range(32)), reference=path == "reference")
        data = (FOLDER / f"level{level}.cgb").read_bytes()
        stream, want = Bitstream.from_bytes(data), np.load(FOLDER / f"level{level}.npz")
        if level:
            for i, coder in enumerate(codec.coders(level)):
                np.testing.assert_array_equal(codec._symbols(stream, i, coder), want[f"symbols{i}"])
            np.testing.assert_array_equal(codec.escapes(stream), want["escapes"])
            np.testing.assert_array_equal(codec.gains(stream), want["gains"])
        back = codec.decode(data, np.float32)
        for name, array in (("keys", back.keys), ("values", back.values)):
            np.testing.assert_allclose(array, want[name], atol=1e-4 * np.abs(want[name]).max())
        np.testing.assert_array_equal(back.token_ids, want["ids"])
        np.testing.assert_array_equal(back.positions, want["positions"])
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
        native.library()
