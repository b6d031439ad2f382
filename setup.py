"""The one thing pyproject.toml cannot say: the codec's C kernels are built where there is a compiler, left out else."""

import sys
from pathlib import Path

from setuptools import Extension, setup

flags = ["/O2"] if sys.platform == "win32" else ["-O3", "-std=c11"]
setup(
    ext_modules=[
        Extension(
            "cachegen_rag.kernels._codec",
            ["kernels/codec.c"],
            depends=[str(header) for header in Path("kernels").glob("*.h")],
            extra_compile_args=flags,
            optional=True,
        ),
    ]
)
