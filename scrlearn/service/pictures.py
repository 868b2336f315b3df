"""Images as data URLs."""

from __future__ import annotations

import base64
import io

from PIL import Image
from torch import Tensor


def picture(image: Tensor) -> str:
    """An image (uint8, C×H×W) as a data URL."""
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
