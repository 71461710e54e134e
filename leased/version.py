"""The version, alone in a file so that building the package imports nothing else."""

from typing import Final

VERSION: Final = "0.1.0"
