"""Builds the C kernel of the shared-memory transport. Everything else about the package is in pyproject.toml.

The extension is optional: without a C compiler the package installs all the same, and the transport says what is
missing when it is asked for (paceline/transport/shm/kernel.py).
"""

from pathlib import Path

from setuptools import Extension, setup

KERNEL = Path("src/paceline/transport/shm/csrc")
# -ffp-contract=off: a fused multiply-add gives other bits than multiplying and adding, and only some CPUs have it.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            "paceline.transport.shm._kernel",
            sources=sorted(str(path) for path in KERNEL.glob("*.c")),
            depends=sorted(str(path) for path in KERNEL.glob("*.h")),
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
