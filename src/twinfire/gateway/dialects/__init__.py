"""Public HTTP APIs: their request and response shapes and the handlers that serve them."""
