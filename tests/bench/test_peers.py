"""llama.cpp's own prompt caches as peers: each really restores, and each hit is a hit again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachegen_rag.bench.peers import peers


@pytest.fixture
def contenders(tiny_gguf: Path, tmp_path: Path) -> Any:
    found = peers(tiny_gguf, n_ctx=512, n_threads=1, folder=tmp_path)
    yield {peer.name: peer for peer in found}
    for peer in found:
        peer.close()


@pytest.mark.parametrize("name", ["state_file", "ram_cache", "disk_cache"])
def test_a_hit_stays_a_hit(contenders: dict[str, Any], name: str) -> None:
    peer = contenders[name]
    document = [i % 200 for i in range(300)]
    peer.prepare([*document, 1, 2, 3], len(document))
    assert peer.stored_bytes() >= 300 * 768  # rows of the tiny model
    for question in ([4, 5], [6, 7, 8], [4, 5], [9]):
        assert 0 < peer.ttft(document + question) < 60


def test_another_prompt_is_not_timed_as_a_hit(contenders: dict[str, Any]) -> None:
    document = [i % 200 for i in range(100)]
    for peer in contenders.values():
        peer.prepare([*document, 1], len(document))
        with pytest.raises(RuntimeError, match=r"restored|begin with"):
            peer.ttft([7] * 150)


def test_state_file_answers_like_the_whole_prompt(contenders: dict[str, Any]) -> None:
    peer = contenders["state_file"]
    document, question = [i % 200 for i in range(100)], [9, 8, 7]
    peer.prepare(document + question, len(document))
    peer.ttft(document + question)
    restored = peer._context.last_logits().copy()
    peer._context.clear()
    peer._decode(document, 0)
    peer._decode(question, len(document))
    assert restored.tolist() == peer._context.last_logits().tolist()
