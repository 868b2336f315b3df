"""What pytest must not import where a library is missing."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["scrlearn/models/fused.py", "scrlearn/models/fused_conv.py"]
