"""Builds the C kernel of the shared-memory transport. Everything else about the package is in pyproject.toml.

The kernel keeps to the part of Python's interface that does not change (the stable ABI), so that one wheel serves every
Python from 3.10 on. A Python without the interpreter lock has no stable ABI, and gets a wheel of its own.

The extension is optional: without a C compiler the package installs all the same, and the transport says what is
missing when it is asked for (paceline/transport/shm/kernel.py).
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

KERNEL = Path("src/paceline/transport/shm/csrc")
# -ffp-contract=off: a fused multiply-add gives other bits than multiplying and adding, and only some CPUs have it.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "paceline.transport.shm._kernel",
            sources=sorted(str(path) for path in KERNEL.glob("*.c")),
            depends=sorted(str(path) for path in KERNEL.glob("*.h")),
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
            py_limited_api=STABLE,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)
