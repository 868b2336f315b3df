"""scrlearn learns image classes one small batch at a time, from a stream that never comes back."""

__version__ = "0.1.0"
