"""The codec on a device: Triton kernels fed from bitstreams, one upload a chunk, and from KV that lies there.

On a GPU the compressed bytes are all that crosses the bus: they are copied from pinned memory on a stream of their own,
while the kernels of the chunk before still run, and unpacked where the model reads them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from cachegen_rag.bitstream import Bitstream
from cachegen_rag.codec.importance import NEUTRAL
from cachegen_rag.errors import CorruptBitstreamError
from cachegen_rag.kernels import triton_decoder, triton_encoder
from cachegen_rag.kernels.reference import KernelError
from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVTarget
from cachegen_rag.models.torch_rope import rotated
from cachegen_rag.rope import cos_sin

if TYPE_CHECKING:
    from cachegen_rag.codec.codec import Codec
    from cachegen_rag.codec.transform import BlockCoder

_ALIGNMENT = 16  # bytes: what the kernels assume of a chunk's beginning
_RING = 4
"""Pinned buffers in use at once: copies that may be under way while the host goes on."""


class Uploader:
    """Copies host bytes to a device through pinned memory on a copy stream; on the CPU it just copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._ring: deque[tuple[torch.Tensor, Any]] = deque()
        self._lock = threading.Lock()

    def upload(self, data: NDArray[np.uint8]) -> torch.Tensor:
        """``data`` as uint8 on the device, its length rounded up to 16. The current stream waits for the copy."""
        size = len(data) + -len(data) % _ALIGNMENT
        if not self._cuda:
            out = torch.zeros(size, dtype=torch.uint8)
            out.numpy()[: len(data)] = data
            return out
        with self._lock:
            pinned = self._buffer(size)
            pinned.numpy()[: len(data)] = data
            with torch.cuda.stream(self._stream):
                out = pinned[:size].to(self._device, non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
            self._ring.append((pinned, done))
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        out.record_stream(current)
        return out

    def _buffer(self, size: int) -> torch.Tensor:
        if len(self._ring) >= _RING:
            pinned, done = self._ring.popleft()
            done.synchronize()
            if len(pinned) >= size:
                return pinned
        return torch.empty(1 << max(16, (size - 1).bit_length()), dtype=torch.uint8, pin_memory=True)


class DeviceCodec:
    """Encodes and decodes torch tensors for one codec. Threads may share it.

    Raises KernelUnavailableError where Triton, or a GPU, is missing.
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self._kernels = triton_decoder(device)
        self._codec, self._device = codec, device
        self._uploader = Uploader(device)
        self._tables: dict[int, Any] = {}
        self._forwards: dict[int, Any] = {}
        self._importance: tuple[list[torch.Tensor], torch.Tensor] | None = None
        self._lock, self._streams = threading.Lock(), threading.local()

    def tables(self, level: int) -> Any:
        """The ``LevelTables`` of a level, on the device; made on first use."""
        with self._lock:
            if level not in self._tables:
                blocks = [(c.columns, c.transform) for c in self._codec.coders(level)]
                self._tables[level] = self._kernels.LevelTables.of(blocks, self._codec.models, self._device)
                self._wait()
            return self._tables[level]

    def fill(self, streams: Sequence[Bitstream], sources: Sequence[memoryview], targets: Sequence[KVTarget]) -> None:
        """Decode chunks of one level, coded by transform, into ``targets`` in the same launches.

        ``sources`` are the bytes that the bitstreams were parsed from. Raises CorruptBitstreamError; the targets may
        have been written then.
        """
        with self._decoding(targets[0]):
            batch = self.batch(streams, sources)
            try:
                batch.decode(self.targets(batch.tables, targets)).check()
            except KernelError as error:
                raise CorruptBitstreamError(f"the symbols cannot be decoded: {error}") from None

    def batch(self, streams: Sequence[Bitstream], sources: Sequence[memoryview]) -> Any:
        """Chunks of one level, uploaded together: a ``triton_decode.Batch``."""
        chunks = [self._chunk(s, np.frombuffer(d, np.uint8)) for s, d in zip(streams, sources, strict=True)]
        padded = [len(c.data) + -len(c.data) % _ALIGNMENT for c in chunks]
        at = np.cumsum([0, *padded])
        if len(chunks) == 1:
            payload = self._uploader.upload(chunks[0].data)
        else:
            joined = np.zeros(int(at[-1]), np.uint8)
            for chunk, start in zip(chunks, at, strict=False):
                joined[start : start + len(chunk.data)] = chunk.data
            payload = self._uploader.upload(joined)
        return self._kernels.Batch(self.tables(streams[0].level), chunks, payload, at[:-1].tolist())

    @contextmanager
    def _decoding(self, target: KVTarget) -> Iterator[None]:
        """Run on a stream of this thread's own, beside the model's work, once the target's memory is free."""
        if self._device.type != "cuda":
            yield
            return
        if not hasattr(self._streams, "stream"):
            self._streams.stream = torch.cuda.Stream(self._device)
        stream = self._streams.stream
        ready = getattr(target.state, "ready", None)
        if ready is not None:
            stream.wait_event(ready)
        else:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def encode(
        self, kv: KV, level: int, exact: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], list[bytes], NDArray[np.uint8]]:
        """A chunk whose arrays are tensors of this device: the escapes' values, every block's stream, gain indices.

        exact : rows that are stored otherwise; they are coded as zeros. Raises KernelError.
        """
        escaped, streams, indices = self.encode_chunks(kv, level, [len(kv)], exact)
        return escaped[0], streams[0], indices

    def encode_chunks(
        self, kv: KV, level: int, rows: Sequence[int], exact: NDArray[np.int64] | None = None
    ) -> tuple[list[NDArray[np.int32]], list[list[bytes]], NDArray[np.uint8]]:
        """Like :meth:`encode`, for consecutive chunks of ``rows`` tokens each."""
        exact = np.empty(0, np.int64) if exact is None else exact
        encoder, tables, forward = triton_encoder(self._device), self.tables(level), self._forward_of(level)
        keys, values = _rows_contiguous(kv.keys), _rows_contiguous(kv.values)
        indices = self._gain_indices(keys, values, level)
        gains = torch.exp2((indices.float() - NEUTRAL) / 2)
        symbols, at, escaped = encoder.quantize(forward, tables, keys, values, gains)
        columns = max(tables.n_columns, 1)
        row, column = at // columns, at % columns
        if len(exact):
            symbols[torch.from_numpy(exact).to(self._device)] = 0
            kept = ~np.isin(row, exact)
            row, column, escaped = row[kept], column[kept], escaped[kept]
        # The list goes block by block.
        ends = np.cumsum([len(c.columns) for c in self._codec.coders(level)])
        block, chunk = np.searchsorted(ends, column, side="right"), np.searchsorted(np.cumsum(rows), row, side="right")
        order = np.lexsort((np.arange(len(row)), block, chunk))
        cuts = np.searchsorted(chunk[order], np.arange(1, len(rows)))
        coded = encoder.entropy_code(symbols, tables, rows)
        return np.split(escaped[order], cuts), coded, np.ascontiguousarray(indices.cpu().numpy().T)

    def _gain_indices(self, keys: torch.Tensor, values: torch.Tensor, level: int) -> torch.Tensor:
        """uint8 ``[tokens, blocks]``: :func:`cachegen_rag.codec.importance.gain_indices` on the device."""
        channels, combine = self._importance_weights()
        estimates = []
        for coder, w in zip(self._codec.coders(level), channels, strict=True):
            parts = [
                (values if c.is_value else keys)[c.layer, :, c.head : c.head + c.heads].flatten(1).float()
                for c in coder.block.cells
            ]
            estimates.append(torch.cat(parts, 1) @ w[:-1] + w[-1])
        octaves = (torch.stack(estimates, 1) @ combine).nan_to_num().clamp(-4, 3.5)
        return (torch.round(2 * octaves) + NEUTRAL).to(torch.uint8)

    def _importance_weights(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        with self._lock:
            if self._importance is None:
                found = self._codec.profile.importance
                channels = [torch.from_numpy(w).to(self._device) for w in found.channels]
                self._importance = (channels, torch.from_numpy(found.combine).to(self._device))
                self._wait()
            return self._importance

    def _forward_of(self, level: int) -> Any:
        tables = self.tables(level)
        with self._lock:
            if level not in self._forwards:
                encoder = triton_encoder(self._device)
                blocks = [_block_forward(encoder, coder) for coder in self._codec.coders(level)]
                self._forwards[level] = encoder.Forward.of(blocks, tables)
                self._wait()
            return self._forwards[level]

    def _wait(self) -> None:
        """Finish what was begun on this stream: tables are used from others."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def fill_rows(
        self, keys: NDArray[np.float16], values: NDArray[np.float16], tokens: NDArray[np.int64], target: KVTarget
    ) -> None:
        """Put exact rows, ``[layers, n, kv_heads, dim]`` with rotation removed, at ``tokens`` of ``target``."""
        where = torch.from_numpy(tokens).to(self._device)
        k, v = (torch.from_numpy(np.array(x)).to(self._device) for x in (keys, values))
        k = rotated(k, torch.from_numpy(target.positions[tokens].astype(np.int64)), target.rope)
        for layer in range(len(k)):
            target.keys[layer][where] = k[layer].to(target.keys[layer].dtype)
            target.values[layer][where] = v[layer].to(target.values[layer].dtype)

    def _chunk(self, stream: Bitstream, data: NDArray[np.uint8]) -> Any:
        start = data.__array_interface__["data"][0]
        offsets, sizes = [], []
        for section in self._codec.stream_sections(stream):
            view = np.frombuffer(section, np.uint8)
            offsets.append(view.__array_interface__["data"][0] - start if len(view) else 0)
            sizes.append(len(view))
        return self._kernels.Chunk(
            data, offsets, sizes, len(stream), self._codec.escapes(stream), self._codec.gains(stream)
        )

    def targets(self, tables: Any, targets: Sequence[KVTarget]) -> Any:
        """Where the chunks' rows go: ``triton_decode.Targets``."""
        first, rope = targets[0], targets[0].rope
        positions = np.concatenate([t.positions for t in targets])
        cosine, sine = cos_sin(positions, rope)
        row_at = np.concatenate([_row_offsets(first, t) for t in targets], axis=1)
        put = tables.put
        return self._kernels.Targets(
            first.keys, first.values, put(row_at), put(cosine), put(sine), rope.layout == "half"
        )


def _row_offsets(first: KVTarget, target: KVTarget) -> NDArray[np.int32]:
    """Elements from a row of ``first`` to the rows of ``target``, keys and values: the same in every layer."""
    out = []
    for a, b in ((first.keys, target.keys), (first.values, target.values)):
        apart = {(y.data_ptr() - x.data_ptr()) // x.element_size() for x, y in zip(a, b, strict=True)}
        if len(apart) > 1 or any(y.stride() != x.stride() or y.stride(-1) != 1 for x, y in zip(a, b, strict=True)):
            raise ValueError("targets that are decoded together must lie in the same memory")
        out.append(apart.pop() + np.arange(len(target.positions), dtype=np.int64) * a[0].stride(0))
    offsets = np.stack(out)
    if len(offsets[0]) and np.abs(offsets).max() >= 1 << 31:
        raise ValueError("targets that are decoded together must lie within 2^31 elements")
    return offsets.astype(np.int32)


def _rows_contiguous(array: Any) -> torch.Tensor:
    """``[layers, tokens, kv_heads, dim]`` with heads and channels next to each other."""
    tensor: torch.Tensor = array
    plain = tensor.stride(-1) == 1 and tensor.stride(2) == tensor.shape[3]
    return tensor if plain else tensor.contiguous()


def _block_forward(encoder: Any, coder: BlockCoder) -> Any:
    """The forward transform of a block multiplied out: from the channels of its cells to its columns."""
    block, transform = coder.block, coder.transform
    matrices, own_at = [], transform.active
    for i, matrix in enumerate(fixed.matrix for fixed in coder.forward.cells):
        joint, own = block.joint, matrix.shape[1] - block.joint
        whole = np.zeros((len(matrix), transform.coefficients), np.float32)
        part = coder.forward.top.matrix[i * joint : (i + 1) * joint].astype(np.float64)
        whole[:, : transform.active] = matrix[:, :joint] @ part
        whole[:, own_at : own_at + own] = matrix[:, joint:]
        own_at += own
        matrices.append(whole[:, coder.quantizer.order])
    cells = [(c.layer, c.is_value, c.head, c.channels) for c in block.cells]
    quantizer = coder.quantizer
    return encoder.BlockForward(
        np.concatenate(matrices), [c.mean for c in block.cells], cells, quantizer.per_step, quantizer.threshold,
        quantizer.reach,
    )  # fmt: skip
