"""The service is tested where its libraries are: pip install 'scrlearn[serve]' httpx."""

import importlib.util

NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "httpx")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_service_*.py"] if missing else []
