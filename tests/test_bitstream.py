"""The bitstream container: golden objects, numbered attacks, every flipped bit, every cut, random mutations."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachegen_rag import bitstream, errors
from cachegen_rag.bitstream import Bitstream, Section
from cachegen_rag.errors import BitstreamError, CorruptBitstreamError, EncodeError, FingerprintMismatchError
from cachegen_rag.kv import KVShape
from cachegen_rag.manifest import Manifest

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden" / "format"
ATTACKS = TESTS / "attacks"
EXPECTED: dict[str, list[str]] = json.loads((ATTACKS / "expected.json").read_text())
PARSE: dict[str, Callable[[bytes], Bitstream | Manifest]] = {
    ".cgb": Bitstream.from_bytes,
    ".cgm": Manifest.from_bytes,
}
GOLDENS = sorted(GOLDEN.iterdir())


def make(**changes: Any) -> Bitstream:
    fields: dict[str, Any] = {
        "fingerprint": bytes(range(32)),
        "profile": "ab" * 32,
        "level": 1,
        "shape": KVShape(3, 2, 4, 6),
        "token_ids": np.array([5, 6, 7], np.int32),
        "positions": np.array([0, 1, 2], np.int32),
        "coding": 1,
        "sections": (Section(1, b"one"), Section(1, b"", 1), Section(9, b"12345678")),
    }
    return Bitstream(**{**fields, **changes})


def content(stream: Bitstream) -> tuple[Any, ...]:
    return (
        stream.fingerprint,
        stream.profile,
        stream.level,
        stream.segment,
        stream.coding,
        stream.shape,
        stream.token_ids.tolist(),
        stream.positions.tolist(),
        [(s.type, s.index, bytes(s.data)) for s in stream.sections],
    )


def attack_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attacks_make", ATTACKS / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestGolden:
    FINGERPRINT = bytes.fromhex("44863b03e9909b7100e05b02526909a346fd7455183f6619e0fe6198c89981e0")
    PROFILE = "1900eab6c028483d7126599ee6f50de0d27907b5c65fa90524580b4b0f9852b0"

    @pytest.mark.parametrize(
        ("file", "expected"),
        [
            (
                "chunk.cgb",
                make(
                    level=2,
                    token_ids=np.array([7, 300, 49151]),
                    sections=(Section(1, b"thirteen byte"), Section(2, b""), Section(2, b"\xff" * 8, 1)),
                ),
            ),
            (
                "pruned.cgb",
                make(
                    level=2,
                    token_ids=np.array([0, 1, 2, 0]),
                    positions=np.array([0, 2, 1000, 1001]),
                    sections=(),
                ),
            ),
            (
                "wide.cgb",
                make(
                    level=255,
                    segment=1,
                    coding=255,
                    token_ids=np.array([2**31 - 1]),
                    positions=np.array([2**31 - 1]),
                    sections=(Section(1, b"thirteen byte"), Section(2, b""), Section(2, b"\xff" * 8, 1)),
                ),
            ),
        ],
    )
    def test_decodes_to_these_values_for_ever(self, file: str, expected: Bitstream) -> None:
        data = (GOLDEN / file).read_bytes()
        stream = Bitstream.from_bytes(data)
        assert content(stream)[2:] == content(expected)[2:]
        assert (stream.fingerprint, stream.profile) == (self.FINGERPRINT, self.PROFILE)
        assert stream.token_ids.dtype == stream.positions.dtype == np.int32

    @pytest.mark.parametrize("path", GOLDENS, ids=lambda p: p.name)
    def test_the_writer_writes_the_same_bytes(self, path: Path) -> None:
        data = path.read_bytes()
        assert PARSE[path.suffix](data).to_bytes() == data

    def test_files_are_those_that_the_second_writer_makes(self) -> None:
        maker = attack_maker()
        assert dict(maker.golden()) == {p.name: p.read_bytes() for p in GOLDENS}


class TestRoundTrip:
    @given(
        positions=st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=40).map(sorted),
        data=st.data(),
        level=st.integers(0, 255),
        shape=st.tuples(*[st.integers(1, 1024)] * 3).map(lambda s: KVShape(s[0], 1, s[1], s[2])),
        sections=st.dictionaries(
            st.tuples(st.integers(0, 65535), st.integers(0, 65535)), st.binary(max_size=40), max_size=6
        ),
    )
    @settings(max_examples=150, deadline=None)
    def test_what_goes_in_comes_out(
        self,
        positions: list[int],
        data: st.DataObject,
        level: int,
        shape: KVShape,
        sections: dict[tuple[int, int], bytes],
    ) -> None:
        ids = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(positions), max_size=len(positions)))
        stream = make(
            positions=np.array(positions, np.int32),
            token_ids=np.array(ids, np.int32),
            level=level,
            shape=shape,
            sections=tuple(Section(kind, blob, index) for (kind, index), blob in sorted(sections.items())),
        )
        encoded = stream.to_bytes()
        again = Bitstream.from_bytes(encoded)
        assert content(again) == content(stream)
        assert again.to_bytes() == encoded

    def test_sections_are_aligned_views(self) -> None:
        data = make().to_bytes()
        for section in Bitstream.from_bytes(data).sections:
            array = np.frombuffer(section.data, np.uint8)
            if len(array):
                assert (array.ctypes.data - np.frombuffer(data, np.uint8).ctypes.data) % bitstream.ALIGNMENT == 0

    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
    def test_any_buffer_is_read(self, wrap: Callable[[bytes], Any]) -> None:
        assert content(Bitstream.from_bytes(wrap(make().to_bytes()))) == content(make())

    def test_overhead_of_a_200_token_chunk(self) -> None:
        ids, positions = np.arange(200) * 200, np.arange(200)
        sections = tuple(Section(kind, b"") for kind in range(4))
        size = len(make(token_ids=ids, positions=positions, sections=sections).to_bytes())
        assert size - 2 * len(ids) <= 170

    def test_section_by_name(self) -> None:
        stream = Bitstream.from_bytes(make().to_bytes())
        assert bytes(stream.section(9)) == b"12345678"
        assert bytes(stream.section(1, 1)) == b""
        with pytest.raises(CorruptBitstreamError, match="no section 9/1"):
            stream.section(9, 1)


class TestWriterRefuses:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"level": 256}, "out of range"),
            ({"level": -1}, "out of range"),
            ({"segment": 300}, "out of range"),
            ({"coding": 256}, "out of range"),
            ({"fingerprint": b"short"}, "32 bytes"),
            ({"fingerprint": bytes(33)}, "32 bytes"),
            ({"profile": "ab"}, "64 hex"),
            ({"profile": "no hex"}, "out of range"),
            ({"shape": KVShape(0, 1, 1, 1)}, "layers = 0"),
            ({"shape": KVShape(1025, 1, 1, 1)}, "layers = 1025"),
            ({"shape": KVShape(1024, 1024, 4096, 4096)}, "elements per token"),
            ({"token_ids": np.array([1, 2])}, "equal length"),
            ({"token_ids": np.array([], int), "positions": np.array([], int)}, "tokens = 0"),
            ({"token_ids": np.array([1, -1, 1])}, "token ids must"),
            ({"token_ids": np.array([1, 2**31, 1])}, "token ids must"),
            ({"positions": np.array([0, 1, 1])}, "strictly increasing"),
            ({"positions": np.array([-1, 0, 1])}, "non-negative"),
            ({"positions": np.array([0, 1, 2**31])}, "below 2"),
            ({"sections": (Section(2, b""), Section(1, b""))}, "strictly increasing"),
            ({"sections": (Section(2, b""), Section(2, b""))}, "strictly increasing"),
            ({"sections": (Section(65536, b""),)}, "out of range"),
            ({"sections": tuple(Section(1, b"", i) for i in range(4097))}, "4097 sections"),
        ],
    )
    def test_what_the_format_cannot_hold(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(EncodeError, match=words):
            make(**changes).to_bytes()

    def test_more_tokens_than_a_chunk_may_have(self) -> None:
        many = np.arange(bitstream.MAX_TOKENS + 1)
        with pytest.raises(EncodeError, match="tokens = 65537"):
            make(token_ids=many, positions=many).to_bytes()


class TestExpect:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"fingerprint": bytes(32)},
            {"profile": "ac" * 32},
            {"shape": KVShape(3, 2, 4, 5)},
            {"token_ids": [5, 6, 8]},
            {"token_ids": [5, 6]},
        ],
    )
    def test_another_model_profile_shape_or_text_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(FingerprintMismatchError):
            make().expect(**wrong)

    def test_the_right_one_passes(self) -> None:
        stream = make()
        assert stream.expect(fingerprint=bytes(range(32)), profile="ab" * 32, shape=KVShape(3, 2, 4, 6)) is stream
        assert stream.expect(token_ids=[5, 6, 7]) is stream


class TestAttacks:
    @pytest.mark.parametrize("file", EXPECTED)
    def test_has_its_one_error(self, file: str) -> None:
        error, words = EXPECTED[file]
        data = (ATTACKS / file).read_bytes()
        tracemalloc.start()
        try:
            with pytest.raises(BitstreamError) as caught:
                PARSE[Path(file).suffix](data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert type(caught.value) is getattr(errors, error)
        assert words in str(caught.value)
        assert peak < 200_000 + 16 * len(data), "memory was allocated for a number that was not checked"

    def test_every_file_is_listed_and_made_by_the_script(self) -> None:
        files = {p.name: p.read_bytes() for p in ATTACKS.iterdir() if p.suffix in PARSE}
        made = {f"{i:03d}-{name}": data for i, (name, data, _, _) in enumerate(attack_maker().attacks(), 1)}
        assert files == made
        assert files.keys() == EXPECTED.keys()


@pytest.mark.parametrize("path", GOLDENS, ids=lambda p: p.name)
class TestDamage:
    def test_every_flipped_bit_is_found(self, path: Path) -> None:
        data, parse = path.read_bytes(), PARSE[path.suffix]
        missed = []
        for bit in range(8 * len(data)):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << (bit % 8)
            try:
                parse(bytes(damaged))
                missed.append(bit)
            except BitstreamError:
                pass
        assert missed == []

    def test_every_cut_is_found(self, path: Path) -> None:
        data, parse = path.read_bytes(), PARSE[path.suffix]
        for size in range(len(data)):
            with pytest.raises(errors.TruncatedBitstreamError):
                parse(data[:size])

    def test_every_burst_up_to_32_bits_is_found(self, path: Path) -> None:
        data, parse, rng = path.read_bytes(), PARSE[path.suffix], random.Random(1)
        for _ in range(3000):
            start = rng.randrange(8 * len(data) - 32)
            burst = (rng.getrandbits(31) << 1 | 1) << start
            damaged = (int.from_bytes(data, "little") ^ burst).to_bytes(len(data) + 8, "little")
            with pytest.raises(BitstreamError):
                parse(damaged[: len(data)])

    def test_random_mutations_raise_our_errors_or_decode(self, path: Path) -> None:
        """Mutants with repaired checksums reach the checks behind them; nothing but our errors may come out."""
        data, parse, rng = path.read_bytes(), PARSE[path.suffix], random.Random(2)
        for _ in range(4000):
            mutant = mutate(data, rng)
            try:
                again = parse(mutant)
            except BitstreamError:
                continue
            assert again.to_bytes() == mutant, "two encodings of one content"


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change, insert, remove or copy a few bytes, then usually repair the header's checksum."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        kind = rng.randrange(5)
        if kind == 0:
            out[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif kind == 1:
            out[at : at + 4] = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1]).to_bytes(4, "little")
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.choice([1, 8, 12, 40]))
        elif kind == 3:
            del out[at : at + rng.choice([1, 8, 12, 40])]
        else:
            out[at : at + 8] = out[:8] if rng.random() < 0.1 else out[at // 2 : at // 2 + 8]
        if len(out) < 16:
            return bytes(out)
    end = int.from_bytes(out[12:16], "little")
    if rng.random() < 0.9 and 16 <= end <= len(out):
        out[end - 4 : end] = bitstream.crc32c(memoryview(out)[: end - 4]).to_bytes(4, "little")
    return bytes(out)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_raise_our_errors(data: bytes) -> None:
    for parse, magic in ((Bitstream.from_bytes, bitstream.MAGIC), (Manifest.from_bytes, b"\x89CGM\r\n\x1a\n")):
        for candidate in (data, magic + data, magic + b"\x01\x00" + data):
            with pytest.raises(BitstreamError):
                parse(candidate)


def test_crc32c_is_castagnoli_and_independent_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bitstream.crc32c(memoryview(b"123456789")) == 0xE3069283
    monkeypatch.setattr(bitstream, "_CRC_BLOCK", 4)
    assert bitstream.crc32c(memoryview(b"123456789")) == 0xE3069283


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_attacks_are_refused_with_next_to_no_memory_left() -> None:
    program = """
import resource, sys
from pathlib import Path
from cachegen_rag.bitstream import Bitstream
from cachegen_rag.errors import BitstreamError
from cachegen_rag.manifest import Manifest

attacks = [(p.suffix, p.read_bytes()) for p in Path(sys.argv[1]).iterdir() if p.suffix in (".cgb", ".cgm")]
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), used + (16 << 20)))
for suffix, data in attacks:
    try:
        (Bitstream if suffix == ".cgb" else Manifest).from_bytes(data)
    except BitstreamError:
        continue
    sys.exit("accepted")
print(len(attacks))
"""
    done = subprocess.run([sys.executable, "-c", program, str(ATTACKS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(EXPECTED)
