"""The version, alone in a file so that building the package imports nothing else."""

VERSION = "0.1.0"
