"""The ``cachegen-rag`` command."""

from __future__ import annotations

from cachegen_rag.cli import answer, maintain, tools
from cachegen_rag.cli.app import app

__all__ = ["answer", "app", "main", "maintain", "tools"]


def main() -> None:
    """Entry point."""
    app()
