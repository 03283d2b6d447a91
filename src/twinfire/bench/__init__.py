"""A load client against any OpenAI-compatible server. Imports nothing of the engine."""
