"""The markup of Kimi K3: elements in channels for reasoning, content and calls.

<|open|>think<|sep|>…<|close|>think<|sep|><|open|>response<|sep|>…<|close|>response<|sep|>
<|open|>tools<|sep|>…<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>
"""

from __future__ import annotations

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
THINK, RESPONSE, TOOLS = (f"<|open|>{name}<|sep|>" for name in ("think", "response", "tools"))
THINK_END, RESPONSE_END, TOOLS_END, MESSAGE_END = (
    f"<|close|>{name}<|sep|>" for name in ("think", "response", "tools", "message")
)
