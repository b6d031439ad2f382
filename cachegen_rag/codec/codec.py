"""Codec: KV to bitstream and back, with one profile."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.bitstream import Bitstream, Section
from cachegen_rag.codec import importance
from cachegen_rag.codec.entropy import decode_stream, encode_stream, pack_integers, unpack_integers
from cachegen_rag.codec.profile import Level, Profile
from cachegen_rag.codec.transform import BlockCoder, Transform, block_rows
from cachegen_rag.errors import CorruptBitstreamError, EncodeError, UnknownLevelError
from cachegen_rag.kernels import cpu
from cachegen_rag.kernels import reference as reference_kernels
from cachegen_rag.kernels.reference import ESCAPE, Escapes, KernelError, Rows, SymbolModels
from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVTarget
from cachegen_rag.rope import RopeSpec, cos_sin, from_interleaved, rotate

CODING_EXACT = 0
CODING_TRANSFORM = 1
SECTION_ROWS = 1  # fp16 rows: all of them (exact coding), or those of the exact tokens
SECTION_ESCAPES = 2
SECTION_STREAM = 3
SECTION_GAINS = 4
_COUNT = struct.Struct("<I")


class Codec:
    """Encodes and decodes KV with one profile. Threads may share it.

    Parameters
    ----------
    profile : the model's profile.
    fingerprint : 32 bytes, ``ModelFingerprint.digest()``, written into every bitstream and demanded of it.
    sinks : whether KV at positions below ``profile.sinks`` begins a sequence and is to be stored exactly. Documents
        computed behind other text have no sinks and do not need this.
    reference : use the readable numpy kernels. For tests.
    """

    def __init__(
        self, profile: Profile, fingerprint: bytes | None = None, *, sinks: bool = False, reference: bool = False
    ) -> None:
        self.profile = profile
        self.fingerprint = profile.fingerprint if fingerprint is None else fingerprint
        self._sinks = profile.sinks if sinks else 0
        self._slow = reference
        self._kernels: Any = reference_kernels if reference else cpu
        self._transform = Transform(profile)
        self.models = SymbolModels.of(profile.frequency)
        self._devices: dict[Any, Any] = {}
        self.levels: tuple[Level, ...] = (Level(0, 0.0, 16.0), *profile.levels)
        self.default_level: int = profile.default_level

    @property
    def lossy_levels(self) -> tuple[int, ...]:
        """The levels that are not exact, finest first."""
        return tuple(level.index for level in self.profile.levels)

    def check_level(self, level: int) -> Level:
        """The descriptor of a level. Raises UnknownLevelError if the profile has no such level."""
        if isinstance(level, bool) or not isinstance(level, (int, np.integer)) or not 0 <= level < len(self.levels):
            known = ", ".join(f"{v.index} ({v.bits:.2f} bits, KL {v.kl:.2g})" for v in self.levels)
            raise UnknownLevelError(f"no level {level!r}; this profile has {known}")
        return self.levels[level]

    def expected_kl(self, level: int) -> float:
        """KL per token, in nats, that calibration measured for this level."""
        return self.check_level(level).kl

    def bits_per_element(self, level: int) -> float:
        """Bits an element that calibration measured for this level, everything included."""
        return self.check_level(level).bits

    def encode(self, kv: KV, level: int) -> bytes:
        """Encode one chunk at one level.

        Raises
        ------
        UnknownLevelError
        EncodeError
            Wrong shape, no tokens, NaN or infinity, or a value too large for the level.
        """
        chosen = self.check_level(level)
        if kv.shape != self.profile.shape:
            raise EncodeError(f"the KV has shape {kv.shape}, the profile is for {self.profile.shape}")
        if not len(kv):
            raise EncodeError("there are no tokens to encode")
        if chosen.exact:
            sections = [Section(SECTION_ROWS, _pack_rows(kv, np.arange(len(kv))))]
        else:
            sections = self._encode_blocks(kv, chosen)
        return Bitstream(
            self.fingerprint, self.profile.hash, chosen.index, kv.shape, kv.token_ids, kv.positions, tuple(sections),
            coding=CODING_EXACT if chosen.exact else CODING_TRANSFORM,
        ).to_bytes()  # fmt: skip

    def _encode_blocks(self, kv: KV, level: Level) -> list[Section]:
        exact = np.flatnonzero(kv.positions < self._sinks)
        sections, escapes = [], []
        if len(exact):
            sections.append(Section(SECTION_ROWS, _COUNT.pack(len(exact)) + exact.astype("<u4").tobytes()
                                    + _pack_rows(kv, exact)))  # fmt: skip
        streams = []
        device = self._on_device(kv.keys)
        if device is not None:
            return sections + self._encode_on(device, kv, level, exact)
        coders = self.coders(level.index)

        def transform(coder: BlockCoder) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
            try:
                components, estimate = self._kernels.components(block_rows(coder.block, kv), coder.forward)
            except KernelError as error:
                _check_finite(kv)  # says where, in channels
                raise EncodeError(f"the KV cannot be transformed: {error}") from None
            components[exact] = 0
            return components, estimate

        def code(coder: BlockCoder, components: NDArray[np.float32], gain: NDArray[np.float32]) -> tuple[Any, bytes]:
            symbols, escaped = self._quantized(components, gain, coder)
            if not symbols.shape[1]:
                return escaped.value, b""
            return escaped.value, encode_stream(symbols, coder.columns, self.models, slow=self._slow)

        parts, estimates = zip(*_encoders().map(transform, coders), strict=True)
        indices = importance.gain_indices(self.profile.importance, estimates)
        coded = _encoders().map(code, coders, parts, importance.gains(indices))
        for index, (escaped, data) in enumerate(coded):
            escapes.append(escaped)
            if data:
                streams.append(Section(SECTION_STREAM, data, index))
        escaped_values = np.concatenate(escapes)
        if len(escaped_values):
            sections.append(Section(SECTION_ESCAPES, pack_integers(escaped_values)))
        return [*sections, *streams, Section(SECTION_GAINS, importance.pack(indices))]

    def _encode_on(self, device: Any, kv: KV, level: Level, exact: NDArray[np.int64]) -> list[Section]:
        try:
            escaped, streams, indices = device.encode(kv, level.index, exact)
        except KernelError as error:
            raise EncodeError(f"the KV cannot be coded at level {level.index}: {error}") from None
        escapes = [Section(SECTION_ESCAPES, pack_integers(escaped))] if len(escaped) else []
        coded = [Section(SECTION_STREAM, data, index) for index, data in enumerate(streams) if data]
        return [*escapes, *coded, Section(SECTION_GAINS, importance.pack(indices))]

    def _quantized(
        self, components: NDArray[np.float32], gain: NDArray[np.float32], coder: BlockCoder
    ) -> tuple[NDArray[np.int8], Escapes]:
        try:
            symbols, escapes = self._kernels.quantize(components, gain, coder.quantizer)
            return symbols, escapes
        except KernelError:
            raise EncodeError(
                f"a component exceeds {reference_kernels.MAX_SIZE:.0f} steps of {coder.step:.3g}, the most that can be "
                "coded: store this chunk at level 0"
            ) from None

    def parse(self, data: bytes | memoryview, token_ids: Any = None) -> Bitstream:
        """Check a bitstream and that it belongs to this profile, model and text.

        Raises BitstreamError's kinds; after this, nothing about the container can be wrong.
        """
        stream = Bitstream.from_bytes(data).expect(
            fingerprint=self.fingerprint, profile=self.profile.hash, shape=self.profile.shape, token_ids=token_ids
        )
        if stream.level >= len(self.levels) or stream.coding != (
            CODING_EXACT if stream.level == 0 else CODING_TRANSFORM
        ):
            raise CorruptBitstreamError(f"level {stream.level} with coding {stream.coding} does not exist")
        if stream.segment:
            raise CorruptBitstreamError(f"refinement {stream.segment} of a level: this version has none")
        found, needed = {(s.type, s.index) for s in stream.sections}, {(SECTION_ROWS, 0)}
        if stream.coding == CODING_TRANSFORM:
            needed = {(SECTION_STREAM, i) for i, coder in enumerate(self.coders(stream.level)) if len(coder.columns)}
            needed |= {(SECTION_GAINS, 0)}
            found -= {(SECTION_ROWS, 0), (SECTION_ESCAPES, 0)}
        if found != needed:
            raise CorruptBitstreamError(f"sections are missing or in excess: {sorted(found ^ needed)[:8]}")
        return stream

    def decode(self, data: bytes | memoryview, dtype: Any = np.float16) -> KV:
        """Decode a bitstream to KV (fp16 or float32), rotary position removed from the keys."""
        stream = self.parse(data)
        s, n = stream.shape, len(stream)
        keys = np.empty((s.layers, n, s.kv_heads, s.key_dim), dtype)
        values = np.empty((s.layers, n, s.kv_heads, s.value_dim), dtype)
        self._fill(stream, data, KVTarget(list(keys), list(values), stream.positions, RopeSpec((), "interleaved")))
        return KV(keys, values, stream.token_ids, stream.positions)

    def decode_into(self, data: bytes | memoryview, target: KVTarget, *, token_ids: Any = None) -> None:
        """Decode a bitstream straight into an engine's memory, keys rotated to ``target.positions``.

        Runs in the calling thread and holds the GIL only between blocks: decode chunks side by side on threads.

        Raises
        ------
        BitstreamError
            Of any kind; the target may have been written in part.
        """
        stream = self.parse(data, token_ids)
        if len(target.positions) != len(stream):
            raise CorruptBitstreamError(f"a chunk of {len(stream)} tokens for a target of {len(target.positions)} rows")
        self._fill(stream, data, target)

    def decode_symbols(self, data: bytes | memoryview) -> int:
        """Decode the symbols of a bitstream and drop them: the number of elements that they stand for."""
        stream = self.parse(data)
        if stream.coding == CODING_TRANSFORM:
            for index, coder in enumerate(self.coders(stream.level)):
                self._symbols(stream, index, coder)
        return len(stream) * stream.shape.elements_per_token

    def coders(self, level: int) -> tuple[BlockCoder, ...]:
        """How a lossy level codes each block."""
        return self._transform.coders(self.levels[level].step)

    def stream_sections(self, stream: Bitstream) -> list[memoryview]:
        """The entropy-coded bytes of every block, empty where a block has no columns."""
        return [
            stream.section(SECTION_STREAM, i) if len(coder.columns) else memoryview(b"")
            for i, coder in enumerate(self.coders(stream.level))
        ]

    def escapes(self, stream: Bitstream) -> NDArray[np.int32]:
        """Values that the symbols do not hold, of all blocks in turn."""
        if any((s.type, s.index) == (SECTION_ESCAPES, 0) for s in stream.sections):
            return unpack_integers(stream.section(SECTION_ESCAPES))
        return np.empty(0, np.int32)

    def gains(self, stream: Bitstream) -> NDArray[np.float32]:
        """What every token's coefficients are multiplied with, float32 ``[blocks, tokens]``."""
        indices = importance.unpack(stream.section(SECTION_GAINS), len(self.profile.blocks), len(stream))
        return importance.inverse_gains(indices)

    def _on_device(self, array: Any) -> Any:
        """The codec of the device where a torch tensor lies, or None for a numpy array."""
        return None if isinstance(array, np.ndarray) else self.on_device(array.device)

    def on_device(self, device: Any) -> Any:
        """This codec on a ``torch.device``: a :class:`cachegen_rag.codec.device.DeviceCodec`, made on first use.

        Raises KernelUnavailableError.
        """
        from cachegen_rag.codec.device import DeviceCodec

        if device not in self._devices:
            self._devices[device] = DeviceCodec(self, device)
        return self._devices[device]

    def _symbols(self, stream: Bitstream, index: int, coder: BlockCoder) -> NDArray[np.int8]:
        if not len(coder.columns):
            return np.zeros((len(stream), 0), np.int8)
        data = stream.section(SECTION_STREAM, index)
        return decode_stream(data, len(stream), coder.columns, self.models, slow=self._slow)

    def _fill(self, stream: Bitstream, data: bytes | memoryview, target: KVTarget) -> None:
        if stream.coding == CODING_EXACT:
            self._fill_rows(stream.section(SECTION_ROWS), np.arange(len(stream)), target)
            return
        device = self._on_device(target.keys[0])
        if device is not None:
            device.fill([stream], [data], [target])
        else:
            self._fill_blocks(stream, target)
        if any((s.type, s.index) == (SECTION_ROWS, 0) for s in stream.sections):
            rows = stream.section(SECTION_ROWS)
            count = _COUNT.unpack_from(rows)[0] if len(rows) >= 4 else 0
            if not 0 < count <= len(stream) or len(rows) < 4 + 4 * count:
                raise CorruptBitstreamError(f"{count} exact tokens in a chunk of {len(stream)}")
            exact = np.frombuffer(rows, "<u4", count, 4).astype(np.int64)
            if exact[-1] >= len(stream) or np.any(np.diff(exact) <= 0):
                raise CorruptBitstreamError("the exact tokens are not in order or outside the chunk")
            self._fill_rows(rows[4 + 4 * count :], exact, target)

    def _fill_blocks(self, stream: Bitstream, target: KVTarget) -> None:
        coders, escaped = self.coders(stream.level), self.escapes(stream)
        cosine, sine = cos_sin(target.positions, target.rope)
        gains, used = self.gains(stream), 0
        for index, coder in enumerate(coders):
            symbols = self._symbols(stream, index, coder)
            at = np.flatnonzero(symbols == ESCAPE)
            if used + len(at) > len(escaped):
                raise CorruptBitstreamError("the symbols call for more escapes than there are")
            escapes = Escapes(at, escaped[used : used + len(at)])
            used += len(at)
            arrays = [
                (target.values if c.is_value else target.keys)[c.layer][:, c.head : c.head + c.heads]
                for c in coder.transform.cells
            ]
            rows = Rows(arrays, cosine, sine, target.rope.layout == "half")
            self._kernels.reconstruct(symbols, escapes, coder.transform, rows, gains[index])
        if used != len(escaped):
            raise CorruptBitstreamError("there are more escapes than the symbols call for")

    def _fill_rows(self, data: memoryview, tokens: NDArray[np.int64], target: KVTarget) -> None:
        """Write fp16 rows (all layers' keys, then all layers' values) to these tokens of the target."""
        s, n = self.profile.shape, len(tokens)
        if len(data) != n * s.fp16_bytes_per_token:
            raise CorruptBitstreamError(
                f"{len(data)} bytes of exact rows, {n} tokens need {n * s.fp16_bytes_per_token}"
            )
        split = s.layers * n * s.key_channels
        keys = np.frombuffer(data, "<f2", split).reshape(s.layers, n, s.kv_heads, s.key_dim)
        values = np.frombuffer(data, "<f2", offset=2 * split).reshape(s.layers, n, s.kv_heads, s.value_dim)
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise CorruptBitstreamError("an exact row contains NaN or infinity")
        device = self._on_device(target.keys[0])
        if device is not None:
            device.fill_rows(keys, values, tokens, target)
            return
        for layer in range(s.layers):
            turned = rotate(keys[layer], target.positions[tokens], target.rope)
            target.keys[layer][tokens] = from_interleaved(turned, target.rope)
            target.values[layer][tokens] = values[layer]


@cache
def _encoders() -> ThreadPoolExecutor:
    """Threads that encode blocks side by side, shared by all codecs: the model waits while its KV is encoded."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="cachegen-encode")


def _check_finite(kv: KV) -> None:
    for name, array in (("keys", kv.keys), ("values", kv.values)):
        if not np.isfinite(array).all():
            raise EncodeError(f"the {name} contain NaN or infinity: the model's cache is damaged, compute it again")


def _pack_rows(kv: KV, tokens: NDArray[np.int64]) -> bytes:
    if not isinstance(kv.keys, np.ndarray):  # tensors of a device: only these rows come to the host
        keys, values = (x[:, tokens].float().cpu().numpy() for x in (kv.keys, kv.values))
        kv = KV(keys, values, kv.token_ids[tokens], kv.positions[tokens])
        tokens = np.arange(len(tokens))
    with np.errstate(over="ignore"):
        keys, values = kv.keys[:, tokens].astype("<f2"), kv.values[:, tokens].astype("<f2")
    if not (np.isfinite(keys).all() and np.isfinite(values).all()):
        _check_finite(kv)
        raise EncodeError("a value is too large for fp16: this KV has no exact level")
    return keys.tobytes() + values.tobytes()
