"""What pytest must not import where a library is missing, and how many threads a test has."""

import importlib.util
import os

# tests are many and small; and the order of sums, which a few compare to the last digits, depends on the threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

NEED_TRITON = [
    "scrlearn/augment_fused.py",
    "scrlearn/losses_fused.py",
    "scrlearn/memory/fused.py",
    "scrlearn/mixing_fused.py",
    "scrlearn/models/fused.py",
    "scrlearn/models/fused_conv.py",
]

collect_ignore = [] if importlib.util.find_spec("triton") else NEED_TRITON
