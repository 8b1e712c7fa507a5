"""The one place that states the version; setup.py reads it as text."""

__version__ = "0.1.0"
