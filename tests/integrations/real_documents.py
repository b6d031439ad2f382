"""A few real-sized documents, and a question that the small model answers from them."""

from __future__ import annotations

from langchain_core.documents import Document

QUESTION = "In which year was the lighthouse of Port Bexley built?"
PLACES = (
    ("Port Alder", "Mara Quint", 1807, 31),
    ("Port Bexley", "Tom Reeve", 1853, 24),
    ("Port Corvo", "Ines Salt", 1871, 40),
)


def documents() -> list[Document]:
    """Three passages of about 100 tokens."""
    return [
        Document(
            id=place,
            page_content=(
                f"The lighthouse of {place} was built in {year}. Its engineer was {engineer}, who had it made of "
                f"granite from the island. The tower of {place} is {height} metres high and stands on the northern "
                f"cliff. Its lamp burned whale oil in the first years. The keeper lived in the small house beside the "
                f"tower with two assistants and walked to the village once a week."
            ),
        )
        for place, engineer, year, height in PLACES
    ]
