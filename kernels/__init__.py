"""The codec's kernels. ``reference.py`` defines them, ``cpu.py`` runs them on CPUs, ``triton_*.py`` on GPUs.

Importing this loads none of them. CPU arrays go to ``cpu``; tensors of a device go to the module that
:func:`triton_decoder` or :func:`triton_encoder` returns.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from cachegen_rag.errors import KernelUnavailableError


def triton_decoder(device: Any) -> Any:
    """The module :mod:`cachegen_rag.kernels.triton_decode`, for a ``torch.device``.

    Raises
    ------
    KernelUnavailableError
        Triton or torch is not installed, or the device is no CUDA device (the CPU is one only for tests, under
        ``TRITON_INTERPRET=1``).
    """
    return _triton("triton_decode", device)


def triton_encoder(device: Any) -> Any:
    """The module :mod:`cachegen_rag.kernels.triton_encode`, for a ``torch.device``; see :func:`triton_decoder`."""
    return _triton("triton_encode", device)


def _triton(name: str, device: Any) -> Any:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise KernelUnavailableError(
            f"the GPU kernels cannot write to memory of device {device.type!r}; "
            "use a CUDA device, or numpy arrays on the CPU"
        )
    try:
        return importlib.import_module(f"cachegen_rag.kernels.{name}")
    except ImportError as error:
        raise KernelUnavailableError(
            f"decoding on a GPU needs torch and Triton ({error}): pip install 'cachegen-rag[gpu]'"
        ) from error
