"""What pytest must not import where a library is missing."""

import importlib.util

NEED_TRITON = [
    "scrlearn/augment_fused.py",
    "scrlearn/losses_fused.py",
    "scrlearn/memory/fused.py",
    "scrlearn/mixing_fused.py",
    "scrlearn/models/fused.py",
    "scrlearn/models/fused_conv.py",
]

collect_ignore = [] if importlib.util.find_spec("triton") else NEED_TRITON
